"""JSON files: one stable layout for writing, and validation against schemas/ that reports every problem at
once."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.schema_fast import surely_follows
from parallel_synthesis.resources import resource

_SHOWN = 80  # characters of an offending value that a message shows


def dump_json(document: Any) -> bytes:
    """The bytes of a JSON file of ours: sorted keys, two spaces, UTF-8, a line end; equal content is equal
    bytes.

    A nan or inf is a ValueError (JSON has none): write null, see `finite_or_null`.
    """
    text = json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode("utf-8")


def finite_or_null(value: Any) -> Any:
    """A copy of a JSON-like value in which numbers that are nan or inf are None and tuples are lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def read_json(path: Path, *, error: Callable[[str], Exception] = CheckpointError) -> Any:
    """The document in a JSON file. nan and inf are read (the reference implementation writes them), a
    repeated key is refused. Raises StorageError when the file cannot be read, `error` when it is not JSON;
    both name the file."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise StorageError(
            f"cannot read {path}: {problem.strerror}; expected a readable JSON file, so check path and "
            f"permissions"
        ) from problem
    return parse_json(raw, str(path), error=error)


def parse_json(raw: bytes, where: str, *, error: Callable[[str], Exception] = CheckpointError) -> Any:
    """The document in the bytes of a JSON file; `where` names the file in the error. Rules as `read_json`."""
    try:
        return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError as problem:
        raise error(
            f"{where}: nested too deeply to be one of our files; restore it from a good copy"
        ) from problem
    except ValueError as problem:  # also bad UTF-8
        raise error(f"{where}: expected JSON: {problem}; restore the file from a good copy") from problem


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"key {repeated[0]!r} appears twice in one object")
    return document


def load_json(path: Path, schema_name: str, *, error: Callable[[str], Exception] = CheckpointError) -> Any:
    """`read_json`, then `validate` against `schemas/<schema_name>.schema.json`."""
    document = read_json(path, error=error)
    validate(document, schema_name, str(path), error=error)
    return document


def validate(
    document: Any, schema_name: str, where: str, *, error: Callable[[str], Exception] = CheckpointError
) -> None:
    """Raises `error` with every problem of the document, one a line, each with its JSON path; `where` names
    the file."""
    found = problems(document, schema_name)
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise error(
            f"{where} does not follow schemas/{schema_name}.schema.json:\n{listed}\ncorrect the named fields"
        )


def problems(document: Any, schema_name: str) -> list[str]:
    """Every problem as `$.path: expected ..., found ...`; empty when the document is valid."""
    schema = _schema(schema_name)
    if surely_follows(document, schema):
        return []
    found = _validator(schema_name).iter_errors(document)
    return [
        _describe(problem) for problem in sorted(found, key=lambda problem: _sort_key(problem.absolute_path))
    ]


@functools.cache
def _validator(schema_name: str) -> Any:
    # Imported here: it costs a tenth of a second that `ps --help` has no use for.
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_schema(schema_name))


@functools.cache
def _schema(schema_name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        resource("schemas", f"{schema_name}.schema.json").read_text("utf-8")
    )
    return document


def _sort_key(path: Iterable[Any]) -> list[tuple[bool, str | int]]:
    return [(isinstance(part, int), part) for part in path]


def _describe(problem: Any) -> str:
    rule, wanted, found = problem.validator, problem.validator_value, problem.instance
    if rule == "required":
        missing = [key for key in wanted if key not in found]
        # jsonschema reports each missing key on its own; its message names the one.
        named = next((key for key in missing if problem.message.startswith(repr(key))), missing[0])
        return f"{problem.json_path}: expected a field {named!r}, found none"
    if rule == "type":
        expected = " or ".join(wanted) if isinstance(wanted, list) else wanted
        return f"{problem.json_path}: expected {expected}, found {_short(found)}"
    if rule in ("enum", "const"):
        expected = " or ".join(map(_short, wanted)) if rule == "enum" else _short(wanted)
        return f"{problem.json_path}: expected {expected}, found {_short(found)}"
    if rule in ("minimum", "exclusiveMinimum", "maximum", "minLength", "minItems", "pattern"):
        return f"{problem.json_path}: expected {rule} {wanted}, found {_short(found)}"
    message = problem.message
    return f"{problem.json_path}: {message if len(message) <= 3 * _SHOWN else message[: 3 * _SHOWN] + ' ...'}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
