"""Retention as properties."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.checkpoint.retention import keep

STEPS = st.sets(st.integers(0, 300), max_size=40)
LAST = st.integers(0, 6)
EVERY = st.none() | st.integers(1, 50)
NAMED = st.sets(st.integers(0, 300), max_size=8)
PROPERTY = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def test_golden() -> None:
    steps = range(0, 105, 5)
    assert keep(steps, last=2, every=None, named=()) == {0, 95, 100}
    assert keep(steps, last=2, every=40, named={35, 100}) == {0, 35, 40, 80, 90, 95, 100}
    assert keep(steps, last=1, every=None, named={95, 100}) == {0, 90, 95, 100}
    assert keep([], last=2, every=5, named={1}) == set()
    assert keep([7], last=0, every=None, named=()) == {7}


@PROPERTY
@given(STEPS, LAST, EVERY, NAMED)
def test_what_must_be_kept_is_kept(steps: set[int], last: int, every: int | None, named: set[int]) -> None:
    kept = keep(steps, last=last, every=every, named=named)
    assert kept <= steps
    assert not steps or max(steps) in kept
    assert (0 in kept) == (0 in steps)
    assert steps & named <= kept
    assert every is None or {step for step in steps if step % every == 0} <= kept
    unnamed = sorted(steps - named)
    assert set(unnamed[len(unnamed) - min(last, len(unnamed)) :]) <= kept


@PROPERTY
@given(STEPS, LAST, EVERY, NAMED)
def test_nothing_else_is_kept(steps: set[int], last: int, every: int | None, named: set[int]) -> None:
    kept = keep(steps, last=last, every=every, named=named)
    other = {step for step in kept - named - {0} if every is None or step % every}
    assert len(other) <= max(last, 1)


@PROPERTY
@given(STEPS, LAST, EVERY, NAMED)
def test_applying_it_again_changes_nothing(
    steps: set[int], last: int, every: int | None, named: set[int]
) -> None:
    kept = keep(steps, last=last, every=every, named=named)
    assert keep(kept, last=last, every=every, named=named) == kept


@PROPERTY
@given(STEPS, LAST, EVERY, NAMED, st.integers(0, 40))
def test_an_interrupted_removal_is_finished(
    steps: set[int], last: int, every: int | None, named: set[int], removed: int
) -> None:
    kept = keep(steps, last=last, every=every, named=named)
    going = sorted(steps - kept)
    assert keep(steps - set(going[:removed]), last=last, every=every, named=named) == kept


@PROPERTY
@given(STEPS, LAST, EVERY, NAMED, st.integers(0, 300))
def test_naming_one_never_costs_another(
    steps: set[int], last: int, every: int | None, named: set[int], more: int
) -> None:
    kept = keep(steps, last=last, every=every, named=named)
    assert kept <= keep(steps, last=last, every=every, named=named | {more}) | {max(steps, default=0)}
