"""A checkpoint of the reference implementation as one of ours: state, counters, place in the order, components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.components import HostState, capture, read_mapper, write_checkpoint
from parallel_synthesis.checkpoint.state import state_problems, training_state
from parallel_synthesis.data.order import Order
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.schema import read_json
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.engine import pinned
from parallel_synthesis.training.extent import open_files, order_of, total_steps
from parallel_synthesis.training.progress import Progress
from parallel_synthesis.training.records import RunRecord, parent_record, run_record


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A checkpoint in host memory, its run's record, and what could not be carried over."""

    host: HostState
    record: RunRecord
    said: Sequence[str]

    def write(self, destination: Path) -> None:
        write_checkpoint(destination, self.host)


def convert(
    checkpoint: Path,
    state: Mapping[str, Any],
    resolved: Resolved,
    *,
    given: str,
    out: Path,
    argv: Sequence[str],
) -> Converted:
    """Reads the components, indexes the data and checks that the run's place in the shuffled order is the same here.

    state: of read_reference_state. Raises CheckpointError where the data, the seed or the state do not agree.
    """
    config = pinned(resolved.config)
    ranks = config.run.ranks
    files = open_files(config, config.data.files, config.data.tasks)
    order = order_of(config, {task: file.rows for task, file in files.items()})
    total = total_steps(config, order.steps_per_epoch)
    progress = Progress(tasks=config.data.tasks, ranks=ranks, steps_per_epoch=order.steps_per_epoch)
    record = run_record(
        config,
        recipe_sha256=resolved.sha256,
        origins=resolved.origins,
        files=files,
        backbone={},  # not recorded by the reference: the first resume does
        total_steps=total,
        argv=argv,
    )
    for file in files.values():
        file.close()
    loop = _loop(state, ranks)
    said = _said(state, loop, ranks)
    _check_place(checkpoint, loop, order)
    progress.restore({**state, _loop_key(ranks): loop})
    _end_epoch(progress)
    ours = training_state(
        global_step=progress.step,
        ranks=ranks,
        optimizer_state=state.get("optimizer_state", {}),
        loop_state=progress.loop_state(epoch_rng_state=order.epoch(progress.epoch_index).rng_state),
        rank_states={rank: progress.rank_state(rank, _streams(state, rank, ranks)) for rank in range(ranks)},
        versions={},
    )
    found = state_problems(ours, ranks=ranks, step=state.get("global_step"))
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise CheckpointError(f"{checkpoint / layout.TRAINING_STATE} can not be continued from:\n{listed}")
    meta = read_json(checkpoint / layout.CHECKPOINT_META)
    if meta.get("global_step") != progress.step:
        raise CheckpointError(
            f"{checkpoint}: checkpoint_meta.json is of step {meta.get('global_step')}, the training state of "
            f"{progress.step}; use another checkpoint"
        )
    host = capture(
        step=progress.step,
        mapper=read_mapper(checkpoint),
        mapper_config={
            "hidden_dim": config.mapper.hidden_dim,
            "metadata_features": config.mapper.metadata_features,
        },
        adapter=_adapter(checkpoint),
        adapter_config=read_json(checkpoint / layout.ADAPTER_CONFIG),
        training_state=ours,
        meta={
            "schema_version": 1,
            "global_step": progress.step,
            "epoch": meta["epoch"],
            "source_run_dir": str(out),
            "metrics": meta["metrics"],
            "recipe": config.recipe,
            "recipe_sha256": resolved.sha256,
            "method": config.run.method,
            "base_model": config.backbone.model,
            "ranks": ranks,
            "total_steps": total,
            "data": {task: entry["sha256"] for task, entry in record.data.items()},
            "parents": [parent_record(given, checkpoint)],
        },
    )
    return Converted(host=host, record=record, said=said)


def _loop_key(ranks: int) -> str:
    return "distributed_loop_state" if ranks > 1 else "single_loop_state"


def _streams(state: Mapping[str, Any], rank: int, ranks: int) -> Mapping[str, Any]:
    saved = state if ranks == 1 else state["rank_state_by_rank"].get(rank, {})
    streams = saved.get("process_rng_state")
    return streams if isinstance(streams, Mapping) else {}


def _loop(state: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The loop's counters with what ours needs besides. Steps of before a fast-forward were never attempted there."""
    given = state.get(_loop_key(ranks))
    if not isinstance(given, Mapping):
        raise CheckpointError(f"the training state lacks {_loop_key(ranks)}: it is of another layout")
    loop = dict(given)
    last = loop.get("last_step_loss")
    loop["last_step_loss"] = float("nan") if last is None else last
    if ranks > 1:
        first = state["rank_state_by_rank"].get(0, {})
        skipped, updates = first.get("skipped_sync_steps_local", 0), loop.get("optimizer_sync_steps_local", 0)
    else:
        skipped, updates = loop.get("skipped_steps", 0), loop.get("optimizer_steps", 0)
    loop["attempted_steps"] = skipped + updates
    return loop


def _check_place(checkpoint: Path, loop: Mapping[str, Any], order: Order) -> None:
    """Refuses where the same step would take other rows here: another length of an epoch, seed or number of rows."""
    epoch, within, step = (loop.get(key) for key in ("epoch_idx", "next_batch_idx_in_epoch", "global_step"))
    if not isinstance(epoch, int) or not isinstance(within, int) or not isinstance(step, int):
        raise CheckpointError(f"{checkpoint}: the training state does not say where in its epoch it stands")
    if epoch * order.steps_per_epoch + within != step or within > order.steps_per_epoch:
        raise CheckpointError(
            f"{checkpoint}: step {step} is step {within} of epoch {epoch + 1} there, and an epoch has "
            f"{order.steps_per_epoch} steps here: these are not the run's data files, batch size or steps_per_epoch"
        )
    saved = _python_state(loop.get("current_epoch_rng_state_before_build"))
    if saved is not None and saved != order.epoch(epoch).rng_state:
        raise CheckpointError(
            f"{checkpoint}: epoch {epoch + 1} was shuffled from another state than here, so the order of the rows "
            f"would not be the run's: give its seed, its data files and its order of the tasks"
        )


def _python_state(given: Any) -> tuple[Any, ...] | None:
    if not isinstance(given, list | tuple) or len(given) != 3:
        return None
    return (given[0], tuple(given[1]), given[2])


def _end_epoch(progress: Progress) -> None:
    """A state that was saved after an epoch's last step and before its end was counted: ours counts at once."""
    done, epoch = progress.step // progress.steps_per_epoch, progress.epoch
    if progress.step % progress.steps_per_epoch or not epoch.attempted:
        return
    if len(progress.epochs) < done:
        progress.epochs.append(
            {
                "epoch": done,
                "avg_loss": epoch.loss,
                "perplexity": epoch.perplexity,
                "target_tokens": epoch.target_tokens,
                "steps": epoch.attempted,
                "optimizer_steps": epoch.updates,
                "skipped_steps": epoch.skipped,
            }
        )
    progress.epoch = type(epoch)()


def _adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    path = checkpoint / layout.ADAPTER_MODEL
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    return tensors


def _said(state: Mapping[str, Any], loop: Mapping[str, Any], ranks: int) -> list[str]:
    step, attempted = state.get("global_step"), loop["attempted_steps"]
    said = [
        "the reference records no hashes of its data and backbone: those in use now are taken to be the run's",
        "the reference records no library versions and no hardware: bits as it would have made them are not promised",
        f"train.log has no digests up to step {step}: earlier steps can not be replayed",
    ]
    skipped = attempted - loop.get("optimizer_sync_steps_local" if ranks > 1 else "optimizer_steps", 0)
    if skipped:
        said.append(f"the reasons of {skipped} skipped steps are in train.log only")
    if attempted != step:
        said.append(f"of {step} steps, {attempted} were counted there: the rest was fast-forwarded")
    return said
