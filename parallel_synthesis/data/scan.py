"""The one pass over a data file's text: finds lines, validates rows, notes where the valid ones are."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from parallel_synthesis.data.rows import MAX_ROW_BYTES, RowProblemError, parse_fields
from parallel_synthesis.data.tasks import Task
from parallel_synthesis.errors import DataError

BAD_ROWS_MOST = 100_000  # beyond this the file is of another kind; a list of them must not fill the memory
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not valid: its line (from 1) and what is wrong, as `field: expected ...`."""

    line: int
    problem: str


@dataclass(slots=True, kw_only=True)
class Rows:
    """Where the valid rows of a text are, in columns of one number a row, and what was wrong with the others.

    offsets, lengths: bytes of a row in the text, without its line end; lines: its line, from 1; checks: its
    CRC-32. loose: the line of each branch whose extract is not the end of its context (rows.RowFields), in order.
    lines_read: lines of the text, blank ones included.
    """

    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    lines: array[int] = field(default_factory=lambda: array("Q"))
    checks: array[int] = field(default_factory=lambda: array("I"))
    loose: array[int] = field(default_factory=lambda: array("Q"))
    bad: list[BadRow] = field(default_factory=list)
    lines_read: int = 0


def scan(chunks: Iterable[bytes], task: Task, path: Path) -> Rows:
    """Validates every row of the text that comes in `chunks`, cut anywhere.

    Only "\\n" ends a line; a "\\r" before it, blank lines, a byte order mark and a missing last "\\n" are
    fine. Raises DataError when there are so many bad rows that the file must be of another kind.
    """
    rows = Rows()
    started: list[bytes] = []  # pieces of a line whose end has not come yet
    length = 0  # bytes of that line so far; of a line that is too long nothing more is kept
    offset = 0
    for chunk in chunks:
        position = 0
        while (end := chunk.find(b"\n", position)) >= 0:
            piece = chunk[position:end]
            length += len(piece)
            _take(rows, b"".join([*started, piece]) if started else piece, offset, length, task, path)
            started.clear()
            offset += length + 1
            length = 0
            position = end + 1
        length += len(chunk) - position
        if length <= MAX_ROW_BYTES:
            started.append(chunk[position:])
        else:
            started.clear()
    if length:
        _take(rows, b"".join(started), offset, length, task, path)
    return rows


def _take(rows: Rows, raw: bytes, offset: int, length: int, task: Task, path: Path) -> None:
    """Takes in one line: `length` bytes at `offset`; `raw` is not whole when that is more than is allowed."""
    rows.lines_read += 1
    if length > MAX_ROW_BYTES:
        _take_bad(rows, f"row: expected at most {MAX_ROW_BYTES} bytes, found {length}", path)
        return
    if rows.lines_read == 1 and raw.startswith(_BOM):
        raw = raw[len(_BOM) :]
        offset += len(_BOM)
    if not raw or raw.isspace():
        return
    try:
        loose = parse_fields(raw, task).loose
    except RowProblemError as problem:
        _take_bad(rows, str(problem), path)
        return
    rows.offsets.append(offset)
    rows.lengths.append(len(raw))
    rows.lines.append(rows.lines_read)
    rows.checks.append(zlib.crc32(raw))
    rows.loose.extend([rows.lines_read] * loose)


def _take_bad(rows: Rows, problem: str, path: Path) -> None:
    rows.bad.append(BadRow(rows.lines_read, problem))
    if len(rows.bad) > BAD_ROWS_MOST:
        first = rows.bad[0]
        raise DataError(
            f"{path}: more than {BAD_ROWS_MOST} of the first {rows.lines_read} lines are not valid rows, "
            f"the first: {path}:{first.line}: {first.problem}. "
            f"Expected one JSON object a line; give the file in that form."
        )
