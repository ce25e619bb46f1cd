"""The guards: limits on counts known from tokenisation alone, checked before any forward pass (no torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from parallel_synthesis.config import OFF, GuardsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Token counts of one row. past = kept tokens over its branches; live = prompt + target.

    dropped: workers of the parallel_kv route that generated nothing and so left no branch.
    """

    prefill: int
    past: int
    live: int
    target: int
    dropped: int = 0

    @property
    def attention_area(self) -> int:
        return self.live * self.total

    @property
    def total(self) -> int:
        return self.past + self.live


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Why one rank's batch is not trained on: a reason by name, its numbers (`live_tokens=1900/1800`), a sentence."""

    reason: str
    numbers: str
    message: str


def check(rows: Iterable[RowCounts], guards: GuardsConfig) -> Skip | None:
    """The first guard a batch exceeds, in design.md's order; None when it may be trained on.

    Prefill is summed over the batch; live, area and total are those of the longest row.
    """
    rows = tuple(rows)
    checks = (
        (
            "fixed_cache_total_prefill_tokens_exceeded",
            "prefill_tokens",
            sum(row.prefill for row in rows),
            guards.prefill_tokens,
        ),
        ("actual_live_tokens_exceeded", "live_tokens", max(row.live for row in rows), guards.live_tokens),
        (
            "actual_attention_area_exceeded",
            "attention_area",
            max(row.attention_area for row in rows),
            guards.attention_area,
        ),
        ("actual_total_tokens_exceeded", "total_tokens", max(row.total for row in rows), guards.total_tokens),
    )
    for reason, quantity, count, limit in checks:
        if limit != OFF and count > limit:
            return Skip(
                reason=reason, numbers=f"{quantity}={count}/{limit}", message=f"guards.{quantity} exceeded"
            )
    return None


def before_generation(guards: GuardsConfig) -> GuardsConfig:
    """Of the guards, what parallel_kv checks before its workers generate: the live sequence is known, the past is not."""
    return dataclasses.replace(guards, prefill_tokens=OFF, attention_area=OFF, total_tokens=OFF)


def check_generated(rows: Iterable[RowCounts], guards: GuardsConfig) -> Skip | None:
    """What parallel_kv checks after generation: each row has a branch, then area and total of the longest row."""
    rows = tuple(rows)
    silent = [row for row in rows if row.past == 0]
    if silent:
        return Skip(
            reason="workers_generated_nothing",
            numbers=f"workers_dropped={sum(row.dropped for row in silent)}",
            message=f"every worker of {len(silent)} of {len(rows)} rows ended at its first token",
        )
    return check(rows, dataclasses.replace(guards, prefill_tokens=OFF, live_tokens=OFF))
