"""Reads a data file once, in large chunks, hashing what lies on disk and unpacking gzip on the way."""

from __future__ import annotations

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from parallel_synthesis.errors import DataError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

CHUNK_BYTES = 2 * 2**20  # large, because the two threads may wait 5 ms for each other at a hand-over
PACKED_BYTES = 256 * 2**10  # small, because zlib copies what is left of a read at every end of a gzip member
GZIP_MAGIC = b"\x1f\x8b"
_GZIP = 31  # zlib's window bits for "a gzip header and trailer, largest window"


class UnpackError(Exception):
    """The unpacked text could not be written; the OSError is its cause."""


class Source(Protocol):
    """A file that is read from its start to its end, once."""

    fd: int
    bytes_read: int  # of the file, as it lies on disk

    def next_chunk(self) -> bytes:
        """The next piece of the text, empty at the end. Raises DataError, StorageError, UnpackError."""

    def sha256(self) -> str:
        """Digest of what was read of the file as it lies on disk."""


class PlainSource:
    """A file that is text as it lies."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self._path = path
        self._hash = hashlib.sha256()
        self.bytes_read = 0

    def next_chunk(self) -> bytes:
        chunk = _read(self.fd, CHUNK_BYTES, self._path)
        self._hash.update(chunk)
        self.bytes_read += len(chunk)
        return chunk

    def sha256(self) -> str:
        return self._hash.hexdigest()


class GzipSource:
    """A gzip file of one or more members; its text also goes to `text`, a file open for writing."""

    def __init__(self, fd: int, path: Path, text: BinaryIO) -> None:
        self.fd = fd
        self._path = path
        self._text = text
        self._hash = hashlib.sha256()
        self._text_hash = hashlib.sha256()
        self._packed = b""
        self._member: zlib._Decompress | None = None
        self._members = 0
        self.bytes_read = 0
        self.text_bytes = 0

    def next_chunk(self) -> bytes:
        pieces: list[bytes] = []
        room = CHUNK_BYTES
        while room > 0 and self._fill():
            piece = self._unpack(room)
            pieces.append(piece)
            room -= len(piece)
        chunk = b"".join(pieces)
        self._text_hash.update(chunk)
        self.text_bytes += len(chunk)
        try:
            self._text.write(chunk)
        except OSError as error:
            raise UnpackError from error
        return chunk

    def sha256(self) -> str:
        return self._hash.hexdigest()

    def text_sha256(self) -> str:
        """Digest of the text."""
        return self._text_hash.hexdigest()

    def _fill(self) -> bool:
        """Has packed bytes at hand, of a member that is open; False at the end of the file."""
        while True:
            if self._member is None and self._members > 0:
                self._packed = self._packed.lstrip(b"\0")  # padding between or after members is allowed
            if self._packed:
                break
            self._packed = _read(self.fd, PACKED_BYTES, self._path)
            if not self._packed:
                if self._member is not None:
                    raise DataError(
                        f"{self._path}: the gzip data ends too early: expected the end of member "
                        f"{self._members + 1}, found the end of the file at byte {self.bytes_read}. "
                        f"{_FETCH_AGAIN}"
                    )
                return False
            self._hash.update(self._packed)
            self.bytes_read += len(self._packed)
        if self._member is None:
            self._member = zlib.decompressobj(_GZIP)
        return True

    def _unpack(self, room: int) -> bytes:
        assert self._member is not None
        try:
            piece = self._member.decompress(self._packed, room)
        except zlib.error as error:
            raise DataError(
                f"{self._path}: the gzip data is damaged before byte {self.bytes_read} of the file, "
                f"in member {self._members + 1}: expected intact gzip data, found: {error}. {_FETCH_AGAIN}"
            ) from None
        if self._member.eof:
            self._packed = self._member.unused_data
            self._member = None
            self._members += 1
        else:
            self._packed = self._member.unconsumed_tail
        return piece


_FETCH_AGAIN = "Copy or download the file again."


def chunks_ahead(source: Source, done: Callable[[], None]) -> Generator[bytes, None, None]:
    """The chunks of `source`; the next one is read and hashed in a second thread during work on this one.

    Reading, hashing and unpacking release the interpreter's lock, so they cost the caller's parsing nothing.
    `done` is called after each chunk, in the caller's thread. Close the generator before the source's file.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="data-source") as pool:
        coming = pool.submit(source.next_chunk)
        while chunk := coming.result():
            coming = pool.submit(source.next_chunk)
            yield chunk
            done()


def _read(fd: int, size: int, path: Path) -> bytes:
    try:
        return os.read(fd, size)
    except OSError as error:
        raise StorageError(
            f"{path}: reading failed: expected {size} more bytes, found: {error.strerror}. "
            f"Check the disk, or copy the file to another one."
        ) from error
