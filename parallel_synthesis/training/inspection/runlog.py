"""A train.log as a whole: attempts, what they supersede, sums over the steps that count, repeats, gaps (no torch).

One pass over the file; a restart sends the reader back over what it supersedes. Memory: the sums' blocks, a few
numbers for each 256 KiB of log and each attempt. `update` goes on where it stopped, for a log that still grows.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training.inspection.blocks import Blocks
from parallel_synthesis.training.log_chunks import LISTED, ChunkReader, NoiseCount
from parallel_synthesis.training.log_columns import Chunk, Tasks
from parallel_synthesis.training.log_reader import EpochLine, Noise, NoteLine, ResumeLine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NEVER = 2**62
_MOST_KEPT = 200  # epochs, notes and attempts that are kept in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Steps that no line of the log tells of."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OddStep:
    """An update whose loss is not finite."""

    step: int
    line: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run that an appended one follows in the same log: its first and last line and step, its records."""

    first_line: int
    last_line: int
    first_step: int
    last_step: int
    records: int


@dataclass(slots=True)
class _Attempts:
    """Attempts of the current run: the line they begin at and their first step (from_step + 1, or the first seen)."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("q"))

    def limits(self) -> NDArray[np.int64]:
        """For each attempt the step from which on a later attempt supersedes it."""
        import numpy as np

        starts = np.array(self.starts, dtype=np.int64)
        later = np.append(starts[1:], _NEVER)
        return np.minimum.accumulate(later[::-1])[::-1]


class RunLog:
    """See the module. Figures are those of the last run in the log; `earlier` tells of runs before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tasks = Tasks()
        self._reader = ChunkReader(path, self.tasks)
        self._quiet = ChunkReader(path, self.tasks)  # reads again; what it meets is known already
        self.offset = 0
        self.lines = 0
        self.earlier: list[Segment] = []
        self._starts: array[int] = array("q")  # of chunks: byte, first line, lowest and highest step
        self._chunk_lines: array[int] = array("q")
        self._lows: array[int] = array("q")
        self._highs: array[int] = array("q")
        self._begin(line=1)
        self.unfinished = False
        self.memory_reserved = 0.0

    def _begin(self, *, line: int) -> None:
        """A new run begins at this line."""
        self.first_line = line
        self.attempts = _Attempts()
        self.blocks: Blocks | None = None
        self.records = 0
        self.last_step = 0  # the last that counts: a resume takes back the steps after the one it began at
        self.first_step = 0
        self.resumes: list[ResumeLine] = []
        self.epochs: list[EpochLine] = []
        self.notes: list[NoteLine] = []
        self._free = False  # a resume in free words was met, and no step since
        self._began = False

    @property
    def noise(self) -> dict[Noise, NoiseCount]:
        return self._reader.noise

    def update(self) -> bool:
        """Reads what was appended since; True when there was something. StorageError when it can not be read."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise StorageError(f"{self.path}: can not be read: {error.strerror}; check the path") from error
        if size < self.offset:
            raise StorageError(f"{self.path}: it has become shorter while it was read; inspect it again")
        before = self.offset
        for chunk in self._reader.read(self.offset, first_line=self.lines + 1):
            self._feed(chunk)
            self.offset = chunk.offset + chunk.length
            self.lines = chunk.first_line + chunk.lines - 1
        self.unfinished = size > self.offset
        return self.offset > before

    # -- one chunk ------------------------------------------------------------------------------------------------

    def _feed(self, chunk: Chunk) -> None:
        self._keep(chunk)
        self._index(chunk)
        rewind = self._boundaries(chunk)
        if self.blocks is None and len(chunk):
            live = chunk.step[chunk.line >= self.first_line]
            if len(live):
                self.blocks = Blocks(int(live.min()))
        if self.blocks is None:
            return
        if rewind is not None and rewind < self.blocks.first:
            self.blocks = Blocks(max(rewind, 1))
            self._again(max(rewind, 1), before=chunk.offset)
        elif rewind is not None:
            block = self.blocks.block(rewind)
            self.blocks.clear_from(block)
            self._again(self.blocks.start(block), before=chunk.offset)
        self._add(chunk, self.blocks, from_step=0)
        self.blocks.add_memory(chunk)

    def _again(self, step: int, *, before: int) -> None:
        """Adds the records of earlier chunks with steps from `step` on again, now that more is known of them."""
        assert self.blocks is not None
        for chunk in self._chunks(step, _NEVER, before=before):
            self._add(chunk, self.blocks, from_step=step)
            self.blocks.add_memory(chunk)

    def _add(self, chunk: Chunk, blocks: Blocks, *, from_step: int, to_step: int = _NEVER) -> None:
        import numpy as np

        keep = self.live(chunk) & (chunk.step >= from_step) & (chunk.step <= to_step)
        chosen = np.flatnonzero(keep)
        blocks.add(chunk, chosen, tasks=len(self.tasks.names))

    def live(self, chunk: Chunk) -> NDArray[np.bool_]:
        """Which records of a chunk count: those of this run that no later attempt supersedes."""
        import numpy as np

        if not self.attempts.lines:
            return np.zeros(len(chunk), dtype=np.bool_)
        attempt = np.searchsorted(np.array(self.attempts.lines), chunk.line, side="right") - 1
        limits = self.attempts.limits()
        found: NDArray[np.bool_] = (attempt >= 0) & (chunk.step < limits[np.maximum(attempt, 0)])
        return found

    def _keep(self, chunk: Chunk) -> None:
        for kept, new in ((self.epochs, chunk.epochs), (self.notes, chunk.notes)):
            kept += new[: _MOST_KEPT - len(kept)]  # type: ignore[operator]
        self.memory_reserved = max(self.memory_reserved, chunk.memory_reserved)

    def _index(self, chunk: Chunk) -> None:
        self._starts.append(chunk.offset)
        self._chunk_lines.append(chunk.first_line)
        self._lows.append(int(chunk.step.min()) if len(chunk) else _NEVER)
        self._highs.append(int(chunk.step.max()) if len(chunk) else -1)

    def _boundaries(self, chunk: Chunk) -> int | None:
        """Finds where attempts and runs begin; the lowest step that a new attempt takes back, None without one."""
        import numpy as np

        steps, lines, count = chunk.step, chunk.line, len(chunk)
        resumes = [resume for resume in chunk.resumes if resume.begins]
        self.resumes += resumes[: _MOST_KEPT - len(self.resumes)]
        by_place: dict[int, list[ResumeLine]] = {}
        for place, resume in zip(
            np.searchsorted(lines, [r.line for r in resumes]).tolist(), resumes, strict=True
        ):
            by_place.setdefault(place, []).append(resume)
        places = set(by_place)
        if count:
            places |= set((np.flatnonzero(steps[1:] <= steps[:-1]) + 1).tolist())
            if not self._began or self._free or steps[0] <= self.last_step:
                places.add(0)
        rewind: int | None = None
        counted = 0
        for place in sorted(places):
            previous = int(steps[place - 1]) if place else self.last_step
            logged = previous
            free = place == 0 and self._free
            for resume in by_place.get(place, ()):
                if resume.from_step is None or not self._began:
                    free = True
                    continue
                previous = resume.from_step
                rewind = self._start(resume.line, previous + 1, logged, rewind)
            if place == count:
                self.records += count - counted
                self.last_step, self._free = previous, free
                return rewind
            step, line = int(steps[place]), int(lines[place])
            appended = step <= self.first_step and step < previous and not free and place not in by_place
            if self._began and appended:
                self.records += place - counted
                counted = place
                self._append(line, previous)
                rewind = None
            if not self._began:
                self._began, self.first_step = True, step
                self.attempts.lines.append(line)
                self.attempts.starts.append(step)
            elif free or step <= previous:
                rewind = self._start(line, step, logged, rewind)
            self.first_step = min(self.first_step, step)
        if count:
            self.records += count - counted
            self.last_step, self._free = int(steps[-1]), False
        return rewind

    def _start(self, line: int, start: int, logged: int, rewind: int | None) -> int | None:
        """Notes an attempt; the lowest step taken back so far."""
        self.attempts.lines.append(line)
        self.attempts.starts.append(start)
        if start > logged:
            return rewind
        return start if rewind is None else min(rewind, start)

    def _append(self, line: int, last_step: int) -> None:
        """A new run begins with this line; the one before becomes a segment of its own."""
        self.earlier.append(
            Segment(
                first_line=self.first_line,
                last_line=line - 1,
                first_step=self.first_step,
                last_step=last_step,
                records=self.records,
            )
        )
        del self.earlier[:-_MOST_KEPT]
        epochs = [epoch for epoch in self.epochs if epoch.line > line]
        self._begin(line=line)
        self.epochs = epochs

    # -- reading again --------------------------------------------------------------------------------------------

    def _chunks(self, first: int, last: int, *, before: int | None = None) -> Iterator[Chunk]:
        """Chunks of this run that hold a step of first..last, in file order."""
        for number in range(len(self._starts)):
            if before is not None and self._starts[number] >= before:
                return
            end = self._starts[number + 1] if number + 1 < len(self._starts) else self.offset
            if end <= self._starts[number] or self._lows[number] > last or self._highs[number] < first:
                continue
            next_line = self._chunk_lines[number + 1] if number + 1 < len(self._starts) else _NEVER
            if next_line <= self.first_line:
                continue
            yield from self._quiet.read(self._starts[number], end, first_line=self._chunk_lines[number])

    def chunks_with(self, first: int, last: int) -> Iterator[Chunk]:
        """Chunks of this run that hold a step of first..last, superseded records too, in file order."""
        return self._chunks(first, last)

    def sums(self, first: int, last: int) -> Blocks:
        """Sums over the steps first..last that count, in blocks as wide as those of the whole run."""
        blocks = Blocks(first, width=1 if self.blocks is None else self.blocks.width)
        for chunk in self._chunks(first, last):
            self._add(chunk, blocks, from_step=first, to_step=last)
        return blocks

    def attempt_starts(self) -> list[tuple[int, int]]:
        """(line, first step) of each attempt after the first; the newest when there are very many."""
        pairs = list(zip(self.attempts.lines[1:], self.attempts.starts[1:], strict=True))
        return pairs[-_MOST_KEPT:]

    @property
    def restarts(self) -> int:
        return max(0, len(self.attempts.lines) - 1)

    def first_line_of_attempt(self, line: int) -> int:
        """Number of the attempt (from 1) that wrote this line."""
        return bisect.bisect_right(self.attempts.lines, line)


def listed(lines: list[int], count: int) -> str:
    """Line numbers for a message: "3, 9, ... (30 in all)"."""
    shown = ", ".join(f"{line:,}" for line in lines)
    return shown if count <= min(LISTED, len(lines)) else f"{shown}, ... ({count:,} in all)"
