"""Runs and checkpoints of the reference implementation: continued to the same bytes, started from, exported, refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ps = Any  # tests/conftest.py, Calls
Write = Callable[..., Path]
Hashes = Callable[[Path], dict[str, str]]
STEPS = 15  # of the run that is never stopped
# 15 steps of one rank end no epoch.
FOUR_RANKS = pytest.mark.parametrize("whole", [4], indirect=True, ids=["ranks4"])


def content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def reference(whole: Path, reference_run: Write, world: dict[str, Any], tmp_path: Path) -> Path:
    return reference_run(whole, tmp_path / "theirs", world["flags"], steps=(2, 6))


@pytest.mark.lane
def test_a_run_begun_there_ends_here_as_if_it_had_begun_here(
    ps: Ps, reference: Path, whole: Path, world: dict[str, Any], hashes: Hashes, tmp_path: Path
) -> None:
    """The order of the rows, AdamW's moments and dropout's random streams all decide these bytes."""
    before = content(reference)
    out = tmp_path / "ours"
    result = ps(
        "resume", reference, "--out", out, "--max-steps", STEPS, "--set", f"data.root={world['root']}"
    )
    assert result.returncode == 0, result.stderr
    assert hashes(out) == hashes(whole)
    assert content(reference) == before
    assert "not carried over: the reference records no hashes of its data" in result.stderr
    log = (out / "train.log").read_text().splitlines()
    assert any(line.startswith("[resume] attempt=2 taken over at step 6 from ") for line in log)
    assert any("[resume] attempt=2 not carried over: " in line for line in log)
    assert "restarts    1 (at step 7)" in ps("inspect", out).stdout
    assert log[0] == (reference / "train.log").read_text().splitlines()[0]
    record = json.loads((out / "run_args.json").read_text())
    assert record["backbone"]["files"]
    assert record["data"].keys() == {"flan", "wildchat"}
    meta = json.loads((out / "checkpoint_meta.json").read_text())
    assert meta["parents"][0]["source"] == str(reference)
    assert meta["parents"][0]["step"] == 6
    summary = json.loads((out / "train_mixed_summary.json").read_text())["train_metrics"]
    assert summary == json.loads((whole / "train_mixed_summary.json").read_text())["train_metrics"]


def test_from_an_earlier_step_and_with_two_processes(
    ps: Ps, reference: Path, whole: Path, world: dict[str, Any], hashes: Hashes, tmp_path: Path
) -> None:
    out = tmp_path / "ours"
    ranks = json.loads((whole / "checkpoint_meta.json").read_text())["ranks"]
    processes = ["--nproc", "2"] if ranks == 4 else []
    result = ps(
        "resume", reference, "--out", out, "--step", 2, "--max-steps", STEPS, *processes,
        "--set", f"data.root={world['root']}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert hashes(out) == hashes(whole)


@FOUR_RANKS
def test_a_state_saved_before_the_epoch_was_counted(
    ps: Ps, whole: Path, world: dict[str, Any], reference_run: Write, hashes: Hashes, tmp_path: Path
) -> None:
    root = f"data.root={world['root']}"
    # Step 10 ends the second epoch.
    theirs = reference_run(whole, tmp_path / "theirs", world["flags"], steps=(10,), fold_epoch=True)
    out = tmp_path / "ours"
    result = ps("resume", theirs, "--out", out, "--set", root)
    assert result.returncode == 0, result.stderr
    for name in ("cache_mapper.pt", "judger_lora/adapter_model.safetensors"):
        assert hashes(out)[name] == hashes(whole)[name]
    epochs = json.loads((out / "train_mixed_summary.json").read_text())["train_metrics"]["epochs"]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]


def test_the_reference_is_left_as_it_is(ps: Ps, reference: Path, tmp_path: Path) -> None:
    before = content(reference)
    result = ps("resume", reference)
    assert result.returncode == 2
    assert "go on with it in a new run by `ps resume" in result.stderr
    assert ps("verify", reference, "--replay", 2).returncode == 2
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert ps("resume", reference, "--out", tmp_path / "taken").returncode == 2
    assert content(reference) == before


@FOUR_RANKS
def test_other_data_are_refused(ps: Ps, reference: Path, world: dict[str, Any], tmp_path: Path) -> None:
    """In the second epoch the generator's state tells the numbers of rows."""
    for name in ("first", "second"):
        shutil.copyfile(world["root"] / f"{name}.jsonl", tmp_path / f"{name}.jsonl")
    lines = (tmp_path / "first.jsonl").read_text().splitlines(keepends=True)
    flan = tmp_path / "data/flan/processed/train_in_context_examples.jsonl"
    flan.parent.mkdir(parents=True)
    flan.write_text("".join(lines[:-1]))  # as many steps, other rows
    wild = tmp_path / "data/wildchat/processed/train_all_lang_multi_turn_min3.jsonl"
    wild.parent.mkdir(parents=True)
    shutil.copyfile(tmp_path / "second.jsonl", wild)
    out = tmp_path / "ours"
    result = ps("resume", reference, "--out", out, "--set", f"data.root={tmp_path}")
    assert result.returncode == 2
    assert "epoch 2 was shuffled from another state" in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".ours*"))


def test_another_seed_is_refused(ps: Ps, reference: Path, world: dict[str, Any], tmp_path: Path) -> None:
    root = f"data.root={world['root']}"
    result = ps("resume", reference, "--out", tmp_path / "ours", "--set", root, "--set", "run.seed=4")
    assert result.returncode == 2
    assert "was shuffled from another state" in result.stderr
    assert not (tmp_path / "ours").exists()


class Crafted:
    """What a pickle can do when it is loaded without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_a_state_is_executed(
    ps: Ps, reference: Path, world: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    from parallel_synthesis.checkpoint.reference_state import read_reference_state
    from parallel_synthesis.errors import CheckpointError

    mark = tmp_path / "executed"
    path = reference / "step_checkpoints/step_000000006/training_state.pt"
    torch.save({"checkpoint_version": 2, "global_step": 6, "evil": Crafted(mark)}, path)
    result = ps("resume", reference, "--out", tmp_path / "ours", "--set", f"data.root={world['root']}")
    assert result.returncode == 2
    assert "needs posix.mkdir, which is not plain data" in result.stderr
    with pytest.raises(CheckpointError, match="weights_only"):  # the second lock
        read_reference_state(path)
    assert not mark.exists()
    assert not (tmp_path / "ours").exists()
    pickle.loads(pickle.dumps(Crafted(mark)))  # it would have been
    assert mark.exists()


def test_an_object_array_is_refused(tmp_path: Path) -> None:
    import numpy as np
    import torch

    from parallel_synthesis.checkpoint.reference_state import read_reference_state
    from parallel_synthesis.errors import CheckpointError

    path = tmp_path / "training_state.pt"
    torch.save({"checkpoint_version": 2, "odd": np.array([{"a": 1}], dtype=object)}, path)
    with pytest.raises(CheckpointError, match=r"training_state\.pt"):
        read_reference_state(path)


@pytest.mark.parametrize("protocol", ["tuple", "dict"])
@pytest.mark.lane
def test_numpys_forms(tmp_path: Path, protocol: str) -> None:
    """numpy's state as a tuple and as a dict, numpy numbers as counters, ranks as texts, all devices' CUDA states."""
    import random

    import numpy as np
    import torch

    from parallel_synthesis.checkpoint.reference_state import read_reference_state

    random.seed(5)
    np.random.seed(5)
    expected = np.random.get_state()
    cuda = [torch.full((16,), device, dtype=torch.uint8) for device in range(4)]
    rng = {
        "python": list(random.getstate()),
        "numpy": np.random.get_state(legacy=protocol == "tuple"),
        "torch_cpu": torch.get_rng_state(),
        "torch_cuda": cuda,
    }
    path = tmp_path / "training_state.pt"
    ranks = {str(rank): {"rank": rank, "process_rng_state": dict(rng)} for rank in range(2)}
    torch.save(
        {
            "checkpoint_version": 2,
            "global_step": np.int64(4),
            "ema_state": {"decay": 0.9},
            "rank_state_by_rank": ranks,
            "distributed_loop_state": {"last_step_loss": np.float32(0.5)},
        },
        path,
    )
    state, said = read_reference_state(path)
    assert (state["global_step"], type(state["global_step"])) == (4, int)
    assert state["distributed_loop_state"]["last_step_loss"] == 0.5
    assert said == ["ema_state has no counterpart here (the learning rate is constant, the weights are fp32)"]
    for rank in range(2):
        streams = state["rank_state_by_rank"][rank]["process_rng_state"]
        assert streams["numpy"] == ("MT19937", expected[1].tolist(), *expected[2:])
        assert streams["python"] == random.getstate()
        assert streams["torch_cuda"].tolist() == [rank] * 16


def test_a_checkpoint_of_theirs_starts_a_run_and_is_exported(
    ps: Ps, reference: Path, world: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "ours"
    begun = ps("train", world["recipe"], "--out", out, "--init", reference, "--max-steps", 1)
    assert begun.returncode == 0, begun.stderr
    parents = json.loads((out / "checkpoint_meta.json").read_text())["parents"]
    assert (parents[0]["source"], parents[0]["step"]) == (str(reference), 6)
    exported = tmp_path / "exported"
    result = ps("snapshot", reference, "--export", exported, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checked"] is False
    source = content(reference / "step_checkpoints/step_000000006")
    copied = content(exported)
    assert copied.pop("manifest.json")
    assert copied == source
    assert ps("verify", exported).returncode == 0


def test_a_run_of_ours_goes_on_in_a_new_directory(
    ps: Ps, whole: Path, hashes: Hashes, tmp_path: Path
) -> None:
    before = content(whole)
    out = tmp_path / "ours"
    result = ps("resume", whole, "--step", 6, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "steps 7-15 reproduced" in result.stderr
    assert hashes(out) == hashes(whole)
    assert content(whole) == before


@FOUR_RANKS
def test_under_a_torchrun_of_the_users_own(
    reference: Path, whole: Path, world: dict[str, Any], hashes: Hashes, environment: Any, tmp_path: Path
) -> None:
    """As the reference's users start it: the first process makes the new run, the other waits for it."""
    out = tmp_path / "ours"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "pscli.compat_train", "--parallel_kv_load_dir", str(reference)]
    command += ["--resume_from_global_step", "6", "--parallel_kv_save_dir", str(out)]
    command += ["--set", f"data.root={world['root']}", "--max-steps", str(STEPS)]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert hashes(out) == hashes(whole)
    assert "processes=2" in (out / "train.log").read_text()
