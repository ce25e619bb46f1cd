"""`ps train`: list, show, plan and run recipes."""

from __future__ import annotations

# What costs start-up time is imported where it is used: help and a mistyped flag answer at once.
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from parallel_synthesis.config import Config
from parallel_synthesis.errors import ConfigError, DataError
from parallel_synthesis.recipe import Resolved, list_recipes, load_recipe
from pscli import running
from pscli.context import Call
from pscli.options import HUB, Debug, Device, Json, MaxSteps, Nproc, Quiet, Sets
from pscli.output import Output, table


def _canonical(config: Config, listed: Sequence[str]) -> tuple[Config, list[str]]:
    from parallel_synthesis.training.task_names import with_canonical_tasks

    return with_canonical_tasks(config, listed)


def _complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    return [(info.name, info.summary) for info in list_recipes() if info.name.startswith(incomplete)]


def train(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="A shipped recipe's name, or a recipe file.", autocompletion=_complete_recipe),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the shipped recipes.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show the resolved recipe and each field's origin.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; write nothing.")] = False,
    rows_at_step: Annotated[
        int | None,
        typer.Option(
            "--rows-at", metavar="N", help="Dry run: also the rows that global step N takes on each rank."
        ),
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Dry run: tokenise the rows; which steps will the guards skip?")
    ] = False,
    nproc: Nproc = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory of the run [runs/RECIPE-TIME].")
    ] = None,
    sets: Sets = None,
    init: Annotated[
        str | None,
        typer.Option(
            "--init",
            metavar="CKPT",
            help=f"Start from the components of a checkpoint: a directory, a run, RUN@NAME, or {HUB}.",
        ),
    ] = None,
    max_steps: MaxSteps = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Move a run at --out aside first.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a recipe into a new run directory.

    \b
    ps train demo                              a first try, on a CPU, in a minute
    ps train --list
    ps train general --show                    the resolved recipe; save it, edit it, train it
    ps train general --dry-run --rows-at 5
    ps train general --nproc 4 --out runs/a --set optim.learning_rate=3e-4
    ps train path/to/own.toml --init runs/a@general_step_176175
    ps train general --nproc 4 -- --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    """
    del as_json, quiet, debug  # Output.from_call has read them, so that a usage error heeds them too
    call: Call = ctx.obj
    if list_:
        _list(call.output)
        return
    if recipe is None:
        names = ", ".join(info.name for info in list_recipes())
        raise ConfigError([f"which recipe? Shipped: {names}; or give a recipe file (ps train --list)"])
    resolved = load_recipe(
        recipe,
        sets=sets or (),
        flags={"--device": device, "--max-steps": max_steps},
        environ=os.environ,
        complete=_canonical,
    )
    if call.output.reports is None:
        for field, variable in resolved.from_environment.items():
            call.output.warning(f"{field} is taken from the environment variable {variable}")
    if show:
        from pscli import reports

        call.output.text(reports.recipe(resolved))
        call.output.document(reports.recipe_document(resolved))
        return
    if coverage:
        from pscli.commands.inspect import print_coverage

        print_coverage(call.output, resolved.config)
        return
    if dry_run or rows_at_step is not None:
        from pscli import launch

        launch.check_processes(nproc=nproc, extra=call.torchrun, ranks=resolved.config.run.ranks)
        _dry_run(call.output, resolved, out=out, init=init, step=rows_at_step)
        return
    worker, launching = running.role(call, nproc)
    place = _place(out, resolved, worker=worker)
    init = _refuse_early(resolved, place, recipe=recipe, init=init, overwrite=overwrite)
    if launching:
        arguments = _worker_arguments(
            recipe, place, sets=sets or (), init=init, max_steps=max_steps, device=device, overwrite=overwrite
        )
        code = running.launched(call, resolved.config, out=place, nproc=nproc, arguments=arguments)
        raise typer.Exit(code)
    running.trained(call, resolved, place, init=init, overwrite=overwrite)


def _list(output: Output) -> None:
    found = list_recipes()
    output.text(table([(info.name, info.summary) for info in found]))
    output.document(
        {"recipes": [{"name": info.name, "summary": info.summary, "path": info.path} for info in found]}
    )


def _dry_run(
    output: Output, resolved: Resolved, *, out: Path | None, init: str | None, step: int | None
) -> None:
    from parallel_synthesis.training.plan import plan, rows_at
    from pscli import reports

    where = out if out is not None else Path("runs")
    planned = plan(resolved.config, out=where, init=init)
    rows = None if step is None or planned.refused else rows_at(resolved.config, planned, step)
    output.text(reports.plan(resolved, planned, step=step, rows=rows))
    document = reports.plan_document(resolved, planned, step=step, rows=rows)
    if not planned.refused:
        output.document(document)
        return
    from pscli.main import exit_code  # here, since it imports the commands

    # The end that the start itself would come to: whoever asks in a script must not be told that all is well.
    first = planned.refused[0]
    message = f"a start would be refused: {str(first).splitlines()[0].rstrip(':')}"
    message = str(first) if output.mode == "json" else message  # a human has the rest on stdout
    output.failure(first, exit_code(first), message=message, more=document)
    raise typer.Exit(exit_code(first))


def _place(out: Path | None, resolved: Resolved, *, worker: bool) -> Path:
    if out is not None:
        return out
    if worker and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(["--out is missing: the processes of a run must be given the same directory"])
    return Path("runs") / f"{resolved.name}-{datetime.now():%Y%m%d-%H%M%S}"


def _refuse_early(
    resolved: Resolved, out: Path, *, recipe: str, init: str | None, overwrite: bool
) -> str | None:
    """What can be refused in a moment is refused before torch is loaded or a process is started.

    Returns `init` as the run is to know it: a Hub id at its commit, fetched once for all processes.
    """
    from parallel_synthesis.checkpoint.layout import RunPaths, locate
    from parallel_synthesis.training.plan import missing_inputs, refuse_existing

    rank = os.environ.get("RANK") or "0"
    if not overwrite and rank == "0":  # another rank may look when rank 0 has made it already
        refuse_existing(RunPaths(out))
    missing = missing_inputs(resolved.config)
    if missing:
        raise DataError(
            "what the run needs is not there:\n"
            + "\n".join(f"  - {text}" for text in missing)
            + f"\nput it there, or set data.root or data.files; `ps train {recipe} --dry-run` plans without"
        )
    return locate(init, quick=True).name if init is not None else None  # who loads them hashes them


def _worker_arguments(
    recipe: str,
    out: Path,
    *,
    sets: Sequence[str],
    init: str | None,
    max_steps: int | None,
    device: str | None,
    overwrite: bool,
) -> list[str]:
    arguments = ["train", recipe, "--out", str(out)]
    for item in sets:
        arguments += ["--set", item]
    for flag, value in (("--init", init), ("--max-steps", max_steps), ("--device", device)):
        if value is not None:
            arguments += [flag, str(value)]
    return [*arguments, "--overwrite"] if overwrite else arguments
