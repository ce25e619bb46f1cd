"""What the loop tells whoever watches it: plain records and the Observer protocol (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from parallel_synthesis.training.guards import RowCounts, Skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One logical rank's part of a step: its rows (numbers within the task, and file:line), their counts, its skip."""

    rank: int
    task: str
    rows: tuple[int, ...]
    places: tuple[str, ...]
    counts: tuple[RowCounts, ...]
    skip: Skip | None

    @property
    def target_tokens(self) -> int:
        return sum(row.target for row in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigest:
    """What a repeated step must reproduce (design.md, "Step digest"). Hex; one entry per logical rank.

    rng: the rank's random streams as the step found them. loss, gradient and reduced are empty when a guard skipped.
    """

    rows: tuple[tuple[int, ...], ...]
    loss: tuple[str, ...]
    gradient: tuple[str, ...]
    rng: tuple[str, ...]
    reduced: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One global step. `loss` is nan and `skips` is not empty for a step without an update.

    generated_tokens, dropped_workers: of the parallel_kv route's workers, None in the fixed route.
    seconds: wall time of the step; memory_gib: peak allocated CUDA memory, else peak RSS, of the first process.
    """

    epoch: int
    step: int
    batches: tuple[RankBatch, ...]
    skips: Mapping[int, Skip] = field(default_factory=dict)
    loss: float
    perplexity: float
    target_tokens: int
    prefill_tokens: int
    live_tokens: int
    seconds: float
    memory_gib: float
    gradient_norm: float
    digest: StepDigest
    generated_tokens: int | None = None
    dropped_workers: int | None = None

    @property
    def task(self) -> str:
        return self.batches[0].task

    @property
    def skipped(self) -> bool:
        return bool(self.skips)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Held-out loss in nats per target token; per task and over all. `when`: before, after, without branches."""

    when: str
    step: int
    loss: float
    tasks: Mapping[str, float]
    rows: int
    target_tokens: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """Everything is loaded and step 0 is committed."""

    out: Path
    recipe: str
    backbone: str
    device: str
    first_step: int
    total_steps: int
    steps_per_epoch: int
    ranks: int
    processes: int
    trainable_parameters: int
    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. Losses are means over all updates so far, weighted by target tokens.

    generated: {tokens, workers_dropped} of the parallel_kv route's workers; empty in the fixed route.
    """

    out: Path
    checkpoint: Path
    step: int
    total_steps: int
    optimizer_steps: int
    skipped_steps: int
    skips_by_reason: Mapping[str, int]
    loss: float
    perplexity: float
    target_tokens: int
    seconds: float
    evaluations: tuple[Evaluation, ...]
    milestones: tuple[str, ...]
    generated: Mapping[str, int] = field(default_factory=dict)


class Observer(Protocol):
    """Called in every process, in the main thread; only the first process has something to show."""

    def started(self, info: RunStarted) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def saved(self, step: int, path: Path, milestone: str | None, seconds: float) -> None: ...
    def evaluated(self, evaluation: Evaluation) -> None: ...
    def finished(self, result: TrainResult) -> None: ...
    def note(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...


class Silent:
    """An observer that shows nothing."""

    def started(self, info: RunStarted) -> None: ...
    def step(self, record: StepRecord) -> None: ...
    def saved(self, step: int, path: Path, milestone: str | None, seconds: float) -> None: ...
    def evaluated(self, evaluation: Evaluation) -> None: ...
    def finished(self, result: TrainResult) -> None: ...
    def note(self, text: str) -> None: ...
    def warning(self, text: str) -> None: ...
