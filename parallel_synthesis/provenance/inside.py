"""Opens the files of one directory and nothing else: no link is followed, no device or pipe is opened.

Every step on the way is opened relative to the one before, with O_NOFOLLOW, so that a link put there meanwhile
leads nowhere either.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from parallel_synthesis.provenance.problems import Problem, ProblemKind

_DRIVE = re.compile(r"[A-Za-z]:")
_XET = re.compile(r"[0-9a-f]{64}")
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe that takes a file's place between the look and the opening must not hang the caller.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells that a file was written or swapped: device, inode, size in bytes, times in ns, names it has."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    links: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_nlink,
        )

    def still_is(self, now: Stamp) -> bool:
        """The same bytes, under a name: a run that makes a hard link of it meanwhile changes its ctime only."""
        same = (self.device, self.inode, self.size, self.mtime_ns)
        linked = now.links != self.links and now.links > 0
        return same == (now.device, now.inode, now.size, now.mtime_ns) and (
            now.ctime_ns == self.ctime_ns or linked
        )


@dataclass(frozen=True, slots=True)
class Inside:
    """A directory, which may itself be named by a link (`latest`).

    blobs: the folder of a Hub cache that a snapshot's entries may point into, None for any other directory. Such
    an entry is not followed either: its text is read, and the blob it names is opened as a plain file.
    """

    directory: Path
    blobs: Path | None = None

    @classmethod
    def of(cls, directory: Path) -> Inside:
        """A directory, known for a snapshot of a Hub cache by where it lies."""
        repository = directory.parent.parent
        snapshot = directory.parent.name == "snapshots" and repository.name.startswith("models--")
        return cls(directory, blobs=repository / "blobs" if snapshot else None)

    def open(self, name: str) -> int | Problem:
        """A descriptor of the regular file `name` (relative, POSIX form), or why there is none."""
        parts = name.split("/")
        try:
            folder = os.open(self.directory, _WALK & ~os.O_NOFOLLOW)
        except OSError as error:
            return _failed(name, str(self.directory), error)
        try:
            for depth, part in enumerate(parts[:-1]):
                found = self._look(name, parts, depth, folder)
                if isinstance(found, Problem):
                    return found
                below = os.open(part, _WALK, dir_fd=folder)
                os.close(folder)
                folder = below
            found = self._look(name, parts, len(parts) - 1, folder)
            if isinstance(found, Problem):
                return found
            fd = os.open(parts[-1], _READ, dir_fd=folder) if found is None else os.open(found, _READ)
        except OSError as error:
            return _failed(name, name, error)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return Problem(path=name, kind="not a regular file", detail=f"{parts[-1]} is not a regular file")
        return fd

    def read(self, name: str, *, limit: int) -> bytes | Problem:
        """The whole content of a small file; one of more than `limit` bytes is a problem, not read."""
        fd = self.open(name)
        if isinstance(fd, Problem):
            return fd
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                detail = f"{size:,} bytes; expected at most {limit:,} of such a file"
                return Problem(path=name, kind="structure", detail=detail, expected=limit, actual=size)
            data = b""
            while len(data) <= limit and (piece := os.pread(fd, min(1 << 20, limit), len(data))):
                data += piece
        except OSError as error:
            return _failed(name, name, error)
        finally:
            os.close(fd)
        return data

    def has(self, name: str) -> bool:
        """Something of this name is there, whatever it is."""
        return os.path.lexists(self.directory / name)

    def unlisted(self, listed: Container[str], folders: Container[str]) -> Iterator[str | Problem]:
        """Names of everything that is not in `listed`, a folder without listed files once.

        A folder that can not be listed is a problem: what is in it was not looked at.
        """
        pending = [""]
        while pending:
            prefix = pending.pop(0)
            try:
                with os.scandir(self.directory / prefix) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
            except OSError as error:
                detail = f"cannot be listed: {error.strerror}"
                yield Problem(path=prefix or ".", kind="unreadable", detail=detail)
                continue
            for entry in entries:
                name = f"{prefix}/{entry.name}" if prefix else entry.name
                if name in folders and entry.is_dir(follow_symlinks=False):
                    pending.append(name)
                elif name not in listed and name not in folders:
                    yield name

    def _look(self, name: str, parts: list[str], depth: int, folder: int) -> Problem | Path | None:
        """Why a step of the way is not to be opened; a Path: the blob that stands for the last one."""
        part = parts[depth]
        mode = os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode
        last = depth == len(parts) - 1
        if stat.S_ISLNK(mode):
            blob = self._blob(parts, folder) if last else None
            return blob or self._link(name, self.directory.joinpath(*parts[: depth + 1]), part)
        if not (stat.S_ISREG(mode) if last else stat.S_ISDIR(mode)):
            wanted = "a regular file" if last else "a directory"
            return Problem(path=name, kind="not a regular file", detail=f"{part} is not {wanted}")
        return None

    def _blob(self, parts: list[str], folder: int) -> Path | None:
        if self.blobs is None:
            return None
        where = self.directory.joinpath(*parts[:-1], os.readlink(parts[-1], dir_fd=folder))
        target, blobs = Path(os.path.normpath(where)), Path(os.path.normpath(self.blobs))
        if target.parent != blobs or not target.name.isalnum():
            return None
        if not target.is_symlink():
            return target
        # huggingface_hub keeps a blob that several repositories may share in CACHE/blobs/ab/abcd..., under its Xet hash.
        shared = Path(os.path.normpath(blobs / os.readlink(target)))
        store = blobs.parent.parent / "blobs" / shared.name[:2]
        return shared if shared.parent == store and _XET.fullmatch(shared.name) else None

    def _link(self, name: str, link: Path, part: str) -> Problem:
        kind: ProblemKind = "escapes"
        try:
            if link.resolve().is_relative_to(self.directory.resolve()):  # looks at names, opens nothing
                kind = "not a regular file"
        except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
            pass
        return Problem(
            path=name,
            kind=kind,
            detail=f"{part} is a symbolic link; expected a file of its own",
            actual="link",
        )


def is_inside(name: str) -> bool:
    """True for a plain relative path in POSIX form that cannot leave its directory."""
    plain = all(part not in ("", ".", "..") for part in name.split("/")) and not set(name) & {"\\", "\0"}
    return plain and not PurePosixPath(name).is_absolute() and not _DRIVE.match(name)


def folders_of(names: Iterable[str]) -> set[str]:
    """Every folder on the way to one of `names`."""
    return {"/".join(name.split("/")[:depth]) for name in names for depth in range(1, name.count("/") + 1)}


def _failed(name: str, where: str, error: OSError) -> Problem:
    if isinstance(error, FileNotFoundError):
        return Problem(path=name, kind="missing", detail="missing")
    if isinstance(error, NotADirectoryError):
        return Problem(path=name, kind="not a regular file", detail=f"{where} is not below a directory")
    return Problem(path=name, kind="unreadable", detail=f"cannot be read: {error.strerror}")
