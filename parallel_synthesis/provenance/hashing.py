"""SHA-256 of files and of what is being written, streamed; a file is never mapped or held in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallel_synthesis.errors import StorageError

BLOCK = (
    4 << 20
)  # bytes read or hashed at once; hashing releases the interpreter lock, so the next read overlaps
_BUFFER = 1 << 20

Bytes = bytes | bytearray | memoryview


def sha256_bytes(data: Bytes) -> str:
    """Lower-case hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path | str, *, start: int = 0, length: int | None = None) -> str:
    """Lower-case hex SHA-256 of a file, or of `length` bytes of it from byte `start` (fewer if it ends
    before).

    Read with pread, not mmap: a file that is cut short meanwhile is an error or another digest, never a
    SIGBUS. Raises StorageError naming the file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            end = max(start, size if length is None else min(size, start + length))
            return _sha256_range(fd, start, end)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}; expected a readable file, so check its permissions and "
            f"the disk"
        ) from error


def _sha256_range(fd: int, start: int, end: int) -> str:
    digest = hashlib.sha256()
    if end - start <= BLOCK:  # one read: a thread would cost more than it saves
        while start < end and (data := os.pread(fd, end - start, start)):
            digest.update(data)
            start += len(data)
        return digest.hexdigest()
    buffers = [memoryview(bytearray(BLOCK)), memoryview(bytearray(BLOCK))]
    with ThreadPoolExecutor(1, thread_name_prefix="hash-reader") as reader:

        def read(buffer: memoryview, offset: int) -> int:
            return os.preadv(fd, [buffer[: min(BLOCK, end - offset)]], offset) if offset < end else 0

        turn = 0
        pending = reader.submit(read, buffers[turn], start)
        while count := pending.result():
            filled = buffers[turn][:count]
            start += count
            turn = 1 - turn
            pending = reader.submit(read, buffers[turn], start)
            digest.update(filled)
    return digest.hexdigest()


class HashingFile:
    """A binary file object for writing: collects small writes, hashes and counts all of them, hands them to
    `sink`.

    `sink` must take everything it is given or raise. `flush` empties the buffer; digest and count are of all
    that was written. There is no destructor: a writer that is abandoned after an error writes nothing more.
    """

    def __init__(self, sink: Callable[[Bytes], object]) -> None:
        self._sink = sink
        self._digest = hashlib.sha256()
        self._pending = bytearray()
        self.bytes = 0

    def write(self, data: Bytes) -> int:
        """Takes all of `data`; its length in bytes."""
        view = memoryview(data)
        if view.nbytes == 0:  # an empty view cannot be cast
            return 0
        view = view.cast("B")
        self.bytes += len(view)
        if len(self._pending) + len(view) < _BUFFER:
            self._pending += view
            return len(view)
        self.flush()
        for at in range(0, len(view), BLOCK):
            self._out(view[at : at + BLOCK])
        return len(view)

    def flush(self) -> None:
        """Hands what is buffered to the sink."""
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._out(pending)

    def _out(self, data: Bytes) -> None:
        self._digest.update(data)
        self._sink(data)

    @property
    def sha256(self) -> str:
        """Lower-case hex digest of everything written so far; flushes first."""
        self.flush()
        return self._digest.hexdigest()
