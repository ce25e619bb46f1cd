"""Makes a manifest for a directory that has none, such as a checkpoint of the reference implementation (no torch)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.disk import is_hidden_name
from parallel_synthesis.checkpoint.parts import check_parts
from parallel_synthesis.checkpoint.replace import replace_json
from parallel_synthesis.checkpoint.structure import HELD, check_state, damage
from parallel_synthesis.checkpoint.verification import is_run
from parallel_synthesis.errors import CheckpointError, StorageError, VerificationError
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.check import default_jobs
from parallel_synthesis.provenance.digests import Progress, Stretch, hash_all
from parallel_synthesis.provenance.inside import Inside, Stamp
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.safetensors_header import Header, read_header
from parallel_synthesis.provenance.schema import load_json


def write_manifest(
    directory: Path, *, jobs: int | None = None, progress: Callable[[int], Progress] | None = None
) -> dict[str, Any]:
    """Hashes every file of a directory and writes its manifest.json, atomically; returns it.

    The manifest says what is there now, so nothing is adopted that does not fit together: links, devices, damaged
    headers, parts of different checkpoints are a VerificationError with every problem. CheckpointError for a run
    (its manifests are made by its saves), a directory that has a manifest, or an empty one.
    """
    inside = Inside(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: expected a directory to make a manifest of")
    if inside.has(manifests.MANIFEST):
        raise CheckpointError(
            f"{directory} has a {manifests.MANIFEST} already; `ps verify {directory}` checks it"
        )
    if is_run(directory):
        raise CheckpointError(
            f"{directory} is a run; name one of its checkpoints, so that it stays what it is"
        )
    names, found = _names(directory)
    found += check_parts(inside, listed=names)
    found += check_state(inside, any_layout=True)
    if not found:  # what is damaged in a way that the files themselves tell is not listed as right
        found += [problem for name in HELD if name in names for problem in damage(inside, name)]
    if found:
        raise VerificationError([str(problem) for problem in found])
    if not names:
        raise CheckpointError(f"{directory} is empty; expected files to list")
    document = manifests.build(
        _entries(inside, names, jobs=jobs, progress=progress),
        global_step=(step := _step(directory, inside)),
        kind="directory" if step is None else "checkpoint",
    )
    replace_json(directory / manifests.MANIFEST, document, "manifest")
    return document


def _step(directory: Path, inside: Inside) -> int | None:
    if not inside.has(layout.CHECKPOINT_META):
        return None
    step: int = load_json(directory / layout.CHECKPOINT_META, "checkpoint_meta")["global_step"]
    return step


def _names(directory: Path) -> tuple[list[str], list[Problem]]:
    """Relative paths of all files below a directory, and what is there that is no file."""
    names: list[str] = []
    found: list[Problem] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        try:
            with os.scandir(directory / prefix) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise StorageError(
                f"{directory / prefix} cannot be listed: {error.strerror}; check its permissions"
            ) from error
        for entry in entries:
            name = f"{prefix}/{entry.name}" if prefix else entry.name
            mode = entry.stat(follow_symlinks=False).st_mode
            if is_hidden_name(entry.name):
                continue
            if stat.S_ISDIR(mode):
                pending.append(name)
            elif not stat.S_ISREG(mode) or not manifests.is_inside(name):
                detail = "is not a regular file with a plain name; a manifest can not list it"
                found.append(Problem(path=name, kind="not a regular file", detail=detail))
            else:
                names.append(name)
    return sorted(names), found


def _entries(
    inside: Inside, names: list[str], *, jobs: int | None, progress: Callable[[int], Progress] | None
) -> dict[str, dict[str, Any]]:
    stamps: dict[str, Stamp] = {}
    headers: dict[str, Header] = {}
    wanted: dict[Stretch, tuple[Inside, str]] = {}
    for name in names:
        fd = inside.open(name)
        if isinstance(fd, Problem):
            raise StorageError(f"{inside.directory}: {fd}; nothing was written")
        try:
            stamps[name] = Stamp.of(os.fstat(fd))
            if name.endswith(".safetensors"):
                headers[name] = read_header(fd)
        finally:
            os.close(fd)
        for stretch in _stretches(stamps[name], headers.get(name)):
            wanted[stretch] = (inside, name)
    total = sum(stretch.length for stretch in wanted)
    digests = hash_all(wanted, jobs=jobs or default_jobs(), progress=progress(total) if progress else None)
    return {name: _entry(stamps[name], headers.get(name), digests) for name in names}


def _stretches(stamp: Stamp, header: Header | None) -> list[Stretch]:
    found = [Stretch(stamp, 0, stamp.size)]
    if header is not None:
        found.append(Stretch(stamp, 0, header.bytes))
        found += [Stretch(stamp, tensor.start, tensor.bytes) for tensor in header.tensors.values()]
    return found


def _entry(stamp: Stamp, header: Header | None, digests: Mapping[Stretch, str | Problem]) -> dict[str, Any]:
    def digest(start: int, length: int) -> str:
        found = digests[Stretch(stamp, start, length)]
        if isinstance(found, Problem):
            raise StorageError(f"{found}; nothing was written")
        return found

    entry: dict[str, Any] = {"bytes": stamp.size, "sha256": digest(0, stamp.size)}
    if header is not None:
        entry["header_sha256"] = digest(0, header.bytes)
        entry["tensors"] = {
            name: {
                "offset": tensor.start,
                "bytes": tensor.bytes,
                "sha256": digest(tensor.start, tensor.bytes),
            }
            for name, tensor in header.tensors.items()
        }
    return entry
