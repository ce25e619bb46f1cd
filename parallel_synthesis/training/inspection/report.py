"""What a log covers, as figures: per task, over time, restarts, repeats, gaps, noise (no torch)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_synthesis.training.inspection.blocks import FIELD, Blocks
from parallel_synthesis.training.inspection.repeats import (
    Repeats,
    find_gaps,
    find_odd,
    find_repeats,
    find_stride,
)
from parallel_synthesis.training.inspection.runlog import Gap, OddStep, RunLog, Segment
from parallel_synthesis.training.progress import perplexity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SHARE, _LEAST = 0.05, 10  # "at start" and "now": this share of the steps, and no fewer than so many
POINTS = 128  # most points of a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """One task. Losses are nats per target token, weighted by tokens, over finite updates; None where there is none.

    steps: updates and skips. rows_planned, steps_planned: of the whole run, None where the log alone is there.
    """

    task: str
    steps: int
    updates: int
    skipped: int
    rows: int
    rows_planned: int | None
    steps_planned: int | None
    tokens: int
    loss: float | None
    loss_at_start: float | None
    loss_now: float | None
    perplexity: float | None
    nonfinite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The run between two steps. tokens: target tokens. tasks, skips: loss per task, ranks' skips per reason."""

    first: int
    last: int
    updates: int
    skipped: int
    tokens: int
    loss: float | None
    tasks: Mapping[str, float | None]
    skips: Mapping[str, int]
    seconds_per_step: float | None
    tokens_per_second: float | None
    memory_gib: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """An attempt after the first: the line it begins at and the first step it does."""

    line: int
    from_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseReport:
    """Lines with something in them that is no record: how many, and the first of them."""

    kind: str
    count: int
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """A log's last run. `tokens_per_second` counts what goes through the backbone (prefill and live) in updates."""

    path: Path
    lines: int
    bytes: int
    first_step: int
    last_step: int
    every: int
    steps: int
    updates: int
    skipped: int
    skips_by_reason: Mapping[str, int]
    rows: int
    rows_exact: bool
    skipped_rows: int
    tokens: int
    loss: float | None
    loss_at_start: float | None
    loss_now: float | None
    perplexity: float | None
    start_until: int
    now_from: int
    nonfinite: int
    nonfinite_first: tuple[OddStep, ...]
    tasks: tuple[TaskReport, ...]
    ranks: int
    seconds: float | None
    seconds_per_step: float | None
    seconds_per_step_now: float | None
    tokens_per_second: float | None
    memory_peak_gib: float | None
    memory_reserved_gib: float | None
    restarts: int
    restarts_last: tuple[Restart, ...]
    superseded: int
    repeats: Repeats
    missing: int
    gaps: tuple[Gap, ...]
    epochs: tuple[tuple[int, float, float], ...]
    notes: tuple[tuple[int, str], ...]
    noise: tuple[NoiseReport, ...]
    unfinished_line: bool
    earlier: tuple[Segment, ...]
    curve: tuple[Point, ...]


def report(
    log: RunLog,
    *,
    batch_size: int = 1,
    rows_planned: Mapping[str, int] | None = None,
    steps_planned: Mapping[str, int] | None = None,
) -> LogReport:
    """Figures of a log that has been read. batch_size: rows a rank and step, for lines that do not number the rows."""
    blocks = log.blocks if log.blocks is not None else Blocks(1)
    total = blocks.total()
    has_steps = log.blocks is not None and bool(
        total[:, FIELD["updates"]].sum() + total[:, FIELD["skipped"]].sum() > 0
    )
    used = blocks.block(log.last_step) + 1 if has_steps else 1
    span = min(used, max(math.ceil(_LEAST / blocks.width), math.ceil(_SHARE * used)))  # in whole blocks
    start_until = min(blocks.start(span) - 1, log.last_step)
    now_from = max(blocks.start(used - span), log.first_step)
    early, late = blocks.sums[:span].sum(axis=0), blocks.sums[used - span : used].sum(axis=0)
    names = log.tasks.names
    planned_tasks = dict.fromkeys([*names, *(rows_planned or {}), *(steps_planned or {})])
    tasks = tuple(
        _task(name, names, (total, early, late), blocks, batch_size, rows_planned, steps_planned)
        for name in planned_tasks
    )
    whole = total.sum(axis=0)
    stride = find_stride(log)
    missing, gaps = find_gaps(log, stride=stride)
    live = int(whole[FIELD["updates"]] + whole[FIELD["skipped"]])
    memory = float(blocks.memory.max())
    return LogReport(
        path=log.path,
        lines=log.lines,
        bytes=log.offset,
        first_step=log.first_step,
        last_step=log.last_step,
        every=stride,
        steps=live,
        updates=int(whole[FIELD["updates"]]),
        skipped=int(whole[FIELD["skipped"]]),
        skips_by_reason={
            name: int(counts.sum()) for name, counts in sorted(blocks.reasons.items()) if counts.any()
        },
        rows=sum(task.rows for task in tasks),
        rows_exact=bool(whole[FIELD["rows_unsaid"]] == 0),
        skipped_rows=int(whole[FIELD["skipped_rows"]]),
        tokens=int(whole[FIELD["tokens"]]),
        loss=_loss(whole),
        loss_at_start=_loss(early.sum(axis=0)),
        loss_now=_loss(late.sum(axis=0)),
        perplexity=_perplexity(_loss(whole)),
        start_until=start_until,
        now_from=now_from,
        nonfinite=int(whole[FIELD["nonfinite"]]),
        nonfinite_first=tuple(find_odd(log)),
        tasks=tasks,
        ranks=log.tasks.ranks,
        seconds=float(whole[FIELD["seconds"]]) if whole[FIELD["timed"]] else None,
        seconds_per_step=_ratio(whole, "seconds", "timed"),
        seconds_per_step_now=_ratio(late.sum(axis=0), "seconds", "timed"),
        tokens_per_second=_ratio(whole, "update_tokens", "update_seconds"),
        memory_peak_gib=memory or None,
        memory_reserved_gib=log.memory_reserved or None,
        restarts=log.restarts,
        restarts_last=tuple(Restart(line=line, from_step=step) for line, step in log.attempt_starts()),
        superseded=log.records - live,
        repeats=find_repeats(log),
        missing=missing,
        gaps=tuple(gaps),
        epochs=tuple(
            sorted(
                {epoch.epoch: (epoch.epoch, epoch.loss, epoch.perplexity) for epoch in log.epochs}.values()
            )
        ),
        notes=tuple((note.line, f"[{note.kind}] {note.text}") for note in log.notes),
        noise=tuple(
            NoiseReport(kind=kind, count=found.count, lines=tuple(found.lines))
            for kind, found in sorted(log.noise.items())
        ),
        unfinished_line=log.unfinished,
        earlier=tuple(log.earlier),
        curve=_curve(log, blocks) if has_steps else (),
    )


def _task(
    name: str,
    names: list[str],
    sums: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]],
    blocks: Blocks,
    batch_size: int,
    rows_planned: Mapping[str, int] | None,
    steps_planned: Mapping[str, int] | None,
) -> TaskReport:
    import numpy as np

    zero = np.zeros(blocks.sums.shape[2])

    def of(values: NDArray[np.float64]) -> NDArray[np.float64]:
        place = names.index(name) if name in names else len(values)
        return values[place] if place < len(values) else zero

    total, early, late = map(of, sums)
    factor = batch_size if total[FIELD["rows_unsaid"]] else 1
    loss = _loss(total)
    return TaskReport(
        task=name,
        steps=int(total[FIELD["updates"]] + total[FIELD["skipped"]]),
        updates=int(total[FIELD["updates"]]),
        skipped=int(total[FIELD["skipped"]]),
        rows=int(total[FIELD["rows"]]) * factor,
        rows_planned=(rows_planned or {}).get(name),
        steps_planned=(steps_planned or {}).get(name),
        tokens=int(total[FIELD["tokens"]]),
        loss=loss,
        loss_at_start=_loss(early),
        loss_now=_loss(late),
        perplexity=_perplexity(loss),
        nonfinite=int(total[FIELD["nonfinite"]]),
    )


def _curve(log: RunLog, blocks: Blocks) -> tuple[Point, ...]:
    used = blocks.block(log.last_step) + 1
    group = max(1, math.ceil(used / POINTS))
    starts = list(range(0, used, group))
    if len(starts) > 1 and 2 * (log.last_step + 1 - blocks.start(starts[-1])) < group * blocks.width:
        starts.pop()  # a last point of a few steps would stand out for nothing
    points = []
    for block, end in zip(starts, [*starts[1:], used], strict=True):
        part = blocks.sums[block:end].sum(axis=0)
        whole = part.sum(axis=0)
        if not whole[FIELD["updates"]] + whole[FIELD["skipped"]]:
            continue
        memory = float(blocks.memory[block:end].max())
        points.append(
            Point(
                first=blocks.start(block),
                last=min(blocks.start(end) - 1, log.last_step),
                updates=int(whole[FIELD["updates"]]),
                skipped=int(whole[FIELD["skipped"]]),
                tokens=int(whole[FIELD["tokens"]]),
                loss=_loss(whole),
                tasks={
                    name: _loss(part[number])
                    for number, name in enumerate(log.tasks.names)
                    if number < len(part) and part[number, FIELD["updates"]]
                },
                skips={
                    reason: int(counts[block:end].sum())
                    for reason, counts in sorted(blocks.reasons.items())
                    if counts[block:end].any()
                },
                seconds_per_step=_ratio(whole, "seconds", "timed"),
                tokens_per_second=_ratio(whole, "update_tokens", "update_seconds"),
                memory_gib=memory or None,
            )
        )
    return tuple(points)


def _loss(sums: NDArray[np.float64]) -> float | None:
    tokens = sums[FIELD["finite_tokens"]]
    return float(sums[FIELD["loss"]] / tokens) if tokens else None


def _ratio(sums: NDArray[np.float64], above: str, below: str) -> float | None:
    return float(sums[FIELD[above]] / sums[FIELD[below]]) if sums[FIELD[below]] > 0 else None


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)
