"""What `ps resume` and its kin are pointed at, and which checkpoint of it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.checkpoint.layout import (
    CHECKPOINT_META,
    MILESTONES,
    STEP_CHECKPOINTS,
    TRAINING_STATE,
    RunPaths,
    committed_milestones,
    find_components,
    parse_step,
)
from parallel_synthesis.checkpoint.nearby import nothing_at
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.errors import CheckpointError, ParallelSynthesisError
from parallel_synthesis.provenance import hub, manifest
from parallel_synthesis.provenance.schema import load_json, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run, and the checkpoint of it that was named, if one was."""

    run: Path
    checkpoint: Path | None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The checkpoint to go on from, and those that were passed over, with the first reason."""

    path: Path
    step: int
    passed_over: tuple[tuple[Path, str], ...]


def find_target(given: str, *, step: int | None = None) -> Target:
    """A run directory, one of its checkpoints or milestones, or RUN@NAME. step: that step's checkpoint of the run.

    Raises CheckpointError for anything that holds no run of ours.
    """
    if hub.hub_id(given) is not None:
        raise CheckpointError(
            f"{given}: no such run; expected a run directory, a checkpoint in one, or RUN@NAME. A checkpoint of the Hub "
            f"is not gone on with in place, but in a new run by `ps resume {given} --out DIR`; a run starts from its "
            f"components by `ps train RECIPE --init {given}`"
        )
    path = Path(given).expanduser()
    named: Path | None = None
    if not path.exists() and "@" in given:
        named = find_components(given)
        path = named.parent.parent
    elif path.is_dir() and not RunPaths(path).run_args.exists():
        inside = path.resolve()
        if (
            inside.parent.name in (STEP_CHECKPOINTS, MILESTONES)
            and RunPaths(inside.parent.parent).run_args.exists()
        ):
            named, path = inside, inside.parent.parent
    if not path.is_dir() and not path.is_file():
        raise nothing_at(given)
    if not RunPaths(path).run_args.exists():
        raise CheckpointError(
            f"{given}: expected a run directory (with run_args.json), a checkpoint in one, or RUN@NAME; "
            f"to start a new run from components alone use `ps train RECIPE --init {given}`"
        )
    if is_reference_record(read_json(RunPaths(path).run_args)):
        raise CheckpointError(
            f"{path} is a run of the reference implementation, which is left as it is; go on with it in a new run "
            f"by `ps resume {path} --out DIR`"
        )
    if step is not None:
        named = _at_step(path, step)
    return Target(run=path, checkpoint=named)


def _at_step(run: Path, step: int) -> Path:
    place = RunPaths(run).step(step)
    if place.is_dir():
        return place
    for milestone in committed_milestones(run).values():
        if _meta_step(milestone) == step:
            return milestone
    there = sorted({found for found, _ in step_directories(run)})
    raise CheckpointError(
        f"{run} has no checkpoint of step {step}; there are: {', '.join(map(str, there)) or 'none'}"
    )


def step_directories(run: Path) -> Iterator[tuple[int, Path]]:
    """(step, path) of everything in step_checkpoints/ that has a step's name, newest first, committed or not."""
    directory = RunPaths(run).step_checkpoints
    if not directory.is_dir():
        return
    steps = ((parse_step(path.name), path) for path in directory.iterdir() if not path.is_symlink())
    yield from sorted(((step, path) for step, path in steps if step is not None), reverse=True)


def choose(target: Target, *, ranks: int) -> Choice:
    """The named checkpoint, or the newest that is whole: all bytes hashed, state and meta of one step and this run.

    Raises CheckpointError when the named one is not whole, or none is; never anything from scratch.
    """
    if target.checkpoint is not None:
        found = why_not(target.checkpoint, ranks=ranks)
        if found is not None:
            raise CheckpointError(
                f"{target.checkpoint} can not be resumed from: {found}; name another checkpoint"
            )
        step = _meta_step(target.checkpoint)
        assert step is not None
        return Choice(path=target.checkpoint, step=step, passed_over=())
    passed_over: list[tuple[Path, str]] = []
    places = [(step, 1, path) for step, path in step_directories(target.run)]
    places += [(_meta_step(path) or 0, 0, path) for path in committed_milestones(target.run).values()]
    for step, _, path in sorted(places, reverse=True):  # a step's own directory before a milestone of it
        found = why_not(path, ranks=ranks)
        if found is None:
            return Choice(path=path, step=step, passed_over=tuple(passed_over))
        passed_over.append((path, found))
    listed = "".join(f"\n  {path.relative_to(target.run)}: {problem}" for path, problem in passed_over)
    raise CheckpointError(
        f"{target.run} has no checkpoint that is whole, so there is nothing to resume from:{listed or ' none was committed'}\n"
        f"Restore one from a copy, or start anew by `ps train RECIPE --out {target.run} --overwrite`; nothing was changed"
    )


def why_not(checkpoint: Path, *, ranks: int) -> str | None:
    """The first reason why a checkpoint can not be resumed from exactly; None when it can."""
    # Here: it loads torch, which a call that only looks for a run does not need.
    from parallel_synthesis.checkpoint.state import read_training_state

    try:
        problems = manifest.verify(checkpoint)
        if problems:
            return str(problems[0])
        step = load_json(checkpoint / CHECKPOINT_META, "checkpoint_meta")["global_step"]
        named = parse_step(checkpoint.name)
        listed = manifest.read(checkpoint)["global_step"]
        if (named is not None and named != step) or listed != step:
            return f"checkpoint_meta.json says step {step}, the directory {named}, the manifest {listed}"
        read_training_state(checkpoint / TRAINING_STATE, ranks=ranks, step=step)
    except ParallelSynthesisError as error:
        return str(error).replace("\n", " ")
    return None


def complete_at(run: Path) -> int | None:
    """Step of a run's final checkpoint when the run is complete and that checkpoint is whole; else None.

    Complete: the manifest in the run directory is valid and its step is the planned end of run_args.json.
    """
    paths = RunPaths(run)
    if not paths.manifest.exists() or manifest.verify(run, extra=False):
        return None
    step = manifest.read(run)["global_step"]
    end: int = load_json(paths.run_args, "run_args")["total_steps"]
    return end if step == end else None


def _meta_step(checkpoint: Path) -> int | None:
    """The step a checkpoint says it is of; None when it does not say, or can not be read."""
    try:
        step: int = load_json(checkpoint / CHECKPOINT_META, "checkpoint_meta")["global_step"]
    except ParallelSynthesisError:
        return None
    return step
