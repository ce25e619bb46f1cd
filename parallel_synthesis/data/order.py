"""The order of an epoch: which rows each logical rank takes at each global step, as the reference has it."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.errors import DataError


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank takes at one step: 1 to batch_size rows, numbered from 0 among the task's valid rows."""

    task: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A task's share of an epoch. `first_group`: number of its first group before the groups are shuffled."""

    task: str
    rows: int
    batches: int
    groups: int
    first_group: int


class Epoch:
    """One shuffled pass over the mix; 4 bytes a row and 4 bytes a step.

    index: 0-based. rng_state: the generator's state before this epoch was drawn (`random.Random.getstate`).
    len(): its global steps, after `steps_per_epoch`.
    """

    def __init__(
        self,
        index: int,
        *,
        rng: random.Random,
        parts: tuple[_Part, ...],
        ranks: int,
        batch_size: int,
        steps: int,
    ) -> None:
        self.index = index
        self.rng_state: tuple[Any, ...] = rng.getstate()
        self._parts = parts
        self._ranks = ranks
        self._batch_size = batch_size
        self._steps = steps
        # What is drawn depends only on the lengths, so compact arrays come out as the reference's lists do.
        self._rows = [_shuffled(part.rows, rng) for part in parts]
        self._groups = _shuffled(sum(part.groups for part in parts), rng)
        self._first_groups = [part.first_group for part in parts]

    def __len__(self) -> int:
        return self._steps

    def batch(self, step: int, rank: int) -> Batch:
        """The batch of logical rank `rank` at step `step` of this epoch, both from 0; IndexError outside."""
        if not 0 <= rank < self._ranks:
            raise IndexError(f"rank {rank}: expected 0 to {self._ranks - 1}")
        number = self._part_of(step)
        part = self._parts[number]
        first = ((self._groups[step] - part.first_group) * self._ranks + rank) * self._batch_size
        return Batch(part.task, tuple(self._rows[number][first : first + self._batch_size]))

    def task(self, step: int) -> str:
        """The task of global step `step` (all ranks of a step take the same)."""
        return self._parts[self._part_of(step)].task

    def task_counts(self) -> dict[str, int]:
        """Steps of each task in this epoch; their sum is len()."""
        counts = Counter(map(self._part_of, range(self._steps)))
        return {part.task: counts[number] for number, part in enumerate(self._parts)}

    def _part_of(self, step: int) -> int:
        if not 0 <= step < self._steps:
            raise IndexError(f"step {step} of epoch {self.index}: expected 0 to {self._steps - 1}")
        # The last of equal starts is the one that has groups.
        return bisect_right(self._first_groups, self._groups[step]) - 1


class Order:
    """The order of every epoch of a run (design "The method": order of an epoch).

    One `random.Random(seed)`. In each epoch, each task in the order of `rows`: its row numbers are shuffled,
    cut into batches of `batch_size` (a short last batch stays) and every `ranks` consecutive batches make a
    group (an incomplete last group is dropped). Then the list of all groups is shuffled with the same
    generator. Step s takes group s, rank r its r-th batch; the next epoch goes on with the generator.

    `rows`: task -> valid rows. `steps_per_epoch` shortens what is used of an epoch, not what is drawn; a
    larger value than the mix has steps changes nothing. Raises DataError when no task fills a single step.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        *,
        ranks: int,
        batch_size: int,
        seed: int,
        steps_per_epoch: int | None = None,
    ) -> None:
        least = {"ranks": ranks, "batch_size": batch_size, "steps_per_epoch": steps_per_epoch}
        for name, value in least.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: expected 1 or more")
        self.ranks = ranks
        self.batch_size = batch_size
        self.seed = seed
        self._parts = _parts(rows, ranks, batch_size)
        self.steps_per_task: Mapping[str, int] = {part.task: part.groups for part in self._parts}
        self.dropped_batches: Mapping[str, int] = {
            part.task: part.batches - part.groups * ranks for part in self._parts
        }
        self.dropped_rows: Mapping[str, int] = {
            part.task: max(0, part.rows - part.groups * ranks * batch_size) for part in self._parts
        }
        available = sum(self.steps_per_task.values())
        if available == 0:
            found = ", ".join(f"{task} {count}" for task, count in rows.items()) or "no task"
            raise DataError(
                f"no task has the {(ranks - 1) * batch_size + 1} rows that one step takes with "
                f"run.ranks = {ranks} and data.batch_size = {batch_size} (rows: {found}). "
                f"Add rows, or lower run.ranks or data.batch_size."
            )
        self.steps_per_epoch = available if steps_per_epoch is None else min(available, steps_per_epoch)
        self._rng = random.Random(seed)
        self._epoch: Epoch | None = None

    def epoch(self, index: int) -> Epoch:
        """Epoch `index`, from 0; IndexError when negative.

        The last one asked for is kept; later ones are drawn from there, earlier ones from the seed again.
        """
        if index < 0:
            raise IndexError(f"epoch {index}: expected 0 or more")
        if self._epoch is not None and index < self._epoch.index:
            self._rng = random.Random(self.seed)
            self._epoch = None
        epoch = self._epoch
        while epoch is None or epoch.index < index:
            epoch = Epoch(
                0 if epoch is None else epoch.index + 1,
                rng=self._rng,
                parts=self._parts,
                ranks=self.ranks,
                batch_size=self.batch_size,
                steps=self.steps_per_epoch,
            )
        self._epoch = epoch
        return epoch


def _parts(rows: Mapping[str, int], ranks: int, batch_size: int) -> tuple[_Part, ...]:
    parts = []
    first_group = 0
    for task, count in rows.items():
        if count < 0:
            raise ValueError(f"rows of {task} = {count}: expected 0 or more")
        batches = -(-count // batch_size)
        groups = batches // ranks
        parts.append(_Part(task=task, rows=count, batches=batches, groups=groups, first_group=first_group))
        first_group += groups
    return tuple(parts)


def _shuffled(count: int, rng: random.Random) -> array[int]:
    numbers = array("I" if count <= 2**32 else "Q", range(count))
    rng.shuffle(numbers)
    return numbers
