"""`ps snapshot`: keep a checkpoint under a name for ever, list, export and drop what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from parallel_synthesis.errors import CheckpointError, ConfigError
from pscli.context import Call
from pscli.options import HUB, Debug, Json, Quiet
from pscli.output import plain, size, table


def snapshot(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(help=f"A run; with --export also one of its checkpoints, RUN@NAME, or {HUB}."),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Keep the checkpoint of this step, not the newest."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name to keep it under [RECIPE_step_N].")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List what is kept.")] = False,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="DEST", help="Write a plain copy that shares nothing.")
    ] = None,
    drop: Annotated[
        str | None, typer.Option("--drop", metavar="NAME", help="Remove what RUN keeps under this name.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Drop without asking.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Keep a checkpoint of a run for ever, at no cost in disk while its step checkpoint exists too.

    \b
    ps snapshot runs/a                              the newest checkpoint
    ps snapshot runs/a --step 40 --name before-lr
    ps snapshot runs/a --list
    ps snapshot runs/a@before-lr --export /backup/before-lr
    ps snapshot runs/a --drop before-lr

    Of a run of the reference implementation a copy is kept, for it may rewrite its own files.
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    output = call.output
    if sum([list_, export is not None, drop is not None]) > 1:
        raise ConfigError(["--list, --export and --drop exclude each other: give one"])
    from parallel_synthesis.checkpoint import snapshots
    from parallel_synthesis.checkpoint.layout import is_committed, locate_whole
    from parallel_synthesis.provenance import hub

    if export is not None:
        source = locate_whole(run)
        checked = is_committed(source.directory)
        how = snapshots.export(source.directory, export)
        said = "every byte was checked on the way"
        if not checked:
            said = "it has no manifest, so its structure alone was checked; the copy has one"
        shown = source.name if hub.hub_id(run) is not None else source.directory
        output.text(f"exported {shown} to {export}; {said}")
        output.document({"exported": shown, "to": export, "how": how, "checked": checked})
        return
    if hub.hub_id(run) is not None:
        raise CheckpointError(
            f"{run}: no such directory; a checkpoint of the Hub is copied by `ps snapshot {run} --export DIR`, what "
            f"else there is needs a run"
        )
    place = Path(run)
    kept_in, at, kept_as = run.rpartition("@")
    if not place.is_dir() and at and Path(kept_in).is_dir():
        raise CheckpointError(
            f"{run} names one checkpoint, which goes with --export alone; here the run is meant, {kept_in}: "
            f"`ps snapshot {kept_in} --drop {kept_as}` removes it, `ps snapshot {kept_in} --list` lists what is kept"
        )
    if not place.is_dir():
        raise CheckpointError(f"{run}: no such directory; expected a run")
    if list_:
        found = snapshots.listed(place)
        rows = [(item.name, f"{item.step:,}", size(item.bytes), size(item.own_bytes)) for item in found]
        output.text(
            table(rows, header=("name", "step", "size", "of it not shared"))
            if rows
            else "nothing is kept yet"
        )
        output.document({"snapshots": plain(found)})
        return
    if drop is not None:
        _ask(output.progress, drop, yes=yes)
        dropped = snapshots.drop(place, drop)
        output.text(f"dropped {dropped.name} (step {dropped.step:,}), {size(dropped.own_bytes)} freed")
        output.document({"dropped": plain(dropped)})
        return
    kept = snapshots.take(place, step=step, name=name)
    cost = "no bytes" if kept.how == "link" else f"a copy ({size(kept.bytes)}): nothing could be shared"
    output.text(f"kept step {kept.step:,} as {run}@{kept.name}, {cost}")
    output.document({"kept": plain(kept)})


def _ask(terminal: bool, name: str, *, yes: bool) -> None:
    if yes:
        return
    if not terminal:
        raise ConfigError([f"--drop {name} asks first, and there is no terminal to ask on: add --yes"])
    typer.confirm(f"Drop {name} for ever?", abort=True, err=True)
