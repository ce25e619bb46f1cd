"""One row of a task: what must be in it, and what training reads from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from parallel_synthesis.data.tasks import Task
from parallel_synthesis.errors import DataError

RULES_VERSION = (
    1  # of parse_fields; raised with every change of what is valid, so that older indices are made anew
)
MAX_ROW_BYTES = 256 * 2**20  # a longer "line" is a file that is not JSON Lines; it must not fill the memory
WHAT_NEXT = 'Fix the file, or set data.on_bad_row = "skip" to leave such rows out and count them.'


class RowProblemError(ValueError):
    """What is wrong with a row, as `field: expected ...`; a DataError where file and line are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A valid row.

    `number` counts the valid rows of its file from 0, `line` the lines from 1. `contexts` are stripped and
    none is blank; `extracts[i]` belongs to `contexts[i]` and equals it where the row gives none.
    """

    task: str
    number: int
    line: int
    id: str | None
    query: str
    target: str
    contexts: tuple[str, ...]
    extracts: tuple[str, ...]
    path: Path = field(repr=False)

    @property
    def place(self) -> str:
        """Where the row stands, for error messages."""
        name = "" if self.id is None else f", id {self.id}"
        return f"{self.path}:{self.line} (task {self.task}, row {self.number}{name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """What training reads from a row, wherever the row stands; see Row.

    loose: branches whose extract is not the end of its context, so that as many tokens are kept as the extract has
    by itself (design.md, "Tokenisation"). That is allowed, and told.
    """

    id: str | None
    query: str
    target: str
    contexts: tuple[str, ...]
    extracts: tuple[str, ...]
    loose: int


def parse_row(raw: bytes, *, task: Task, path: Path, line: int, number: int) -> Row:
    """The row in `raw` (one line of the file, UTF-8 JSON, with or without its line end).

    Raises DataError `path:line: field: expected ...`.
    """
    try:
        fields = parse_fields(raw, task)
    except RowProblemError as problem:
        raise DataError(f"{path}:{line}: {problem}. {WHAT_NEXT}") from None
    return Row(
        task=task.name,
        number=number,
        line=line,
        id=fields.id,
        query=fields.query,
        target=fields.target,
        contexts=fields.contexts,
        extracts=fields.extracts,
        path=path,
    )


def parse_fields(raw: bytes, task: Task) -> RowFields:
    """Validates one line and takes what training needs; fields that training does not use are not looked at.

    An optional field that is null counts as absent. Raises RowProblemError.
    """
    if len(raw) > MAX_ROW_BYTES:
        raise RowProblemError(f"row: expected at most {MAX_ROW_BYTES} bytes, found {len(raw)}")
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RowProblemError(_explain(raw, error)) from None
    if not isinstance(document, dict):
        raise RowProblemError(f"row: expected an object, found {_kind(document)}")
    question, query = _pair(document, "question", "query", task)
    gold, answer = _pair(document, "gold", "answer", task)
    target_field, target = ("gold", gold) if answer is None else ("answer", answer)
    if _is_blank(target):
        raise RowProblemError(f"{target_field}: expected a target that is not empty, found {_kind(target)}")
    _check_references(document, task)
    contexts, extracts, loose = _branches(document, task)
    return RowFields(
        id=_identifier(document.get("id")),
        query=question if query is None or (question and _is_blank(query)) else query,
        target=target,
        contexts=contexts,
        extracts=extracts,
        loose=loose,
    )


def _pair(document: dict[str, Any], required: str, preferred: str, task: Task) -> tuple[str, str | None]:
    """A required field and the one that is used instead when present; in a user's own task that one suffices."""
    better = _optional_text(document, preferred)
    if task.own and better is not None and document.get(required) is None:
        return "", better
    return _required_text(document, required), better


def _branches(document: dict[str, Any], task: Task) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Contexts and extracts, both stripped, without the pairs whose context is blank; how many pairs are loose."""
    name = "agent_reference_contexts"
    if task.contexts_may_stand_in and document.get(name) is None:
        if document.get("contexts") is None:
            raise RowProblemError(f"{name}: expected a list of strings here or in contexts, found neither")
        name = "contexts"
    contexts = _texts(document, name)
    extracts: list[str] | None = None
    if document.get("agent_extract_contexts") is not None:
        extracts = _texts(document, "agent_extract_contexts")
        if len(extracts) != len(contexts):
            raise RowProblemError(
                f"agent_extract_contexts: expected {len(contexts)} strings, one for each of {name}, "
                f"found {len(extracts)}"
            )
    kept_contexts = []
    kept_extracts = []
    loose = 0
    for index, text in enumerate(contexts):
        stripped = text.strip()
        if stripped:
            extract = (extracts[index].strip() if extracts is not None else "") or stripped
            kept_contexts.append(stripped)
            kept_extracts.append(extract)
            loose += not stripped.endswith(extract)
    if not kept_contexts:
        raise RowProblemError(f"{name}: expected at least one context that is not blank, found none")
    return tuple(kept_contexts), tuple(kept_extracts), loose


def _texts(document: dict[str, Any], name: str) -> list[str]:
    value = document.get(name)
    if not isinstance(value, list):
        raise RowProblemError(f"{name}: expected a list of strings, found {_found(document, name)}")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise RowProblemError(f"{name}[{index}]: expected a string, found {_kind(item)}")
    return value


def _required_text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise RowProblemError(f"{name}: expected a string, found {_found(document, name)}")
    return value


def _optional_text(document: dict[str, Any], name: str) -> str | None:
    value = document.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RowProblemError(f"{name}: expected a string or nothing, found {_kind(value)}")


def _check_references(document: dict[str, Any], task: Task) -> None:
    value = document.get("references")
    if isinstance(value, list) or ((task.contexts_may_stand_in or task.own) and value is None):
        return
    raise RowProblemError(f"references: expected a list, found {_found(document, 'references')}")


def _identifier(value: object) -> str | None:
    """The id only names a row in messages, so a number will do and anything else is as good as none."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _is_blank(text: str) -> bool:
    return not text or text.isspace()


def _found(document: dict[str, Any], name: str) -> str:
    return _kind(document[name]) if name in document else "no such field"


def _kind(value: object) -> str:
    """What a JSON value is, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a blank string" if _is_blank(value) else "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _explain(raw: bytes, error: orjson.JSONDecodeError) -> str:
    """Bad UTF-8 and bad JSON come as one error from the parser; the user needs to know which, and where."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as bad:
        return f"row: expected UTF-8, found byte 0x{raw[bad.start]:02x} at byte {bad.start + 1} of the line"
    return f"row: expected valid JSON, found {error.msg} at character {error.pos + 1} of the line"
