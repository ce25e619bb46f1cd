"""Makes a data file's index in one pass that hashes, unpacks and validates, and keeps it in the cache."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from parallel_synthesis.data.cache import CACHE_VARIABLE, Entry, Identity, Index, Text, settle
from parallel_synthesis.data.scan import Rows, scan
from parallel_synthesis.data.source import GzipSource, PlainSource, Source, UnpackError, chunks_ahead
from parallel_synthesis.data.tasks import Task
from parallel_synthesis.errors import DataError, StorageError

Progress = Callable[[int, int], None]  # (bytes of the file done, bytes of the file)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file that is open for reading at its start. packed: it is gzip."""

    task: Task
    path: Path
    fd: int
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexed:
    """An index and the open file that its rows are read from: the data file itself, or a gzip file's text.

    reused: it came from the cache. not_kept: why it could not be kept there, None when it was.
    """

    index: Index
    fd: int
    reused: bool = False
    not_kept: str | None = None


def index_file(file: DataFile, cache: Path, progress: Progress | None) -> Indexed:
    """The index of `file`: the one in `cache` if it is of this very file, else made anew and kept there.

    Of several processes one makes it and the others wait. The caller owns both descriptors afterwards; on an
    error only the file's. Raises DataError and StorageError as `open_rows` does.
    """
    entry = Entry(cache, file.path, file.task)
    indexed = _cached(file, entry)
    if indexed is not None:
        return indexed
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(entry.lock())
        except OSError as error:
            return dataclasses.replace(_make(file, None, progress), not_kept=str(error))
        made_meanwhile = _cached(file, entry)
        return made_meanwhile or _make(file, entry, progress)


def _cached(file: DataFile, entry: Entry) -> Indexed | None:
    """What the cache has of exactly this file; of a gzip file only together with its untouched text."""
    index = entry.load(Identity.of(file.fd))
    if index is None or file.packed != (index.text is not None):
        return None
    if index.text is None:
        return Indexed(index=index, fd=file.fd, reused=True)
    try:
        text_fd = os.open(entry.text_path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if Identity.of(text_fd) != index.text.identity:
        os.close(text_fd)
        return None
    return Indexed(index=index, fd=text_fd, reused=True)


def _make(file: DataFile, entry: Entry | None, progress: Progress | None) -> Indexed:
    """Reads the file; keeps what it found in `entry`, or nowhere."""
    settle(Identity.of(file.fd))
    if not file.packed:
        source = PlainSource(file.fd, file.path)
        identity, rows = _read_all(file, source, progress)
        index = Index(identity=identity, sha256=source.sha256(), text=None, rows=rows)
        return Indexed(index=index, fd=file.fd, not_kept=None if entry is None else _keep(entry, index))
    not_kept = None
    if entry is not None:
        try:
            return _unpack_into_cache(file, entry, progress)
        except UnpackError as error:
            not_kept = str(error.__cause__)
            os.lseek(file.fd, 0, os.SEEK_SET)
    return dataclasses.replace(_unpack_into_temporary(file, progress), not_kept=not_kept)


def _unpack_into_cache(file: DataFile, entry: Entry, progress: Progress | None) -> Indexed:
    """Raises UnpackError when the cache has no room or cannot be written."""
    with contextlib.ExitStack() as on_failure:
        try:
            with entry.new_text() as text_file:
                text_fd = os.dup(text_file.fileno())
                on_failure.callback(os.close, text_fd)
                made = _unpack(file, text_file, progress)
        except OSError as error:
            raise UnpackError from error
        # Moving a file may change its time stamps, so they are taken where it lies now.
        assert made.text is not None
        index = dataclasses.replace(made, text=dataclasses.replace(made.text, identity=Identity.of(text_fd)))
        on_failure.pop_all()
    return Indexed(index=index, fd=text_fd, not_kept=_keep(entry, index))


def _unpack_into_temporary(file: DataFile, progress: Progress | None) -> Indexed:
    """The text goes to a file without a name, which is gone with this process, however it ends."""
    with contextlib.ExitStack() as on_failure:
        try:
            with tempfile.TemporaryFile() as text_file:
                text_fd = os.dup(text_file.fileno())
                on_failure.callback(os.close, text_fd)
                index = _unpack(file, text_file, progress)
        except (OSError, UnpackError) as error:
            cause = error.__cause__ if isinstance(error, UnpackError) else error
            raise StorageError(
                f"{file.path}: expected room for its text in {tempfile.gettempdir()}, found: {cause}. "
                f"Set {CACHE_VARIABLE} to a directory that has the room."
            ) from cause
        on_failure.pop_all()
    return Indexed(index=index, fd=text_fd)


def _unpack(file: DataFile, text_file: BinaryIO, progress: Progress | None) -> Index:
    source = GzipSource(file.fd, file.path, text_file)
    identity, rows = _read_all(file, source, progress)
    try:
        text_file.flush()
    except OSError as error:
        raise UnpackError from error
    text = Text(
        bytes=source.text_bytes,
        sha256=source.text_sha256(),
        identity=Identity.of(text_file.fileno()),
    )
    return Index(identity=identity, sha256=source.sha256(), text=text, rows=rows)


def _read_all(file: DataFile, source: Source, progress: Progress | None) -> tuple[Identity, Rows]:
    before = Identity.of(file.fd)

    def done() -> None:
        if progress is not None:
            progress(source.bytes_read, before.size)

    # Closed at once on an error: the second thread must not read on in a descriptor that others may get.
    with contextlib.closing(chunks_ahead(source, done)) as chunks:
        rows = scan(chunks, file.task, file.path)
    if Identity.of(file.fd) != before or source.bytes_read != before.size:
        raise DataError(
            f"{file.path}: expected a file that stays as it is, found that it changed while it was indexed. "
            f"Wait until it is complete, then start again."
        )
    return before, rows


def _keep(entry: Entry, index: Index) -> str | None:
    """Why the index could not be kept; it is in memory anyway."""
    try:
        entry.keep(index)
    except OSError as error:
        return str(error)
    return None
