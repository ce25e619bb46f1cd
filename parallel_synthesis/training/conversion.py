"""A checkpoint of the reference implementation as one of ours: state, counters, place in the order, components.

And one of ours whose run is not known, under the settings of a recipe: it is checked that they can be its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.components import HostState, capture, read_mapper, write_checkpoint
from parallel_synthesis.checkpoint.reference_state import refuse_streams
from parallel_synthesis.checkpoint.state import read_training_state, state_problems, training_state
from parallel_synthesis.config import Config
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.tasks import canonical_name
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.schema import read_json
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.engine import pinned
from parallel_synthesis.training.extent import open_files, order_of, total_steps
from parallel_synthesis.training.place import check_place, loop_key
from parallel_synthesis.training.progress import Progress
from parallel_synthesis.training.records import RunRecord, parent_record, run_record

_MAPPER_PARAMETERS = 4  # weight and bias of two layers


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
    record, order = _indexed(config, resolved, argv)
    progress = Progress(tasks=config.data.tasks, ranks=ranks, steps_per_epoch=order.steps_per_epoch)
    loop = _loop(state, ranks)
    said = _said(state, loop, ranks)
    _check_order(checkpoint, loop, order)
    said += _check_optimizer(checkpoint, state, resolved)
    progress.restore({**state, loop_key(ranks): loop})
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
    refuse_streams(checkpoint / layout.TRAINING_STATE, ours)
    adapter = _adapter(checkpoint)
    _check_fits(checkpoint, config, ours, loop.get("tasks"), adapter)
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
        adapter=adapter,
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
            "total_steps": record.total_steps,
            "data": {task: entry["sha256"] for task, entry in record.data.items()},
            "parents": [parent_record(given, checkpoint)],
            "run": record.carried(),
        },
    )
    return Converted(host=host, record=record, said=said)


def adopt(
    checkpoint: Path, meta: Mapping[str, Any], resolved: Resolved, *, argv: Sequence[str]
) -> tuple[RunRecord, list[str]]:
    """The record of a run that goes on from a checkpoint of ours under a recipe's settings, and what can not be checked.

    For checkpoints from before they carried their run's record. Raises CheckpointError where the recipe can not be that
    of the checkpoint's run: another seed, other data, another length, learning rate or method.
    """
    config = pinned(resolved.config)
    record, order = _indexed(config, resolved, argv)
    state = read_training_state(
        checkpoint / layout.TRAINING_STATE, ranks=config.run.ranks, step=meta["global_step"]
    )
    _check_order(checkpoint, state[loop_key(config.run.ranks)], order)
    said = [
        "the checkpoint is from a version that did not keep its run's settings: those of the recipe are taken"
    ]
    said += _check_optimizer(checkpoint, state, resolved)
    for name, saved, now, origin in (
        ("run.method", meta.get("method"), config.run.method, "run.method"),
        ("the planned end, in steps", meta.get("total_steps"), record.total_steps, "run.max_steps"),
    ):
        if saved is not None and saved != now:
            said += _differs(checkpoint, resolved, name, saved, now, origin)
    for task in sorted(meta.get("data", {}).keys() | record.data.keys()):
        saved, entry = meta.get("data", {}).get(task), record.data.get(task, {})
        if meta.get("data") and saved not in (entry.get("sha256"), entry.get("unpacked_sha256")):
            raise CheckpointError(
                f"{checkpoint} was made with data of task {task} of sha256 {str(saved)[:16]}, here it is "
                f"{str(entry.get('sha256'))[:16]} ({entry.get('path', 'not in the recipe')}): give the run's own data"
            )
    if meta.get("versions"):  # so that the resume compares with those that the checkpoint was made with
        record = dataclasses.replace(record, environment={**record.environment, "packages": meta["versions"]})
    return record, said


def _indexed(config: Config, resolved: Resolved, argv: Sequence[str]) -> tuple[RunRecord, Order]:
    """Indexes the data; the record of a run over it, without its backbone, which the first resume adds."""
    files = open_files(config, config.data.files, config.data.tasks)
    try:
        order = order_of(config, {task: file.rows for task, file in files.items()})
        record = run_record(
            config,
            recipe_sha256=resolved.sha256,
            origins=resolved.origins,
            files=files,
            backbone={},
            total_steps=total_steps(config, order.steps_per_epoch),
            argv=argv,
        )
    finally:
        for file in files.values():
            file.close()
    return record, order


def _check_fits(
    checkpoint: Path,
    config: Config,
    state: Mapping[str, Any],
    tasks: Sequence[str] | None,
    adapter: Mapping[str, torch.Tensor],
) -> None:
    """The tasks and the trained parameters are those of the config; what a state is by itself has been judged."""
    if tasks is not None and sorted(map(canonical_name, tasks)) != sorted(config.data.tasks):
        raise CheckpointError(
            f"{checkpoint}: its tasks are {', '.join(tasks)}, those here are {', '.join(config.data.tasks)}: "
            f"give its run's by --set data.tasks=..., or use another checkpoint"
        )
    lora = sum(".lora_" in name for name in adapter)
    count = {"both": _MAPPER_PARAMETERS + lora, "mapper_only": _MAPPER_PARAMETERS, "lora_only": lora}
    saved = sum(len(group["params"]) for group in state["optimizer_state"]["param_groups"])
    if saved != count[config.run.components]:
        raise CheckpointError(
            f"{checkpoint}: its optimizer is of {saved} parameters, expected {count[config.run.components]} with "
            f"run.components = {config.run.components}: set it to the run's, or use another checkpoint"
        )


def _check_order(checkpoint: Path, loop: Mapping[str, Any], order: Order) -> None:
    check_place(
        checkpoint,
        loop,
        steps_per_epoch=order.steps_per_epoch,
        epoch_rng_state=lambda epoch: order.epoch(epoch).rng_state,
    )


def _check_optimizer(checkpoint: Path, state: Mapping[str, Any], resolved: Resolved) -> list[str]:
    """The optimizer's settings are in its state: those of the config must be the same, or set by the user."""
    groups = (state.get("optimizer_state") or {}).get("param_groups") or [{}]
    said = []
    for name, key in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        saved, now = groups[0].get(key), getattr(resolved.config.optim, name)
        if isinstance(saved, int | float) and saved != now:
            said += _differs(checkpoint, resolved, f"optim.{name}", saved, now, f"optim.{name}")
    return said


def _differs(
    checkpoint: Path, resolved: Resolved, name: str, saved: object, now: object, field: str
) -> list[str]:
    """Refuses what the checkpoint tells otherwise, unless it was set by the user's own `--set`: then it is said."""
    if resolved.origins.get(field) == "--set":
        return [f"{name} was {saved} in the checkpoint's run and is {now} now, as it was set"]
    raise CheckpointError(
        f"{checkpoint} was made with {name} = {saved}, {resolved.name} has {now}: this is not its recipe; give the "
        f"right one, or --set {field}=VALUE"
    )


def _streams(state: Mapping[str, Any], rank: int, ranks: int) -> Mapping[str, Any]:
    saved = state if ranks == 1 else state["rank_state_by_rank"].get(rank, {})
    streams = saved.get("process_rng_state")
    return streams if isinstance(streams, Mapping) else {}


def _loop(state: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The loop's counters with what ours needs besides. Steps of before a fast-forward were never attempted there."""
    given = state.get(loop_key(ranks))
    if not isinstance(given, Mapping):
        raise CheckpointError(f"the training state lacks {loop_key(ranks)}: it is of another layout")
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
