"""Atomic commits: a checkpoint directory appears whole under its final name or not at all.

The protocol ("Files of a run" in the design): write into a hidden sibling, fsync the files, write
manifest.json last, fsync the directories, rename, fsync the parent, then repoint `latest` by a renamed
symlink. Removal renames to a hidden name first, so a final name never stands for half of something. Every
change goes through a `Disk`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from parallel_synthesis.checkpoint.disk import (
    DISK,
    Disk,
    Transfer,
    abandoned,
    claimed,
    hidden_name,
    is_hidden_name,
    make_directories,
    remove_tree,
    storage_errors,
    write_all,
)
from parallel_synthesis.checkpoint.layout import LATEST, is_committed, newest_committed, step_name
from parallel_synthesis.checkpoint.transfer import transfer
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.hashing import Bytes, HashingFile
from parallel_synthesis.provenance.manifest import MANIFEST
from parallel_synthesis.provenance.schema import dump_json, validate

_WRITE_BACK = 32 << 20  # bytes of a file after which they are sent to the disk while the rest is made
_COST: tuple[Transfer, ...] = ("link", "reflink", "copy")
_T = TypeVar("_T")


class Staging:
    """The hidden directory of a commit in progress. Names are relative POSIX paths; each is written once,
    durably.

    Errors name the file by its final path; OSError becomes StorageError.
    """

    def __init__(self, hidden: Path, destination: Path, disk: Disk) -> None:
        self._hidden = hidden
        self._destination = destination
        self._disk = disk
        self._entries: dict[str, dict[str, Any]] = {}

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[HashingFile]:
        """A new file to write; hashed while it is written, fsynced and entered into the manifest at the
        end."""
        if not manifests.is_inside(name) or name in self._entries:
            raise ValueError(f"{name!r}: expected the relative path of a file not yet written")
        path, final = self._hidden / name, self._destination / name
        with storage_errors("write", final):
            self._make_parents(name)
            fd = self._disk.create(path)
        try:
            written = on_its_way = 0

            def sink(data: Bytes) -> None:
                nonlocal written, on_its_way
                with storage_errors("write", final):
                    write_all(self._disk, fd, data)
                written += len(data)
                if written - on_its_way >= _WRITE_BACK:
                    self._disk.start_writing(fd, on_its_way, written - on_its_way)
                    on_its_way = written

            file = HashingFile(sink)
            yield file
            file.flush()
            with storage_errors("write", final):
                self._disk.fsync(fd)
        finally:
            os.close(fd)
        self._entries[name] = {"bytes": file.bytes, "sha256": file.sha256}

    def write_bytes(self, name: str, data: Bytes) -> None:
        """A whole file at once."""
        with self.open(name) as file:
            file.write(data)

    def write_json(self, name: str, document: Mapping[str, Any], schema: str | None) -> None:
        """A JSON file in the stable layout; CheckpointError when it does not follow
        schemas/<schema>.schema.json."""
        if schema is not None:
            validate(document, schema, str(self._destination / name))
        self.write_bytes(name, dump_json(document))

    def describe(self, name: str, details: Mapping[str, Any]) -> None:
        """Adds fields to a written file's manifest entry (a safetensors file's header_sha256 and tensors)."""
        self._entries[name].update(details)

    def entry(self, name: str) -> dict[str, Any]:
        """The manifest entry of a file that has been written."""
        return dict(self._entries[name])

    def finish(self, *, step: int | None, kind: str) -> dict[str, Any]:
        """Writes the manifest; commit calls it after `fill`."""
        document = manifests.build(self._entries, global_step=step, kind=kind)
        final = self._destination / MANIFEST
        with storage_errors("write", final):
            _write_file(self._disk, self._hidden / MANIFEST, dump_json(document))
        return document

    def _make_parents(self, name: str) -> None:
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            directory = self._hidden.joinpath(*parts[:depth])
            if not directory.is_dir():
                self._disk.mkdir(directory)


def commit(
    destination: Path,
    *,
    step: int | None,
    fill: Callable[[Staging], None],
    kind: str = "checkpoint",
    disk: Disk = DISK,
) -> dict[str, Any]:
    """Commits a new directory; `fill` writes its files. Returns the manifest. step: None only for a directory
    that is no checkpoint, which says its `kind`.

    Files are 0444 less the umask. Whatever fails, inside `fill` too, leaves nothing under the final name and
    removes the hidden sibling; earlier checkpoints are not touched. A kill leaves at most a hidden sibling,
    which the next commit beside it clears. Raises StorageError (path and free space named), CheckpointError
    when the name is taken.
    """

    def build(hidden: Path) -> dict[str, Any]:
        staging = Staging(hidden, destination, disk)
        fill(staging)
        return staging.finish(step=step, kind=kind)

    return _commit_directory(destination, build, disk)


def link_checkpoint(source: Path, destination: Path, *, copy: bool = False, disk: Disk = DISK) -> Transfer:
    """Commits `destination` as the same checkpoint as the committed `source`: a milestone or a snapshot.

    Hard links, which add no bytes; where links are not possible reflinks, else copies, whose content is
    checked against the manifest on the way. copy=True copies always (an export). Returns the costliest way
    that was needed. CheckpointError when the source is not whole (by size) or the name is taken; StorageError
    as `commit`.
    """
    source, files = _committed_files(source)

    def build(hidden: Path) -> Transfer:
        used: Transfer = "link"
        for name, sha256 in files.items():
            target = hidden / name
            if not target.parent.is_dir():
                disk.mkdir(target.parent)
            way = transfer(source / name, target, sha256, disk, copy=copy)
            used = max(used, way, key=_COST.index)
        return used

    return _commit_directory(destination, build, disk)


def link_final(source: Path, out: Path, *, disk: Disk = DISK) -> Transfer:
    """Puts the six component entries of a committed checkpoint into the run directory, manifest.json last.

    An old manifest there goes first, so that at no moment a manifest stands beside files that are not its
    own; each file is replaced by a rename. Done already: nothing is touched. Returns as link_checkpoint. A
    failure leaves the run directory without a manifest, which is a run that is not complete.
    """
    source, files = _committed_files(source)
    if all(_same_file(source / name, out / name) for name in files):
        return "link"
    used: Transfer = "link"
    with storage_errors("write", out):
        make_directories(out, disk)
        _clear_stale(out, disk)
        if os.path.lexists(out / MANIFEST):
            disk.unlink(out / MANIFEST)
            disk.fsync_directory(out)
        for directory in sorted({(out / name).parent for name in files} - {out}):
            if directory.is_symlink():  # what lies behind it is not the run's
                raise CheckpointError(
                    f"{directory} is a symbolic link; expected a directory: move the link away"
                )
            make_directories(directory, disk)
            _clear_stale(directory, disk)
    for name, sha256 in files.items():
        target = out / name
        with storage_errors("write", target):
            if name == MANIFEST:  # every file durable before the manifest that vouches for them
                for directory in sorted({(out / other).parent for other in files}):
                    disk.fsync_directory(directory)
            used = max(used, _replace(source / name, target, sha256, disk), key=_COST.index)
    with storage_errors("write", out):
        disk.fsync_directory(out)
    return used


def set_latest(step_checkpoints: Path, step: int, *, disk: Disk = DISK) -> None:
    """Points `latest` at the committed checkpoint of `step`, by renaming a new symlink over the old one."""
    name = step_name(step)
    latest = step_checkpoints / LATEST
    if not is_committed(step_checkpoints / name):
        raise CheckpointError(
            f"{step_checkpoints / name} is not a committed checkpoint; expected its {MANIFEST}; {LATEST} "
            f"stays as it is"
        )
    if latest.is_symlink() and latest.readlink() == Path(name):
        return
    hidden = step_checkpoints / hidden_name(LATEST)
    with storage_errors("write", latest):
        _clear_stale(step_checkpoints, disk)
        try:
            disk.symlink(name, hidden)
            disk.rename(hidden, latest)
        except BaseException:
            _discard(hidden, disk)
            raise
        disk.fsync_directory(step_checkpoints)


def remove_checkpoint(path: Path, *, disk: Disk = DISK) -> None:
    """Removes a checkpoint: renamed to a hidden name in one step, then its manifest, then the rest.

    A kill in between leaves a hidden leftover, never half a checkpoint under its name. StorageError naming
    the path.
    """
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint directory; expected one; nothing was removed")
    hidden = path.parent / hidden_name(path.name)
    with storage_errors("remove", path):
        disk.rename(path, hidden)
        disk.fsync_directory(path.parent)
        with claimed(hidden):
            remove_tree(hidden, disk, first=MANIFEST)


def prune(run: Path, keep: Container[int], *, disk: Disk = DISK) -> list[int]:
    """Removes the committed step checkpoints of a run whose step is not in `keep`, oldest first; returns
    their steps.

    The one `latest` points to always stays.
    """
    found = newest_committed(run)
    latest = (found[0].path.parent / LATEST).resolve() if found else None
    going = [there for there in reversed(found) if there.step not in keep and there.path.resolve() != latest]
    for there in going:
        remove_checkpoint(there.path, disk=disk)
    return [there.step for there in going]


def clear_stale(parent: Path, *, disk: Disk = DISK) -> list[str]:
    """Removes what dead processes left half-written in a directory; returns the hidden names that are gone.

    What a living process is writing stays. A missing directory holds nothing. StorageError naming the
    directory.
    """
    if not parent.is_dir():
        return []
    with storage_errors("clear leftovers in", parent):
        return _clear_stale(parent, disk)


def _clear_stale(parent: Path, disk: Disk) -> list[str]:
    cleared = []
    for name in sorted(entry.name for entry in parent.iterdir() if is_hidden_name(entry.name)):
        if abandoned(parent / name):
            with contextlib.suppress(FileNotFoundError):  # another process clears too
                remove_tree(parent / name, disk, first=MANIFEST)
                cleared.append(name)
    return cleared


def _commit_directory(destination: Path, build: Callable[[Path], _T], disk: Disk) -> _T:
    """`build` fills a hidden directory, manifest last; then it becomes `destination`."""
    parent = destination.parent
    hidden = parent / hidden_name(destination.name)
    renamed = False
    try:
        with storage_errors("write", destination):
            make_directories(parent, disk)
            _refuse_taken(destination)
            _clear_stale(parent, disk)
            disk.mkdir(hidden)
            with claimed(hidden):
                result = build(hidden)
                for directory in sorted((path for path in hidden.rglob("*") if path.is_dir()), reverse=True):
                    disk.fsync_directory(directory)
                disk.fsync_directory(hidden)
                _refuse_taken(destination)  # again: rename would replace an empty directory without a word
                disk.rename(hidden, destination)
                renamed = True
                disk.fsync_directory(parent)
    except BaseException:
        if renamed:  # whole, but the save is reported as failed, so its name must not appear later
            with contextlib.suppress(OSError):
                disk.rename(destination, hidden)
        _discard(hidden, disk)
        raise
    return result


def _refuse_taken(destination: Path) -> None:
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination} exists already; a committed checkpoint is never rewritten; move it away or "
            f"choose another name"
        )


def _discard(path: Path, disk: Disk) -> None:
    with contextlib.suppress(
        OSError
    ):  # the error that led here is the one to report; the next commit clears the rest
        remove_tree(path, disk, first=MANIFEST)


def _committed_files(source: Path) -> tuple[Path, dict[str, str | None]]:
    """The resolved directory and its files with their sha256, manifest.json (None) last; refuses one that is
    not whole."""
    source = source.resolve()
    document = manifests.read(source)
    found = manifests.verify_quick(source, extra=False)
    if found:
        listed = "; ".join(map(str, found))
        raise CheckpointError(
            f"{source} is not whole: {listed}; expected what its manifest lists; use another checkpoint"
        )
    files: dict[str, str | None] = {name: entry["sha256"] for name, entry in document["files"].items()}
    return source, {**files, MANIFEST: None}


def _replace(source: Path, target: Path, sha256: str | None, disk: Disk) -> Transfer:
    """Puts a file of the same content at `target`, replacing what is there in one step."""
    if _same_file(
        source, target
    ):  # renaming one link over another of the same file would do nothing and leave both
        return "link"
    hidden = target.parent / hidden_name(target.name)
    try:
        way = transfer(source, hidden, sha256, disk, copy=False)
        disk.rename(hidden, target)
    except BaseException:
        _discard(hidden, disk)
        raise
    return way


def _write_file(disk: Disk, path: Path, data: Bytes) -> None:
    fd = disk.create(path)
    try:
        write_all(disk, fd, data)
        disk.fsync(fd)
    finally:
        os.close(fd)


def _same_file(source: Path, target: Path) -> bool:
    try:
        return not target.is_symlink() and source.samefile(target)
    except FileNotFoundError:
        return False
