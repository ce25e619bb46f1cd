"""The guards: order, limits, sums and longest rows."""

from __future__ import annotations

import pytest

from parallel_synthesis.config import GuardsConfig
from parallel_synthesis.training.guards import RowCounts, check

SHORT = RowCounts(prefill=100, past=60, live=20, target=5)
LONG = RowCounts(prefill=300, past=200, live=50, target=9)


def test_every_guard_is_off_by_default() -> None:
    huge = RowCounts(prefill=10**9, past=10**9, live=10**9, target=1)
    assert check([huge], GuardsConfig()) is None


@pytest.mark.parametrize(
    ("guards", "reason", "numbers"),
    [
        ({"prefill_tokens": 399}, "fixed_cache_total_prefill_tokens_exceeded", "prefill_tokens=400/399"),
        ({"live_tokens": 49}, "actual_live_tokens_exceeded", "live_tokens=50/49"),
        ({"attention_area": 12499}, "actual_attention_area_exceeded", "attention_area=12500/12499"),
        ({"total_tokens": 249}, "actual_total_tokens_exceeded", "total_tokens=250/249"),
    ],
)
def test_one_above_the_limit_skips_and_the_limit_itself_does_not(
    guards: dict[str, int], reason: str, numbers: str
) -> None:
    skip = check([SHORT, LONG], GuardsConfig(**guards))
    assert skip is not None
    assert (skip.reason, skip.numbers) == (reason, numbers)
    at_limit = {name: limit + 1 for name, limit in guards.items()}
    assert check([SHORT, LONG], GuardsConfig(**at_limit)) is None


def test_guards_are_asked_in_the_order_of_the_reference() -> None:
    names = ["prefill_tokens", "live_tokens", "attention_area", "total_tokens"]
    reasons = []
    while names:
        skip = check([LONG], GuardsConfig(**dict.fromkeys(names, 0)))
        assert skip is not None
        reasons.append(skip.reason)
        names.pop(0)
    assert reasons == [
        "fixed_cache_total_prefill_tokens_exceeded",
        "actual_live_tokens_exceeded",
        "actual_attention_area_exceeded",
        "actual_total_tokens_exceeded",
    ]
