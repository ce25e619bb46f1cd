"""A new run: everything is loaded and checked before its directory is made."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from parallel_synthesis.checkpoint.layout import Located, RunPaths, disk_needed, free_bytes, locate
from parallel_synthesis.data.check import difference
from parallel_synthesis.errors import ConfigError, StorageError
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.device import device_name
from parallel_synthesis.training.engine import Engine, build_engine, open_processes, pinned, warnings
from parallel_synthesis.training.events import Evaluation, Observer
from parallel_synthesis.training.log import LogWriter
from parallel_synthesis.training.plan import refuse_existing
from parallel_synthesis.training.ranks import Processes
from parallel_synthesis.training.records import RunRecord, backbone_record, parent_record, run_record
from parallel_synthesis.training.repeats import Repeats
from parallel_synthesis.training.run import Run
from parallel_synthesis.training.saving import Saver


def start_run(
    resolved: Resolved,
    *,
    out: Path,
    observer: Observer,
    init: str | None,
    overwrite: bool,
    argv: Sequence[str],
    order_from_step: int = 0,
) -> Run:
    """Loads and checks everything; only then, in the first process, makes `out`. Collective.

    order_from_step: the global step after which the data order is taken up, without reading the rows before it.
    """
    config = pinned(resolved.config)
    paths = RunPaths(out)
    processes, device = open_processes(config)
    if processes.is_first and not overwrite:
        refuse_existing(paths)
    start = _start(init, processes) if init is not None else None
    parents = []
    if start is not None:  # before anything is computed, and once: it reads every byte
        found = parent_record(start.name, start.directory) if processes.is_first else {}
        parents = [processes.exchange(found)[0]]
    engine = build_engine(config, processes, device, components=start.directory if start else None)
    if start is not None:
        engine.load_components(start.directory)
    if not 0 <= order_from_step < engine.total_steps:
        raise ConfigError(
            [
                f"--order-from-step {order_from_step}: expected 0 to {engine.total_steps - 1}, the run's last step but one"
            ]
        )
    engine.progress.step = order_from_step
    record = record_of(resolved, engine, argv=argv)
    log = None
    for text in warnings(engine):
        observer.warning(text)
    if processes.is_first:
        check_disk(paths, engine, observer)
        told = list(filter(None, map(difference, engine.files.values())))
        if told:
            more = f" ({len(told) - 1} more of the run's files differ)" if len(told) > 1 else ""
            observer.warning(
                f"{told[0]}{more}; `ps verify --data` tells more. The run goes on with what is there"
            )
        make_out(paths, overwrite=overwrite, observer=observer)
        record.write(paths)
        log = LogWriter(paths.train_log, ranks=config.run.ranks)
        if order_from_step:
            text = (
                f"order taken up after step {order_from_step} with the components of {init}, a fresh optimizer and "
                f"fresh random streams: this continuation is not exact"
            )
            log.line(f"[resume] {text}")
            observer.warning(text)
    processes.exchange(None)  # nobody trains before the run has its place
    evaluations: list[Evaluation] = []
    return Run(
        engine=engine,
        paths=paths,
        saver=Saver(
            engine, paths=paths, record=record, parents=parents, observer=observer, evaluations=evaluations
        ),
        log=log,
        observer=observer,
        evaluations=evaluations,
        repeats=Repeats(),
        attempt=1,
    )


def _start(init: str, processes: Processes) -> Located:
    """The components to start from, the same on every process. A branch of a Hub repository may move between two
    processes' looks; the first one's commit counts."""
    found = locate(init)
    name = processes.exchange(found.name)[0]
    return found if name == found.name else locate(name)


def record_of(resolved: Resolved, engine: Engine, *, argv: Sequence[str]) -> RunRecord:
    """The run's record; the backbone's files are hashed by the first process alone."""
    config, backbone = engine.config, engine.backbone
    return run_record(
        config,
        recipe_sha256=resolved.sha256,
        origins=resolved.origins,
        files=engine.files,
        backbone=backbone_record(
            config.backbone.model,
            revision=backbone.revision or getattr(backbone.model.config, "_commit_hash", None),
            device=device_name(engine.device),
            dtype=str(backbone.dtype).removeprefix("torch."),
            resized_from=backbone.resized_from,
        )
        if engine.processes.is_first
        else {},
        total_steps=engine.total_steps,
        argv=argv,
    )


def check_disk(paths: RunPaths, engine: Engine, observer: Observer) -> None:
    """Refuses a run whose checkpoints can not fit, before its first step."""
    needed = disk_needed(engine.checkpoint_bytes, engine.total_steps, engine.config.checkpoint)
    free = free_bytes(paths.out)
    if needed > free:
        raise StorageError(
            f"{paths.out}: the checkpoints of this run need {needed:,} bytes at their most, {free:,} are free; "
            f"free some space, name another --out, or keep fewer (checkpoint.keep_last, keep_every, milestones)"
        )
    if needed * 2 > free:
        observer.warning(
            f"the checkpoints of this run need {needed:,} of the {free:,} free bytes of {paths.out}"
        )


def make_out(paths: RunPaths, *, overwrite: bool, observer: Observer) -> None:
    """Makes OUT; with `overwrite` what is there is moved aside, never deleted."""
    try:
        if overwrite and paths.out.exists():
            aside = paths.out.with_name(f"{paths.out.name}.old-{datetime.now():%Y%m%d-%H%M%S}")
            paths.out.rename(aside)
            observer.warning(f"moved the earlier {paths.out} to {aside}")
        paths.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{paths.out}: can not be made: {error.strerror}; name another --out") from error
