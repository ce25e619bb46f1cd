"""Opens the rows of a .jsonl or .jsonl.gz file: validated and indexed once, then read one by one from disk.

Memory is 24 bytes a row plus two chunks of text, whatever the size of the file. The first opening reads the
whole file (hash, validation); later ones reuse the index in the cache (cache.py) as long as the file is the
same.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import stat
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parallel_synthesis.data.build import DataFile, Indexed, Progress, index_file
from parallel_synthesis.data.cache import Identity, cache_directory
from parallel_synthesis.data.rows import WHAT_NEXT, Row, parse_row
from parallel_synthesis.data.scan import BadRow, Rows
from parallel_synthesis.data.source import GZIP_MAGIC
from parallel_synthesis.data.tasks import Task
from parallel_synthesis.errors import DataError, StorageError

if TYPE_CHECKING:
    from types import TracebackType

BAD_ROWS_LISTED = 20

__all__ = ["BadRow", "Loose", "RowFile", "cache_directory", "loose_among", "open_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loose:
    """Branches whose extract is not the end of its context, in how many rows, and the line of the first (0: none).

    Of such a context as many tokens are kept as its extract has by itself, whatever they say.
    """

    branches: int
    rows: int
    first_line: int

    @property
    def said(self) -> str | None:
        """What a user should know, None when there are none."""
        if not self.branches:
            return None
        many, rows = self.branches > 1, self.rows > 1
        return (
            f"{self.branches:,} branch{'es' * many} in {self.rows:,} row{'s' * rows} "
            f"{'have' if many else 'has'} an extract that is not the end of its context (first in line "
            f"{self.first_line}). The end of the context is kept all the same, as many tokens of it as the extract has"
        )

    def note(self, where: str) -> str | None:
        """`said`, of a task or file."""
        return None if self.said is None else f"{where}: {self.said}"


def loose_among(rows: Rows, in_use: int) -> Loose:
    """Those among the first `in_use` valid rows."""
    last = rows.lines[in_use - 1] if in_use else 0
    lines = rows.loose[: bisect.bisect_right(rows.loose, last)]
    return Loose(branches=len(lines), rows=len(set(lines)), first_line=lines[0] if lines else 0)


class RowFile:
    """The valid rows of one file, read from disk when asked for.

    rows: valid rows in use (after `max_rows`). bad: rows left out, up to the last row in use.
    loose: of the rows in use, see Loose.
    bytes, sha256: of the file as it lies on disk.
    unpacked_bytes, unpacked_sha256: of a gzip file's text, else None.
    reused: the index came from the cache.
    not_kept: why nothing could be kept in the cache, None when it was.
    """

    def __init__(
        self,
        *,
        task: Task,
        path: Path,
        indexed: Indexed,
        rows: int,
        bad: tuple[BadRow, ...],
    ) -> None:
        index = indexed.index
        self.task = task.name
        self.path = path
        self.rows = rows
        self.bad = bad
        self.loose = loose_among(index.rows, rows)
        self.bytes = index.identity.size
        self.sha256 = index.sha256
        self.unpacked_bytes = None if index.text is None else index.text.bytes
        self.unpacked_sha256 = None if index.text is None else index.text.sha256
        self.reused = indexed.reused
        self.not_kept = indexed.not_kept
        self._task = task
        self._places = index.rows
        self._fd = indexed.fd
        self._opened_as = Identity.of(indexed.fd)
        # Runs at the latest when the object goes, so that a forgotten close leaks no descriptor.
        self._close = weakref.finalize(self, os.close, indexed.fd)

    def read(self, number: int) -> Row:
        """Row `number`, 0 to rows - 1, else IndexError. May be called from several threads at once.

        Raises DataError when the bytes are no longer those that were indexed, StorageError when reading
        fails.
        """
        if not 0 <= number < self.rows:
            raise IndexError(f"{self.path}: row {number}: expected 0 to {self.rows - 1}")
        if not self._close.alive:
            raise ValueError(f"{self.path}: the row file is closed")
        line = self._places.lines[number]
        raw = self._bytes(self._places.offsets[number], self._places.lengths[number])
        if zlib.crc32(raw) != self._places.checks[number]:
            raise self._changed(line)
        return parse_row(raw, task=self._task, path=self.path, line=line, number=number)

    def _bytes(self, offset: int, length: int) -> bytes:
        try:
            raw = os.pread(self._fd, length, offset)
            while len(raw) < length and (more := os.pread(self._fd, length - len(raw), offset + len(raw))):
                raw += more
        except OSError as error:
            raise StorageError(
                f"{self.path}: reading {length} bytes at {offset} failed: {error.strerror}."
            ) from error
        return raw

    def _changed(self, line: int) -> DataError:
        now = Identity.of(self._fd)
        found = f"{now.size} bytes" if now.size != self._opened_as.size else "other bytes of the same length"
        return DataError(
            f"{self.path}:{line}: row: expected the bytes that were indexed, of a file of "
            f"{self._opened_as.size} bytes, found {found}: the file was changed while it was in use. "
            f"Put the file back, or start again: it is then indexed anew."
        )

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._close()

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_rows(
    task: Task,
    path: Path,
    *,
    on_bad_row: Literal["refuse", "skip"] = "refuse",
    max_rows: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> RowFile:
    """The rows of `path`, JSON Lines (UTF-8), plain or gzip.

    max_rows: use only the first N valid rows; bad rows behind them do not matter. cache: where indices are
    kept (None: cache_directory()); when it cannot be written, the index stays in memory and a gzip file's
    text goes to an unnamed file in the temporary directory. progress: called while the file is indexed.

    Raises DataError: no such file, not a file, damaged gzip, rows that are not valid (with `on_bad_row =
    "refuse"`), no valid row. Raises StorageError: no permission, a read error, no space for a gzip file's
    text.
    """
    with contextlib.ExitStack() as on_failure:
        fd = _open(task, path)
        on_failure.callback(os.close, fd)
        file = DataFile(task=task, path=path, fd=fd, packed=_is_gzip(fd, path))
        indexed = index_file(file, cache_directory() if cache is None else cache, progress)
        if indexed.fd != fd:
            on_failure.close()  # the packed file has been read
            on_failure.callback(os.close, indexed.fd)
        rows, bad = _in_use(indexed.index.rows, max_rows)
        _refuse(path, indexed.index.rows, in_use=rows, bad=bad, skip=on_bad_row == "skip")
        on_failure.pop_all()
        return RowFile(task=task, path=path, indexed=indexed, rows=rows, bad=bad)


def _open(task: Task, path: Path) -> int:
    settings = f"Set data.files.{task.name} to the file, or data.root to the directory its path starts in."
    try:
        mode = path.stat().st_mode  # before opening: opening a pipe would wait for its writer
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "neither a file nor a directory"
            raise DataError(
                f"{path}: expected a .jsonl or .jsonl.gz file for task {task.name}, found {kind}. {settings}"
            )
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path}: expected the data file of task {task.name}, found no such file. {settings}"
        ) from None
    except PermissionError:
        raise StorageError(
            f"{path}: expected to read the data file of task {task.name}, found no permission. "
            f"Give this user read permission on the file and its directories. {settings}"
        ) from None
    except OSError as error:
        raise StorageError(
            f"{path}: the data file of task {task.name} cannot be opened: {error.strerror}. {settings}"
        ) from error


def _is_gzip(fd: int, path: Path) -> bool:
    try:
        start = os.pread(fd, len(GZIP_MAGIC), 0)
    except OSError as error:
        raise StorageError(f"{path}: reading failed: {error.strerror}. Check the disk.") from error
    if start == GZIP_MAGIC:
        return True
    if path.suffix.lower() == ".gz":
        found = "an empty file" if not start else "something else"
        raise DataError(
            f"{path}: expected gzip data in a file named .gz, found {found}. "
            f"Copy or download the file again, or rename it if it is plain text."
        )
    return False


def _in_use(rows: Rows, max_rows: int | None) -> tuple[int, tuple[BadRow, ...]]:
    """The number of rows in use and the bad ones among and before them."""
    count = len(rows.offsets)
    if max_rows is None or max_rows > count:
        return count, tuple(rows.bad)
    last = rows.lines[max_rows - 1]
    return max_rows, tuple(bad for bad in rows.bad if bad.line < last)


def _refuse(path: Path, rows: Rows, *, in_use: int, bad: tuple[BadRow, ...], skip: bool) -> None:
    """Raises DataError for bad rows that may not be skipped, and for a file without a valid row."""
    if in_use and (skip or not bad):
        return
    listed = "".join(f"\n  {path}:{row.line}: {row.problem}" for row in bad[:BAD_ROWS_LISTED])
    more = f"\n  ... and {len(bad) - BAD_ROWS_LISTED} more" if len(bad) > BAD_ROWS_LISTED else ""
    if in_use:
        raise DataError(
            f"{path}: {len(bad)} of {len(bad) + in_use} rows are not valid:{listed}{more}\n{WHAT_NEXT}"
        )
    found = f"{len(bad)} that are not:{listed}{more}\n" if bad else f"none in {rows.lines_read} lines. "
    raise DataError(
        f"{path}: expected at least one valid row, found {found}Give a file with rows of this task."
    )
