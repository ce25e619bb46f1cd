"""SHA-256 of files and of what is being written, streamed; a file is never mapped or held in memory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from parallel_synthesis.errors import StorageError

BLOCK = (
    4 << 20
)  # bytes read or hashed at once; hashing releases the interpreter lock, so the next read overlaps
_BUFFER = 1 << 20
_AHEAD = 1 << 20  # bytes of a block that is read ahead: three of them stay in the processor's cache

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
    for piece in read_ahead(fd, start, end):
        digest.update(piece)
    return digest.hexdigest()


def read_ahead(fd: int, start: int, end: int, *, block: int = _AHEAD) -> Iterator[memoryview]:
    """The bytes of a file from `start` to `end`, or to its own end; the next block is read by a second thread
    while the caller works on this one. A piece is valid until the next one is asked for."""
    buffers = [memoryview(bytearray(block)) for _ in range(3)]
    with ThreadPoolExecutor(1, thread_name_prefix="hash-reader") as reader:

        def read(turn: int, offset: int) -> int:
            # A whole block, so that the next one's place is known before this one has come.
            filled, buffer = 0, buffers[turn % 3][: max(0, end - offset)]
            while filled < len(buffer) and (count := os.preadv(fd, [buffer[filled:]], offset + filled)):
                filled += count
            return filled

        pending = deque(reader.submit(read, turn, start + turn * block) for turn in range(2))
        turn = 0
        while count := pending.popleft().result():
            pending.append(reader.submit(read, turn + 2, start + (turn + 2) * block))
            yield buffers[turn % 3][:count]
            turn += 1


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
