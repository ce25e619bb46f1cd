"""Steps that are done again after a resume, compared with the log's superseded lines (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel_synthesis.training.events import StepDigest
from parallel_synthesis.training.log_chunks import ChunkReader
from parallel_synthesis.training.log_columns import digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which a repeated step differs: its rank (None: the step as a whole) and component."""

    step: int
    rank: int | None
    component: str
    before: str
    now: str

    def __str__(self) -> str:
        who = "all ranks" if self.rank is None else f"rank {self.rank}"
        return f"step {self.step}, {who}: {self.component} was {self.before}, now {self.now}"


@dataclass(slots=True, kw_only=True)
class Repeats:
    """The digests of steps that an earlier attempt logged and this one does again. stops: a difference ends the run."""

    stops: bool = True
    expected: Mapping[int, StepDigest] = field(default_factory=dict)
    reproduced: list[int] = field(default_factory=list)
    differs: bool = False

    @property
    def last(self) -> int:
        """The last step to be repeated; 0 when there is none."""
        return max(self.expected, default=0)

    def check(self, step: int, digest: StepDigest) -> Difference | None:
        """Compares a step just done; only the first difference of an attempt is returned, the rest follows from it."""
        before = self.expected.get(step)
        if before is None or self.differs:
            return None
        found = first_difference(step, before, digest)
        if found is None:
            self.reproduced.append(step)
        else:
            self.differs = True
        return found


def first_difference(step: int, before: StepDigest, now: StepDigest) -> Difference | None:
    """The first difference in the order in which one causes the next: rows, RNG, loss, gradient, reduced gradient."""
    named = (
        ("rows", before.rows, now.rows),
        ("RNG", before.rng, now.rng),
        ("loss", before.loss, now.loss),
        ("gradient", before.gradient, now.gradient),
    )
    for component, old, new in named:
        if len(old) != len(new):
            return Difference(
                step=step, rank=None, component=component, before=f"{len(old)} ranks", now=f"{len(new)} ranks"
            )
        for rank, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                return Difference(step=step, rank=rank, component=component, before=str(one), now=str(other))
    if before.reduced != now.reduced:
        return Difference(
            step=step, rank=None, component="reduced gradient", before=before.reduced, now=now.reduced
        )
    return None


def read_logged(path: Path, *, after: int, until: int | None = None) -> dict[int, StepDigest]:
    """Step -> digest of the last attempt that logged it, for steps after `after` (up to `until`); streamed.

    Raises StorageError when the log can not be read.
    """
    found = {}
    for chunk in ChunkReader(path).read() if path.exists() else ():
        wanted = chunk.step > after
        if until is not None:
            wanted &= chunk.step <= until
        for place in wanted.nonzero()[0].tolist():
            digest = digest_of(chunk.taken[place], chunk.proof[place])
            if digest is not None:
                found[int(chunk.step[place])] = digest
    return found


def step_ranges(steps: list[int]) -> str:
    """[31, 32, 33, 40] -> "31-33, 40"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
