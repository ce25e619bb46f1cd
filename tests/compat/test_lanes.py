"""Both virtual environments at once: a run that was begun with one set of libraries goes on with the other.

What is asserted of the bits was measured, not hoped for: on a CPU, with the same torch, both releases of transformers and
PEFT compute the same ones. Where a later release does not, this test says so, and the README's sentence has to go.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.lanes

Ps = Any  # tests/conftest.py, Calls
STEPS, STOPPED_AT = 15, 7  # in the second of three epochs, between two saves
# The other lane's tokenizer is a package of its own release, too.
DIFFERENT = ("transformers", "peft", "tokenizers")
STOP = f"""
import os, signal, sys
from parallel_synthesis.training import loop
after = loop._after_step
def then_stop(run, record):
    after(run, record)
    if record.step == {STOPPED_AT}:
        os.kill(os.getpid(), signal.SIGTERM)
loop._after_step = then_stop
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def lanes(module_ps: Ps, other_ps: Ps) -> dict[str, Ps]:
    return {"this": module_ps, "other": other_ps}


@pytest.fixture(scope="module")
def recipe(module_recipe: Callable[..., Path]) -> Path:
    """Dropout, so that the random streams count; a backbone that both releases of transformers can read."""
    return module_recipe(
        run={"epochs": 3},
        backbone={"model": "package:artifacts/demo/backbone"},
        lora={"dropout": 0.2},
        checkpoint={"every": 2, "keep_last": 20},
    )


@pytest.fixture(scope="module")
def whole(lanes: dict[str, Ps], recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In each lane, the run that is never stopped. Nobody writes into them."""
    made = {}
    for name, ps in lanes.items():
        made[name] = tmp_path_factory.mktemp("whole") / name
        result = ps("train", recipe, "--out", made[name])
        assert result.returncode == 0, result.stderr
    return made


def record_of(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "run_args.json").read_text())
    return record


def packages(run: Path) -> dict[str, str]:
    found: dict[str, str] = record_of(run)["environment"]["packages"]
    return found


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def state_digest(run: Path) -> str:
    """Of the training state without the versions of the libraries that wrote it."""
    import torch

    from parallel_synthesis.checkpoint.state import canonical_digest

    state = torch.load(run / "training_state.pt", weights_only=True)
    assert state.pop("versions")
    return canonical_digest(state)


def test_these_are_two_lanes(whole: dict[str, Path]) -> None:
    this, other = packages(whole["this"]), packages(whole["other"])
    assert {name for name in this if this[name] != other[name]} == set(DIFFERENT)


def test_both_lanes_make_the_same_bytes(
    whole: dict[str, Path], hashes: Callable[[Path], dict[str, str]]
) -> None:
    this, other = hashes(whole["this"]), hashes(whole["other"])
    # PEFT writes its version and the options that it knows; the training state has the versions of its libraries.
    assert {name for name in this if this[name] != other[name]} == {
        "judger_lora/adapter_config.json",
        "training_state.pt",
    }
    assert state_digest(whole["this"]) == state_digest(whole["other"])


@pytest.mark.parametrize(("first", "second"), [("this", "other"), ("other", "this")])
def test_a_run_begun_in_one_lane_ends_in_the_other(
    lanes: dict[str, Ps],
    whole: dict[str, Path],
    recipe: Path,
    hashes: Callable[[Path], dict[str, str]],
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    out = tmp_path / "run"
    begun = lanes[first]("train", recipe, "--out", out, script=STOP)
    assert begun.returncode == 75, begun.stderr
    before, versions = content(out), [packages(whole[name]) for name in (first, second)]

    refused = lanes[second]("resume", out)
    assert refused.returncode == 2
    for name in DIFFERENT:
        row = r" +".join(re.escape(text) for text in (name, *(lane[name] for lane in versions)))
        assert re.search(rf"^  {row} +breaks bit equality$", refused.stderr, re.MULTILINE), refused.stderr
    asked = re.findall(r"--accept-drift (\S+)", refused.stderr)
    assert sorted(asked) == sorted(DIFFERENT)
    assert content(out) == before

    accepted = [word for name in asked for word in ("--accept-drift", name)]
    result = lanes[second]("resume", out, *accepted)
    assert result.returncode == 0, result.stderr
    for name in DIFFERENT:
        assert (
            f"changed since: {name}: {versions[0][name]} -> {versions[1][name]} (breaks bit" in result.stderr
        )
    record = record_of(out)
    assert sorted(record["accepted_drift"]) == sorted(DIFFERENT)
    assert {item["name"]: (item["saved"], item["now"]) for item in record["attempts"][-1]["drift"]} == {
        name: (versions[0][name], versions[1][name]) for name in DIFFERENT
    }
    assert json.loads((out / "checkpoint_meta.json").read_text())["global_step"] == STEPS
    for ps in lanes.values():
        assert ps("verify", out, "--complete").returncode == 0
    # Measured: the bytes of the run that was never stopped, and that of either lane.
    mine, uninterrupted = hashes(out), hashes(whole[second])
    assert {name: mine[name] for name in mine if mine[name] != uninterrupted[name]} == {}
    assert state_digest(out) == state_digest(whole[first])


def test_steps_done_again_in_the_other_lane_are_compared(
    lanes: dict[str, Ps], whole: dict[str, Path], recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert lanes["other"]("train", recipe, "--out", out, script=STOP).returncode == 75
    accepted = [word for name in DIFFERENT for word in ("--accept-drift", name)]
    result = lanes["this"]("resume", out, "--step", 4, *accepted)
    assert result.returncode == 0, result.stderr
    assert f"steps 5-{STOPPED_AT} reproduced" in result.stderr
    assert state_digest(out) == state_digest(whole["this"])
