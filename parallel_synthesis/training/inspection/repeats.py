"""Steps that a log holds more than once: were they the same each time; and gaps and non-finite steps, by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from parallel_synthesis.training.inspection.blocks import FIELD
from parallel_synthesis.training.inspection.runlog import Gap, OddStep, RunLog
from parallel_synthesis.training.log_chunks import LISTED
from parallel_synthesis.training.log_columns import Chunk, digest_of
from parallel_synthesis.training.repeats import first_difference

_MOST_READ_AGAIN = 4  # times the log's size; a log that restarts at every line must end too
_ENOUGH = 8  # updates that tell how a log is thinned
_SMALL = 1 << 26  # bytes that are always read again


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A step that differs between two attempts: the first difference in words, and the lines of both."""

    step: int
    line_before: int
    line_now: int
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """repeated: steps logged again by a later attempt; same, differing: of those compared. proven: same digests too."""

    repeated: int
    same: int
    proven: int
    differing: int
    not_compared: int
    first: tuple[Repeat, ...]


class Version(NamedTuple):
    """A step as one line has it, for comparing. taken, proof: rows and digests as written, empty when it has none."""

    line: int
    skipped: bool
    task: int
    loss: float
    tokens: int
    taken: bytes
    proof: bytes


def version(chunk: Chunk, place: int) -> Version:
    return Version(
        int(chunk.line[place]),
        bool(chunk.skipped[place]),
        int(chunk.task[place]),
        float(chunk.loss[place]),
        int(chunk.tokens[place]),
        chunk.taken[place],
        chunk.proof[place],
    )


def difference(step: int, before: Version, now: Version, names: tuple[list[str], list[str]]) -> str | None:
    """The first thing in which two versions of a step differ, None when they agree. names: task names of each."""
    if names[0][before.task] != names[1][now.task]:
        return f"task: {names[0][before.task]}, {names[1][now.task]}"
    if before.skipped != now.skipped:
        said = {True: "skipped", False: "an update"}
        return f"{said[before.skipped]}, then {said[now.skipped]}"
    if before.proof and now.proof and (before.taken, before.proof) != (now.taken, now.proof):
        one, other = digest_of(before.taken, before.proof), digest_of(now.taken, now.proof)
        if one is not None and other is not None:
            found = first_difference(step, one, other)
            if found is not None:
                who = "all ranks" if found.rank is None else f"rank {found.rank}"
                return f"{found.component} of {who}: {found.before}, {found.now}"
    if not before.skipped and not _same(before.loss, now.loss):
        return f"loss: {before.loss}, {now.loss}"
    if not before.skipped and before.tokens != now.tokens:
        return f"target tokens: {before.tokens}, {now.tokens}"
    return None


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def find_repeats(log: RunLog) -> Repeats:
    """Compares every step that a later attempt logged again with the last one before it."""
    import numpy as np

    repeated = same = proven = differing = not_compared = 0
    first: list[Repeat] = []
    if not log.restarts:
        return Repeats(repeated=0, same=0, proven=0, differing=0, not_compared=0, first=())
    starts = np.array(log.attempts.lines)
    budget = max(_SMALL, _MOST_READ_AGAIN * log.offset)
    highest = -1
    names = (log.tasks.names, log.tasks.names)
    low = min(log.attempts.starts[1:])
    for chunk in log.chunks_with(low, 2**62):
        if not len(chunk):
            continue
        attempt = np.searchsorted(starts, chunk.line, side="right") - 1
        for number in np.unique(attempt).tolist():
            if number < 0:
                continue
            places = np.flatnonzero(attempt == number)
            again = (
                places[(chunk.step[places] <= highest) & (chunk.step[places] >= low)]
                if number
                else places[:0]
            )
            highest = max(highest, int(chunk.step[places].max()))
            if not len(again):
                continue
            before, read = _versions(
                log, chunk, int(chunk.step[again].min()), int(chunk.step[again].max()), number, budget
            )
            budget -= read
            for place in again.tolist():
                step = int(chunk.step[place])
                old = before.get(step)
                if old is None:
                    not_compared += budget <= 0
                    continue
                repeated += 1
                now = version(chunk, place)
                found = difference(step, old, now, names)
                if found is None:
                    same += 1
                    proven += bool(old.proof and now.proof)
                else:
                    differing += 1
                    if len(first) < LISTED:
                        first.append(
                            Repeat(step=step, line_before=old.line, line_now=now.line, difference=found)
                        )
    return Repeats(
        repeated=repeated,
        same=same,
        proven=proven,
        differing=differing,
        not_compared=not_compared,
        first=tuple(first),
    )


def _versions(
    log: RunLog, until: Chunk, low: int, high: int, attempt: int, budget: int
) -> tuple[dict[int, Version], int]:
    """The last versions of steps low..high from attempts before `attempt`, and the bytes that were read for them."""
    found: dict[int, Version] = {}
    read = 0
    line_end = int(log.attempts.lines[attempt])
    for chunk in log.chunks_with(low, high):
        if chunk.offset > until.offset or read > budget:
            break
        read += chunk.length
        for place in (
            ((chunk.step >= low) & (chunk.step <= high) & (chunk.line < line_end)).nonzero()[0].tolist()
        ):
            if chunk.line[place] >= log.first_line:
                found[int(chunk.step[place])] = version(chunk, place)
    return found, read


def find_gaps(log: RunLog, *, stride: int) -> tuple[int, list[Gap]]:
    """Steps between the first and the last that no line tells of: how many, and the first stretches of them."""
    import numpy as np

    blocks = log.blocks
    if blocks is None or stride != 1:
        return 0, []
    counts = (blocks.total_by_block("updates") + blocks.total_by_block("skipped")).astype(int)
    last = log.last_step
    missing = 0
    gaps: list[Gap] = []
    for block in range(blocks.block(last) + 1):
        begin, end = blocks.start(block), min(blocks.start(block + 1) - 1, last)
        lacking = end - begin + 1 - int(counts[block])
        if lacking <= 0:
            continue
        missing += lacking
        if len(gaps) >= LISTED:
            continue
        there = np.zeros(end - begin + 1, dtype=np.bool_)
        for chunk in log.chunks_with(begin, end) if counts[block] else ():
            keep = log.live(chunk) & (chunk.step >= begin) & (chunk.step <= end)
            there[chunk.step[keep] - begin] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[True], there, [True]]).astype(int)))
        for one, other in zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True):
            if gaps and gaps[-1].last == begin + one - 1:
                gaps[-1] = Gap(first=gaps[-1].first, last=begin + other - 1)
            else:
                gaps.append(Gap(first=begin + one, last=begin + other - 1))
    return missing, gaps[:LISTED]


def find_odd(log: RunLog) -> list[OddStep]:
    """The first steps whose loss is not finite."""
    import numpy as np

    found: list[OddStep] = []
    blocks = log.blocks
    if blocks is None:
        return found
    for block in np.flatnonzero(blocks.sums[:, :, FIELD["nonfinite"]].sum(axis=1)).tolist():
        if len(found) >= LISTED:
            break
        begin, end = blocks.start(block), blocks.start(block + 1) - 1
        for chunk in log.chunks_with(begin, end):
            odd = ~np.isfinite(chunk.loss) & ~chunk.skipped & (chunk.step >= begin) & (chunk.step <= end)
            for place in np.flatnonzero(odd & log.live(chunk)).tolist():
                found.append(
                    OddStep(
                        step=int(chunk.step[place]),
                        line=int(chunk.line[place]),
                        loss=float(chunk.loss[place]),
                    )
                )
    return found[:LISTED]


def find_stride(log: RunLog) -> int:
    """How far apart logged updates are: 1, or N in a log of the reference that was thinned (its --log_every_steps N).

    Such a log has updates at multiples of N only; skips it has all.
    """
    import numpy as np

    blocks = log.blocks
    if blocks is None:
        return 1
    updates = blocks.total_by_block("updates").sum()
    missing = log.last_step - log.first_step + 1 - updates - blocks.total_by_block("skipped").sum()
    if 2 * missing <= updates:  # a gap, not every second step or more
        return 1
    for chunk in log.chunks_with(log.first_step, log.last_step):
        steps = chunk.step[log.live(chunk) & ~chunk.skipped]
        if len(steps) >= _ENOUGH:
            return max(1, int(np.gcd.reduce(steps)))
    return 1
