"""`ps resume`: continue a stopped run exactly, or take only its place in the data order."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from parallel_synthesis.errors import ConfigError, StorageError
from pscli import running
from pscli.context import Call
from pscli.options import HUB, Debug, Device, Json, MaxSteps, Nproc, Quiet, Sets

_LONGEST_WAIT = 3600.0  # seconds in which the first process indexes the data and copies a checkpoint


def resume(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(
            help="A run, one of its checkpoints or milestones, or RUN@NAME; with --out or --order-from-step also "
            f"{HUB}."
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="From the checkpoint of this step, not the newest."),
    ] = None,
    nproc: Nproc = None,
    max_steps: MaxSteps = None,
    sets: Sets = None,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept-drift", metavar="NAME", help="Go on although this has changed; recorded."),
    ] = None,
    device: Device = None,
    order_from_step: Annotated[
        int | None,
        typer.Option(
            "--order-from-step",
            metavar="N",
            help="Not exact: take only components, and the data order after step N, into a new run.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="R",
            help="With --order-from-step: the recipe to train. With --out: the settings of a checkpoint whose run is "
            "not known, and what a reference run's flags are laid over.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Go on in a new run; the one given is not touched."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Continue a run bit for bit, with nothing to retype.

    The newest checkpoint whose every byte is right is taken; newer or damaged ones are moved to superseded/.
    What has changed since the run began is compared first, and refused where it changes the result.

    \b
    ps resume runs/a
    ps resume runs/a --nproc 2                     any number that divides the logical ranks
    ps resume runs/a --step 40                     go back; later checkpoints are moved, not deleted
    ps resume runs/a --max-steps 500               a later end
    ps resume runs/a --accept-drift torch
    ps resume runs/a --step 40 --out runs/b        in a new run; runs/a may be one of the reference implementation
    ps resume my-lab/general --out runs/b          a checkpoint carries its run's settings, seed and order included
    ps resume CKPT --order-from-step 95060 --recipe general --out runs/b      not exact
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    if order_from_step is not None:
        _take_order(
            call, run, order_from_step, recipe=recipe, out=out, sets=sets, max_steps=max_steps, device=device,
            nproc=nproc,
        )  # fmt: skip
        return
    if recipe is not None and out is None:
        raise ConfigError(
            ["--recipe goes with --out or --order-from-step; a run's own record says what it is"]
        )
    if out is not None:
        more = [] if max_steps is None else [f"run.max_steps={max_steps}"]
        _continue_in(call, run, out, step=step, recipe=recipe, sets=[*(sets or ()), *more], nproc=nproc)
        run, step = str(out), None
    from parallel_synthesis.provenance.schema import load_json
    from parallel_synthesis.recipe import load_record
    from parallel_synthesis.training.targets import complete_at, find_target

    target = find_target(run, step=step)
    paths = target.paths
    resolved = load_record(
        load_json(paths.run_args, "run_args"),
        path=paths.run_args,
        sets=sets or (),
        flags={"--max-steps": max_steps, "--device": device},
    )
    worker, launching = running.role(call, nproc)
    if not worker and step is None and max_steps is None and not sets:
        done = complete_at(target.run)
        if done is not None:
            call.output.text(f"{target.run} is complete at step {done:,}; nothing to do")
            call.output.document({"complete": True, "out": target.run, "step": done})
            return
    if launching:
        arguments = ["resume", run]
        for flag, value in (("--step", step), ("--max-steps", max_steps), ("--device", device)):
            arguments += [] if value is None else [flag, str(value)]
        for flag, values in (("--set", sets), ("--accept-drift", accept)):
            for item in values or ():
                arguments += [flag, item]
        raise typer.Exit(
            running.launched(call, resolved.config, out=target.run, nproc=nproc, arguments=arguments)
        )
    from pscli import reports
    from pscli.progress import Watcher

    watcher = Watcher(call.output, log_every=resolved.config.log.every)
    from parallel_synthesis.training import resume as library

    call.output.stops.check()  # loading torch may lose an interrupt
    options = library.ResumeOptions(
        max_steps=max_steps,
        sets=sets or (),
        accept=accept or (),
        device=device,
        argv=running.typed_arguments(call),
    )
    try:
        result = library.resume(target, options, observer=watcher)
    finally:
        watcher.close()
    call.output.text(reports.ending(resolved, result))
    call.output.document(reports.result_document(resolved, result))


def _continue_in(
    call: Call,
    given: str,
    out: Path,
    *,
    step: int | None,
    recipe: str | None,
    sets: Sequence[str],
    nproc: int | None,
) -> None:
    """Makes `out` a run that stands where `given` stands; an ordinary resume of it follows.

    Under a torchrun of the user's own the first process makes it and the others wait for its directory.
    """
    from parallel_synthesis.training.continuation import begin, find_source, settings_from, wait_for

    worker, _ = running.role(call, nproc)
    if worker and os.environ["RANK"] != "0":
        deadline = time.monotonic() + _LONGEST_WAIT
        while not wait_for(out):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{out}: the first process has not made it; do all see the same directory?"
                )
            time.sleep(0.2)
        return
    source = find_source(given, step=step)
    if source is None:
        raise ConfigError(
            [
                f"{given} has components without a training state: take only its place in the order by "
                f"--order-from-step N --recipe R --out {out}, or start from it by `ps train R --init {given}`"
            ]
        )
    said = begin(
        source, out, recipe=recipe, sets=sets, environ=os.environ, argv=running.typed_arguments(call)
    )
    unread = f"; recipe {recipe} is not read" if source.ours and recipe is not None else ""
    call.output.note(f"the settings are {settings_from(source, recipe)}{unread}")
    call.output.note(f"{out} goes on from {source.name}, step {source.step:,}")
    for text in said:
        call.output.warning(f"not carried over: {text}")


def _take_order(
    call: Call,
    checkpoint: str,
    step: int,
    *,
    recipe: str | None,
    out: Path | None,
    sets: list[str] | None,
    max_steps: int | None,
    device: str | None,
    nproc: int | None,
) -> None:
    """A new run from components alone, its data order begun after a completed step."""
    from parallel_synthesis.recipe import load_recipe
    from parallel_synthesis.training.task_names import with_canonical_tasks

    if out is None or recipe is None:
        raise ConfigError(["--order-from-step needs --out (the new run) and --recipe (what to train)"])
    resolved = load_recipe(
        recipe,
        sets=sets or (),
        flags={"--max-steps": max_steps, "--device": device},
        environ=os.environ,
        complete=with_canonical_tasks,
    )
    if running.role(call, nproc)[1]:
        from parallel_synthesis.checkpoint.layout import locate

        arguments = [
            "resume",
            locate(checkpoint).name,
            "--order-from-step",
            str(step),
            "--recipe",
            recipe,
            "--out",
            str(out),
        ]
        for item in sets or ():
            arguments += ["--set", item]
        for flag, value in (("--max-steps", max_steps), ("--device", device)):
            arguments += [] if value is None else [flag, str(value)]
        raise typer.Exit(running.launched(call, resolved.config, out=out, nproc=nproc, arguments=arguments))
    running.trained(call, resolved, out, init=checkpoint, order_from_step=step)
