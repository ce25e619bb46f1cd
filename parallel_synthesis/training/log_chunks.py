"""train.log at speed: a chunk of lines becomes columns, by one compiled expression; odd lines go to log_reader.py.

Memory is one chunk, whatever the size of the log. A line longer than LONGEST is passed over, named and not kept.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training.log_columns import (
    LINE,
    Chunk,
    Slow,
    Tasks,
    are_plain,
    make_chunk,
    plain_columns,
)
from parallel_synthesis.training.log_reader import Noise, parse_line

CHUNK = 1 << 18  # bytes; a chunk and what is made of it stay in a core's cache
LONGEST = 1 << 22  # bytes of a line; no record of ours comes near it
LISTED = 20  # line numbers kept for each kind of noise
_MEMORY = re.compile(
    rb"\[cuda-memory\] rank=(\d+) step=(\d{1,15}) allocated_gib=[\d.]+ reserved_gib=[\d.]+ "
    rb"peak_allocated_gib=(\d+\.\d+) peak_reserved_gib=(\d+\.\d+)\n"
)


@dataclass(slots=True)
class NoiseCount:
    """How often a kind of noise was met, and the first lines it was met on."""

    count: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.add_many(line, 1)

    def add_many(self, first_line: int, count: int) -> None:
        """`count` lines in a row."""
        self.count += count
        self.lines += range(first_line, first_line + min(count, LISTED - len(self.lines)))


class ChunkReader:
    """Reads a log's whole lines chunk by chunk. tasks: shared numbers of task names; noise: met so far."""

    def __init__(self, path: Path, tasks: Tasks | None = None) -> None:
        self.path = path
        self.tasks = Tasks() if tasks is None else tasks
        self.noise: dict[Noise, NoiseCount] = {}

    def read(self, start: int = 0, end: int | None = None, *, first_line: int = 1) -> Iterator[Chunk]:
        """Chunks from byte `start` (the begin of line `first_line`) to `end` or as far as there are whole lines.

        Raises StorageError when the file can not be read.
        """
        try:
            with self.path.open("rb") as file:
                yield from self._read(file, start, end, first_line)
        except OSError as error:
            raise StorageError(
                f"{self.path}: can not be read: {error.strerror}; check its path and permissions"
            ) from error

    def _read(self, file: BinaryIO, start: int, end: int | None, line: int) -> Iterator[Chunk]:
        file.seek(start)
        offset, held, passing = start, b"", False
        while end is None or offset + len(held) < end:
            wanted = CHUNK if end is None else min(CHUNK, end - offset - len(held))
            read = file.read(wanted)
            if not read:
                return
            data = held + read if held else read
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                if len(data) < LONGEST and not passing:
                    held = data
                    continue
                if not passing:
                    self._note("line too long", line)
                offset, held, passing = offset + len(data), b"", True
                continue
            held = data[cut:]
            if passing:  # the end of a line that was too long
                past = data.index(b"\n") + 1
                offset, line, passing = offset + past, line + 1, False
                data, cut = data[past:], cut - past
                if cut == 0:
                    continue
            chunk = self._parse(data if cut == len(data) else data[:cut], offset, line)
            offset, line = offset + cut, line + chunk.lines
            yield chunk

    def _note(self, noise: Noise, line: int) -> None:
        self.noise.setdefault(noise, NoiseCount()).add(line)

    def _parse(self, data: bytes, offset: int, first_line: int) -> Chunk:
        length, count = len(data), data.count(b"\n")
        if b"\r\n" in data and data.count(b"\r\n") == count:  # a whole log with such ends stays quick
            self.noise.setdefault("carriage return", NoiseCount()).add_many(first_line, count)
            data = data.replace(b"\r\n", b"\n")
        columns = list(zip(*LINE.findall(data), strict=True))
        odd: Sequence[int] = range(count)
        rows = None
        if columns and any(columns[1]):
            numbers: Sequence[int] = odd
            left: Sequence[int] = ()
            if not all(columns[1]):
                plain = columns[1]
                numbers = list(itertools.compress(odd, plain))
                left = list(itertools.compress(odd, map(operator.not_, plain)))
                columns = [tuple(itertools.compress(column, plain)) for column in columns]
            if are_plain(columns, self.tasks):
                rows = plain_columns(numbers, columns, self.tasks)
            odd = odd if rows is None else left
        slow = Slow(self.tasks)
        if odd:
            self._read_lines(data.split(b"\n"), odd, first_line, slow)
        return make_chunk(rows, slow, offset=offset, length=length, first_line=first_line, lines=count)

    def _read_lines(self, lines: list[bytes], numbers: Sequence[int], first_line: int, slow: Slow) -> None:
        memory = [number for number in numbers if lines[number].startswith(b"[cuda-memory] ")]
        if memory:
            text = b"".join([lines[number] + b"\n" for number in memory])
            found = _MEMORY.findall(text)
            if len(found) == len(memory) == text.count(b"["):
                slow.memory_step += [int(one[1]) for one in found]
                slow.memory_peak += [float(one[2]) for one in found]
                slow.memory_reserved = max(slow.memory_reserved, *(float(one[3]) for one in found))
                skip = set(memory)
                numbers = [number for number in numbers if number not in skip]
        for number in numbers:
            if not lines[number] or slow.add_plain_skip(number, lines[number]):
                continue
            parsed = parse_line(lines[number] + b"\n", first_line + number)
            for noise in parsed.noise:
                self._note(noise, first_line + number)
            if parsed.record is not None:
                slow.add(number, parsed.record, lines[number])
