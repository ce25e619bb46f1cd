"""train.log at speed: a chunk of lines becomes columns, by one compiled expression; odd lines go to log_reader.py.

The expression is loose and takes its groups for what they seem to be; log_columns.py checks them all at once, and when
one is not, every line of the chunk is read with care. tests/training/test_log_fast.py holds the two ways together.

Memory is one chunk, whatever the size of the log. A line longer than LONGEST is passed over, named and not kept;
it is named once its end is there, so that one that is still being written is not met twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training.log_columns import LINE, OTHER, Chunk, Slow, Tasks, make_chunk, plain_columns
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
        # passed: bytes, from the offset on, of a line that is too long to be held
        offset, held, passed = start, b"", 0
        while end is None or offset + passed + len(held) < end:
            wanted = CHUNK if end is None else min(CHUNK, end - offset - passed - len(held))
            read = file.read(wanted)
            if not read:
                return
            data = held + read if held else read
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                if len(data) < LONGEST and not passed:
                    held = data
                    continue
                passed, held = passed + len(data), b""
                continue
            held = data[cut:]
            if passed:  # the end of a line that was too long: it is passed over, and counts as a line
                past = data.index(b"\n") + 1
                self._note("line too long", line)
                length, passed = passed + past, 0
                nothing = Slow(self.tasks)
                yield make_chunk(None, nothing, offset=offset, length=length, first_line=line, lines=1)
                offset, line = offset + length, line + 1
                data, cut = data[past:], cut - past
                if cut == 0:
                    continue
            chunk = self._parse(data if cut == len(data) else data[:cut], offset, line)
            offset, line = offset + cut, line + chunk.lines
            yield chunk

    def _note(self, noise: Noise, line: int) -> None:
        self.noise.setdefault(noise, NoiseCount()).add(line)

    def _parse(self, data: bytes, offset: int, first_line: int) -> Chunk:
        import numpy as np

        length = len(data)
        if b"\r" in data and data.count(b"\r\n") == data.count(
            b"\n"
        ):  # a whole log with such ends stays quick
            self.noise.setdefault("carriage return", NoiseCount()).add_many(first_line, data.count(b"\n"))
            data = data.replace(b"\r\n", b"\n")
        found = LINE.findall(data)
        updates = [line for line in found if line[0]]
        number = np.arange(len(found))
        odd: list[tuple[int, bytes]] = []
        if len(updates) < len(found):
            odd = [(at, line[OTHER]) for at, line in enumerate(found) if not line[0]]
            number = np.delete(number, [at for at, _ in odd])
        rows = plain_columns(number, list(zip(*updates, strict=True)), self.tasks) if updates else None
        if rows is None:
            odd = list(enumerate(data.split(b"\n")[:-1]))
        slow = Slow(self.tasks)
        self._read_lines(odd, first_line, slow)
        lines = len(odd) if rows is None else len(found)
        return make_chunk(rows, slow, offset=offset, length=length, first_line=first_line, lines=lines)

    def _read_lines(self, lines: list[tuple[int, bytes]], first_line: int, slow: Slow) -> None:
        memory = [(number, line) for number, line in lines if line.startswith(b"[cuda-memory] ")]
        if memory:
            text = b"".join([line + b"\n" for _, line in memory])
            found = _MEMORY.findall(text)
            if len(found) == len(memory) == text.count(b"["):
                slow.memory_step += [int(one[1]) for one in found]
                slow.memory_peak += [float(one[2]) for one in found]
                slow.memory_reserved = max(slow.memory_reserved, *(float(one[3]) for one in found))
                skip = {number for number, _ in memory}
                lines = [(number, line) for number, line in lines if number not in skip]
        for number, line in lines:
            if not line or slow.add_plain_skip(number, line):
                continue
            parsed = parse_line(line + b"\n", first_line + number)
            for noise in parsed.noise:
                self._note(noise, first_line + number)
            if parsed.record is not None:
                slow.add(number, parsed.record)
