"""Snapshots: checkpoints kept under a name for ever, as hard links beside the automatic milestones (no torch)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.commit import Staging, commit, link_checkpoint, remove_checkpoint
from parallel_synthesis.checkpoint.disk import Transfer
from parallel_synthesis.checkpoint.embeddings import export_whole, is_incomplete
from parallel_synthesis.checkpoint.layout import (
    CHECKPOINT_META,
    COMPONENT_ENTRIES,
    JUDGER_LORA,
    RunPaths,
    committed_milestones,
    is_committed,
    milestone_name,
    newest_committed,
    parse_step,
)
from parallel_synthesis.checkpoint.structure import check_structure
from parallel_synthesis.compat import RECIPE_NAME, is_reference_record
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import manifest
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.schema import load_json, read_json

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One kept checkpoint. own_bytes: bytes that only it holds; 0 while a step checkpoint shares its files."""

    name: str
    path: Path
    step: int
    bytes: int
    own_bytes: int
    how: str | None = None


def take(run: Path, *, step: int | None = None, name: str | None = None) -> Snapshot:
    """Keeps the newest committed checkpoint (or that of `step`) under a name; <recipe>_step_<N> when none is given.

    Every byte is checked against the manifest before it is linked. In a run of the reference implementation the
    structure is checked, and what is kept is a copy with a manifest: its writer may go on to rewrite its files, and
    would rewrite those that share their bytes. Raises CheckpointError for a run without checkpoints, a step without
    one, a damaged one, or a name that is taken or no file name.
    """
    paths = RunPaths(run)
    theirs = paths.run_args.is_file() and is_reference_record(read_json(paths.run_args))
    committed = {found.step: found.path for found in newest_committed(run)} | (_plain(run) if theirs else {})
    if not committed:
        raise CheckpointError(
            f"{run} has no committed checkpoint to keep; expected a run (--export copies single checkpoints)"
        )
    wanted = max(committed) if step is None else step
    if wanted not in committed:
        there = ", ".join(map(str, sorted(committed)))
        raise CheckpointError(f"{run} has no checkpoint of step {wanted}; there are those of: {there}")
    source = committed[wanted]
    known = is_committed(source)
    problems = manifest.verify(source) if known else check_structure(Inside(source), of_step=True).problems
    if problems:
        raise CheckpointError(f"{source} is damaged and was not kept: {problems[0]}; choose another step")
    if name is None:
        recipe = load_json(source / CHECKPOINT_META, "checkpoint_meta").get("recipe")
        name = milestone_name(recipe or (RECIPE_NAME if theirs else "run"), wanted)
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} can not name a snapshot; expected letters, digits, '.', '_' and '-' only"
        )
    if is_committed(paths.milestones / name):
        raise CheckpointError(f"{run} has a snapshot {name} already; choose another --name")
    if known:
        how = link_checkpoint(source, paths.milestones / name, copy=theirs)
    else:
        _export_foreign(source, paths.milestones / name)
        how = "copy"
    return _describe(paths.milestones / name, how)


def _plain(run: Path) -> dict[int, Path]:
    """step -> directory of the step checkpoints that have no manifest."""
    place = RunPaths(run).step_checkpoints
    paths = place.iterdir() if place.is_dir() else ()
    found = {parse_step(path.name): path for path in paths if path.is_dir() and not path.is_symlink()}
    return {step: path for step, path in found.items() if step is not None and not is_committed(path)}


def listed(run: Path) -> list[Snapshot]:
    """All snapshots and milestones of a run, by step and name."""
    found = [_describe(path, None) for path in committed_milestones(run).values()]
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.name))


def export(checkpoint: Path, destination: Path) -> Transfer:
    """A plain copy that shares nothing with the run; every byte is checked on the way.

    Embeddings that were left out of the adapter (checkpoint.embeddings = "drop") are put back; CheckpointError
    saying which and whose they are when they can not be found. A checkpoint without a manifest (of the reference
    implementation) has nothing to be checked by but its structure: its component files are copied as they are, and
    the copy gets a manifest.
    """
    if is_incomplete(checkpoint):
        export_whole(checkpoint, destination)
        return "copy"
    if not is_committed(checkpoint):
        problems = check_structure(Inside.of(checkpoint)).problems
        if problems:
            raise CheckpointError(
                f"{checkpoint} is damaged and was not copied: {problems[0]}; use another one"
            )
        _export_foreign(checkpoint, destination)
        return "copy"
    return link_checkpoint(checkpoint, destination, copy=True)


def _export_foreign(checkpoint: Path, destination: Path) -> None:
    """A checkpoint of the reference implementation, which has no manifest: its component files; the copy gets one."""
    names = [name for name in COMPONENT_ENTRIES if (checkpoint / name).is_file()]
    names += [f"{JUDGER_LORA}/{path.name}" for path in sorted((checkpoint / JUDGER_LORA).iterdir())]
    meta = checkpoint / CHECKPOINT_META
    step = load_json(meta, "checkpoint_meta")["global_step"] if meta.is_file() else None

    def fill(staging: Staging) -> None:
        for name in names:
            with staging.open(name) as target, (checkpoint / name).open("rb") as file:
                while data := file.read(1 << 20):
                    target.write(data)

    commit(destination, step=step, fill=fill, kind="directory" if step is None else "checkpoint")


def drop(run: Path, name: str) -> Snapshot:
    """Removes a snapshot or milestone, and nothing else. CheckpointError when there is none of that name."""
    found = next((snapshot for snapshot in listed(run) if snapshot.name == name), None)
    if found is None:
        names = ", ".join(snapshot.name for snapshot in listed(run)) or "none"
        raise CheckpointError(f"{run} has no snapshot {name!r}; there are: {names}")
    remove_checkpoint(found.path)
    return found


def _describe(path: Path, how: str | None) -> Snapshot:
    document: dict[str, Any] = manifest.read(path)
    sizes = [(path / name).stat() for name in document["files"] if (path / name).is_file()]
    return Snapshot(
        name=path.name,
        path=path,
        step=document["global_step"],
        bytes=sum(stat.st_size for stat in sizes),
        own_bytes=sum(stat.st_size for stat in sizes if stat.st_nlink == 1),
        how=how,
    )
