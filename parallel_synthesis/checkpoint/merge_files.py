"""Reading what a merge reads, without torch and without mapping files: safetensors by pread, the shapes in a .pt."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType

from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.safetensors_header import Header, read_header
from parallel_synthesis.provenance.torch_file import TensorLook, look


class TensorFile:
    """A safetensors file read by pread: one that is cut or changed meanwhile is an error, never a SIGBUS.

    CheckpointError for a file that is truncated or no safetensors file, StorageError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hasher: InputHasher | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            self._stat = _identity(os.fstat(self._fd))
            self.size = self._stat[0]
            header = self._read_header()
            self.entries = header.tensors
            self._data_start = header.bytes
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._hasher is not None:
            self._hasher.stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def hash_while_reading(self) -> None:
        """From here on what is read in file order is hashed on the way, so that `sha256` costs no second read."""
        self._hasher = InputHasher()
        self.read(0, self._data_start)

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` of the file."""
        parts = []
        at = offset
        while at < offset + count:
            try:
                data = os.pread(self._fd, offset + count - at, at)
            except OSError as error:
                raise _unreadable(self.path, error) from error
            if not data:
                raise CheckpointError(
                    f"{self.path} ends at byte {at}; expected {self.size} bytes, so it was cut while it was read; "
                    f"restore it and merge again"
                )
            parts.append(data)
            at += len(data)
        whole = parts[0] if len(parts) == 1 else b"".join(parts)
        if self._hasher is not None:
            self._hasher.feed(offset, whole)
        return whole

    def tensor(self, name: str) -> bytes:
        """All bytes of a tensor."""
        entry = self.entries[name]
        return self.read(entry.start, entry.bytes)

    def sha256(self) -> str:
        """sha256 of the whole file; of what was read where that was everything in order, else read again."""
        found = self._hasher.result(self.size) if self._hasher is not None else None
        return sha256_file(self.path) if found is None else found

    def check_unchanged(self) -> None:
        """CheckpointError when the file was written to, or replaced, since it was opened."""
        try:
            now = _identity(os.fstat(self._fd))
            there = self.path.stat()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if now != self._stat or (there.st_ino, there.st_dev) != self._stat[2:]:
            raise CheckpointError(
                f"{self.path} was changed while it was read; merge again when nothing writes to it"
            )

    def _read_header(self) -> Header:
        try:
            header = read_header(self._fd)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if header.problems:
            raise CheckpointError(
                f"{self.path} is not a whole safetensors file: {'; '.join(header.problems[:3])}; restore it, or use "
                f"another checkpoint"
            )
        return header


class InputHasher:
    """Hashes in a thread of its own what is read of a file, for as long as it comes in the file's order."""

    def __init__(self) -> None:
        self._expected = 0
        self._in_order = True
        self._digest = hashlib.sha256()
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._run, name="input-hasher", daemon=True)
        self._thread.start()

    def feed(self, offset: int, data: bytes) -> None:
        if offset != self._expected:
            self._in_order = False
        if self._in_order:
            self._expected += len(data)
            self._queue.put(data)

    def result(self, size: int) -> str | None:
        """The digest when all `size` bytes came in order, else None."""
        self.stop()
        return self._digest.hexdigest() if self._in_order and self._expected == size else None

    def stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            self._digest.update(data)


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_dev


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot read {path}: {error.strerror}; expected a readable file, so check its permissions and the disk"
    )


def pt_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """name -> shape of the tensors of a torch state dict, read without torch and without running anything.

    CheckpointError naming the file for anything but a dict of tensors, StorageError when it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = look(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from error
    state = found.value
    plain = isinstance(state, dict) and all(isinstance(tensor, TensorLook) for tensor in state.values())
    if found.problems or not plain:
        reason = "; ".join(found.problems[:3]) or "it holds something else"
        raise CheckpointError(f"{path}: expected a state dict of tensors: {reason}; use another checkpoint")
    return {str(name): tensor.shape for name, tensor in state.items()}
