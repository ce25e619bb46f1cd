"""The manifest of a directory: what each of its files must be, and every way in which the directory differs.

Format (schemas/manifest.schema.json): {schema_version: 1, kind: "checkpoint", global_step, files: {relative
path: {bytes, sha256, and for a safetensors file header_sha256 and tensors: {name: {offset, bytes,
sha256}}}}}. Offsets count from the start of the file; the header is everything before the first tensor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.schema import load_json

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1

ProblemKind = Literal[
    "manifest", "missing", "unreadable", "not a regular file", "escapes", "size", "digest", "extra"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One difference between a directory and its manifest. `path` is relative to the directory."""

    path: str
    kind: ProblemKind
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


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


def read(directory: Path) -> dict[str, Any]:
    """The validated manifest of a directory. CheckpointError when there is none, it is damaged, or it names a
    path outside the directory; StorageError when it cannot be read."""
    path = directory / MANIFEST
    if not path.is_file() or path.is_symlink():
        raise CheckpointError(
            f"{directory} is not a committed checkpoint: expected a file {MANIFEST} in it; name another "
            f"checkpoint"
        )
    document: dict[str, Any] = load_json(path, "manifest")
    outside = [name for name in document["files"] if not is_inside(name)]
    if outside:
        raise CheckpointError(
            f"{path}: {outside[0]!r} is not a path inside the directory; do not use this checkpoint"
        )
    return document


def is_inside(name: str) -> bool:
    """True for a plain relative path in POSIX form that cannot leave its directory and is not the manifest's
    own."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") for part in parts) and "\\" not in name and "\0" not in name
    return plain and name != MANIFEST and not PurePosixPath(name).is_absolute()


def verify(directory: Path, *, quick: bool = False, extra: bool = True) -> list[Problem]:
    """Every problem of a directory against its manifest, as data; empty means whole.

    quick: existence, kind and size only, no reading of content. extra: also report what the manifest does not
    list (off for a run directory, whose root holds other things beside its final components). Nothing is
    raised for a damaged directory: a manifest that is missing or invalid is itself a problem of kind
    "manifest".
    """
    try:
        document = read(directory)
    except (CheckpointError, StorageError) as error:
        return [Problem(path=MANIFEST, kind="manifest", detail=str(error))]
    files: dict[str, dict[str, Any]] = document["files"]
    found = []
    for name, entry in sorted(files.items()):
        found += _verify_file(directory, name, entry, quick=quick)
    if extra:
        for name in sorted(_unlisted(directory, set(files))):
            found.append(Problem(path=name, kind="extra", detail="not listed in the manifest"))
    return found


def verify_quick(directory: Path, *, extra: bool = True) -> list[Problem]:
    """`verify` without reading content."""
    return verify(directory, quick=True, extra=extra)


def _verify_file(directory: Path, name: str, entry: Mapping[str, Any], *, quick: bool) -> list[Problem]:
    path = directory
    parts = name.split("/")
    for depth, part in enumerate(parts):
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return [Problem(path=name, kind="missing", detail="missing")]
        except OSError as error:
            return [Problem(path=name, kind="unreadable", detail=f"cannot be read: {error.strerror}")]
        last = depth == len(parts) - 1
        if stat.S_ISLNK(mode):
            # Followed, it could lead out of the directory; committed checkpoints have none.
            kind: ProblemKind = "not a regular file" if _stays_inside(path, directory) else "escapes"
            return [
                Problem(path=name, kind=kind, detail=f"{part} is a symbolic link; expected a file of its own")
            ]
        if not (stat.S_ISREG(mode) if last else stat.S_ISDIR(mode)):
            wanted = "a regular file" if last else "a directory"
            return [Problem(path=name, kind="not a regular file", detail=f"{part} is not {wanted}")]
    return _verify_content(path, name, entry, quick=quick)


def _verify_content(path: Path, name: str, entry: Mapping[str, Any], *, quick: bool) -> list[Problem]:
    try:
        size = path.stat().st_size
        if size != entry["bytes"]:
            return [Problem(path=name, kind="size", detail=f"{size} bytes; expected {entry['bytes']}")]
        if quick or sha256_file(path) == entry["sha256"]:
            return []
        named = _damaged_parts(path, entry)
    except (OSError, StorageError) as error:
        return [Problem(path=name, kind="unreadable", detail=f"cannot be read: {error}")]
    where = f" (damaged: {', '.join(named[:5])}{' ...' if len(named) > 5 else ''})" if named else ""
    return [Problem(path=name, kind="digest", detail=f"content differs from its sha256{where}")]


def _damaged_parts(path: Path, entry: Mapping[str, Any]) -> list[str]:
    """Which parts of a safetensors file differ: "header", else names of tensors."""
    tensors: Mapping[str, Mapping[str, Any]] = entry.get("tensors", {})
    if "header_sha256" not in entry:
        return []
    data_start = min((tensor["offset"] for tensor in tensors.values()), default=entry["bytes"])
    damaged = [] if sha256_file(path, length=data_start) == entry["header_sha256"] else ["header"]
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1]["offset"], item[0])):
        if sha256_file(path, start=tensor["offset"], length=tensor["bytes"]) != tensor["sha256"]:
            damaged.append(f"tensor {name}")
    return damaged


def _stays_inside(link: Path, directory: Path) -> bool:
    try:
        return link.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return False


def _unlisted(directory: Path, listed: set[str]) -> Iterator[str]:
    """Relative paths of everything the manifest does not account for; a directory without listed files
    once."""
    wanted_directories = {
        "/".join(name.split("/")[:depth]) for name in listed for depth in range(1, name.count("/") + 1)
    }
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            entries = sorted(os.scandir(directory / prefix), key=lambda entry: entry.name)
        except OSError:
            continue  # what is listed below it is reported as unreadable by itself
        for entry in entries:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            if name in wanted_directories and entry.is_dir(follow_symlinks=False):
                pending.append(name)
            elif name not in listed and name not in wanted_directories and name != MANIFEST:
                yield name
