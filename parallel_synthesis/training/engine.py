"""What computes: data, order, model, optimizer and random streams of one process, built from a config alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_synthesis.config import Config, WorkersConfig
from parallel_synthesis.data.index import RowFile
from parallel_synthesis.data.rows import Row
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.model.backbone import Backbone, load_backbone
from parallel_synthesis.model.components import embedding_rows
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import (
    RowTokens,
    system_message,
    tokenize_row,
    tokenize_worker_prompt,
)
from parallel_synthesis.resources import PACKAGE_PREFIX, resolve_path
from parallel_synthesis.training.device import choose_device, prepare_device
from parallel_synthesis.training.evaluate import HeldOut
from parallel_synthesis.training.extent import open_files, order_of, total_steps
from parallel_synthesis.training.guards import before_generation
from parallel_synthesis.training.prepare import Preparer
from parallel_synthesis.training.progress import Progress
from parallel_synthesis.training.ranks import Processes, World
from parallel_synthesis.training.rng import RankStreams
from parallel_synthesis.training.step import Stepper

ADAM_COPIES = 3  # a trained weight is saved once itself and twice as AdamW's moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One process's view of a run that is ready to step. workers: those of parallel_kv, None in the fixed route."""

    config: Config
    workers: WorkersConfig | None
    processes: Processes
    device: torch.device
    files: Mapping[str, RowFile]
    held_out: HeldOut | None
    preparer: Preparer
    backbone: Backbone
    synthesizer: Synthesizer
    parameters: Sequence[tuple[str, nn.Parameter]]
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    streams: RankStreams
    progress: Progress
    total_steps: int

    @property
    def checkpoint_bytes(self) -> int:
        """About what one checkpoint takes on the disk."""
        frozen = sum(
            tensor.numel() * tensor.element_size() for tensor in self.synthesizer.adapter_state().values()
        )
        return (
            frozen
            + 4 * (ADAM_COPIES - 1) * sum(parameter.numel() for _, parameter in self.parameters)
            + 2**16
        )

    def load_components(self, checkpoint: Path) -> None:
        """Mapper and LoRA of a checkpoint; embeddings of its adapter as checkpoint.embeddings says."""
        carry = self.config.checkpoint.embeddings == "keep"
        self.synthesizer.load_components(checkpoint, carry=carry)

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Components, optimizer, counters and, last, the random streams of a committed checkpoint.

        Raises CheckpointError where a piece is missing or belongs to another run.
        """
        self.load_components(checkpoint)
        self.progress.restore(state)
        updates = self.progress.totals.updates
        _load_optimizer(self.optimizer, state["optimizer_state"], self.parameters, updates=updates)
        for rank in self.processes.mine:
            saved = state if self.processes.ranks == 1 else state["rank_state_by_rank"][rank]
            self.streams.restore(rank, saved["process_rng_state"])

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        self.processes.close()


def open_processes(config: Config) -> tuple[Processes, torch.device]:
    """Device, deterministic algorithms and process group."""
    world = World.from_environment()
    device = choose_device(config.backbone, local_index=world.local_index)
    prepare_device(config.backbone, device)
    return Processes(world, ranks=config.run.ranks, device=device), device


def build_engine(
    config: Config, processes: Processes, device: torch.device, *, components: Path | None = None
) -> Engine:
    """Indexes and validates the data, then loads the backbone. Collective; writes nothing but the index cache.

    components: the checkpoint that will be loaded; the backbone gets as many embedding rows as its adapter has.
    """
    files = processes.first_then_others(lambda: open_files(config, config.data.files, config.data.tasks))
    order = order_of(config, {task: file.rows for task, file in files.items()})
    rows = None if components is None else embedding_rows(components)
    backbone = load_backbone(config.backbone, device=str(device), embedding_rows=rows)
    synthesizer = Synthesizer(backbone, mapper=config.mapper, lora=config.lora, seed=config.run.seed)
    workers = config.workers if config.run.method == "parallel_kv" else None
    tokenize = row_tokenizer(backbone, think=config.workers.think, generated=workers is not None)
    parameters = synthesizer.parameters(config.run.components)
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in parameters],
        lr=config.optim.learning_rate,
        weight_decay=config.optim.weight_decay,
    )
    streams = RankStreams(processes.mine, seed=config.run.seed, device=device)
    return Engine(
        config=config,
        workers=workers,
        processes=processes,
        device=device,
        files=files,
        held_out=_read_held_out(config, processes, tokenize),
        preparer=Preparer(
            order=order,
            files=files,
            tokenize=tokenize,
            guards=config.guards if workers is None else before_generation(config.guards),
            ranks=processes.mine,
        ),
        backbone=backbone,
        synthesizer=synthesizer,
        parameters=parameters,
        optimizer=optimizer,
        stepper=Stepper(synthesizer, parameters, optimizer, processes, streams),
        streams=streams,
        progress=Progress(
            tasks=config.data.tasks, ranks=config.run.ranks, steps_per_epoch=order.steps_per_epoch
        ),
        total_steps=total_steps(config, order.steps_per_epoch),
    )


def warnings(engine: Engine) -> list[str]:
    """What a user should know before the first step: rows left out, extracts that are not the end of their
    context, a planned end that can not be reached."""
    found = [
        f"{len(file.bad):,} rows of {task} are left out (data.on_bad_row = skip); the first is line "
        f"{file.bad[0].line}: {file.bad[0].problem}"
        for task, file in engine.files.items()
        if file.bad
    ]
    if engine.config.run.method == "fixed_parallel_kv":  # the other route's branches are generated, not read
        found += filter(None, (file.loose.note(task) for task, file in engine.files.items()))
    wanted = engine.config.run.max_steps
    if wanted is not None and wanted > engine.total_steps:
        epochs, shortened = engine.config.run.epochs, engine.config.run.steps_per_epoch
        if shortened is not None and shortened * epochs == engine.total_steps:
            why, what = (
                f"the run's end by run.steps_per_epoch = {shortened:,}",
                "run.steps_per_epoch or run.epochs",
            )
        else:
            why, what = "the data", "run.epochs"
        found.append(
            f"run.max_steps = {wanted:,} is beyond {why}: the run ends after {engine.total_steps:,} steps; "
            f"raise {what} to go on"
        )
    return found


def pinned(config: Config) -> Config:
    """The config with local paths made absolute, so that a resume works from any directory."""

    def absolute(value: str) -> str:
        return value if value.startswith(PACKAGE_PREFIX) else str(Path(value).expanduser().resolve())

    model = config.backbone.model
    if resolve_path(model).exists():
        model = absolute(model)
    return dataclasses.replace(
        config,
        backbone=dataclasses.replace(config.backbone, model=model),
        data=dataclasses.replace(config.data, root=absolute(config.data.root)),
    )


def row_tokenizer(backbone: Backbone, *, think: bool, generated: bool = False) -> Callable[[Row], RowTokens]:
    """A row -> its tokens, under the backbone's tokenizer and system message.

    generated: the workers will generate the branches; the row's contexts are not read, its query is.
    """
    system = system_message(backbone.name)

    def tokenize(row: Row) -> RowTokens:
        tokens = tokenize_row(
            backbone.tokenizer,
            query=row.query,
            target=row.target,
            contexts=() if generated else row.contexts,
            extracts=() if generated else row.extracts,
            system=system,
            think=think,
        )
        if not generated:
            return tokens
        prompt = tokenize_worker_prompt(backbone.tokenizer, query=row.query, system=system)
        return dataclasses.replace(tokens, worker_prompt=prompt)

    return tokenize


def _read_held_out(
    config: Config, processes: Processes, tokenize: Callable[[Row], RowTokens]
) -> HeldOut | None:
    held_out = config.evaluate
    if not held_out.files:
        return None
    files = processes.first_then_others(
        lambda: open_files(config, held_out.files, sorted(held_out.files), max_rows=held_out.max_rows)
    )
    rows = HeldOut.read(files, tokenize)
    for file in files.values():
        file.close()
    return rows


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    updates: int,
) -> None:
    """AdamW's state; its hyperparameters stay those of the config. Shapes are checked: another order of the
    parameters would load silently with the wrong moments."""
    count = sum(len(group["params"]) for group in saved["param_groups"])
    if count != len(parameters):
        raise CheckpointError(
            f"optimizer_state holds {count} parameters, expected {len(parameters)}: not of this run"
        )
    found = saved["state"]
    whole = all({"step", "exp_avg", "exp_avg_sq"} <= entry.keys() for entry in found.values())
    if not whole or len(found) != (len(parameters) if updates else 0):
        raise CheckpointError(
            f"optimizer_state: expected step, exp_avg and exp_avg_sq of {len(parameters) if updates else 0} parameters "
            f"after {updates} updates, found {len(found)} entries: not of this run; use another checkpoint"
        )
    for index, (name, parameter) in enumerate(parameters):
        for key, value in saved["state"].get(index, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise CheckpointError(
                    f"optimizer_state: {key} of parameter {index} has shape {list(value.shape)}, "
                    f"expected {list(parameter.shape)} ({name}): not of this run"
                )
    fresh = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": fresh})
