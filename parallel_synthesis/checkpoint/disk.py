"""The few changes a commit makes to a disk, as one replaceable object, and the hidden names work in progress
has.

Everything in commit.py changes the disk through `Disk` alone, so that a test can stop it at each single
change.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from parallel_synthesis.checkpoint.layout import free_bytes
from parallel_synthesis.errors import StorageError
from parallel_synthesis.provenance.hashing import Bytes

Transfer = Literal["link", "reflink", "copy"]  # how a file came to have a second name, cheapest first
READ_ONLY = 0o444  # less the umask, which the kernel takes off at creation
_FICLONE = 0x40049409  # ioctl: share the blocks of another file (Linux; btrfs, xfs and others)
_FOREIGN_AGE = 24 * 3600.0  # seconds after which another machine's unlocked leftovers count as abandoned
_HIDDEN = re.compile(r"\.(?P<name>.+)\.partial-(?P<host>[^@/]*)@(?P<pid>[0-9]+)-[0-9a-f]{16}", re.DOTALL)


class Disk:
    """Each method is one change (or one wait for a change to be durable). Errors are OSError."""

    def create(self, path: Path) -> int:
        """A new file, read-only for later openers; its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, READ_ONLY)

    def write(self, fd: int, data: Bytes) -> int:
        return os.write(fd, data)

    def start_writing(self, fd: int, start: int, length: int) -> None:
        """Asks for bytes just written to go to the disk in the background, so that fsync has less to wait for."""
        with contextlib.suppress(OSError, AttributeError):  # advice only, and unknown to some systems
            os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no fsync of directories
                raise
        finally:
            os.close(fd)

    def mkdir(self, path: Path) -> None:
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def symlink(self, content: str, path: Path) -> None:
        path.symlink_to(content)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def reflink(self, source_fd: int, target_fd: int) -> None:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()


DISK = Disk()


def storage_error(action: str, path: Path, error: OSError) -> StorageError:
    """ "cannot <action> <path>: <reason>", the free space where that may be the reason, and what to do."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            space = f" ({free_bytes(path)} bytes free there)"
        except StorageError:
            space = ""
        return StorageError(
            f"cannot {action} {path}: {reason}{space}; expected room for the whole checkpoint; "
            f"free some space or raise the limit, then try again (a run goes on by `ps resume`): every earlier "
            f"checkpoint is untouched"
        )
    return StorageError(
        f"cannot {action} {path}: {reason}; expected a directory that can be written; "
        f"check its permissions and the disk, then try again (a run goes on by `ps resume`): every earlier "
        f"checkpoint is untouched"
    )


@contextlib.contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """OSError inside becomes a StorageError about `path`."""
    try:
        yield
    except OSError as error:
        raise storage_error(action, path, error) from error


def hidden_name(name: str) -> str:
    """A fresh hidden name for work in progress on `name`; says whose it is. Draws from no seeded
    generator."""
    return f".{name}.partial-{_host()}@{os.getpid()}-{os.urandom(8).hex()}"


def is_hidden_name(name: str) -> bool:
    return _HIDDEN.fullmatch(name) is not None


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Holds a lock on a hidden directory for as long as its owner lives: a kill -9 frees it, on any
    machine."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: `abandoned` then judges by process and age
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def abandoned(path: Path) -> bool:
    """True for a hidden leftover whose writer is dead: nobody holds its lock and, on this machine, no other
    living process has its process id. Names that are not ours are never abandoned."""
    match = _HIDDEN.fullmatch(path.name)
    if match is None:
        return False
    locked = _locked(path)
    if locked:
        return False
    if match["host"] == _host():
        pid = int(match["pid"])
        return pid == os.getpid() or not _alive(pid)
    if locked is not None:
        return True
    try:
        return time.time() - os.lstat(path).st_mtime > _FOREIGN_AGE
    except OSError:
        return False


def _locked(path: Path) -> bool | None:
    """Whether a living process holds the lock; None when that cannot be known (no directory, or no locks
    here)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(fd)
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:60]


def make_directories(path: Path, disk: Disk) -> None:
    """Creates a directory and the missing ones above it, each made durable in its parent."""
    missing = []
    place = path
    while not place.is_dir():
        missing.append(place)
        if place == place.parent:
            break
        place = place.parent
    for place in reversed(missing):
        with contextlib.suppress(
            FileExistsError
        ):  # another process was quicker; a file there fails just below
            disk.mkdir(place)
        disk.fsync_directory(place.parent)


def remove_tree(path: Path, disk: Disk, *, first: str) -> None:
    """Removes a file, a link or a directory with all in it (following no link), the entry `first` before all
    others."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        disk.unlink(path)
        return
    entries = sorted(path.iterdir(), key=lambda entry: (entry.name != first, entry.name))
    for entry in entries:
        remove_tree(entry, disk, first=first)
    disk.rmdir(path)


def write_all(disk: Disk, fd: int, data: Bytes) -> None:
    """Writes all of `data`; a short write goes on where it stopped (a full disk shows at the second try)."""
    view = memoryview(data)
    while view:
        view = view[disk.write(fd, view) :]
