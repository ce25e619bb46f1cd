"""Reading what a merge reads, without torch and without mapping files: safetensors by pread, the shapes in a .pt."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import Bytes, sha256_file
from parallel_synthesis.provenance.safetensors_header import Header, read_header
from parallel_synthesis.provenance.torch_file import TensorLook, look


class TensorFile:
    """A safetensors file read by pread: one that is cut or changed meanwhile is an error, never a SIGBUS.

    CheckpointError for a file that is truncated or no safetensors file, StorageError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hasher: InputHasher | None = None
        self._in_order: int | None = None  # bytes hashed so far where the whole file is hashed
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

    def hash_whole(self) -> None:
        """From here on what is read in the file's order is hashed on the way, so that `sha256` reads nothing again."""
        self._hasher, self._in_order = InputHasher(), 0
        self.read(0, self._data_start)

    def hash_parts(self) -> None:
        """From here on `feed` hashes tensors on the way; see `part_digests`."""
        self._hasher = InputHasher()

    def feed(self, name: str, data: Bytes) -> None:
        """The next bytes of a tensor, for its digest. Nothing happens where the whole file is hashed."""
        if self._hasher is not None and self._in_order is None:
            self._hasher.put(name, data)

    def part_digests(self) -> dict[str, str]:
        """tensor -> sha256 of what was fed of it."""
        return {} if self._hasher is None or self._in_order is not None else self._hasher.digests()

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
        if self._hasher is not None and offset == self._in_order:
            self._hasher.put("", whole)
            self._in_order += count
        return whole

    def tensor(self, name: str) -> bytes:
        """All bytes of a tensor."""
        entry = self.entries[name]
        return self.read(entry.start, entry.bytes)

    def sha256(self) -> str:
        """sha256 of the whole file; of what was read where that was everything in order, else read again."""
        if self._hasher is not None and self._in_order == self.size:
            return self._hasher.digests()[""]
        return sha256_file(self.path)

    def part_sha256(self, start: int, count: int) -> str:
        """sha256 of a stretch of the file, read again."""
        return sha256_file(self.path, start=start, length=count)

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
    """Hashes what is read of a file in a thread of its own, under a key for each digest."""

    def __init__(self) -> None:
        self._digests: dict[str, Any] = {}
        self._queue: queue.Queue[tuple[str, Bytes] | None] = queue.Queue(maxsize=4)
        self._thread = threading.Thread(target=self._run, name="input-hasher", daemon=True)
        self._thread.start()

    def put(self, key: str, data: Bytes) -> None:
        self._queue.put((key, data))

    def digests(self) -> dict[str, str]:
        """key -> sha256 of all its data; nothing can be added after."""
        self.stop()
        return {key: digest.hexdigest() for key, digest in self._digests.items()}

    def stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            key, data = item
            if key not in self._digests:
                self._digests[key] = hashlib.sha256()
            self._digests[key].update(data)


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
