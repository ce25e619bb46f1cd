"""A small writer of the reference implementation's run directories, from formats.md alone; its numbers come from a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

STEPS = 15  # three epochs of five
MIX = ("flan", "wildchat")
FILES = {
    "first": "data/flan/processed/train_in_context_examples.jsonl",
    "second": "data/wildchat/processed/train_all_lang_multi_turn_min3.jsonl",
}


def place_data(directory: Path) -> None:
    """The tiny tasks' rows under the usual names of two tasks of the mix."""
    for name, place in FILES.items():
        target = directory / place
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / f"{name}.jsonl", target)


@pytest.fixture(scope="module")
def world(module_recipe: Callable[..., Path], tiny_backbone: Path) -> dict[str, Any]:
    """A recipe over two tasks of the mix, and the reference's flags that say the same."""
    recipe = module_recipe(
        run={"epochs": 3, "ranks": 4},
        lora={"dropout": 0.2},
        data={"tasks": list(MIX), "files": {}},
        checkpoint={"every": 2, "keep_last": 20},
    )
    place_data(recipe.parent)
    flags = {
        "method": "fixed_parallel_kv",
        "model_name": str(tiny_backbone),
        "tasks": list(MIX),
        "train_split": "train",
        "train_samples_per_task": -1,
        "device": "cpu",
        "seed": 3,
        "think": False,
        "dist_backend": "gloo",
        "generate_bs": 1,
        "max_new_tokens": 4096,
        "temperature": 0.6,
        "top_p": 0.95,
        "attn_implementation": "sdpa",
        "num_epochs": 3,
        "steps_per_epoch": None,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "log_every_steps": 1,
        "parallel_kv_train_components": "both",
        "parallel_kv_mapper_hidden_dim": 32,
        "parallel_kv_mapper_metadata_features": "both",
        "parallel_kv_num_parallel_agents": 3,
        "parallel_kv_lora_r": 4,
        "parallel_kv_lora_alpha": 8,
        "parallel_kv_lora_dropout": 0.2,
        "parallel_kv_target_position_logits": True,
        "parallel_kv_target_position_logit_chunk_size": 64,
        "parallel_kv_skip_train_if_total_tokens_exceed": -1,
        "parallel_kv_save_every_steps": 2,
        "fixed_parallel_kv_cache_max_tokens_per_text": -1,
    }
    return {"recipe": recipe, "flags": flags, "root": recipe.parent}


@pytest.fixture(scope="module", params=[4, 1], ids=["ranks4", "ranks1"])
def whole(
    request: pytest.FixtureRequest,
    world: dict[str, Any],
    module_ps: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The run of ours that is never stopped. Nobody writes into it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    more = ["--set", f"run.ranks={request.param}", "--max-steps", STEPS]
    result = module_ps("train", world["recipe"], "--out", out, *more)
    assert result.returncode == 0, result.stderr
    return out


def numpy_state(saved: Any) -> Any:
    import numpy as np

    name, keys, *rest = saved
    return (name, np.array(keys, dtype=np.uint32), *rest)


def write_checkpoint(source: Path, out: Path, *, fold_epoch: bool = False) -> None:
    """A checkpoint of the reference with the numbers of one of ours: a pickle with numpy objects, no manifest."""
    import numpy as np
    import torch

    out.mkdir(parents=True)
    shutil.copytree(source / "judger_lora", out / "judger_lora")
    shutil.copyfile(source / "cache_mapper.pt", out / "cache_mapper.pt")
    meta = json.loads((source / "checkpoint_meta.json").read_text())
    kept = {key: meta[key] for key in ("global_step", "epoch", "source_run_dir", "metrics")}
    (out / "checkpoint_meta.json").write_text(json.dumps(kept | {"source_run_dir": None}))
    ours = torch.load(source / "training_state.pt", weights_only=True)
    state = {
        "checkpoint_version": 2,
        "global_step": ours["global_step"],
        "optimizer_state": ours["optimizer_state"],
        "lr_scheduler_state": None,
        "amp_scaler_state": None,
        "ema_state": None,
    }
    many = "distributed_loop_state" in ours
    key = "distributed_loop_state" if many else "single_loop_state"
    added = ("skips_by_reason", "attempted_steps")
    loop = {name: value for name, value in ours[key].items() if name not in added}
    loop["last_step_loss"] = np.float64(loop["last_step_loss"])
    if fold_epoch:  # saved after an epoch's last step, before its end was counted
        done = loop["epoch_summaries"].pop()
        assert loop["next_batch_idx_in_epoch"] == 0
        loop["epoch_idx"] -= 1
        loop["next_batch_idx_in_epoch"] = done["steps"]
        loop["current_epoch_rng_state_before_build"] = None
        partial = loop["current_epoch_partial"]
        sync, end = ("sync_steps_local", "_global") if many else ("steps", "")
        partial[f"epoch_attempted_{sync}"] = done["steps"]
        partial[f"epoch_optimizer_{sync}"] = done["optimizer_steps"]
        partial[f"epoch_weighted_loss{end}"] = done["avg_loss"] * done["target_tokens"]
        partial[f"epoch_target_tokens{end}"] = done["target_tokens"]
    state[key] = loop
    if many:
        state["rank_state_by_rank"] = ours["rank_state_by_rank"]
        rngs = [rank["process_rng_state"] for rank in state["rank_state_by_rank"].values()]
    else:
        state["process_rng_state"] = ours["process_rng_state"]
        rngs = [state["process_rng_state"]]
    for rng in rngs:
        rng["numpy"] = numpy_state(rng["numpy"])
    torch.save(state, out / "training_state.pt")


def write_run(
    whole: Path, out: Path, flags: Mapping[str, Any], *, steps: tuple[int, ...], fold_epoch: bool = False
) -> Path:
    """A reference run directory that was stopped after the last of `steps`."""
    for step in steps:
        name = f"step_{step:09d}"
        write_checkpoint(
            whole / "step_checkpoints" / name, out / "step_checkpoints" / name, fold_epoch=fold_epoch
        )
    (out / "step_checkpoints" / "latest").symlink_to(name)
    (out / "run_args.json").write_text(json.dumps(dict(flags)))
    lines = []
    for line in (whole / "train.log").read_text().splitlines():
        head, _, _ = line.partition(" seconds=")
        if " step=" in line and int(line.split(" step=")[1].split()[0]) <= steps[-1] + 1:
            lines.append(head + "\n")  # one step more was logged than saved
    (out / "train.log").write_text("".join(lines))
    return out


@pytest.fixture(scope="session")
def reference_run() -> Callable[..., Path]:
    """reference_run(whole, out, flags, steps=(2, 6)): see write_run."""
    return write_run
