"""Everything a run needs before its first step: data, order, model, optimizer, directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

from parallel_synthesis.checkpoint.layout import RunPaths, find_components
from parallel_synthesis.config import Config
from parallel_synthesis.data.index import RowFile, open_rows
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.rows import Row
from parallel_synthesis.data.tasks import find_task, task_path
from parallel_synthesis.errors import RefusedError, RunExistsError, StorageError
from parallel_synthesis.model.backbone import Backbone, load_backbone
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import RowTokens, system_message, tokenize_row
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.device import choose_device, prepare_device
from parallel_synthesis.training.evaluate import HeldOut
from parallel_synthesis.training.events import Evaluation, Observer, RunStarted, TrainResult
from parallel_synthesis.training.log import LogWriter
from parallel_synthesis.training.prepare import Preparer
from parallel_synthesis.training.progress import Progress
from parallel_synthesis.training.ranks import Processes, World
from parallel_synthesis.training.records import backbone_record, parent_record, run_record
from parallel_synthesis.training.rng import RankStreams
from parallel_synthesis.training.saving import Saver
from parallel_synthesis.training.step import Stepper


@dataclass(slots=True, kw_only=True)
class Run:
    """One process's view of a run that is ready to step. `log` is None in all processes but the first."""

    config: Config
    paths: RunPaths
    processes: Processes
    device: torch.device
    files: Mapping[str, RowFile]
    held_out: HeldOut | None
    preparer: Preparer
    backbone: Backbone
    synthesizer: Synthesizer
    parameters: Sequence[tuple[str, nn.Parameter]]
    stepper: Stepper
    streams: RankStreams
    progress: Progress
    total_steps: int
    saver: Saver
    log: LogWriter | None
    observer: Observer
    began: float = field(default_factory=time.monotonic)

    def started(self) -> RunStarted:
        return RunStarted(
            out=self.paths.out,
            recipe=self.config.recipe,
            backbone=self.backbone.name,
            device=str(self.device),
            first_step=self.progress.step + 1,
            total_steps=self.total_steps,
            steps_per_epoch=self.progress.steps_per_epoch,
            ranks=self.processes.ranks,
            processes=self.processes.world.size,
            trainable_parameters=sum(parameter.numel() for _, parameter in self.parameters),
            rows={task: file.rows for task, file in self.files.items()},
        )

    def result(self, evaluations: Sequence[Evaluation]) -> TrainResult:
        totals = self.progress.totals
        return TrainResult(
            out=self.paths.out,
            checkpoint=self.paths.step(self.progress.step),
            step=self.progress.step,
            total_steps=self.total_steps,
            optimizer_steps=totals.updates,
            skipped_steps=totals.skipped,
            skips_by_reason=dict(sorted(self.progress.reasons.items())),
            loss=totals.loss,
            perplexity=totals.perplexity,
            target_tokens=totals.target_tokens,
            seconds=time.monotonic() - self.began,
            evaluations=tuple(evaluations),
            milestones=self.saver.milestones,
        )

    def close(self) -> None:
        """Ends the writer, the log, the data files and the process group. A failing writer does not hide an error."""
        try:
            self.saver.close()
        finally:
            if self.log is not None:
                self.log.close()
            for file in self.files.values():
                file.close()
            self.processes.close()


def set_up(
    resolved: Resolved,
    *,
    out: Path,
    observer: Observer,
    init: str | None,
    overwrite: bool,
    argv: Sequence[str],
) -> Run:
    """Loads and checks everything; only then, in the first process, creates `out`. Collective."""
    config = resolved.config
    if config.run.method != "fixed_parallel_kv":
        raise RefusedError(
            f'run.method = "{config.run.method}" is not in this version; use run.method = "fixed_parallel_kv"'
        )
    world = World.from_environment()
    device = choose_device(config.backbone, local_index=world.local_index)
    prepare_device(config.backbone, device)
    processes = Processes(world, ranks=config.run.ranks, device=device)
    paths = RunPaths(out)
    if processes.is_first and not overwrite:
        refuse_existing(paths)

    files = processes.first_then_others(lambda: open_files(config, config.data.files, config.data.tasks))
    order = Order(
        {task: file.rows for task, file in files.items()},
        ranks=config.run.ranks,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        steps_per_epoch=config.run.steps_per_epoch,
    )
    total_steps = order.steps_per_epoch * config.run.epochs
    if config.run.max_steps is not None:
        total_steps = min(total_steps, config.run.max_steps)

    init_from = find_components(Path(init)) if init is not None else None
    backbone = load_backbone(config.backbone, device=str(device))
    synthesizer = Synthesizer(backbone, mapper=config.mapper, lora=config.lora, seed=config.run.seed)
    if init_from is not None:
        synthesizer.load_components(init_from)
    tokenize = row_tokenizer(backbone, think=config.workers.think)
    held_out = None
    if config.evaluate.files:
        held_out_files = processes.first_then_others(
            lambda: open_files(
                config, config.evaluate.files, tuple(config.evaluate.files), max_rows=config.evaluate.max_rows
            )
        )
        held_out = HeldOut.read(held_out_files, tokenize)
        for file in held_out_files.values():
            file.close()

    parameters = synthesizer.parameters(config.run.components)
    optimizer = torch.optim.AdamW(
        [parameter for _, parameter in parameters],
        lr=config.optim.learning_rate,
        weight_decay=config.optim.weight_decay,
    )
    streams = RankStreams(processes.mine, seed=config.run.seed, device=device)
    progress = Progress(
        tasks=config.data.tasks, ranks=config.run.ranks, steps_per_epoch=order.steps_per_epoch
    )
    preparer = Preparer(
        order=order, files=files, tokenize=tokenize, guards=config.guards, ranks=processes.mine
    )
    log = None
    record = run_record(
        resolved,
        files=files,
        backbone=backbone_record(
            config.backbone.model,
            revision=backbone.revision or getattr(backbone.model.config, "_commit_hash", None),
            device=device.type,
            dtype=str(backbone.dtype),
            resized_from=backbone.resized_from,
        )
        if processes.is_first
        else {},
        total_steps=total_steps,
        argv=argv,
    )
    if processes.is_first:
        create_out(paths, overwrite=overwrite, observer=observer)
        record.write(paths)
        log = LogWriter(paths.train_log, ranks=config.run.ranks)
    processes.exchange(None)  # nobody trains before the run has its place
    saver = Saver(
        config=config,
        paths=paths,
        processes=processes,
        synthesizer=synthesizer,
        parameters=parameters,
        optimizer=optimizer,
        streams=streams,
        preparer=preparer,
        progress=progress,
        record=record,
        parents=[parent_record(init, init_from)] if init is not None and init_from is not None else [],
        total_steps=total_steps,
        observer=observer,
    )
    return Run(
        config=config,
        paths=paths,
        processes=processes,
        device=device,
        files=files,
        held_out=held_out,
        preparer=preparer,
        backbone=backbone,
        synthesizer=synthesizer,
        parameters=parameters,
        stepper=Stepper(synthesizer, parameters, optimizer, processes, streams),
        streams=streams,
        progress=progress,
        total_steps=total_steps,
        saver=saver,
        log=log,
        observer=observer,
    )


def open_files(
    config: Config, files: Mapping[str, str], tasks: Sequence[str], *, max_rows: int | None = None
) -> dict[str, RowFile]:
    """The tasks' files, indexed and validated whole. `files`: task -> path, as the recipe writes them."""
    opened = {}
    for name in tasks:
        task = find_task(name, own=files)
        opened[name] = open_rows(
            task,
            task_path(task, root=config.data.root, files=files),
            on_bad_row=config.data.on_bad_row,
            max_rows=max_rows if max_rows is not None else config.data.max_rows,
        )
    return opened


def row_tokenizer(backbone: Backbone, *, think: bool) -> Callable[[Row], RowTokens]:
    """A row -> its tokens, under the backbone's tokenizer and system message."""
    system = system_message(backbone.name)

    def tokenize(row: Row) -> RowTokens:
        return tokenize_row(
            backbone.tokenizer,
            query=row.query,
            target=row.target,
            contexts=row.contexts,
            extracts=row.extracts,
            system=system,
            think=think,
        )

    return tokenize


def refuse_existing(paths: RunPaths) -> None:
    """Raises RunExistsError when OUT holds a run, or anything else that is not ours to mix with."""
    if paths.run_args.exists() or paths.train_log.exists() or paths.step_checkpoints.exists():
        raise RunExistsError(
            f"{paths.out} already holds a run; go on with it by `ps resume {paths.out}`, "
            f"or start anew by --overwrite, which moves it aside"
        )
    if paths.out.exists() and (not paths.out.is_dir() or any(paths.out.iterdir())):
        raise RunExistsError(f"{paths.out} is not an empty directory; name another --out")


def create_out(paths: RunPaths, *, overwrite: bool, observer: Observer) -> None:
    """Makes OUT; with `overwrite` what is there is moved aside, never deleted."""
    try:
        if overwrite and paths.out.exists():
            aside = paths.out.with_name(f"{paths.out.name}.old-{datetime.now():%Y%m%d-%H%M%S}")
            paths.out.rename(aside)
            observer.warning(f"moved the earlier {paths.out} to {aside}")
        paths.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{paths.out}: can not be made: {error.strerror}; name another --out") from error
