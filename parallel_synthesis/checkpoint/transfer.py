"""A committed file in a second place: a link, or on file systems that have none a reflink or a checked copy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from parallel_synthesis.checkpoint.disk import Disk, Transfer, write_all
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.hashing import HashingFile
from parallel_synthesis.provenance.manifest import MANIFEST

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_REFLINKS = _NO_LINKS | {errno.EINVAL, errno.ENOTTY, errno.EBADF, errno.ETXTBSY}


def transfer(source: Path, target: Path, sha256: str | None, disk: Disk, *, copy: bool) -> Transfer:
    """Gives the committed file `source` a second place at `target`, and says how. copy: its bytes, not a link.

    sha256: as its manifest has it, None where no manifest lists it. A copy whose content is another raises
    CheckpointError; what the disk refuses OSError.
    """
    if not copy:
        try:
            disk.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return "link"
    source_fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target_fd = disk.create(target)
        try:
            way = _copy(source_fd, target_fd, source, sha256, disk, reflink=not copy)
            disk.fsync(target_fd)
        finally:
            os.close(target_fd)
    finally:
        os.close(source_fd)
    return way


def _copy(
    source_fd: int, target_fd: int, source: Path, sha256: str | None, disk: Disk, *, reflink: bool
) -> Transfer:
    if reflink:
        try:
            disk.reflink(source_fd, target_fd)
        except OSError as error:
            if error.errno not in _NO_REFLINKS:
                raise
        else:
            return "reflink"
    file = HashingFile(lambda data: write_all(disk, target_fd, data))
    while data := os.read(source_fd, 1 << 20):
        file.write(data)
    if sha256 not in (None, file.sha256):
        raise CheckpointError(
            f"{source} is damaged: its content differs from the sha256 in its {MANIFEST}; use another "
            f"checkpoint"
        )
    file.flush()
    return "copy"
