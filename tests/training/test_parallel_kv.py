"""The parallel_kv route in whole runs: exact over processes and kills, guards around generation, workers dropped."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ps = Any  # tests/conftest.py, Calls
Hashes = Callable[[Path], dict[str, str]]
STEPS = 10
HELD_OUT = {"files": {"first": "second.jsonl"}, "max_rows": 5}


def backbone_that_ends(source: Path, place: Path, ends: list[int]) -> Path:
    """The tiny backbone with these end tokens; a random model all but never writes its one EOS."""
    shutil.copytree(source, place)
    path = place / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    return place


def sections(backbone: Path, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "run": {"method": "parallel_kv", "epochs": 2},
        "backbone": {"model": str(backbone)},
        "workers": {"count": 3, "max_new_tokens": 8, "temperature": 0.6, "top_p": 0.95},
        "lora": {"dropout": 0.2},
        "checkpoint": {"every": 2, "keep_last": 9},
    }
    for name, fields in changes.items():
        found.setdefault(name, {}).update(fields)
    return found


@pytest.fixture(scope="module")
def some_end(tiny_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every third token ends a worker: texts of many lengths, workers that write nothing, now and then all of a row."""
    return backbone_that_ends(tiny_backbone, tmp_path_factory.mktemp("ends") / "some", list(range(0, 512, 3)))


@pytest.fixture(scope="module")
def recipe(module_recipe: Callable[..., Path], some_end: Path) -> Path:
    return module_recipe(**sections(some_end, evaluate=HELD_OUT))


@pytest.fixture(scope="module")
def whole(module_ps: Ps, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is never stopped. Nobody writes into it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ok(module_ps("train", recipe, "--out", out))
    return out


def ok(result: Any) -> Any:
    assert result.returncode == 0, result.stderr
    return result


def step_lines(out: Path) -> list[str]:
    """The last attempt's line of each step, without what differs from run to run."""
    last = {}
    for line in (out / "train.log").read_text().splitlines():
        found = re.search(r" step=(\d+) (task|rank_tasks)=", line)
        if found:
            last[int(found[1])] = re.sub(r" (seconds|memory_gib)=\S+", "", line)
    return [last[step] for step in sorted(last)]


def metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "train_mixed_summary.json").read_text())["train_metrics"]
    return found


def evaluations(out: Path) -> list[tuple[str, float, int]]:
    found = json.loads((out / "train_mixed_summary.json").read_text())["evaluations"]
    return [(item["when"], item["loss"], item["rows"]) for item in found]


def numbers(lines: list[str], field: str) -> list[int]:
    return [int(number) for number in re.findall(rf" {field}=(\d+)", "\n".join(lines))]


def test_the_run_below_has_dropped_workers_skips_and_updates(whole: Path) -> None:
    """Else the tests that compare with it would prove less than they seem to. And the log and summary say so."""
    lines = step_lines(whole)
    assert len(lines) == STEPS
    skipped = [line for line in lines if "skipped" in line]
    assert 0 < len(skipped) < STEPS
    assert all("reason=workers_generated_nothing workers_dropped=3 msg=" in line for line in skipped)
    assert any(line.count("reason=") < 4 for line in skipped), "one rank's row stops the step on all"
    tokens, dropped = numbers(lines, "generated_tokens"), numbers(lines, "workers_dropped")
    assert len(tokens) == STEPS
    assert any(count > 0 for count in dropped)
    found = metrics(whole)
    counted = [
        int(re.findall(r" workers_dropped=(\d+) (?:grad_norm|rows)=", line)[0]) for line in lines
    ]  # a skip's own words have the field too
    assert found["generated"] == {"tokens": sum(tokens), "workers_dropped": sum(counted)}
    assert found["skips_by_reason"].keys() == {"workers_generated_nothing"}


@pytest.mark.parametrize("count", [2, 4])
def test_the_same_bytes_from_one_and_from_several_processes(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path, count: int
) -> None:
    out = tmp_path / "out"
    ok(ps("train", recipe, "--out", out, "--nproc", count))
    assert hashes(out) == hashes(whole)
    assert step_lines(out) == step_lines(whole)
    assert evaluations(out) == evaluations(whole)


def test_killed_and_resumed_is_exact(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for steps in (3, 7):
        call = ps.start(*(["resume", out] if out.exists() else ["train", recipe, "--out", out]))
        deadline = time.monotonic() + 60
        while not (out / "train.log").exists() or len(step_lines(out)) < steps:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        call.signal(signal.SIGKILL)
        assert call.wait().returncode == -signal.SIGKILL
    ok(ps("resume", out))
    assert hashes(out) == hashes(whole)
    assert step_lines(out) == step_lines(whole)
    assert metrics(out) == metrics(whole)
    assert evaluations(out) == evaluations(whole)


def test_steps_can_be_replayed(ps: Ps, whole: Path) -> None:
    result = ok(ps("verify", whole, "--replay", 5))
    assert "reproduced" in result.stdout or "same" in result.stdout, result.stdout


def test_another_temperature_is_drift(ps: Ps, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out, symlinks=True)
    result = ps("resume", out, "--set", "workers.temperature=0.7")
    assert result.returncode == 2
    assert "--accept-drift workers.temperature" in result.stderr


def test_the_workers_settings_decide_the_result(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    seen = {hashes(whole)["cache_mapper.pt"]}
    for number, change in enumerate(("temperature=0", "top_p=0.5", "count=2", "max_new_tokens=1")):
        out = tmp_path / str(number)
        ok(ps("train", recipe, "--out", out, "--set", f"workers.{change}"))
        seen.add(hashes(out)["cache_mapper.pt"])
    assert len(seen) == 5


COUNTING = """
import sys
from parallel_synthesis.model.synthesizer import Synthesizer
calls = {"work": 0, "loss": 0}
def counted(name, original):
    def call(*args, **kwargs):
        calls[name] += 1
        return original(*args, **kwargs)
    return call
Synthesizer.work = counted("work", Synthesizer.work)
Synthesizer.loss = counted("loss", Synthesizer.loss)
from pscli.main import call
code = call(sys.argv[1:])
print("CALLS", calls["work"], calls["loss"], file=sys.stderr)
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("guard", "reason", "rows_worked"),
    [
        ("live_tokens", "actual_live_tokens_exceeded", 0),
        ("attention_area", "actual_attention_area_exceeded", 5 * 4),
        ("total_tokens", "actual_total_tokens_exceeded", 5 * 4),
    ],
)
def test_live_is_guarded_before_generation_area_and_total_after_it(
    ps: Ps, tiny_recipe: Callable[..., Path], tiny_backbone: Path, tmp_path: Path, guard: str, reason: str,
    rows_worked: int,
) -> None:  # fmt: skip
    """And all three before the training forward. prefill_tokens is a guard of the fixed route."""
    guards = {"prefill_tokens": 1, guard: 1}
    recipe = tiny_recipe(**sections(tiny_backbone, run={"epochs": 1}, guards=guards))
    result = ok(ps("train", recipe, "--out", tmp_path / "out", script=COUNTING))
    assert f"CALLS {rows_worked} 0" in result.stderr
    lines = step_lines(tmp_path / "out")
    assert len(lines) == 5
    assert all(f"reason={reason} {guard}=" in line for line in lines)
    assert (sum(numbers(lines, "generated_tokens")) > 0) == (rows_worked > 0)


def test_total_counts_what_the_workers_wrote(
    ps: Ps, tiny_recipe: Callable[..., Path], tiny_backbone: Path, tmp_path: Path
) -> None:
    """live + 3 x 8 generated tokens: at the limit it is trained, one below it is skipped."""
    recipe = tiny_recipe(**sections(tiny_backbone, run={"ranks": 1, "max_steps": 1}, guards={}))
    ok(ps("train", recipe, "--out", tmp_path / "free"))
    (line,) = step_lines(tmp_path / "free")
    assert numbers([line], "generated_tokens") == [24]
    total = numbers([line], "live_tokens")[0] + 24
    for limit, skipped in ((total, False), (total - 1, True)):
        out = tmp_path / str(limit)
        ok(ps("train", recipe, "--out", out, "--set", f"guards.total_tokens={limit}"))
        (line,) = step_lines(out)
        assert (f"reason=actual_total_tokens_exceeded msg=total_tokens={total}/{limit}" in line) == skipped


def test_workers_that_all_write_nothing_skip_every_step(
    ps: Ps, tiny_recipe: Callable[..., Path], tiny_backbone: Path, hashes: Hashes, tmp_path: Path
) -> None:
    backbone = backbone_that_ends(tiny_backbone, tmp_path / "all", list(range(512)))
    out = tmp_path / "out"
    recipe = tiny_recipe(**sections(backbone, run={"epochs": 1}))
    result = ok(ps("train", recipe, "--out", out, script=COUNTING))
    assert "CALLS 20 0" in result.stderr
    assert metrics(out)["generated"] == {"tokens": 0, "workers_dropped": 5 * 4 * 3}
    start, end = hashes(out / "step_checkpoints" / "step_000000000"), hashes(out)
    assert start["cache_mapper.pt"] == end["cache_mapper.pt"]


def test_held_out_rows_get_the_same_branches_each_time(
    ps: Ps, tiny_recipe: Callable[..., Path], some_end: Path, tmp_path: Path
) -> None:
    """Whatever was drawn since: here the losses before and after must be equal, nothing is trained."""
    still = sections(some_end, run={"max_steps": 2}, evaluate=HELD_OUT, guards={"attention_area": 1})
    ok(ps("train", tiny_recipe(**still), "--out", tmp_path / "out"))
    losses = {when: loss for when, loss, _ in evaluations(tmp_path / "out")}
    assert losses["before"] == losses["after"] != losses["after, branches removed"]


def test_held_out_rows_use_up_no_random_numbers(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ok(ps("train", recipe, "--out", out, "--set", "evaluate.files={}"))
    assert not evaluations(out)
    assert hashes(out) == hashes(whole)
