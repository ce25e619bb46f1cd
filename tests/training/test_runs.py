"""Whole runs as a user starts them: files, bytes over 1, 2 and 4 processes, guards, non-finite steps, refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ps = Callable[..., subprocess.CompletedProcess[str]]
Recipe = Callable[..., Path]
Hashes = Callable[[Path], dict[str, str]]


def log_lines(out: Path) -> list[str]:
    return (out / "train.log").read_text().splitlines()


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r" (seconds|memory_gib)=\S+", "", line) for line in lines]


def ok(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


def test_a_run_leaves_the_files_of_the_design(ps: Ps, tiny_recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok(ps("train", tiny_recipe(checkpoint={"milestones": [3], "keep_last": 1}), "--out", out))
    entries = {
        "cache_mapper.pt",
        "cache_mapper_config.json",
        "judger_lora",
        "training_state.pt",
        "checkpoint_meta.json",
        "manifest.json",
    }
    assert {path.name for path in out.iterdir()} == entries | {
        "run_args.json",
        "train.log",
        "train_mixed_summary.json",
        "step_checkpoints",
        "milestones",
    }
    steps = out / "step_checkpoints"
    # the start, the milestone's step, the last one; step 2 and 4 were saved and went
    assert sorted(os.listdir(steps)) == ["latest", "step_000000000", "step_000000003", "step_000000005"]
    assert os.readlink(steps / "latest") == "step_000000005"
    for place in (steps / "step_000000000", steps / "step_000000005", out / "milestones" / "tiny_step_3"):
        assert {path.name for path in place.iterdir()} == entries
    final, last = out / "training_state.pt", steps / "step_000000005" / "training_state.pt"
    assert final.stat().st_ino == last.stat().st_ino  # a link, not a copy
    assert final.stat().st_mode & 0o222 == 0
    meta = json.loads((out / "checkpoint_meta.json").read_text())
    assert meta["global_step"] == 5
    assert {"avg_loss", "perplexity", "target_tokens", "optimizer_steps"} <= meta["metrics"].keys()
    step_meta = json.loads((out / "milestones/tiny_step_3/checkpoint_meta.json").read_text())
    assert step_meta["metrics"].keys() == {"task", "loss", "perplexity", "target_tokens"}
    summary = json.loads((out / "train_mixed_summary.json").read_text())
    assert summary["train_metrics"]["global_steps"] == 5
    assert len(log_lines(out)) == 6


# peft's own use of a transformers name that transformers deprecates
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_final_adapter_is_what_peft_loads(
    ps: Ps, tiny_recipe: Recipe, tiny_backbone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ok(ps("train", tiny_recipe(), "--out", out))
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_backbone), out / "judger_lora"
    )
    tensors = load_file(out / "judger_lora" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2  # layers x modules x (A, B); no embeddings
    loaded = {
        name.replace(".default", ""): value for name, value in model.named_parameters() if "lora_" in name
    }
    assert all(loaded[name].equal(value) for name, value in tensors.items())
    assert any(value.abs().max() > 0 for name, value in tensors.items() if "lora_B" in name)


def test_one_two_and_four_processes_end_with_the_same_bytes(
    ps: Ps, tiny_recipe: Recipe, hashes: Hashes, tmp_path: Path
) -> None:
    recipe = tiny_recipe(lora={"dropout": 0.2}, data={"batch_size": 2}, run={"epochs": 2})
    ends, logs = [], []
    for count in (1, 2, 4):
        out = tmp_path / f"out{count}"
        ok(ps("train", recipe, "--out", out, *(("--nproc", count) if count > 1 else ())))
        ends.append(hashes(out))
        logs.append(without_times(log_lines(out)))
    assert ends[0] == ends[1] == ends[2]
    assert logs[0] == logs[1] == logs[2]


def test_another_seed_gives_other_bytes(ps: Ps, tiny_recipe: Recipe, hashes: Hashes, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    ok(ps("train", recipe, "--out", tmp_path / "a", "--max-steps", 1))
    ok(ps("train", recipe, "--out", tmp_path / "b", "--max-steps", 1, "--set", "run.seed=4"))
    assert hashes(tmp_path / "a") != hashes(tmp_path / "b")


def test_one_logical_rank_has_the_single_process_layout(ps: Ps, tiny_recipe: Recipe, tmp_path: Path) -> None:
    import torch

    out = tmp_path / "out"
    ok(ps("train", tiny_recipe(run={"ranks": 1}), "--out", out, "--max-steps", 2))
    assert log_lines(out)[0].startswith("[train] epoch=1 step=1 task=")
    state = torch.load(out / "training_state.pt", weights_only=True)
    assert "single_loop_state" in state
    assert "process_rng_state" in state
    assert "rank_state_by_rank" not in state


COUNTING = """
import sys
from parallel_synthesis.model import synthesizer
calls = {"forward": 0}
original = synthesizer.run_base
def counted(*args, **kwargs):
    calls["forward"] += 1
    return original(*args, **kwargs)
synthesizer.run_base = counted
from parallel_synthesis.model import branches
before = branches.prefill
def prefill(*args, **kwargs):
    calls["forward"] += 1
    return before(*args, **kwargs)
synthesizer.prefill = prefill
from pscli.main import call
code = call(sys.argv[1:])
print("FORWARDS", calls["forward"], file=sys.stderr)
raise SystemExit(code)
"""


def counted_run(ps: Ps, recipe: Path, out: Path) -> int:
    result = ok(ps("train", recipe, "--out", out, script=COUNTING))
    return int(result.stderr.rsplit("FORWARDS ", 1)[1])


def test_a_guarded_step_costs_no_forward_on_any_rank(ps: Ps, tiny_recipe: Recipe, tmp_path: Path) -> None:
    recipe = tiny_recipe(guards={"live_tokens": 1})
    assert counted_run(ps, recipe, tmp_path / "all") == 0
    lines = [line for line in log_lines(tmp_path / "all") if "step=" in line]
    assert len(lines) == 5
    assert all(
        "skipped" in line and "reason=actual_live_tokens_exceeded live_tokens=" in line for line in lines
    )
    assert (
        counted_run(ps, tiny_recipe(guards={"live_tokens": -1}), tmp_path / "none") == 5 * 4 * 2
    )  # steps x ranks x (one live forward, one prefill call)


def test_one_ranks_skip_skips_the_step_and_is_saved_at_a_milestone(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "probe"
    ok(ps("train", tiny_recipe(), "--out", out))
    prefill = [int(number) for number in re.findall(r"prefill_tokens=(\d+)", "\n".join(log_lines(out)))]
    limit = max(prefill) // 3  # some rank of some step lies above, most lie below
    skipping = tmp_path / "skipping"
    recipe = tiny_recipe(
        guards={"prefill_tokens": limit}, checkpoint={"every": 0, "milestones": [1, 2, 3, 4, 5]}
    )
    ok(ps("train", recipe, "--out", skipping))
    steps = [line for line in log_lines(skipping) if " step=" in line]
    skipped = [line for line in steps if "skipped" in line]
    assert 0 < len(skipped) < 5
    assert any(line.count("reason=") < 4 for line in skipped)  # one rank's limit stopped all
    summary = json.loads((skipping / "train_mixed_summary.json").read_text())["train_metrics"]
    assert summary["skipped_sync_steps"] == len(skipped)
    assert summary["optimizer_steps"] == 5 - len(skipped)
    assert summary["skipped_samples"] == 4 * len(skipped)
    assert sorted(os.listdir(skipping / "milestones")) == [f"tiny_step_{step}" for step in (1, 2, 3, 4, 5)]


def test_nothing_is_updated_by_a_run_that_skips_every_step(
    ps: Ps, tiny_recipe: Recipe, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ok(ps("train", tiny_recipe(guards={"total_tokens": 1}), "--out", out))
    start, end = hashes(out / "step_checkpoints" / "step_000000000"), hashes(out)
    assert start["cache_mapper.pt"] == end["cache_mapper.pt"]
    assert start["judger_lora/adapter_model.safetensors"] == end["judger_lora/adapter_model.safetensors"]


def test_a_run_that_holds_a_run_is_refused_and_overwrite_moves_it_aside(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    recipe = tiny_recipe()
    ok(ps("train", recipe, "--out", out, "--max-steps", 1))
    again = ps("train", recipe, "--out", out)
    assert again.returncode == 2
    assert f"ps resume {out}" in again.stderr
    ok(ps("train", recipe, "--out", out, "--max-steps", 2, "--overwrite"))
    (aside,) = tmp_path.glob("out.old-*")
    assert json.loads((aside / "checkpoint_meta.json").read_text())["global_step"] == 1
    assert json.loads((out / "checkpoint_meta.json").read_text())["global_step"] == 2


def test_init_starts_from_the_components_of_another_run(
    ps: Ps, tiny_recipe: Recipe, hashes: Hashes, tmp_path: Path
) -> None:
    recipe = tiny_recipe(checkpoint={"milestones": [2]})
    first, second = tmp_path / "first", tmp_path / "second"
    ok(ps("train", recipe, "--out", first, "--max-steps", 3))
    ok(ps("train", recipe, "--out", second, "--max-steps", 1, "--init", f"{first}@tiny_step_2"))
    start, source = (
        hashes(second / "step_checkpoints" / "step_000000000"),
        hashes(first / "milestones" / "tiny_step_2"),
    )
    assert start["cache_mapper.pt"] == source["cache_mapper.pt"]
    assert start["judger_lora/adapter_model.safetensors"] == source["judger_lora/adapter_model.safetensors"]
    (parent,) = json.loads((second / "checkpoint_meta.json").read_text())["parents"]
    assert parent["step"] == 2
    assert parent["components"]["cache_mapper.pt"] == source["cache_mapper.pt"]


def test_a_bad_row_is_refused_before_the_first_step_with_file_line_and_field(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    rows = (tmp_path / "second.jsonl").read_text().splitlines()
    bad: dict[str, Any] = json.loads(rows[4])
    bad["gold"] = None
    rows[4] = json.dumps(bad)
    (tmp_path / "second.jsonl").write_text("\n".join(rows) + "\n")
    result = ps("train", recipe, "--out", tmp_path / "out")
    assert result.returncode == 2
    assert re.search(r"second\.jsonl:5: .*gold", result.stderr)
    assert not (tmp_path / "out").exists()
    result = ok(ps("train", recipe, "--out", tmp_path / "out", "--set", "data.on_bad_row=skip"))
    data = json.loads((tmp_path / "out" / "run_args.json").read_text())["data"]
    assert data["second"]["bad_rows"] == 1
    assert data["second"]["bad_rows_first"][0]["line"] == 5


def test_a_ranks_own_error_comes_first_and_ends_the_job_within_seconds(
    tiny_recipe: Recipe, tmp_path: Path, torchrun: Ps
) -> None:
    script = (
        "import os, sys\n"
        "from parallel_synthesis.errors import DataError\n"
        "from parallel_synthesis.training import step\n"
        "compute = step.Stepper.compute\n"
        "calls = []\n"
        "def failing(self, batches):\n"
        "    calls.append(1)\n"
        "    if os.environ['RANK'] == '2' and len(calls) == 2:\n"
        "        raise DataError('row 17 of rank 2 is gone')\n"
        "    return compute(self, batches)\n"
        "step.Stepper.compute = failing\n"
        "from pscli.main import call\n"
        "raise SystemExit(call(sys.argv[1:]))\n"
    )
    started = time.monotonic()
    result = torchrun(4, "train", tiny_recipe(), "--out", tmp_path / "out", script=script)
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if "rank 2" in line or "another rank" in line]
    assert "row 17 of rank 2 is gone" in ours[0]
    assert time.monotonic() - started < 60  # start-up of four processes on two cores included; no hang


def test_replicas_that_part_stop_the_run_and_name_the_tensor(
    tiny_recipe: Recipe, tmp_path: Path, torchrun: Ps
) -> None:
    script = (
        "import os, sys\n"
        "from parallel_synthesis.training import step\n"
        "update = step.Stepper.update\n"
        "def parting(self):\n"
        "    update(self)\n"
        "    if os.environ['RANK'] == '1':\n"
        "        self._parameters[2].data[0, 0] += 1e-6\n"  # the mapper's third tensor, net.2.weight
        "step.Stepper.update = parting\n"
        "from pscli.main import call\n"
        "raise SystemExit(call(sys.argv[1:]))\n"
    )
    result = torchrun(2, "train", tiny_recipe(), "--out", tmp_path / "out", script=script)
    assert result.returncode != 0
    assert (
        "step 2: tensor cache_mapper.net.2.weight of process 1 differs from that of process 0"
        in result.stderr
    )
    steps = tmp_path / "out" / "step_checkpoints"
    assert sorted(os.listdir(steps)) == ["latest", "step_000000000"]  # nothing of the parted state was saved


NAN = """
import sys
from parallel_synthesis.model import synthesizer
loss = synthesizer.Synthesizer.loss
calls = []
def poisoned(self, row, **more):
    calls.append(1)
    total, count = loss(self, row, **more)
    return (total * float("nan"), count) if len(calls) == 4 + 3 else (total, count)  # step 2, rank 2
synthesizer.Synthesizer.loss = poisoned
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


def test_a_non_finite_loss_stops_before_the_optimizer_and_names_the_row(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(checkpoint={"every": 1})
    stopped = ps("train", recipe, "--out", tmp_path / "stop", script=NAN)
    assert stopped.returncode == 1
    assert re.search(r"step 2: .*rank 2: loss=nan, .*(first|second)\.jsonl:\d+", stopped.stderr)
    assert sorted(os.listdir(tmp_path / "stop" / "step_checkpoints")) == [
        "latest",
        "step_000000000",
        "step_000000001",
    ]

    ok(ps("train", recipe, "--out", tmp_path / "skip", "--set", "log.on_nonfinite=skip", script=NAN))
    line = next(line for line in log_lines(tmp_path / "skip") if " step=2 " in line)
    assert "skipped" in line
    assert "rank=2" in line
    assert "reason=nonfinite_loss" in line
    steps = tmp_path / "skip" / "step_checkpoints"
    summary = json.loads((tmp_path / "skip" / "train_mixed_summary.json").read_text())["train_metrics"]
    assert summary["skips_by_reason"] == {"nonfinite_loss": 1}
    assert (steps / "step_000000005").is_dir()


@pytest.mark.parametrize(("number", "nproc"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 1), (signal.SIGINT, 2)])
def test_a_stop_signal_saves_the_step_and_exits_75(
    ps: Any, tiny_recipe: Recipe, tmp_path: Path, number: signal.Signals, nproc: int
) -> None:
    out = tmp_path / "out"
    recipe = tiny_recipe(run={"epochs": 100000}, checkpoint={"every": 0})
    process = ps.start("train", recipe, "--out", out, *(["--nproc", nproc] if nproc > 1 else []))
    deadline = time.monotonic() + 60
    while not (out / "train.log").exists() or len(log_lines(out)) < 3:
        if time.monotonic() > deadline:
            process.signal(signal.SIGKILL)
            pytest.fail(process.wait().stderr)
        time.sleep(0.05)
    process.signal(number)
    result = process.wait()
    assert result.returncode == 75, result.stderr
    last = log_lines(out)[-1]
    found = re.fullmatch(rf"\[stop\] signal={number.name} step=(\d+) checkpoint=(\S+)", last)
    assert found is not None, last
    meta = json.loads((out / found[2] / "checkpoint_meta.json").read_text())
    assert meta["global_step"] == int(found[1])
    assert not (out / "manifest.json").exists()  # not complete
