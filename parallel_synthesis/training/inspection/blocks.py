"""Sums over the steps of a log in a bounded number of blocks of equal width; the finer, the shorter the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from parallel_synthesis.training.log_columns import UNKNOWN, Chunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CAPACITY = 512  # blocks
_MOST_REASONS = 50  # as of tasks: noise must not fill the memory
OTHER_REASON = "(other reasons)"
# What is summed for each block and task. loss: nats times tokens over finite updates, weighed by `finite_tokens`.
FIELDS = (
    "updates",
    "skipped",
    "loss",
    "finite_tokens",
    "tokens",
    "rows",
    "skipped_rows",
    "rows_unsaid",
    "seconds",
    "timed",
    "update_seconds",
    "update_tokens",
    "prefill",
    "live",
    "nonfinite",
)
FIELD = {name: place for place, name in enumerate(FIELDS)}


class Blocks:
    """Sums [CAPACITY, tasks, FIELDS] of steps `first` .. ; block b holds steps first + b * width .. + width - 1."""

    def __init__(self, first: int, *, width: int = 1) -> None:
        import numpy as np

        self.first = first
        self.width = width
        self.sums = np.zeros((CAPACITY, 1, len(FIELDS)))
        self.memory = np.zeros(CAPACITY)  # GiB, the peak of the block
        self.reasons: dict[str, Floats] = {}  # reason -> ranks' skips of each block

    def block(self, step: int) -> int:
        return (step - self.first) // self.width

    def start(self, block: int) -> int:
        """The first step of a block."""
        return self.first + block * self.width

    def clear_from(self, block: int) -> None:
        """Forgets the steps from this block on."""
        self.sums[block:] = 0
        self.memory[block:] = 0
        for counts in self.reasons.values():
            counts[block:] = 0

    def add(self, chunk: Chunk, chosen: NDArray[np.int64], *, tasks: int) -> None:
        """Adds the chosen records of a chunk, given by their places; all have a step >= first."""
        import numpy as np

        if not len(chosen):
            return
        while self.block(int(chunk.step[chosen].max())) >= CAPACITY:
            self._widen()
        if tasks > self.sums.shape[1]:
            grown = np.zeros((CAPACITY, tasks + 4, len(FIELDS)))
            grown[:, : self.sums.shape[1]] = self.sums
            self.sums = grown
        block = (chunk.step[chosen] - self.first) // self.width
        low = int(block.min())
        count, width = int(block.max()) - low + 1, self.sums.shape[1]
        key = (block - low) * width + chunk.task[chosen]
        skipped = chunk.skipped[chosen]
        loss, tokens, rows = chunk.loss[chosen], chunk.tokens[chosen], chunk.rows[chosen]
        seconds, memory = chunk.seconds[chosen], chunk.memory[chosen]
        finite = np.isfinite(loss) & ~skipped
        timed = np.isfinite(seconds)
        prefill, live = chunk.prefill[chosen], chunk.live[chosen]
        values = {
            "updates": ~skipped,
            "skipped": skipped,
            "loss": np.where(finite, loss, 0.0) * tokens,
            "finite_tokens": np.where(finite, tokens, 0),
            "tokens": np.where(skipped, 0, tokens),
            "rows": np.where(skipped, 0, np.abs(rows)),
            "skipped_rows": np.where(skipped, np.abs(rows), 0),
            "rows_unsaid": rows <= 0,
            "seconds": np.where(timed, seconds, 0.0),
            "timed": timed,
            # A skipped step computes nothing: its tokens are no throughput.
            "update_seconds": np.where(timed & ~skipped, seconds, 0.0),
            "update_tokens": np.where(timed & ~skipped, np.maximum(prefill, 0) + np.maximum(live, 0), 0),
            "prefill": np.where(prefill == UNKNOWN, 0, prefill),
            "live": np.where(live == UNKNOWN, 0, live),
            "nonfinite": ~finite & ~skipped,
        }
        for name, weights in values.items():
            added = np.bincount(key, weights=weights, minlength=count * width)
            self.sums[low : low + count, :, FIELD[name]] += added.reshape(count, width)
        known = np.isfinite(memory)
        np.maximum.at(self.memory, block[known], memory[known])
        found = zip(chosen[skipped].tolist(), block[skipped].tolist(), strict=True)
        self._add_reasons(Counter((reason, at) for place, at in found for reason in chunk.skips[place]))

    def _add_reasons(self, found: Mapping[tuple[str, int], int]) -> None:
        """(reason, block) -> ranks' skips."""
        import numpy as np

        for (reason, block), count in found.items():
            if reason not in self.reasons and len(self.reasons) >= _MOST_REASONS:
                reason = OTHER_REASON
            self.reasons.setdefault(reason, np.zeros(CAPACITY))[block] += count

    def add_memory(self, chunk: Chunk) -> None:
        """Peaks of [cuda-memory] records; those of superseded steps count too, a peak is a peak."""
        import numpy as np

        if len(chunk.memory_step):
            block = np.clip((chunk.memory_step - self.first) // self.width, 0, CAPACITY - 1)
            np.maximum.at(self.memory, block, chunk.memory_peak)

    def _widen(self) -> None:
        """Two blocks become one."""
        import numpy as np

        half = CAPACITY // 2

        def folded(values: Floats) -> Floats:
            out = np.zeros_like(values)
            out[:half] = values[0::2] + values[1::2]
            return out

        self.sums = folded(self.sums)
        self.reasons = {reason: folded(counts) for reason, counts in self.reasons.items()}
        memory = np.zeros(CAPACITY)
        memory[:half] = np.maximum(self.memory[0::2], self.memory[1::2])
        self.memory = memory
        self.width *= 2

    def total(self) -> Floats:
        """Sums [tasks, FIELDS] over all steps."""
        out: Floats = self.sums.sum(axis=0)
        return out

    def total_by_block(self, name: str) -> Floats:
        """Sums [CAPACITY] of one field over the tasks."""
        out: Floats = self.sums[:, :, FIELD[name]].sum(axis=1)
        return out
