"""Proof by repetition: restore a checkpoint of a run in a scratch directory, do K steps again, compare with its log."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.checkpoint.layout import (
    ADAPTER_MODEL,
    CACHE_MAPPER,
    TRAINING_STATE,
    RunPaths,
    committed_milestones,
    is_committed,
)
from parallel_synthesis.checkpoint.state import canonical_digest, read_training_state
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import drift
from parallel_synthesis.provenance.manifest import read as read_manifest
from parallel_synthesis.provenance.schema import load_json
from parallel_synthesis.recipe import load_record
from parallel_synthesis.training.engine import build_engine, open_processes
from parallel_synthesis.training.events import Observer
from parallel_synthesis.training.loop import steps
from parallel_synthesis.training.repeats import Difference, Repeats, read_logged
from parallel_synthesis.training.run import Run
from parallel_synthesis.training.saving import Saver
from parallel_synthesis.training.setup import record_of
from parallel_synthesis.training.signals import StopRequest
from parallel_synthesis.training.targets import Target, step_directories, why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """steps: how many were done again, from `from_step` on. checkpoints: steps whose saved bytes were compared too."""

    run: Path
    from_step: int
    steps: int
    checkpoints: tuple[int, ...]
    difference: Difference | None


def replay(target: Target, count: int, *, observer: Observer) -> ReplayResult:
    """Does `count` steps of a run again, from its newest whole checkpoint at or before (last logged step - count).

    Nothing of the run is touched. CheckpointError when no checkpoint allows that many, naming what is possible.
    """
    paths = RunPaths(target.run)
    saved = load_json(paths.run_args, "run_args")
    logged = read_logged(paths.train_log, after=0)
    resolved = load_record(saved, path=paths.run_args)
    checkpoint, first = _start(target, count, last=max(logged, default=0), ranks=resolved.config.run.ranks)
    processes, device = open_processes(resolved.config)
    engine = build_engine(resolved.config, processes, device, components=checkpoint)
    record = record_of(resolved, engine, argv=())
    for item in drift.compare(saved, record.document()):
        if item.kind != drift.HARMLESS:
            observer.warning(f"changed since: {item.name}: {item.saved} -> {item.now} ({item.kind})")
    state = read_training_state(checkpoint / TRAINING_STATE, ranks=resolved.config.run.ranks, step=first)
    engine.restore(checkpoint, state)
    with tempfile.TemporaryDirectory(prefix="ps-replay-") as scratch:
        place = RunPaths(Path(scratch))
        run = Run(
            engine=engine,
            paths=place,
            saver=Saver(engine, paths=place, record=record, parents=[], observer=observer, evaluations=[]),
            log=None,
            observer=observer,
            evaluations=[],
            repeats=Repeats(expected=logged),
            attempt=0,
        )
        try:
            return _compare(run, target.run, first=first, last=first + count)
        finally:
            run.close()


def _start(target: Target, count: int, *, last: int, ranks: int) -> tuple[Path, int]:
    """The checkpoint to begin at, and its step."""
    if target.checkpoint is not None:
        problem = why_not(target.checkpoint, ranks=ranks)
        if problem is not None:
            raise CheckpointError(
                f"{target.checkpoint} can not be restored: {problem}; name another checkpoint"
            )
        step = read_manifest(target.checkpoint)["global_step"]
        if step + count > last:
            raise CheckpointError(
                f"{target.checkpoint} is at step {step} and the log ends at step {last}: "
                f"at most {last - step} steps can be replayed from it"
            )
        return target.checkpoint, step
    places = {step: path for step, path in step_directories(target.run) if is_committed(path)}
    for milestone in committed_milestones(target.run).values():
        places.setdefault(read_manifest(milestone)["global_step"], milestone)
    for step in sorted(places, reverse=True):
        if step <= last - count and why_not(places[step], ranks=ranks) is None:
            return places[step], step
    possible = [f"up to {last - step} from step {step}" for step in sorted(places) if step < last]
    raise CheckpointError(
        f"{target.run}: the log ends at step {last} and no whole checkpoint lies {count} steps before that; "
        f"possible are {', '.join(possible) or 'none'}"
    )


def _compare(run: Run, original: Path, *, first: int, last: int) -> ReplayResult:
    compared: list[int] = []
    difference: Difference | None = None
    run.observer.started(dataclasses.replace(run.started(), total_steps=last, out=original))
    for record in steps(run, StopRequest(), last=last):
        run.engine.progress.add(record)
        if record.step not in run.repeats.expected:
            raise CheckpointError(
                f"{original}: step {record.step} is not in train.log with a digest; it can not be compared"
            )
        run.observer.step(record)
        difference = run.repeats.check(record.step, record.digest)
        source = _checkpoint_of(original, record.step)
        if difference is None and source is not None:
            run.saver.save(record)
            run.saver.wait()
            difference = _file_difference(record.step, source, run.paths.step(record.step))
            compared.append(record.step)
        if difference is not None:
            break
    return ReplayResult(
        run=original,
        from_step=first,
        steps=run.engine.progress.step - first,
        checkpoints=tuple(compared),
        difference=difference,
    )


def _checkpoint_of(run: Path, step: int) -> Path | None:
    place = RunPaths(run).step(step)
    if is_committed(place):
        return place
    for milestone in committed_milestones(run).values():
        if read_manifest(milestone)["global_step"] == step:
            return milestone
    return None


def _file_difference(step: int, before: Path, now: Path) -> Difference | None:
    """Component files by their digests; the training state by its canonical digest, library versions apart."""
    old, new = read_manifest(before)["files"], read_manifest(now)["files"]
    for file in (CACHE_MAPPER, ADAPTER_MODEL):
        if old[file]["sha256"] != new[file]["sha256"]:
            return Difference(
                step=step, rank=None, component=file, before=old[file]["sha256"], now=new[file]["sha256"]
            )
    one, other = (
        canonical_digest(
            {
                key: value
                for key, value in read_training_state(place / TRAINING_STATE).items()
                if key != "versions"
            }
        )
        for place in (before, now)
    )
    if one != other:
        return Difference(step=step, rank=None, component=TRAINING_STATE, before=one, now=other)
    return None
