"""Comparing repeated steps: the first cause is named, in the order rows, RNG, loss, gradient, reduced gradient."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from parallel_synthesis.training.events import StepDigest
from parallel_synthesis.training.repeats import Repeats, first_difference, read_logged, step_ranges

BASE = StepDigest(rows=((1,), (2,)), loss=("aa", "bb"), gradient=("cc", "dd"), rng=("ee", "ff"), reduced="99")


@pytest.mark.parametrize(
    ("changes", "rank", "component"),
    [
        ({"reduced": "00"}, None, "reduced gradient"),
        ({"reduced": "00", "gradient": ("cc", "xx")}, 1, "gradient"),
        ({"gradient": ("xx", "xx"), "loss": ("aa", "xx")}, 1, "loss"),
        ({"loss": ("xx", "xx"), "rng": ("xx", "ff")}, 0, "RNG"),
        ({"rng": ("xx", "ff"), "rows": ((1,), (3,))}, 1, "rows"),
        ({"loss": (), "gradient": (), "reduced": ""}, None, "loss"),  # one of the two was skipped
    ],
)
def test_the_first_cause_is_named(changes: dict[str, object], rank: int | None, component: str) -> None:
    found = first_difference(7, BASE, dataclasses.replace(BASE, **changes))
    assert found is not None
    assert (found.step, found.rank, found.component) == (7, rank, component)
    assert first_difference(7, BASE, BASE) is None


def test_only_the_first_differing_step_is_reported() -> None:
    other = dataclasses.replace(BASE, reduced="00")
    repeats = Repeats(expected={3: BASE, 4: BASE, 5: BASE})
    assert repeats.check(3, BASE) is None
    assert repeats.check(4, other) is not None
    assert repeats.check(5, other) is None
    assert repeats.check(6, other) is None  # never logged before
    assert (repeats.reproduced, repeats.differs, repeats.last) == ([3], True, 5)


def test_the_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    line = "[train] epoch=1 step={} task=a loss=1.0 ppl=1.0 target_tokens=1 rows=0 rank_loss={} rank_grad=b rank_rng=c grad=d\n"
    log = tmp_path / "train.log"
    log.write_text(
        line.format(1, "old")
        + "[resume] attempt=2 from_step=0 x\n"
        + line.format(1, "new")
        + line.format(2, "z")
    )
    logged = read_logged(log, after=0, until=1)
    assert {step: digest.loss for step, digest in logged.items()} == {1: ("new",)}
    assert read_logged(tmp_path / "none.log", after=0) == {}


def test_ranges() -> None:
    assert step_ranges([31, 32, 33, 40]) == "31-33, 40"
