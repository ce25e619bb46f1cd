"""Promise 1 under real faults: whatever happens to a run, resumed it ends with the bytes of the one never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ps = Any  # tests/conftest.py, Calls
Hashes = Callable[[Path], dict[str, str]]
STEPS = 15  # three epochs; the order, the optimizer and dropout's random streams all matter


@pytest.fixture(scope="module")
def recipe(module_recipe: Callable[..., Path]) -> Path:
    return module_recipe(
        run={"epochs": 3},
        lora={"dropout": 0.2},
        checkpoint={"every": 2, "milestones": [6, 9], "keep_last": 5},
    )


@pytest.fixture(scope="module")
def whole(module_ps: Ps, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is never stopped. Nobody writes into it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = module_ps("train", recipe, "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def stopped(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run as it was after step 12, killed while it did step 13."""
    out = tmp_path / "run"
    shutil.copytree(whole, out, symlinks=True)
    for name in ("step_000000014", "step_000000015"):
        shutil.rmtree(out / "step_checkpoints" / name)
    for name in (
        "manifest.json",
        "checkpoint_meta.json",
        "cache_mapper.pt",
        "cache_mapper_config.json",
        "training_state.pt",
    ):
        (out / name).unlink()
    shutil.rmtree(out / "judger_lora")
    latest = out / "step_checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to("step_000000012")
    lines = (out / "train.log").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if " step=13 " in line)
    (out / "train.log").write_text("".join(lines[: at + 1]))
    return out


def log_of(out: Path) -> str:
    return (out / "train.log").read_text()


def totals(out: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((out / "train_mixed_summary.json").read_text())["train_metrics"]
    return metrics


def same_end(out: Path, whole: Path, hashes: Hashes) -> None:
    assert hashes(out) == hashes(whole)
    assert totals(out) == totals(whole)
    for name in ("tiny_step_6", "tiny_step_9"):
        assert hashes(out / "milestones" / name) == hashes(whole / "milestones" / name)


def snapshot_of(out: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(out)): (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def kill_until_done(ps: Ps, recipe: Path, out: Path, rng: random.Random, kills: int) -> int:
    """Starts or resumes the run again and again, killing it after a random time; returns how often it was killed."""
    done = 0
    while True:
        command = (
            ["resume", out]
            if (out / "step_checkpoints" / "latest").exists()
            else ["train", recipe, "--out", out]
        )
        if command[0] == "train" and out.exists():
            shutil.rmtree(out)  # killed before the first commit: there is nothing to resume
        call = ps.start(*command)
        if done < kills:
            time.sleep(rng.uniform(0.2, 2.0))
            with contextlib.suppress(ProcessLookupError):
                call.signal(signal.SIGKILL)
        result = call.wait()
        done += result.returncode == -signal.SIGKILL
        if result.returncode != -signal.SIGKILL:
            assert result.returncode == 0, result.stderr
            return done


def test_killed_at_random_times(ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", time.time_ns() % 10**6))
    sys.stderr.write(f"to repeat: KILL_SEED={seed}\n")
    out = tmp_path / "run"
    rng = random.Random(seed)
    killed = 0
    while killed < 8:
        shutil.rmtree(out, ignore_errors=True)
        killed += kill_until_done(ps, recipe, out, rng, 4)
        same_end(out, whole, hashes)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_fifty_times(ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path) -> None:
    rng, killed, out = random.Random(50), 0, tmp_path / "run"
    while killed < 50:
        shutil.rmtree(out, ignore_errors=True)
        killed += kill_until_done(ps, recipe, out, rng, 10)
        same_end(out, whole, hashes)


KILL_AT_CHANGE = """
import os, signal, sys
from parallel_synthesis.checkpoint.disk import Disk
count = 0
def counted(method):
    def call(self, *args):
        global count
        count += 1
        if count == int(os.environ["KILL_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args)
    return call
for name in ("create", "write", "fsync", "fsync_directory", "mkdir", "rename", "symlink", "link", "unlink", "rmdir"):
    setattr(Disk, name, counted(getattr(Disk, name)))
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


@pytest.mark.parametrize("at", [1, 4, 12, 25, 31, 33, 36, 38, 40, 52, 58, 61])
def test_killed_inside_a_save(ps: Ps, stopped: Path, whole: Path, hashes: Hashes, at: int) -> None:
    """At a change to the disk during the save of step 14: while writing, between rename and pointer, in retention."""
    result = ps("resume", stopped, script=KILL_AT_CHANGE, env={"KILL_AT": str(at)})
    assert result.returncode == -signal.SIGKILL
    result = ps("resume", stopped)
    assert result.returncode == 0, result.stderr
    same_end(stopped, whole, hashes)
    assert not [path for path in stopped.rglob(".*") if ".partial-" in path.name]


STOP_AFTER = """
import os, signal, sys
from parallel_synthesis.training import loop
after = loop._after_step
def then_stop(run, record):
    after(run, record)
    if record.step == int(os.environ["STOP_AFTER"]):
        os.kill(os.getpid(), signal.SIGTERM)
loop._after_step = then_stop
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "step", [1, 5, 6, 10, 14]
)  # after the first, at an epoch's end, at a milestone, before the last
def test_stopped_by_a_signal(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path, step: int
) -> None:
    out = tmp_path / "run"
    result = ps("train", recipe, "--out", out, script=STOP_AFTER, env={"STOP_AFTER": str(step)})
    assert result.returncode == 75, result.stderr
    assert re.search(rf"\[stop\] signal=SIGTERM step={step} ", log_of(out).splitlines()[-1])
    result = ps("resume", out)
    assert result.returncode == 0, result.stderr
    same_end(out, whole, hashes)
    assert "[resume] attempt=2 from_step=" in log_of(out)


def test_stopped_right_after_a_skipped_step(
    ps: Ps, tiny_recipe: Callable[..., Path], hashes: Hashes, tmp_path: Path
) -> None:
    recipe = tiny_recipe(lora={"dropout": 0.1})
    assert ps("train", recipe, "--out", tmp_path / "probe").returncode == 0
    prefill = [int(number) for number in re.findall(r"prefill_tokens=(\d+)", log_of(tmp_path / "probe"))]
    guarded = tiny_recipe(
        lora={"dropout": 0.1}, guards={"prefill_tokens": max(prefill) // 3}, checkpoint={"every": 0}
    )
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert ps("train", guarded, "--out", straight).returncode == 0
    skipped = [int(step) for step in re.findall(r"skipped epoch=1 step=(\d+)", log_of(straight))]
    step = next(step for step in skipped if step < 5)
    result = ps("train", guarded, "--out", broken, script=STOP_AFTER, env={"STOP_AFTER": str(step)})
    assert result.returncode == 75, result.stderr
    assert ps("resume", broken).returncode == 0
    assert hashes(broken) == hashes(straight)
    assert totals(broken) == totals(straight)


def test_stopped_at_the_last_step_before_it_was_finalised(
    ps: Ps, stopped: Path, whole: Path, hashes: Hashes
) -> None:
    shutil.copytree(
        whole / "step_checkpoints" / "step_000000015", stopped / "step_checkpoints" / "step_000000015"
    )
    result = ps("resume", stopped)
    assert result.returncode == 0, result.stderr
    assert hashes(stopped) == hashes(whole)
    assert (stopped / "manifest.json").exists()


def test_another_number_of_processes_takes_it_up(ps: Ps, stopped: Path, whole: Path, hashes: Hashes) -> None:
    for nproc in (2, 4):
        again = stopped.with_name(f"run{nproc}")
        shutil.copytree(stopped, again, symlinks=True)
        result = ps("resume", again, "--nproc", nproc)
        assert result.returncode == 0, result.stderr
        same_end(again, whole, hashes)


def test_a_complete_run_is_not_touched(ps: Ps, whole: Path) -> None:
    before = snapshot_of(whole)
    result = ps("resume", whole)
    assert result.returncode == 0
    assert "is complete at step 15" in result.stdout
    assert snapshot_of(whole) == before


def test_repeated_steps_are_compared_and_reported(ps: Ps, stopped: Path, whole: Path, hashes: Hashes) -> None:
    result = ps("resume", stopped)
    assert result.returncode == 0, result.stderr
    assert "steps 13 reproduced" in result.stderr
    assert "[resume] attempt=2 steps 13 reproduced" in log_of(stopped)
    assert log_of(stopped).count(" step=13 ") == 2  # the superseded line stays
    same_end(stopped, whole, hashes)


@pytest.mark.parametrize(
    ("field", "component"),
    [("rank_grad", "gradient"), ("rank_loss", "loss"), ("rank_rng", "RNG"), ("rows", "rows")],
)
def test_a_divergence_names_step_rank_and_component(
    ps: Ps, stopped: Path, field: str, component: str
) -> None:
    lines = log_of(stopped).splitlines()
    parts = re.search(rf" {field}=(\S+)", lines[-1])
    assert parts is not None
    values = parts[1].split(";")
    values[2] = "7" * len(values[2]) if field != "rows" else "777"
    lines[-1] = lines[-1].replace(parts[1], ";".join(values))
    (stopped / "train.log").write_text("\n".join(lines) + "\n")
    result = ps("resume", stopped)
    assert result.returncode == 1
    assert f"step 13, rank 2: {component} was" in result.stderr
    assert f"[error] divergence step 13, rank 2: {component} was" in log_of(stopped)
    result = ps("resume", stopped, "--step", 12, "--set", "log.on_divergence=warn")
    assert result.returncode == 0, (
        result.stderr
    )  # the last attempt of step 13 was the true one: it is reproduced


def test_warn_goes_on_after_a_divergence(ps: Ps, stopped: Path, whole: Path, hashes: Hashes) -> None:
    text = log_of(stopped)
    grad = re.findall(r" grad=(\S+)", text)[-1]
    (stopped / "train.log").write_text(text.replace(grad, "0" * 16))
    result = ps("resume", stopped, "--set", "log.on_divergence=warn")
    assert result.returncode == 0, result.stderr
    assert (
        "warning: a repeated step is not the one in the log: step 13, all ranks: reduced gradient"
        in result.stderr
    )
    assert hashes(stopped)["cache_mapper.pt"] == hashes(whole)["cache_mapper.pt"]


def test_going_back_moves_newer_checkpoints_aside_and_keeps_milestones(
    ps: Ps, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out, symlinks=True)
    for attempt in (2, 3):  # twice from the same place, below both milestones
        result = ps("resume", out, "--step", 0)
        assert result.returncode == 0, result.stderr
        same_end(out, whole, hashes)
        moved = sorted(os.listdir(out / "superseded" / f"attempt-{attempt}"))
        assert moved[-1] == "step_000000015"
        assert "steps 1-15 reproduced" in result.stderr
    assert os.readlink(out / "step_checkpoints" / "latest") == "step_000000015"


def test_a_milestone_that_comes_out_otherwise_is_an_error_and_stays(
    ps: Ps, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out, symlinks=True)
    before = hashes(out / "milestones" / "tiny_step_6")
    change = ("--set", "optim.learning_rate=0.5", "--accept-drift", "optim.learning_rate")
    result = ps("resume", out, "--step", 0, *change)
    assert result.returncode == 1
    assert "tiny_step_6" in result.stderr
    assert hashes(out / "milestones" / "tiny_step_6") == before


def damage(directory: Path, kind: str) -> None:
    state = directory / "training_state.pt"
    adapter = directory / "judger_lora" / "adapter_model.safetensors"
    for path in (state, adapter):
        path.chmod(0o644)
    if kind == "missing file":
        state.unlink()
    elif kind == "truncated":
        os.truncate(adapter, adapter.stat().st_size - 1)
    elif kind == "zeroed":
        state.write_bytes(bytes(state.stat().st_size))
    elif kind == "one bit":
        data = bytearray(adapter.read_bytes())
        data[-5] ^= 1
        adapter.write_bytes(data)
    elif kind == "extra bytes":
        with state.open("ab") as file:
            file.write(b"x")
    elif kind == "empty":
        shutil.rmtree(directory)
        directory.mkdir()
    elif kind == "another step":
        shutil.rmtree(directory)
        shutil.copytree(directory.with_name("step_000000010"), directory)


@pytest.mark.parametrize(
    "kind", ["missing file", "truncated", "zeroed", "one bit", "extra bytes", "empty", "another step"]
)
def test_a_damaged_newest_is_passed_over_and_kept_aside(
    ps: Ps, stopped: Path, whole: Path, hashes: Hashes, kind: str
) -> None:
    newest = stopped / "step_checkpoints" / "step_000000012"
    damage(newest, kind)
    named = ps("resume", stopped, "--step", 12)
    assert named.returncode == 2
    assert "can not be resumed from" in named.stderr
    result = ps("resume", stopped)
    assert result.returncode == 0, result.stderr
    assert "passed over step_checkpoints/step_000000012" in result.stderr
    assert "resuming from step_checkpoints/step_000000010" in result.stderr
    assert (stopped / "superseded" / "attempt-2" / "step_000000012").is_dir()
    same_end(stopped, whole, hashes)


def test_stray_names_and_a_dangling_latest_do_not_matter(
    ps: Ps, stopped: Path, whole: Path, hashes: Hashes
) -> None:
    steps = stopped / "step_checkpoints"
    shutil.copytree(steps / "step_000000010", steps / "step_000000099.bak")
    (steps / "latest").unlink()
    (steps / "latest").symlink_to("step_000000077")
    result = ps("resume", stopped)
    assert result.returncode == 0, result.stderr
    assert "resuming from step_checkpoints/step_000000012" in result.stderr
    assert (steps / "step_000000099.bak").is_dir()
    same_end(stopped, whole, hashes)


def test_when_all_are_damaged_nothing_starts_from_scratch(ps: Ps, stopped: Path) -> None:
    for place in [*(stopped / "step_checkpoints").glob("step_*"), *(stopped / "milestones").iterdir()]:
        damage(place, "one bit")
    before = snapshot_of(stopped)
    result = ps("resume", stopped)
    assert result.returncode == 2
    assert "no checkpoint that is whole" in result.stderr
    assert "step_000000012" in result.stderr
    assert snapshot_of(stopped) == before


def test_a_checkpoint_or_milestone_can_be_named(ps: Ps, stopped: Path, whole: Path, hashes: Hashes) -> None:
    result = ps("resume", f"{stopped}@tiny_step_9")
    assert result.returncode == 0, result.stderr
    assert "resuming from milestones/tiny_step_9" in result.stderr
    same_end(stopped, whole, hashes)


def test_drift_is_classed_refused_and_recorded_when_accepted(ps: Ps, stopped: Path) -> None:
    record = json.loads((stopped / "run_args.json").read_text())
    record["environment"]["packages"]["torch"] = "1.0"
    record["environment"]["platform"] = "Another 1"
    record["data"]["first"]["sha256"] = "0" * 64
    (stopped / "run_args.json").write_text(json.dumps(record))
    before = snapshot_of(stopped)
    result = ps("resume", stopped)
    assert result.returncode == 2
    assert re.search(r"data\.first .*changes the data or the loss", result.stderr)
    assert re.search(r"torch +1\.0 .*breaks bit equality", result.stderr)
    assert re.search(r"platform .*harmless", result.stderr)
    assert "--accept-drift data.first --accept-drift torch" in result.stderr
    assert snapshot_of(stopped) == before
    result = ps("resume", stopped, "--accept-drift", "data.first", "--accept-drift", "torch")
    assert result.returncode == 0, result.stderr
    assert json.loads((stopped / "run_args.json").read_text())["accepted_drift"] == ["data.first", "torch"]
    assert json.loads((stopped / "checkpoint_meta.json").read_text())["accepted_drift"] == [
        "data.first",
        "torch",
    ]
    assert "accepted_drift=data.first,torch" in log_of(stopped)


def test_what_the_user_sets_is_drift_too_unless_it_is_harmless(
    ps: Ps, stopped: Path, whole: Path, hashes: Hashes
) -> None:
    refused = ps("resume", stopped, "--set", "optim.learning_rate=1e-3")
    assert refused.returncode == 2
    assert "--accept-drift optim.learning_rate" in refused.stderr
    result = ps("resume", stopped, "--set", "checkpoint.every=1", "--set", "checkpoint.keep_last=1")
    assert result.returncode == 0, result.stderr
    assert hashes(stopped) == hashes(whole)


def test_a_later_end_and_an_earlier_one(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert ps("train", recipe, "--out", out, "--max-steps", 7).returncode == 0
    assert ps("resume", out).stdout.startswith(f"{out} is complete at step 7")
    early = ps("resume", out, "--max-steps", 3)
    assert early.returncode == 2
    assert "lies before the checkpoint's step 7" in early.stderr
    result = ps("resume", out, "--max-steps", 15)
    assert result.returncode == 0, result.stderr
    assert {**hashes(out), "training_state.pt": ""} == {**hashes(whole), "training_state.pt": ""}


FILL = """
import os, sys
from pathlib import Path
from parallel_synthesis.training import loop
after = loop._after_step
def fill(run, record):
    if record.step == 3:
        filler = Path(os.environ["FILLED"]) / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    after(run, record)
loop._after_step = fill
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("4m")


def test_a_full_disk_ends_the_run_and_loses_nothing(
    ps: Ps, recipe: Path, whole: Path, hashes: Hashes, disk: Path
) -> None:
    out = disk / "run"
    result = ps("train", recipe, "--out", out, script=FILL, env={"FILLED": str(disk)})
    assert result.returncode == 3, result.stderr
    assert re.search(rf"{out}\S+.*(No space left|free some space)", result.stderr)
    assert ps("verify", out).returncode == 0  # step 0 and 2 are whole
    (disk / "filler").unlink()
    result = ps("resume", out)
    assert result.returncode == 0, result.stderr
    same_end(out, whole, hashes)


def test_a_full_disk_ends_all_ranks(recipe: Path, disk: Path, torchrun: Ps) -> None:
    started = time.monotonic()
    env = {"FILLED": str(disk)}
    result = torchrun(2, "train", recipe, "--out", disk / "run", script=FILL, env=env)
    assert result.returncode != 0
    assert "free some space" in result.stderr
    assert time.monotonic() - started < 90


def test_too_small_a_disk_is_refused_before_the_first_step(ps: Ps, recipe: Path, disk: Path) -> None:
    with (disk / "filler").open("wb") as file:
        file.write(bytes(3_800_000))
    result = ps("train", recipe, "--out", disk / "run")
    assert result.returncode == 3
    assert re.search(r"need [\d,]+ bytes at their most, [\d,]+ are free", result.stderr)
    assert not (disk / "run").exists()


def test_a_pickle_with_code_is_never_executed(ps: Ps, stopped: Path, tmp_path: Path) -> None:
    """Even when whoever put it there has also made the manifest say that it belongs there."""
    import hashlib
    import io
    import pickle
    import zipfile

    proof = tmp_path / "executed"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (proof,))

    checkpoint = stopped / "step_checkpoints" / "step_000000012"
    for name in ("training_state.pt", "cache_mapper.pt"):
        original = (checkpoint / name).read_bytes()
        crafted = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(original)) as old, zipfile.ZipFile(crafted, "w") as new:
            for item in old.namelist():
                new.writestr(item, pickle.dumps(Attack(), 2) if item.endswith("data.pkl") else old.read(item))
        manifest_path = checkpoint / "manifest.json"
        kept = manifest_path.read_text()
        manifest = json.loads(kept)
        manifest["files"][name] = {
            **manifest["files"][name],
            "bytes": len(crafted.getvalue()),
            "sha256": hashlib.sha256(crafted.getvalue()).hexdigest(),
        }
        for path, data in (
            (checkpoint / name, crafted.getvalue()),
            (manifest_path, json.dumps(manifest).encode()),
        ):
            path.chmod(0o644)
            path.write_bytes(data)
        result = ps("resume", stopped, "--step", 12)
        assert result.returncode == 2
        assert name in result.stderr
        assert not proof.exists()
        (checkpoint / name).write_bytes(original)
        manifest_path.write_text(kept)


def test_only_the_order_is_taken_up_from_bare_components(
    ps: Ps, recipe: Path, whole: Path, tmp_path: Path
) -> None:
    out, bare = tmp_path / "new", tmp_path / "bare"
    shutil.copytree(whole / "milestones" / "tiny_step_9", bare)
    (bare / "training_state.pt").unlink()
    (bare / "manifest.json").unlink()
    refused = ps("resume", bare)
    assert refused.returncode == 2
    assert "--init" in refused.stderr
    result = ps("resume", bare, "--order-from-step", 9, "--recipe", recipe, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "not exact" in result.stderr
    rows = dict(re.findall(r" step=(\d+) .* rows=(\S+)", log_of(whole)))
    again = dict(re.findall(r" step=(\d+) .* rows=(\S+)", log_of(out)))
    assert again == {step: row for step, row in rows.items() if int(step) > 9}
    assert totals(out)["optimizer_steps"] == 6


@pytest.mark.parametrize("count", [3, 5])
def test_replay_reproduces_steps_and_saved_bytes(ps: Ps, whole: Path, count: int) -> None:
    before = snapshot_of(whole)
    result = ps("verify", whole, "--replay", count)
    assert result.returncode == 0, result.stderr
    assert f"{count} steps reproduced" in result.stdout
    assert snapshot_of(whole) == before


def test_replay_names_the_first_difference(ps: Ps, stopped: Path) -> None:
    text = log_of(stopped)
    losses = re.findall(r" step=11 .* rank_loss=(\S+)", text)[0]
    changed = losses.split(";")
    changed[1] = "deadbeef"
    (stopped / "train.log").write_text(text.replace(losses, ";".join(changed)))
    result = ps("verify", stopped, "--replay", 3)
    assert result.returncode == 1
    assert "step 11, rank 1: loss was deadbeef" in result.stderr
    result = ps("verify", stopped, "--replay", 500)
    assert result.returncode == 2
    assert "possible are" in result.stderr


def test_a_run_has_one_writer_at_a_time(ps: Ps, tiny_recipe: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = tiny_recipe(run={"epochs": 100_000}, checkpoint={"every": 0})
    command = [sys.executable, "-m", "pscli", "train", str(recipe), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (out / "train.log").exists() or " step=3 " not in log_of(out):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = ps("resume", out)
        assert second.returncode == 2
        assert "another process is writing this run" in second.stderr
        assert "running" in ps("inspect", out).stdout.splitlines()[0]
        assert "[resume]" not in log_of(out)
        assert not (out / "superseded").exists()
    finally:
        running.kill()
        running.wait()
    assert "not complete" in ps("inspect", out).stdout.splitlines()[0]  # a kill frees the run


def test_an_edited_config_is_refused_and_set_is_the_way(ps: Ps, stopped: Path) -> None:
    record = json.loads((stopped / "run_args.json").read_text())
    record["config"]["optim"]["learning_rate"] = 1e-3
    (stopped / "run_args.json").write_text(json.dumps(record))
    before = snapshot_of(stopped)
    result = ps("resume", stopped)
    assert result.returncode == 2
    assert "its config was edited" in result.stderr
    assert snapshot_of(stopped) == before


def test_a_log_that_leads_elsewhere_is_not_written(ps: Ps, stopped: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.log"
    (stopped / "train.log").rename(elsewhere)
    (stopped / "train.log").symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    assert ps("resume", stopped).returncode == 3
    assert elsewhere.read_bytes() == before


EVALUATION_KILLED = """
import os, signal, sys
from parallel_synthesis.training import loop
evaluate = loop._evaluate
def killed(run, kinds):
    if kinds[0][0] == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    evaluate(run, kinds)
loop._evaluate = killed
from pscli.main import call
raise SystemExit(call(sys.argv[1:]))
"""


def test_killed_in_the_last_evaluation_it_is_made_up_for(
    ps: Ps, tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    recipe = tiny_recipe(evaluate={"files": {"second": "second.jsonl"}})
    assert ps("train", recipe, "--out", out, script=EVALUATION_KILLED).returncode == -signal.SIGKILL
    result = ps("resume", out)
    assert result.returncode == 0, result.stderr
    found = json.loads((out / "train_mixed_summary.json").read_text())["evaluations"]
    assert [evaluation["when"] for evaluation in found] == ["before", "after", "after, branches removed"]
