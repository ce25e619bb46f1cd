"""Which steps the guards skip, from the counts of the rows: by task and reason, the spread of what the guards compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel_synthesis.config import OFF, Config, GuardsConfig
from parallel_synthesis.data.order import Order
from parallel_synthesis.training.guards import RowCounts, check
from parallel_synthesis.training.inspection.runlog import RunLog

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = NDArray[np.int64]  # [rows, 4]: prefill, past, live, target; -1 for a row that no step takes

QUANTITIES = ("prefill_tokens", "live_tokens", "attention_area", "total_tokens")
SHARES = (90, 99, 100)  # percent of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One quantity over the steps: what the guard compares, the largest of the step's ranks. keeps: percent -> limit.

    over: steps above the limit in force, whatever the other guards say.
    """

    quantity: str
    limit: int
    median: int
    p90: int
    p99: int
    largest: int
    over: int
    keeps: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCoverage:
    """A task's steps. skips: reason -> ranks' skips. rows: those the run takes; kept_rows: of them, in steps with an update."""

    task: str
    steps: int
    skipped: int
    skips: Mapping[str, int]
    rows: int
    kept_rows: int
    tokens: int
    spreads: tuple[Spread, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The prediction against a run's log: steps compared, steps where they differ, the first of them."""

    compared: int
    differing: int
    first: int | None
    predicted: str | None
    logged: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The prediction. skipped_first: the first steps that will be skipped. tokens: target tokens of the updates."""

    recipe: str
    steps: int
    updates: int
    skipped: int
    skips: Mapping[str, int]
    skipped_first: tuple[int, ...]
    tokens: int
    tasks: tuple[TaskCoverage, ...]
    spreads: tuple[Spread, ...]
    tokenised: int
    cached: int
    agreement: Agreement | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    task: str
    values: tuple[int, int, int, int]
    skips: tuple[str, ...]
    rows: int
    tokens: int


def foretell(
    config: Config,
    order: Order,
    total: int,
    counts: Mapping[str, Counts],
    *,
    tokenised: int,
    cached: int,
    log: RunLog | None = None,
) -> Coverage:
    """The skips of the run's `total` steps. counts: of each task's rows. log: a run's log to compare with."""
    steps = list(_steps(order, total, counts, config.guards))
    return Coverage(
        recipe=config.recipe,
        steps=total,
        updates=sum(not step.skips for step in steps),
        skipped=sum(bool(step.skips) for step in steps),
        skips=_reasons(steps),
        skipped_first=tuple(number for number, step in enumerate(steps, start=1) if step.skips)[:20],
        tokens=sum(step.tokens for step in steps if not step.skips),
        tasks=tuple(_task(name, steps, config.guards) for name in config.data.tasks),
        spreads=_spreads(steps, config.guards),
        tokenised=tokenised,
        cached=cached,
        agreement=None if log is None else _agreement(log, steps),
    )


def _steps(order: Order, total: int, counts: Mapping[str, Counts], guards: GuardsConfig) -> Iterator[_Step]:
    for number in range(total):
        index, place = divmod(number, order.steps_per_epoch)
        epoch = order.epoch(index)
        skips, values, rows, tokens, task = [], [0, 0, 0, 0], 0, 0, ""
        for rank in range(order.ranks):
            batch = epoch.batch(place, rank)
            task = batch.task
            found = [
                RowCounts(prefill=int(c[0]), past=int(c[1]), live=int(c[2]), target=int(c[3]))
                for c in counts[batch.task][list(batch.rows)]
            ]
            skip = check(found, guards)
            if skip is not None:
                skips.append(skip.reason)
            mine = (
                sum(row.prefill for row in found),
                max(row.live for row in found),
                max(row.attention_area for row in found),
                max(row.total for row in found),
            )
            values = list(map(max, values, mine))
            rows += len(found)
            tokens += sum(row.target for row in found)
        one, two, three, four = values
        yield _Step(task=task, values=(one, two, three, four), skips=tuple(skips), rows=rows, tokens=tokens)


def _reasons(steps: Sequence[_Step]) -> dict[str, int]:
    return dict(sorted(Counter(reason for step in steps for reason in step.skips).items()))


def _task(name: str, steps: Sequence[_Step], guards: GuardsConfig) -> TaskCoverage:
    mine = [step for step in steps if step.task == name]
    return TaskCoverage(
        task=name,
        steps=len(mine),
        skipped=sum(bool(step.skips) for step in mine),
        skips=_reasons(mine),
        rows=sum(step.rows for step in mine),
        kept_rows=sum(step.rows for step in mine if not step.skips),
        tokens=sum(step.tokens for step in mine if not step.skips),
        spreads=_spreads(mine, guards),
    )


def _spreads(steps: Sequence[_Step], guards: GuardsConfig) -> tuple[Spread, ...]:
    found = []
    for place, quantity in enumerate(QUANTITIES):
        values = sorted(step.values[place] for step in steps)
        if not values:
            continue
        limit: int = getattr(guards, quantity)

        def keeping(percent: float, values: Sequence[int] = values) -> int:
            return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]

        found.append(
            Spread(
                quantity=quantity,
                limit=limit,
                median=keeping(50),
                p90=keeping(90),
                p99=keeping(99),
                largest=values[-1],
                over=sum(value > limit for value in values) if limit != OFF else 0,
                keeps={str(share): keeping(share) for share in SHARES},
            )
        )
    return tuple(found)


def _agreement(log: RunLog, steps: Sequence[_Step]) -> Agreement:
    """Guard skips only: that a loss is not finite can not be foretold."""
    compared = differing = 0
    first: tuple[int, str, str] | None = None
    for chunk in log.chunks_with(1, len(steps)):
        for place in log.live(chunk).nonzero()[0].tolist():
            step = int(chunk.step[place])
            if step > len(steps):
                continue
            logged = chunk.skips.get(place, ())
            if any(reason.startswith("nonfinite") for reason in logged):
                logged = ()
            compared += 1
            if logged != steps[step - 1].skips:
                differing += 1
                if first is None or step < first[0]:
                    first = (
                        step,
                        ", ".join(steps[step - 1].skips) or "an update",
                        ", ".join(logged) or "an update",
                    )
    return Agreement(
        compared=compared,
        differing=differing,
        first=None if first is None else first[0],
        predicted=None if first is None else first[1],
        logged=None if first is None else first[2],
    )
