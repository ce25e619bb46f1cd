"""Reads and tokenises a step's rows and checks the guards, one step ahead of the training, on one thread (no torch)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.config import GuardsConfig
from parallel_synthesis.data.index import RowFile
from parallel_synthesis.data.order import Epoch, Order
from parallel_synthesis.data.rows import Row
from parallel_synthesis.model.tokens import RowTokens
from parallel_synthesis.training.events import RankBatch
from parallel_synthesis.training.guards import RowCounts, check, check_generated


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A global step (1-based) as one process needs it: its ranks' batches and their tokens."""

    step: int
    epoch_index: int
    batches: tuple[RankBatch, ...]
    tokens: Mapping[int, tuple[RowTokens, ...]]


class Preparer:
    """Prepares steps in order. Draws no random numbers."""

    def __init__(
        self,
        *,
        order: Order,
        files: Mapping[str, RowFile],
        tokenize: Callable[[Row], RowTokens],
        guards: GuardsConfig,
        ranks: Sequence[int],
    ) -> None:
        self._order = order
        self._files = files
        self._tokenize = tokenize
        self._guards = guards
        self._ranks = ranks
        self._order_lock = threading.Lock()  # the training thread asks for an epoch's state while we prepare
        self._rng_states: dict[int, Any] = {}

    def steps(self, first: int, last: int) -> Iterator[PreparedStep]:
        """Steps first..last; while one is trained on, the next is being prepared."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as pool:
            ahead = pool.submit(self._prepare, first) if first <= last else None
            for step in range(first, last + 1):
                assert ahead is not None
                ready = ahead.result()
                ahead = pool.submit(self._prepare, step + 1) if step < last else None
                yield ready

    def epoch_rng_state(self, epoch_index: int) -> Any:
        """Python random state before that epoch's order is built (formats.md, loop states)."""
        if epoch_index not in self._rng_states:
            self._epoch(epoch_index)
        return self._rng_states[epoch_index]

    def _epoch(self, index: int) -> Epoch:
        with self._order_lock:
            epoch = self._order.epoch(index)
            self._rng_states[index] = epoch.rng_state
            return epoch

    def _prepare(self, step: int) -> PreparedStep:
        epoch_index, index = divmod(step - 1, self._order.steps_per_epoch)
        epoch = self._epoch(epoch_index)
        batches, tokens = [], {}
        for rank in self._ranks:
            batch = epoch.batch(index, rank)
            rows = [self._files[batch.task].read(number) for number in batch.rows]
            tokens[rank] = tuple(self._tokenize(row) for row in rows)
            counts = tuple(count(row) for row in tokens[rank])
            batches.append(
                RankBatch(
                    rank=rank,
                    task=batch.task,
                    rows=batch.rows,
                    places=tuple(row.place for row in rows),
                    counts=counts,
                    skip=check(counts, self._guards),
                )
            )
        return PreparedStep(step=step, epoch_index=epoch_index, batches=tuple(batches), tokens=tokens)


def count(row: RowTokens, *, workers: int = 0) -> RowCounts:
    """What the guards look at. workers: how many have generated the row's branches."""
    return RowCounts(
        prefill=row.prefill_tokens,
        past=row.past,
        live=row.live_tokens,
        target=row.target_tokens,
        dropped=max(0, workers - len(row.branches)),
    )


def with_generated(
    batches: Iterable[RankBatch],
    rows: Mapping[int, Sequence[RowTokens]],
    *,
    workers: int,
    guards: GuardsConfig,
) -> tuple[RankBatch, ...]:
    """The batches with the counts, and the skip, that their rows have once the workers have generated."""
    judged = []
    for batch in batches:
        counts = tuple(count(row, workers=workers) for row in rows[batch.rank])
        judged.append(dataclasses.replace(batch, counts=counts, skip=check_generated(counts, guards)))
    return tuple(judged)
