"""What a run would do, without torch and without writing: rows, steps, saves, disk, and what is missing.

Where a row count comes from: the cached index of the file; else, for a usual file that is absent or has the
manifest's size, the manifest; else the file is indexed in memory, and that index is not kept.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from parallel_synthesis.checkpoint.layout import (
    RunPaths,
    disk_needed,
    free_bytes,
    kept_steps,
    milestone_name,
    saved_steps,
)
from parallel_synthesis.config import Config
from parallel_synthesis.data.manifests import manifest_entry
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.tasks import Task, find_task, task_path
from parallel_synthesis.errors import (
    BackboneError,
    DataError,
    ParallelSynthesisError,
    RunExistsError,
    StorageError,
)
from parallel_synthesis.model.sizes import read_shapes, trainable_sizes
from parallel_synthesis.model.source import find_source, looks_like_path
from parallel_synthesis.resources import resolve_path
from parallel_synthesis.training.extent import order_of, total_steps
from parallel_synthesis.training.init_plan import InitPlan, look_at_init, unattached

if TYPE_CHECKING:
    from parallel_synthesis.data.index import Loose

RowsFrom = Literal["cached index", "indexed", "manifest", "unknown"]
_NOWHERE = Path(os.devnull) / "nowhere"  # an index cache that can not be written
_STATE_BYTES_PER_RANK = 40_000  # RNG streams and counters of one logical rank, as measured
_OVERHEAD_BYTES = 26_000  # headers, JSON files with the run's record, the epoch's RNG state


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One task of the mix. rows: valid rows in use. steps and what is dropped: of a full epoch.

    loose: branches whose extract is not the end of its context, None where the rows have not been read.
    """

    task: str
    file: Path
    rows: int | None
    rows_from: RowsFrom
    bad_rows: int
    loose: Loose | None = None
    steps: int | None = None
    dropped_rows: int | None = None
    dropped_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class MilestonePlan:
    """A step that is kept for ever; `reached`: it lies within the run."""

    step: int
    name: str
    reached: bool


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """count, first, last: of all saves, step 0 included. kept: steps on the disk when they are most."""

    count: int
    first: int
    last: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class DiskPlan:
    """Bytes: of one checkpoint (estimated from the backbone's shapes), of all at their peak, free at OUT."""

    checkpoint: int
    needed: int
    free: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps are global, None where a row count is unknown. missing: what must be there before it can run.

    refused: what a start would raise although the files are there, such as rows that are not valid.
    init: the checkpoint whose components it starts from.
    """

    tasks: tuple[TaskPlan, ...]
    ranks: int
    batch_size: int
    epochs: int
    steps_per_epoch: int | None
    total_steps: int | None
    saves: SavePlan | None
    milestones: tuple[MilestonePlan, ...]
    disk: DiskPlan | None
    trainable_parameters: int | None
    init: InitPlan | None
    missing: tuple[str, ...]
    refused: tuple[ParallelSynthesisError, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """What one logical rank takes at a step: row numbers among the task's valid rows, from 0."""

    rank: int
    task: str
    rows: tuple[int, ...]


def missing_inputs(config: Config) -> list[str]:
    """Data files and a local backbone that are not there. Looks only; quick enough for every start."""
    found = []
    for name in config.data.tasks:
        path = _path(config, name, config.data.files)
        if not path.exists():
            found.append(f"data of task {name}: {path}")
    for name in config.evaluate.files:
        path = _path(config, name, config.evaluate.files)
        if not path.exists():
            found.append(f"held-out data of task {name}: {path}")
    try:
        find_source(config.backbone.model, config.backbone.revision)
    except BackboneError as error:
        found.append(str(error))
    return found


def refuse_existing(paths: RunPaths) -> None:
    """Raises RunExistsError when OUT holds a run, or anything else that is not ours to mix with."""
    if paths.run_args.exists() or paths.train_log.exists() or paths.step_checkpoints.exists():
        raise RunExistsError(
            f"{paths.out} already holds a run; go on with it by `ps resume {paths.out}`, "
            f"or start anew by --overwrite, which moves it aside"
        )
    if paths.out.exists() and (not paths.out.is_dir() or any(paths.out.iterdir())):
        raise RunExistsError(f"{paths.out} is not an empty directory; name another --out")


def plan(
    config: Config, *, cache: Path | None = None, out: Path | None = None, init: str | None = None
) -> Plan:
    """Plans a run. cache: where indices are kept (None: the usual place), only read. out: for its free space.

    init: the checkpoint to start from; CheckpointError when it is none, since a misspelt one is no plan. The config
    has canonical task names (training/task_names.py). Nothing else that is missing is an error here.
    """
    shapes = read_shapes(config.backbone.model, config.backbone.revision) or {}
    start, unfit = look_at_init(init, config, shapes) if init is not None else (None, [])
    missing = missing_inputs(config)
    warnings: list[str] = []
    refused: list[ParallelSynthesisError] = []
    tasks = []
    for name in config.data.tasks:
        task, problem = _task(config, name, cache)
        tasks.append(task)
        refused += [problem] if problem is not None else []
    if config.run.method == "fixed_parallel_kv":
        notes = (task.loose.note(task.task) for task in tasks if task.loose is not None)
        warnings += [note for note in notes if note is not None]
    note = _download(config)
    warnings += [note] if note is not None else []
    order = None
    if all(task.rows is not None for task in tasks):
        try:
            order = _order(config, tasks)
        except DataError as error:
            refused.append(error)
    if order is not None:
        tasks = [_with_order(task, order) for task in tasks]
        warnings += [f"task {task.task} fills no step: {task.rows} rows" for task in tasks if not task.steps]
    total = None if order is None else _total(config, order.steps_per_epoch, warnings)
    foreign = unattached(config, shapes)
    refused += [*([] if foreign is None else [foreign]), *unfit]
    sizes = None if foreign is not None else trainable_sizes(shapes, config.lora, config.mapper)
    trained = None
    disk = None
    if sizes is not None:
        trained = {"both": sizes.mapper + sizes.lora, "mapper_only": sizes.mapper, "lora_only": sizes.lora}[
            config.run.components
        ]
        if total is not None:
            stored = 4 * (sizes.mapper + sizes.lora) + 8 * trained + 200 * sizes.lora_tensors
            stored += _OVERHEAD_BYTES + _STATE_BYTES_PER_RANK * config.run.ranks
            disk = _disk(config, stored, total, out, warnings)
    milestones = tuple(
        MilestonePlan(
            step=step, name=milestone_name(config.recipe, step), reached=total is not None and step <= total
        )
        for step in sorted(set(config.checkpoint.milestones))
    )
    if total is not None:
        warnings += [
            f"milestone {item.step} lies beyond the end of the run ({total} steps)"
            for item in milestones
            if not item.reached
        ]
    return Plan(
        tasks=tuple(tasks),
        ranks=config.run.ranks,
        batch_size=config.data.batch_size,
        epochs=config.run.epochs,
        steps_per_epoch=None if order is None else order.steps_per_epoch,
        total_steps=total,
        saves=None if total is None else _saves(config, total),
        milestones=milestones,
        disk=disk,
        trainable_parameters=trained,
        init=start,
        missing=tuple(missing),
        refused=tuple(refused),
        warnings=tuple(warnings),
    )


def rows_at(config: Config, planned: Plan, step: int) -> tuple[RankRows, ...]:
    """Which rows every logical rank takes at global step `step` (1-based, as in train.log).

    Raises DataError for a step outside the run, or when the run's rows are unknown.
    """
    if planned.steps_per_epoch is None or planned.total_steps is None:
        raise DataError(
            "the row counts of some tasks are unknown, so no step can be looked up; "
            f"still missing: {'; '.join([*planned.missing, *map(str, planned.refused)])}"
        )
    if not 1 <= step <= planned.total_steps:
        raise DataError(f"step {step}: expected 1 to {planned.total_steps}, the steps of this run")
    epoch, index = divmod(step - 1, planned.steps_per_epoch)
    drawn = _order(config, planned.tasks).epoch(epoch)
    batches = [(rank, drawn.batch(index, rank)) for rank in range(planned.ranks)]
    return tuple(RankRows(rank=rank, task=batch.task, rows=batch.rows) for rank, batch in batches)


def _order(config: Config, tasks: Iterable[TaskPlan]) -> Order:
    return order_of(config, {task.task: task.rows or 0 for task in tasks})


def _with_order(task: TaskPlan, order: Order) -> TaskPlan:
    return dataclasses.replace(
        task,
        steps=order.steps_per_task[task.task],
        dropped_rows=order.dropped_rows[task.task],
        dropped_batches=order.dropped_batches[task.task],
    )


def _total(config: Config, steps_per_epoch: int, warnings: list[str]) -> int:
    asked = config.run.steps_per_epoch
    if asked is not None and asked > steps_per_epoch:
        warnings.append(f"run.steps_per_epoch = {asked}: the data has {steps_per_epoch} steps")
    total = steps_per_epoch * config.run.epochs
    limit = config.run.max_steps
    if limit is not None and limit > total:
        warnings.append(f"run.max_steps = {limit}: the run ends after {total} steps")
    return total_steps(config, steps_per_epoch)


def _task(config: Config, name: str, cache: Path | None) -> tuple[TaskPlan, DataError | StorageError | None]:
    """The task's rows, and why a start would refuse its file (that it is absent is said by missing_inputs)."""
    task = find_task(name, own=config.data.files)
    path = _path(config, name, config.data.files)
    limit = config.data.max_rows
    size = path.stat().st_size if path.exists() else None
    entry = manifest_entry(name)
    if entry is not None and config.data.files.get(name, entry.path) == entry.path:
        known, expected = entry.rows, entry.bytes
    else:
        known, expected = None, None

    def planned(rows: int | None, rows_from: RowsFrom, bad: int = 0, loose: Loose | None = None) -> TaskPlan:
        if rows is not None and limit is not None:
            rows = min(rows, limit)
        return TaskPlan(task=name, file=path, rows=rows, rows_from=rows_from, bad_rows=bad, loose=loose)

    if size is None:
        return planned(known, "unknown" if known is None else "manifest"), None
    indexed = path.is_file() and _is_indexed(task, path, cache)
    if not indexed and size == expected:
        return planned(known, "manifest"), None
    try:
        return planned(*_count(config, task, path, cache if indexed else _NOWHERE)), None
    except (DataError, StorageError) as error:
        return planned(None, "unknown"), error


def _is_indexed(task: Task, path: Path, cache: Path | None) -> bool:
    """True when opening the rows will find its index in the cache and so write nothing."""
    from parallel_synthesis.data.cache import Entry, Identity, cache_directory

    entry = Entry(cache_directory() if cache is None else cache, path, task)
    try:
        with path.open("rb") as file:
            index = entry.load(Identity.of(file.fileno()))
    except OSError:
        return False
    return index is not None and (index.text is None or entry.text_path.is_file())


def _count(config: Config, task: Task, path: Path, cache: Path | None) -> tuple[int, RowsFrom, int, Loose]:
    from parallel_synthesis.data.index import open_rows

    with open_rows(
        task, path, on_bad_row=config.data.on_bad_row, max_rows=config.data.max_rows, cache=cache
    ) as file:
        return file.rows, "cached index" if file.reused else "indexed", len(file.bad), file.loose


def _download(config: Config) -> str | None:
    """A note when the backbone is a Hub id that is not in the local cache."""
    model, revision = config.backbone.model, config.backbone.revision
    if looks_like_path(model) or resolve_path(model).exists():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return f"backbone.model = {model}: not a Hub id"
    return (
        None
        if isinstance(cached, str)
        else f"backbone {model} is not in the Hub cache: the start downloads it"
    )


def _path(config: Config, name: str, files: Mapping[str, str]) -> Path:
    return task_path(find_task(name, own=files), root=config.data.root, files=files)


def _saves(config: Config, total: int) -> SavePlan:
    saved = saved_steps(total, config.checkpoint)
    return SavePlan(
        count=len(saved), first=saved[0], last=saved[-1], kept=len(kept_steps(total, config.checkpoint))
    )


def _disk(config: Config, checkpoint: int, total: int, out: Path | None, warnings: list[str]) -> DiskPlan:
    needed = disk_needed(checkpoint, total, config.checkpoint)
    free = None if out is None else free_bytes(out)
    if free is not None and free < needed:
        warnings.append(f"{out}: {free} bytes are free and the checkpoints take {needed}")
    return DiskPlan(checkpoint=checkpoint, needed=needed, free=free)
