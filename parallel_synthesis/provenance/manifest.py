"""Manifests: what each file of a directory must be. Written in one form, read in every form that says the same.

Ours (schemas/manifest.schema.json): {schema_version: 1, kind: "checkpoint", global_step, files: {relative path:
{bytes, sha256, and for a safetensors file header_sha256 and tensors: {name: {offset, bytes, sha256}}}}}. Offsets
count from the start of the file; the header is everything before the first tensor. Also read: release manifests
(`components` in the place of `files`) and the lines of sha256sum. Upper-case hex, CR LF, a byte order mark and
back slashes in paths are read right; ours has none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel_synthesis.errors import CheckpointError, ManifestError, StorageError
from parallel_synthesis.provenance import inside as insides
from parallel_synthesis.provenance.check import Expected, Part, Place, check
from parallel_synthesis.provenance.hashing import sha256_bytes
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.problems import Problem, ProblemKind
from parallel_synthesis.provenance.schema import parse_json, problems

__all__ = ["MANIFEST", "Listing", "Problem", "ProblemKind", "build", "is_inside", "read", "verify"]

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
LIMIT = 64 << 20  # bytes of a manifest file
_LINE = re.compile(r"(?P<escaped>\\?)(?P<sha256>[0-9A-Fa-f]{64}) [ *](?P<path>.+)")

Form = Literal["manifest", "release_manifest", "sha256sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A manifest that was read. document: its JSON, normalised; empty for sha256sum's lines. sha256: of its bytes."""

    form: Form
    source: str
    sha256: str
    files: Mapping[str, Expected]
    document: Mapping[str, Any]


def build(
    files: Mapping[str, Mapping[str, Any]], *, global_step: int | None, kind: str = "checkpoint"
) -> dict[str, Any]:
    """A manifest document; `global_step` is left out when None (a directory that is no checkpoint)."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "files": {path: dict(entry) for path, entry in sorted(files.items())},
    }
    if global_step is not None:
        document["global_step"] = global_step
    return document


def is_inside(name: str) -> bool:
    """True for a plain relative path in POSIX form that cannot leave its directory and is not the manifest's
    own."""
    return insides.is_inside(name) and name != MANIFEST


def read(directory: Path) -> dict[str, Any]:
    """The validated manifest of a directory. ManifestError (a CheckpointError) when there is none, it is damaged, or
    it names a path outside the directory; StorageError when it cannot be read."""
    return dict(listing(directory).document)


def listing(directory: Path) -> Listing:
    """The manifest of a directory; errors as `read`."""
    path = directory / MANIFEST
    raw = Inside.of(directory).read(MANIFEST, limit=LIMIT)
    if isinstance(raw, Problem):
        if raw.kind == "unreadable":
            raise StorageError(f"cannot read {path}: {raw.detail}; check its permissions and the disk")
        raise ManifestError(
            [
                f"{directory} is not a committed checkpoint: expected a file {MANIFEST} in it ({raw.detail}); name "
                f"another checkpoint"
            ]
        )
    found = parse(raw, str(path))
    if found.form != "manifest":
        raise ManifestError([f"{path}: expected a manifest with a list of files"])
    return found


def parse(raw: bytes, where: str) -> Listing:
    """A manifest of any of the forms. ManifestError with every problem; each names the file and the place in it."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ManifestError([f"{where}: expected UTF-8 text: {error}"]) from error
    if text.lstrip()[:1] in ("{", "["):
        return _parse_json(raw, where)
    return _parse_lines(text, raw, where)


def _parse_json(raw: bytes, where: str) -> Listing:
    document = parse_json(raw, where, error=lambda message: ManifestError([message]))
    form: Form = "manifest"
    if isinstance(document, dict) and "files" not in document and "components" in document:
        form = "release_manifest"
    key = "files" if form == "manifest" else "components"
    found: list[str] = []
    if isinstance(document, dict) and isinstance(document.get(key), dict):
        document[key] = _normalised(document[key], f"{where}: $.{key}", found)
        if form == "release_manifest":
            _lower(document.get("mapper"), "source_sha256")
            for entry in _values(document.get("training_datasets")):
                _lower(entry, "sha256")
    found += [f"{where}: {problem}" for problem in problems(document, form)]
    if found:
        raise ManifestError(found)
    files = {name: _expected(entry) for name, entry in document[key].items()}
    return Listing(form=form, source=where, sha256=sha256_bytes(raw), files=files, document=document)


def _normalised(files: Mapping[str, Any], where: str, found: list[str]) -> dict[str, Any]:
    """The entries under POSIX paths with lower-case digests; what is wrong with the paths goes to `found`."""
    entries: dict[str, Any] = {}
    for written, entry in files.items():
        name = _path(written, where, found, seen=entries)
        _lower(entry, "sha256", "header_sha256")
        if isinstance(entry, dict):
            for tensor in _values(entry.get("tensors")):
                _lower(tensor, "sha256")
        entries[name] = entry
    return entries


def _path(written: str, where: str, found: list[str], *, seen: Mapping[str, Any]) -> str:
    name = written.replace("\\", "/")
    if not is_inside(name):
        found.append(f"{where}: {written!r} is not a path inside the directory; do not use this manifest")
    elif name in seen:
        found.append(f"{where}: {written!r} is listed twice")
    return name


def _parse_lines(text: str, raw: bytes, where: str) -> Listing:
    found: list[str] = []
    files: dict[str, Expected] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            found.append(
                f"{where}:{number}: expected 64 hex digits, two spaces and a path, found {line[:80]!r}"
            )
            continue
        path = match["path"]
        if match["escaped"]:
            path = re.sub(r"\\(.)", lambda code: {"n": "\n", "r": "\r"}.get(code[1], code[1]), path)
        name = _path(path.removeprefix("./"), f"{where}:{number}", found, seen=files)
        files[name] = Expected(sha256=match["sha256"].lower())
    if not files and not found:
        found.append(f"{where}: expected at least one file, found none")
    if found:
        raise ManifestError(found)
    return Listing(form="sha256sum", source=where, sha256=sha256_bytes(raw), files=files, document={})


def sha256sum_lines(files: Mapping[str, Expected]) -> str:
    """The list as `sha256sum -c` reads it, sorted by path."""
    lines = []
    for name, expected in sorted(files.items()):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{'' if escaped == name else chr(92)}{expected.sha256}  {escaped}\n")
    return "".join(lines)


def verify(directory: Path, *, quick: bool = False, extra: bool = True) -> list[Problem]:
    """Every problem of a directory's bytes against its manifest, as data; empty means whole.

    quick: existence, kind and size only, no reading of content. extra: also report what the manifest does not
    list (off for a run directory, whose root holds other things beside its final components). Nothing is
    raised for a damaged directory: a manifest that is missing or invalid is itself a problem of kind
    "manifest".
    """
    try:
        listed = listing(directory)
    except (CheckpointError, StorageError) as error:
        return [Problem(path=MANIFEST, kind="manifest", detail=str(error))]
    place = Place(inside=Inside.of(directory), files=listed.files, extra=extra, known=is_manifest)
    return check([place], quick=quick).places[0].problems


def verify_quick(directory: Path, *, extra: bool = True) -> list[Problem]:
    """`verify` without reading content."""
    return verify(directory, quick=True, extra=extra)


def is_manifest(name: str) -> bool:
    return name == MANIFEST


def _expected(entry: Mapping[str, Any]) -> Expected:
    tensors: Mapping[str, Mapping[str, Any]] = entry.get("tensors", {})
    parts = [
        Part(label=f"tensor {name}", start=tensor["offset"], bytes=tensor["bytes"], sha256=tensor["sha256"])
        for name, tensor in tensors.items()
    ]
    if "header_sha256" in entry:
        end = min((part.start for part in parts), default=entry["bytes"])
        parts.append(Part(label="header", start=0, bytes=end, sha256=entry["header_sha256"]))
    parts.sort(key=lambda part: (part.start, part.bytes, part.label))
    return Expected(sha256=entry["sha256"], bytes=entry["bytes"], parts=tuple(parts))


def _lower(entry: Any, *keys: str) -> None:
    if isinstance(entry, dict):
        for key in keys:
            if isinstance(entry.get(key), str):
                entry[key] = entry[key].lower()


def _values(entries: Any) -> Sequence[Any]:
    return list(entries.values()) if isinstance(entries, dict) else []
