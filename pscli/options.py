"""The options that every command has, with one wording. Output.from_call reads their values, so commands ignore them."""

from __future__ import annotations

from typing import Annotated

import typer

HUB = "OWNER/NAME[@REVISION] or hf://OWNER/NAME[@REVISION] of the Hub"  # wherever a checkpoint is taken
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print results, warnings and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and torchrun's own messages.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.FIELD=VALUE",
        help="Override a field (`ps train RECIPE --show` lists them); may be repeated. A list is a,b or '[a, b]'; "
        "`none` unsets a field that may be unset.",
    ),
]
Nproc = Annotated[int | None, typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine.")]
MaxSteps = Annotated[
    int | None, typer.Option("--max-steps", metavar="N", help="End after N global steps, skips included.")
]
Device = Annotated[str | None, typer.Option("--device", metavar="D", help="auto, cpu, cuda or cuda:N.")]
