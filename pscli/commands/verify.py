"""`ps verify`: are the bytes of a run or checkpoint those of its manifests, and can its steps be reproduced."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parallel_synthesis.errors import DivergenceError, VerificationError
from pscli import running
from pscli.context import Call
from pscli.options import Debug, Json, Quiet


def verify(
    ctx: typer.Context,
    path: Annotated[str, typer.Argument(help="A run, one of its checkpoints or milestones, or RUN@NAME.")],
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="K", min=1, help="Do K steps again and compare them with the log."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check every byte of a run's checkpoints against their manifests; with --replay, prove that its steps repeat.

    \b
    ps verify runs/a
    ps verify runs/a@general_step_95060
    ps verify runs/a --replay 20          in a scratch directory; the run is not touched
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    if replay is None:
        _bytes(call, path)
    else:
        _replay(call, path, replay)


def _bytes(call: Call, path: str) -> None:
    from parallel_synthesis.checkpoint.layout import (
        RunPaths,
        committed_milestones,
        find_components,
        newest_committed,
    )
    from parallel_synthesis.provenance import manifest

    given = Path(path)
    run = RunPaths(given)
    if run.run_args.exists():
        places = [found.path for found in reversed(newest_committed(given))]
        places += committed_milestones(given).values()
        places += [given] if run.manifest.exists() else []
    else:
        places = [find_components(path)]
    found = {place: manifest.verify(place, extra=place != given) for place in places}
    problems = [f"{place}: {problem}" for place, listed in found.items() for problem in listed]
    if problems or not places:
        raise VerificationError(problems or [f"{path}: there is no committed checkpoint to verify"])
    ends = "" if not run.run_args.exists() or run.manifest.exists() else "; the run is not complete"
    call.output.text(
        f"{len(places)} checkpoint{'s' * (len(places) > 1)}: every byte is as its manifest says{ends}"
    )
    call.output.document({"checked": places, "complete": run.manifest.exists()})


def _replay(call: Call, path: str, count: int) -> None:
    from parallel_synthesis.training.targets import find_target
    from pscli.progress import Watcher

    target = find_target(path)
    watcher = Watcher(call.output, log_every=1)
    with running.stop_signals_interrupt():
        from parallel_synthesis.training.replay import replay

        try:
            result = replay(target, count, observer=watcher)
        finally:
            watcher.close()
    if result.difference is not None:
        raise DivergenceError(
            f"{target.run}: from step {result.from_step} the replay differs: {result.difference}. "
            f"The data, the code, the libraries or the machine are not those that made the log"
        )
    also = f", and the bytes of {len(result.checkpoints)} checkpoints" if result.checkpoints else ""
    call.output.text(f"{result.steps} steps reproduced from step {result.from_step}{also}")
    call.output.document(
        {"reproduced": result.steps, "from_step": result.from_step, "checkpoints": result.checkpoints}
    )
