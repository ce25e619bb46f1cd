"""A run directory, ours or the reference implementation's: its log against its plan, summary and checkpoints (no torch)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.layout import (
    TRAIN_LOG,
    RunPaths,
    committed_milestones,
    milestone_name,
    newest_committed,
)
from parallel_synthesis.data.order import Order
from parallel_synthesis.errors import CheckpointError, DataError, ParallelSynthesisError
from parallel_synthesis.provenance import manifest
from parallel_synthesis.provenance.schema import load_json
from parallel_synthesis.training.inspection.blocks import FIELD
from parallel_synthesis.training.inspection.report import LogReport, report
from parallel_synthesis.training.inspection.runlog import RunLog
from parallel_synthesis.training.log import is_being_written

_LIVE_SECONDS = (
    120.0  # a log that nobody wrote to for so long is not that of a live run, unless its steps are longer
)
_LOSS_DIGITS = 1e-4  # the log rounds to 4 digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A total that train_mixed_summary.json and the log give differently, up to the summary's step."""

    name: str
    log: Any
    summary: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """A step that is to be kept for ever. due: the run has come to it."""

    name: str
    step: int
    present: bool
    due: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A run. planned_steps: None where nothing says; missing: what it lacks to be complete; seconds_left: of a live one."""

    path: Path
    recipe: str | None
    method: str | None
    model: str | None
    planned_steps: int | None
    steps_per_epoch: int | None
    complete: bool
    live: bool
    seconds_left: float | None
    missing: tuple[str, ...]
    milestones: tuple[Milestone, ...]
    checkpoints: tuple[int, ...]
    summary_step: int | None
    disagreements: tuple[Disagreement, ...]
    not_compared: str | None
    log: LogReport
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run's records say of its extent; None where they do not."""

    recipe: str | None
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    attempts: tuple[Mapping[str, Any], ...]
    data: Mapping[str, Mapping[str, Any]]
    total_steps: int | None
    steps_per_epoch: int | None
    batch_size: int
    rows: Mapping[str, int] | None
    steps: Mapping[str, int] | None
    milestones: tuple[int, ...]
    summary: Mapping[str, Any] | None


EMPTY_PLAN = Plan(
    recipe=None,
    config={},
    environment={},
    attempts=(),
    data={},
    total_steps=None,
    steps_per_epoch=None,
    batch_size=1,
    rows=None,
    steps=None,
    milestones=(),
    summary=None,
)


def is_run(path: Path) -> bool:
    """A directory with a train.log."""
    return path.is_dir() and (path / TRAIN_LOG).is_file()


def read_plan(run: Path) -> Plan:
    """The plan of a run directory; of one of the reference as far as its flags go."""
    paths = RunPaths(run)
    record: dict[str, Any] = load_json(paths.run_args, "run_args") if paths.run_args.is_file() else {}
    summary = load_json(paths.summary, "train_mixed_summary") if paths.summary.is_file() else None
    if "config" not in record:
        return _reference_plan(record, summary)
    config = record["config"]
    rows = {task: int(entry["rows"]) for task, entry in record.get("data", {}).items()}
    total = int(record["total_steps"])
    rows_planned, steps_planned, per_epoch = _extent(config, rows, total)
    return Plan(
        recipe=record["recipe"],
        config=config,
        environment=record["environment"],
        attempts=tuple(record.get("attempts", ())),
        data=record["data"],
        total_steps=total,
        steps_per_epoch=per_epoch,
        batch_size=int(config["data"]["batch_size"]),
        rows=rows_planned,
        steps=steps_planned,
        milestones=tuple(config["checkpoint"]["milestones"]),
        summary=summary,
    )


def _reference_plan(flags: dict[str, Any], summary: Mapping[str, Any] | None) -> Plan:
    metrics = {} if summary is None else summary["train_metrics"]
    per_epoch = metrics.get("steps_per_epoch") or flags.get("steps_per_epoch")
    epochs = flags.get("num_epochs", 1)
    known = isinstance(per_epoch, int) and per_epoch > 0 and isinstance(epochs, int)
    batch = flags.get("generate_bs", 1)
    return Plan(
        recipe=None,
        config=flags,
        environment={},
        attempts=(),
        data={},
        total_steps=per_epoch * epochs if known else None,
        steps_per_epoch=per_epoch if known else None,
        batch_size=batch if isinstance(batch, int) and batch > 0 else 1,
        rows=None,
        steps=None,
        milestones=(),
        summary=summary,
    )


def _extent(
    config: Mapping[str, Any], rows: Mapping[str, int], total: int
) -> tuple[dict[str, int] | None, dict[str, int] | None, int | None]:
    """Rows and steps each task has in the run's `total` steps, and the steps of an epoch."""
    batch = int(config["data"]["batch_size"])
    run = config["run"]
    try:
        order = recorded_order(config, rows)
    except (DataError, KeyError):
        return None, None, None
    per_epoch = order.steps_per_epoch
    full = per_epoch == sum(order.steps_per_task.values())
    epochs, rest = divmod(total, per_epoch)
    steps = dict.fromkeys(order.steps_per_task, 0)
    taken = dict.fromkeys(order.steps_per_task, 0)
    if full:
        for task, count in order.steps_per_task.items():
            steps[task] += count * epochs
            taken[task] += (rows[task] - order.dropped_rows[task]) * epochs
    for index, last in (
        [(epochs, rest)] if full else [*((e, per_epoch) for e in range(epochs)), (epochs, rest)]
    ):
        if not last:
            continue
        epoch = order.epoch(index)
        for step in range(last):
            task = epoch.task(step)
            steps[task] += 1
            taken[task] += (
                run["ranks"]
                if batch == 1
                else sum(len(epoch.batch(step, rank).rows) for rank in range(run["ranks"]))
            )
    return taken, steps, per_epoch


def recorded_order(config: Mapping[str, Any], rows: Mapping[str, int]) -> Order:
    """The order of a run, from its record's config and each task's rows. KeyError, DataError when they do not give one."""
    run, data = config["run"], config["data"]
    return Order(
        {task: rows[task] for task in data["tasks"]},
        ranks=run["ranks"],
        batch_size=data["batch_size"],
        seed=run["seed"],
        steps_per_epoch=run["steps_per_epoch"],
    )


def inspect_run(run: Path, *, log: RunLog | None = None, plan: Plan | None = None) -> RunReport:
    """Everything the files of a run say. log, plan: given back to be read on, when a live run is followed.

    Raises CheckpointError where a record is not readable as what it should be, StorageError where not at all.
    """
    paths = RunPaths(run)
    plan = read_plan(run) if plan is None else plan
    log = RunLog(paths.train_log) if log is None else log
    log.update()
    figures = report(log, batch_size=plan.batch_size, rows_planned=plan.rows, steps_planned=plan.steps)
    committed = [found.step for found in newest_committed(run)]
    milestones = _milestones(run, plan, figures.last_step)
    complete, lacking = _complete(paths, plan, figures, milestones)
    left = None if plan.total_steps is None else plan.total_steps - figures.last_step
    pace = figures.seconds_per_step_now
    idle = time.time() - paths.train_log.stat().st_mtime
    written = is_being_written(paths.train_log)
    recent = idle < max(_LIVE_SECONDS, 20 * (pace or 0.0)) and not _ended(log)
    live = not complete and bool(left) and (recent if written is None else written)
    summary_step, disagreements, not_compared = _compare_summary(log, figures, plan)
    settings = plan.config
    own = isinstance(settings.get("run"), Mapping)
    return RunReport(
        path=run,
        recipe=plan.recipe,
        method=settings["run"]["method"] if own else settings.get("method"),
        model=settings["backbone"]["model"] if own else settings.get("model_name"),
        planned_steps=plan.total_steps,
        steps_per_epoch=plan.steps_per_epoch,
        complete=complete,
        live=live,
        seconds_left=left * pace if live and left is not None and pace is not None else None,
        missing=tuple(lacking),
        milestones=milestones,
        checkpoints=tuple(committed),
        summary_step=summary_step,
        disagreements=disagreements,
        not_compared=not_compared,
        log=figures,
        config=plan.config,
        environment=plan.environment,
        attempts=plan.attempts,
    )


def _ended(log: RunLog) -> bool:
    """A [stop] or [error] record is the last thing the log says of its run."""
    last_attempt = log.attempts.lines[-1] if log.attempts.lines else 0
    return any(note.line >= last_attempt for note in log.notes)


def _milestones(run: Path, plan: Plan, last_step: int) -> tuple[Milestone, ...]:
    there = committed_milestones(run)
    found = []
    for step in sorted(set(plan.milestones)):
        name = milestone_name(plan.recipe or "custom", step)
        reached = plan.total_steps is None or step <= plan.total_steps
        found.append(
            Milestone(name=name, step=step, present=name in there, due=reached and step <= last_step)
        )
    named = {milestone.name for milestone in found}
    for name, path in there.items():
        if name not in named:
            found.append(Milestone(name=name, step=_step_of(path), present=True, due=True))
    return tuple(found)


def _step_of(path: Path) -> int:
    try:
        step: int = manifest.read(path)["global_step"]
    except ParallelSynthesisError:
        return 0
    return step


def _complete(
    paths: RunPaths, plan: Plan, figures: LogReport, milestones: tuple[Milestone, ...]
) -> tuple[bool, list[str]]:
    """Whether the final manifest is there, fits and is the planned end's; and what is lacking."""
    lacking = []
    total = plan.total_steps
    if total is None:
        lacking.append("the planned number of steps: no record says it")
    elif figures.last_step < total:
        lacking.append(f"steps {figures.last_step + 1:,} to {total:,}")
    if figures.missing:
        lacking.append(f"{figures.missing:,} steps within the log")
    lacking += [f"milestone {m.name}, which was due" for m in milestones if m.due and not m.present]
    lacking += [
        f"milestone {m.name}, still to come"
        for m in milestones
        if not m.due and not m.present and (total or 0) >= m.step
    ]
    if not paths.manifest.exists():
        lacking.append("the final checkpoint (its manifest.json is written at the end)")
        return False, lacking
    problems = manifest.verify(paths.out, quick=True, extra=False)
    if problems:
        lacking.append(f"final checkpoint: {problems[0]}")
        return False, lacking
    step = manifest.read(paths.out).get("global_step")
    if total is not None and step != total:
        lacking.append(f"a final checkpoint of step {total:,} (there is one of step {step:,})")
    return not problems and step == total, lacking


def _compare_summary(
    log: RunLog, figures: LogReport, plan: Plan
) -> tuple[int | None, tuple[Disagreement, ...], str | None]:
    """The summary's totals against the log's up to the same step; or why they can not be compared."""
    if plan.summary is None:
        return None, (), "there is no train_mixed_summary.json"
    metrics = plan.summary["train_metrics"]
    step = int(metrics["global_steps"])
    if figures.every > 1:
        return step, (), f"the log holds only every {figures.every}th step"
    if step > figures.last_step:
        return step, (Disagreement(name="global_steps", log=figures.last_step, summary=step),), None
    if log.blocks is None:
        return step, (), "the log holds no step"
    blocks = log.blocks if step == figures.last_step else log.sums(figures.first_step, step)
    sums = blocks.total()
    whole = sums.sum(axis=0)
    unsaid = whole[FIELD["rows_unsaid"]] > 0

    def by_task(field: str) -> dict[str, int]:
        return {
            name: int(sums[number, FIELD[field]])
            for number, name in enumerate(log.tasks.names)
            if number < len(sums) and sums[number, FIELD[field]]
        }

    pairs: list[tuple[str, Any]] = [
        ("optimizer_steps", int(whole[FIELD["updates"]])),
        ("skipped_sync_steps", int(whole[FIELD["skipped"]])),
        ("skipped_steps", int(whole[FIELD["skipped"]])),
        ("target_tokens", int(whole[FIELD["tokens"]])),
        ("per_task_steps", by_task("updates")),
        ("skips_by_reason", {name: int(c.sum()) for name, c in sorted(blocks.reasons.items()) if c.any()}),
    ]
    if not unsaid:
        pairs += [
            ("per_task_seen_samples", by_task("rows")),
            ("skipped_samples", int(whole[FIELD["skipped_rows"]])),
        ]
    found = [
        Disagreement(name=name, log=mine, summary=metrics[name])
        for name, mine in pairs
        if name in metrics and mine != metrics[name]
    ]
    tokens = whole[FIELD["finite_tokens"]]
    loss = metrics.get("avg_loss")
    if (
        tokens
        and isinstance(loss, int | float)
        and not abs(whole[FIELD["loss"]] / tokens - loss) <= _LOSS_DIGITS
    ):
        found.append(Disagreement(name="avg_loss", log=float(whole[FIELD["loss"]] / tokens), summary=loss))
    return step, tuple(found), None


def find_log(given: str) -> Path:
    """The log meant by a run directory or a log's own path. CheckpointError when there is none."""
    path = Path(given).expanduser()
    if is_run(path):
        return path / TRAIN_LOG
    if path.is_file():
        return path
    raise CheckpointError(f"{given}: expected a run directory with a {TRAIN_LOG}, or a log file")


def ends_here(run: Path) -> bool:
    """A run that nobody needs to watch any more: it has its final manifest."""
    return RunPaths(run).manifest.exists()
