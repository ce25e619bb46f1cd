"""Where a run stands: the counters, their place in training_state.pt and in train_mixed_summary.json (no torch).

The layouts are formats.md's: one logical rank has a `single_loop_state`, several have a `distributed_loop_state`
and one rank state each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.training.events import StepRecord


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over steps. weighted_loss is in nats (loss times target tokens)."""

    attempted: int = 0
    updates: int = 0
    skipped: int = 0
    weighted_loss: float = 0.0
    target_tokens: int = 0

    def add(self, record: StepRecord) -> None:
        self.attempted += 1
        if record.skipped:
            self.skipped += 1
            return
        self.updates += 1
        self.weighted_loss += record.loss * record.target_tokens
        self.target_tokens += record.target_tokens

    @property
    def loss(self) -> float:
        """Mean nats per target token; nan before the first update."""
        return self.weighted_loss / self.target_tokens if self.target_tokens else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass(slots=True, kw_only=True)
class RankCounters:
    """What one logical rank went through."""

    steps: Counter[str] = field(default_factory=Counter)
    samples: Counter[str] = field(default_factory=Counter)
    skipped_steps: int = 0
    skipped_samples: int = 0


@dataclass(slots=True, kw_only=True)
class Progress:
    """All counters of a run. `step` is the number of global steps done, skips included."""

    tasks: Sequence[str]
    ranks: int
    steps_per_epoch: int
    step: int = 0
    totals: Totals = field(default_factory=Totals)
    epoch: Totals = field(default_factory=Totals)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    rank_counters: list[RankCounters] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    last_loss: float = math.nan
    generated: Counter[str] = field(
        default_factory=Counter
    )  # of parallel_kv's workers; empty in the fixed route

    def __post_init__(self) -> None:
        if not self.rank_counters:
            self.rank_counters = [RankCounters() for _ in range(self.ranks)]

    @property
    def epoch_index(self) -> int:
        """0-based epoch of the next step."""
        return self.step // self.steps_per_epoch

    def add(self, record: StepRecord) -> dict[str, Any] | None:
        """Counts a step; returns the summary of the epoch that it ended, if it ended one."""
        self.step = record.step
        self.totals.add(record)
        self.epoch.add(record)
        for counters, batch in zip(self.rank_counters, record.batches, strict=True):
            if record.skipped:
                counters.skipped_steps += 1
                counters.skipped_samples += len(batch.rows)
            else:
                counters.steps[batch.task] += 1
                counters.samples[batch.task] += len(batch.rows)
        for skip in record.skips.values():
            self.reasons[skip.reason] += 1
        if record.generated_tokens is not None and record.dropped_workers is not None:
            self.generated.update(tokens=record.generated_tokens, workers_dropped=record.dropped_workers)
        if not record.skipped:
            self.last_loss = record.loss
        if self.step % self.steps_per_epoch:
            return None
        done = {
            "epoch": record.epoch,
            "avg_loss": self.epoch.loss,
            "perplexity": self.epoch.perplexity,
            "target_tokens": self.epoch.target_tokens,
            "steps": self.epoch.attempted,
            "optimizer_steps": self.epoch.updates,
            "skipped_steps": self.epoch.skipped,
        }
        self.epochs.append(done)
        self.epoch = Totals()
        return done

    def loop_state(self, *, epoch_rng_state: Any) -> dict[str, Any]:
        """single_loop_state or distributed_loop_state. epoch_rng_state: python random state before the epoch was built."""
        many = self.ranks > 1
        state: dict[str, Any] = {
            "epoch_idx": self.epoch_index,
            "next_batch_idx_in_epoch": self.step % self.steps_per_epoch,
            "current_epoch_rng_state_before_build": epoch_rng_state,
            "epoch_summaries": [dict(done) for done in self.epochs],
            "global_step": self.step,
            "last_step_loss": self.last_loss,
            "last_step_ppl": perplexity(self.last_loss),
            "skips_by_reason": dict(sorted(self.reasons.items())),
            "attempted_steps": self.totals.attempted,
        }
        if self.generated:
            state["generated"] = dict(self.generated)
        if many:
            state |= {
                "tasks": list(self.tasks),
                "world_size": self.ranks,
                "optimizer_sync_steps_local": self.totals.updates,
                "total_weighted_loss_global": self.totals.weighted_loss,
                "total_target_tokens_global": self.totals.target_tokens,
                "current_epoch_partial": {
                    "epoch_weighted_loss_global": self.epoch.weighted_loss,
                    "epoch_target_tokens_global": self.epoch.target_tokens,
                    "epoch_attempted_sync_steps_local": self.epoch.attempted,
                    "epoch_optimizer_sync_steps_local": self.epoch.updates,
                    "epoch_skipped_sync_steps_local": self.epoch.skipped,
                    "epoch_fast_forwarded_sync_steps_local": 0,
                },
            }
        else:
            only = self.rank_counters[0]
            state |= {
                "optimizer_steps": self.totals.updates,
                "total_weighted_loss": self.totals.weighted_loss,
                "total_target_tokens": self.totals.target_tokens,
                "per_task_steps": dict(only.steps),
                "per_task_seen_samples": dict(only.samples),
                "skipped_steps": only.skipped_steps,
                "skipped_samples": only.skipped_samples,
                "current_epoch_partial": {
                    "epoch_weighted_loss": self.epoch.weighted_loss,
                    "epoch_target_tokens": self.epoch.target_tokens,
                    "epoch_attempted_steps": self.epoch.attempted,
                    "epoch_optimizer_steps": self.epoch.updates,
                    "epoch_skipped_steps": self.epoch.skipped,
                    "epoch_fast_forwarded_steps": 0,
                },
            }
        return state

    def rank_state(self, rank: int, rng_state: Mapping[str, Any]) -> dict[str, Any]:
        """One entry of rank_state_by_rank."""
        counters = self.rank_counters[rank]
        return {
            "rank": rank,
            "process_rng_state": dict(rng_state),
            "per_task_steps_local": dict(counters.steps),
            "per_task_seen_samples_local": dict(counters.samples),
            "skipped_sync_steps_local": counters.skipped_steps,
            "skipped_samples_local": counters.skipped_samples,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes the counters back from a training state of this run. Raises CheckpointError where a piece is missing."""
        many = self.ranks > 1
        try:
            loop = state["distributed_loop_state" if many else "single_loop_state"]
            partial = loop["current_epoch_partial"]
            sync, end = ("sync_steps_local", "_global") if many else ("steps", "")
            self.step = loop["global_step"]
            self.epochs = [dict(done) for done in loop["epoch_summaries"]]
            self.reasons = Counter(loop.get("skips_by_reason", {}))
            self.last_loss = loop["last_step_loss"]
            self.generated = Counter(loop.get("generated", {}))
            self.epoch = Totals(
                attempted=partial[f"epoch_attempted_{sync}"],
                updates=partial[f"epoch_optimizer_{sync}"],
                skipped=partial[f"epoch_skipped_{sync}"],
                weighted_loss=partial[f"epoch_weighted_loss{end}"],
                target_tokens=partial[f"epoch_target_tokens{end}"],
            )
            updates = loop[f"optimizer_{sync}"]
            attempted = loop.get(
                "attempted_steps", self.step
            )  # fewer where the order was taken up at a later step
            self.totals = Totals(
                attempted=attempted,
                updates=updates,
                skipped=attempted - updates,
                weighted_loss=loop[f"total_weighted_loss{end}"],
                target_tokens=loop[f"total_target_tokens{end}"],
            )
            if many:
                for rank, counters in enumerate(self.rank_counters):
                    saved = state["rank_state_by_rank"][rank]
                    counters.steps = Counter(saved["per_task_steps_local"])
                    counters.samples = Counter(saved["per_task_seen_samples_local"])
                    counters.skipped_steps = saved["skipped_sync_steps_local"]
                    counters.skipped_samples = saved["skipped_samples_local"]
            else:
                only = self.rank_counters[0]
                only.steps, only.samples = (
                    Counter(loop["per_task_steps"]),
                    Counter(loop["per_task_seen_samples"]),
                )
                only.skipped_steps, only.skipped_samples = loop["skipped_steps"], loop["skipped_samples"]
        except (KeyError, IndexError) as error:
            raise CheckpointError(
                f"training_state.pt lacks {error} for {self.ranks} logical ranks: it is of another run or layout"
            ) from error

    def train_metrics(self) -> dict[str, Any]:
        """`train_metrics` of train_mixed_summary.json. Samples are summed over the ranks; steps are global."""
        samples: Counter[str] = Counter()
        for counters in self.rank_counters:
            samples.update(counters.samples)
        skipped = "skipped_sync_steps" if self.ranks > 1 else "skipped_steps"
        generated = {"generated": dict(self.generated)} if self.generated else {}
        return generated | {
            "global_steps": self.step,
            "optimizer_steps": self.totals.updates,
            "steps_per_epoch": self.steps_per_epoch,
            "world_size": self.ranks,
            "per_task_steps": dict(self.rank_counters[0].steps),
            "per_task_seen_samples": dict(samples),
            skipped: self.totals.skipped,
            "skipped_samples": sum(counters.skipped_samples for counters in self.rank_counters),
            "skips_by_reason": dict(sorted(self.reasons.items())),
            "target_tokens": self.totals.target_tokens,
            "avg_loss": finite(self.totals.loss),
            "perplexity": finite(self.totals.perplexity),
            "last_step_loss": finite(self.last_loss),
            "last_step_perplexity": finite(perplexity(self.last_loss)),
            "epochs": [{key: finite(value) for key, value in done.items()} for done in self.epochs],
        }


def perplexity(loss: float) -> float:
    """exp(loss); nan where that overflows, as in the reference's log."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.nan


def finite(value: Any) -> Any:
    """JSON has no nan: a number that is not finite becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
