"""`ps resume`: continue a stopped run exactly, or take only its place in the data order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from parallel_synthesis.errors import ConfigError
from pscli import running
from pscli.context import Call
from pscli.options import Debug, Device, Json, MaxSteps, Nproc, Quiet, Sets


def resume(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="A run, one of its checkpoints or milestones, or RUN@NAME.")],
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
        str | None, typer.Option("--recipe", metavar="R", help="With --order-from-step: the recipe to train.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="With --order-from-step: the new run.")
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
    ps resume CKPT --order-from-step 95060 --recipe general --out runs/b      not exact
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    if order_from_step is not None:
        _take_order(
            call, run, order_from_step, recipe=recipe, out=out, sets=sets, max_steps=max_steps, device=device
        )
        return
    if recipe is not None or out is not None:
        raise ConfigError(
            ["--recipe and --out go with --order-from-step; a resume goes on in the run itself"]
        )
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
    with running.stop_signals_interrupt():
        from parallel_synthesis.training import resume as library

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
) -> None:
    """A new run from components alone, its data order begun after a completed step."""
    from parallel_synthesis.recipe import load_recipe
    from parallel_synthesis.training.plan import with_canonical_tasks
    from pscli import reports
    from pscli.progress import Watcher

    if out is None or recipe is None:
        raise ConfigError(["--order-from-step needs --out (the new run) and --recipe (what to train)"])
    if running.role(call, None)[1]:
        raise ConfigError(
            ["--order-from-step starts a new run; give it torchrun by running under torchrun itself"]
        )
    resolved = load_recipe(
        recipe,
        sets=sets or (),
        flags={"--max-steps": max_steps, "--device": device},
        environ=os.environ,
        complete=with_canonical_tasks,
    )
    watcher = Watcher(call.output, log_every=resolved.config.log.every)
    with running.stop_signals_interrupt():
        from parallel_synthesis.training import loop

        try:
            result = loop.train(
                resolved,
                out=out,
                observer=watcher,
                init=checkpoint,
                argv=running.typed_arguments(call),
                order_from_step=step,
            )
        finally:
            watcher.close()
    call.output.text(reports.ending(resolved, result))
    call.output.document(reports.result_document(resolved, result))
