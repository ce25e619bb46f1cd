"""Taking up a stopped run: which checkpoint, what has changed since, what to put aside, and the state put back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.commit import clear_stale, set_latest
from parallel_synthesis.checkpoint.layout import CHECKPOINT_META, TRAINING_STATE, RunPaths, is_committed
from parallel_synthesis.checkpoint.state import read_training_state
from parallel_synthesis.errors import CheckpointError, ConfigError, StorageError
from parallel_synthesis.provenance import drift
from parallel_synthesis.provenance.schema import load_json
from parallel_synthesis.recipe import load_record
from parallel_synthesis.training.engine import Engine, build_engine, open_processes, pinned, warnings
from parallel_synthesis.training.events import Observer, TrainResult
from parallel_synthesis.training.log import LogWriter, count_attempts
from parallel_synthesis.training.loop import run_to_end
from parallel_synthesis.training.place import check_place, loop_key
from parallel_synthesis.training.ranks import Processes
from parallel_synthesis.training.records import RunRecord, config_sha256, read_evaluations
from parallel_synthesis.training.repeats import Repeats, read_logged
from parallel_synthesis.training.run import Run
from parallel_synthesis.training.saving import Saver, keep_milestone
from parallel_synthesis.training.setup import record_of
from parallel_synthesis.training.targets import Choice, Target, choose, step_directories


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """What a resume may change. accept: names of drift; sets: `section.field=value`."""

    max_steps: int | None = None
    sets: Sequence[str] = ()
    accept: Sequence[str] = ()
    device: str | None = None
    argv: Sequence[str] = ()


def resume(target: Target, options: ResumeOptions, *, observer: Observer) -> TrainResult:
    """Continues a run from its newest good checkpoint, or from the one named, to the planned end.

    Collective. Raises CheckpointError when no checkpoint is whole or the named one is not, and when something that
    decides the result has changed and is not accepted by name; nothing was moved or written then.
    """
    run = take_up(target, options, observer=observer)
    try:
        return run_to_end(run)
    finally:
        run.close()


def take_up(target: Target, options: ResumeOptions, *, observer: Observer) -> Run:
    """Everything of a resume before its first step."""
    paths = RunPaths(target.run)
    saved = load_json(paths.run_args, "run_args")
    if saved.get("config_sha256") not in (None, config_sha256(saved["config"])):
        raise CheckpointError(
            f"{paths.run_args}: its config was edited (config_sha256 does not fit it): restore it from a copy; "
            f"changes are made by --set, so that they are recorded"
        )
    resolved = load_record(
        saved,
        path=paths.run_args,
        sets=options.sets,
        flags={"--max-steps": options.max_steps, "--device": options.device},
    )
    config = pinned(resolved.config)
    processes, device = open_processes(config)
    choice = _choose(target, processes, ranks=config.run.ranks)
    engine = build_engine(config, processes, device, components=choice.path)
    if engine.total_steps < choice.step:
        raise ConfigError(
            [
                f"the planned end, step {engine.total_steps}, lies before the checkpoint's step {choice.step}: "
                f"give a later end, or an earlier checkpoint by --step"
            ]
        )
    record, found = _check_drift(saved, record_of(resolved, engine, argv=options.argv), options, processes)
    state = read_training_state(choice.path / TRAINING_STATE, ranks=config.run.ranks, step=choice.step)
    engine.restore(choice.path, state)
    if not any(item.kind == drift.DATA for item in found):  # then another order was asked for
        check_place(
            choice.path,
            state[loop_key(config.run.ranks)],
            steps_per_epoch=engine.progress.steps_per_epoch,
            epoch_rng_state=engine.preparer.epoch_rng_state,
        )
    evaluations = read_evaluations(paths, until=choice.step)
    saver = Saver(
        engine,
        paths=paths,
        record=record,
        parents=_parents(saved, choice),
        observer=observer,
        evaluations=evaluations,
    )
    saver.resumed_at(choice.step)
    log, attempt = None, 0
    if processes.is_first:
        if choice.step > 0 and not (paths.train_log.is_file() and paths.train_log.stat().st_size):
            observer.warning(f"{paths.train_log} is missing or empty: steps 1-{choice.step} have no record")
        log = LogWriter(paths.train_log, ranks=processes.ranks)  # first: it is the run's lock
        for text in warnings(engine):
            observer.warning(text)
        attempt = count_attempts(paths.train_log) + 1
        record = _with_attempt(record, saved, attempt, choice, found, options)
        for place in (paths.out, paths.step_checkpoints, paths.milestones):
            clear_stale(place)  # what a killed writer left half done, under hidden names
        _put_aside(paths, choice, attempt, observer)
        record.write(paths)
        _announce(log, paths, choice, attempt, found, record, engine, observer)
        for step in sorted(engine.config.checkpoint.milestones):
            if step <= choice.step and is_committed(paths.step(step)):
                keep_milestone(paths, config.recipe, step)
    processes.exchange(None)  # nobody steps before the places are clear
    changed = any(item.kind != drift.HARMLESS for item in found)
    return Run(
        engine=engine,
        paths=paths,
        saver=saver,
        log=log,
        observer=observer,
        evaluations=evaluations,
        repeats=Repeats(
            expected=read_logged(paths.train_log, after=choice.step) if processes.is_first else {},
            stops=config.log.on_divergence == "stop" and not changed,
        ),
        attempt=attempt,
    )


def _choose(target: Target, processes: Processes, *, ranks: int) -> Choice:
    """The first process looks; all take its choice."""
    mine = choose(target, ranks=ranks) if processes.is_first else None
    choice = processes.exchange(mine)[0]
    assert choice is not None
    return choice


def _check_drift(
    saved: dict[str, Any], now: RunRecord, options: ResumeOptions, processes: Processes
) -> tuple[RunRecord, list[drift.Drift]]:
    """Refuses what changes the result and is not accepted. The first process compares; all get the verdict."""
    if processes.is_first:
        document = now.document()
        if not saved.get("backbone"):  # taken over from the reference, which does not record it
            saved = {**saved, "backbone": document["backbone"]}
        found = drift.compare(saved, document)
        stopping = drift.refused(found, options.accept)
        if stopping:
            rows = [("", "saved", "now", "class")] + [(d.name, d.saved, d.now, d.kind) for d in found]
            widths = [max(len(row[column]) for row in rows) for column in range(3)]
            listed = "\n".join(
                "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]])
                for row in rows
            )
            names = " ".join(f"--accept-drift {name}" for name in dict.fromkeys(d.name for d in stopping))
            raise CheckpointError(
                f"this is not what the run was started with:\n{listed}\n"
                f"Restore what was, or go on knowingly (recorded in the run, the checkpoints and the log) by {names}"
            )
    else:
        found = []
    found = processes.exchange(found)[0]
    accepted = [d.name for d in found if d.kind != drift.HARMLESS]
    everything = dict.fromkeys([*saved.get("accepted_drift", []), *accepted])
    return dataclasses.replace(now, accepted_drift=list(everything)), found


def _with_attempt(
    record: RunRecord,
    saved: dict[str, Any],
    attempt: int,
    choice: Choice,
    found: Sequence[drift.Drift],
    options: ResumeOptions,
) -> RunRecord:
    entry = {
        "attempt": attempt,
        "from_step": choice.step,
        "checkpoint": choice.path.name,
        "argv": list(options.argv),
        "drift": [dataclasses.asdict(item) for item in found],
    }
    return dataclasses.replace(
        record,
        argv=saved.get("argv", []),
        attempts=[*saved.get("attempts", []), entry],
        continued_from=saved.get("continued_from"),
    )


def _parents(saved: dict[str, Any], choice: Choice) -> list[dict[str, Any]]:
    """What the run was begun from: the checkpoint of another run that it went on from, else what its own ones say."""
    continued: dict[str, Any] | None = saved.get("continued_from")
    if continued is not None:
        return [continued]
    parents: list[dict[str, Any]] = load_json(choice.path / CHECKPOINT_META, "checkpoint_meta").get(
        "parents", []
    )
    return parents


def _put_aside(paths: RunPaths, choice: Choice, attempt: int, observer: Observer) -> None:
    """Moves step directories that are newer than the choice, or damaged, to superseded/; `latest` goes back first."""
    moving = [
        path
        for step, path in step_directories(paths.out)
        if step > choice.step or any(path == damaged for damaged, _ in choice.passed_over)
    ]
    place = paths.superseded / f"attempt-{attempt}"
    try:
        if is_committed(paths.step(choice.step)):
            set_latest(paths.step_checkpoints, choice.step)
        for path in moving:
            place.mkdir(parents=True, exist_ok=True)
            path.rename(_free_name(place / path.name))
            observer.note(f"moved {path.relative_to(paths.out)} to {place.relative_to(paths.out)}/")
        if paths.manifest.exists():  # a completed run goes on: from here on it is not complete
            paths.manifest.unlink()
    except OSError as error:
        raise StorageError(
            f"{place}: {error.strerror}: superseded checkpoints could not be moved; check permissions and space"
        ) from error


def _free_name(path: Path) -> Path:
    """A kill while moving leaves some moved: the next attempt with the same number must not overwrite them."""
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _announce(
    log: LogWriter,
    paths: RunPaths,
    choice: Choice,
    attempt: int,
    found: Sequence[drift.Drift],
    record: RunRecord,
    engine: Engine,
    observer: Observer,
) -> None:
    """The log's `[resume]` line, and the same for who watches."""
    for path, problem in choice.passed_over:
        observer.warning(f"passed over {path.relative_to(paths.out)}: {problem}")
    for item in found:
        if item.name not in drift.RULED_VARIABLES:
            observer.note(f"changed since: {item.name}: {item.saved} -> {item.now} ({item.kind})")
    observer.note(f"resuming from {choice.path.relative_to(paths.out)} (attempt {attempt})")
    accepted = ",".join(record.accepted_drift) or "none"
    log.line(
        f"[resume] attempt={attempt} from_step={choice.step} checkpoint={choice.path.name} "
        f"processes={engine.processes.world.size} accepted_drift={accepted}"
    )
