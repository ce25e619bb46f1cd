"""Held-out loss: in evaluation mode, without drawing random numbers, the same for any number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from parallel_synthesis.config import WorkersConfig
from parallel_synthesis.data.index import RowFile
from parallel_synthesis.data.rows import Row
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import RowTokens
from parallel_synthesis.training.events import Evaluation
from parallel_synthesis.training.ranks import Processes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The held-out rows of a run, tokenised; task by task in order."""

    rows: Sequence[tuple[str, RowTokens]]

    @staticmethod
    def read(files: Mapping[str, RowFile], tokenize: Callable[[Row], RowTokens]) -> HeldOut:
        return HeldOut(
            rows=[
                (task, tokenize(file.read(number)))
                for task, file in files.items()
                for number in range(file.rows)
            ]
        )


def evaluate(
    synthesizer: Synthesizer,
    held_out: HeldOut,
    processes: Processes,
    *,
    when: str,
    step: int,
    with_branches: bool,
    workers: WorkersConfig | None = None,
) -> Evaluation:
    """Mean nats per target token over the held-out rows; each process takes every size-th row.

    workers: they generate a row's branches first, from streams seeded by its number alone, so that every
    evaluation sees the same; a row whose workers all generate nothing is read without branches.
    Sums are taken in row order after the exchange, so the result does not depend on the number of processes.
    """
    started = time.monotonic()
    world = processes.world
    mine = {}
    with torch.no_grad():
        for number in range(world.index, len(held_out.rows), world.size):
            row = held_out.rows[number][1]
            if workers is not None and with_branches:
                row = synthesizer.work(row, workers, generator=torch.Generator().manual_seed(number))
            summed, _ = synthesizer.loss(row, with_branches=with_branches, train=False)
            mine[number] = float(summed)
    losses: dict[int, float] = {}
    for part in processes.exchange(mine):
        losses |= part
    sums: dict[str, list[float]] = {}
    for number, (task, row) in enumerate(held_out.rows):
        loss, tokens = sums.setdefault(task, [0.0, 0.0])
        sums[task] = [loss + losses[number], tokens + row.target_tokens]
    total = sum(tokens for _, tokens in sums.values())
    return Evaluation(
        when=when,
        step=step,
        loss=sum(loss for loss, _ in sums.values()) / total,
        tasks={task: loss / tokens for task, (loss, tokens) in sums.items()},
        rows=len(held_out.rows),
        target_tokens=int(total),
        seconds=time.monotonic() - started,
    )
