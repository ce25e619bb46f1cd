"""`parallel-synthesis-train`: the reference implementation's command, run as the `ps train` or `ps resume` it means.

Its flags and our own options may be mixed: `--learning_rate 3e-4 --set lora.r=8 --nproc 4`. `--recipe R` takes a
recipe's values for what no flag says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from parallel_synthesis import compat
from parallel_synthesis.config import OFF, Config
from parallel_synthesis.errors import ConfigError, ParallelSynthesisError
from parallel_synthesis.recipe import sections
from parallel_synthesis.resources import resource
from pscli.output import Output, table
from pscli.start import Stops

PROGRAM = "parallel-synthesis-train"


def run(stops: Stops) -> None:
    """Runs the call in sys.argv (pscli/start.py): never returns."""
    raise SystemExit(main(sys.argv[1:], stops=stops))


def main(arguments: Sequence[str], *, stops: Stops | None = None) -> int:
    """Translates the call and runs it; returns its exit code, by the table of `ps`."""
    from pscli.main import call, exit_code, split_arguments

    words, torchrun = split_arguments(arguments)
    output = Output.from_call(words, os.environ, stops=stops)
    if any(word in ("-h", "--help") for word in words):
        output.text(_help())
        return 0
    try:
        translated, warnings = translate(words, torchrun=torchrun, environ=os.environ)
    except (ParallelSynthesisError, OSError) as error:
        code = exit_code(error)
        output.failure(error, code)
        return code
    if output.reports is None:
        for text in warnings:
            output.warning(text)
    tail = ["--", *torchrun] if torchrun else []
    return call([*translated, *tail], typed=[PROGRAM, *arguments], stops=stops)


def translate(
    words: Sequence[str], *, torchrun: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The words of the `ps` call that is meant, and what has to be said before. Raises ConfigError."""
    found = compat.take_apart(words, options=_options())
    given = compat.settings(found.flags)
    problems = [*found.problems, *given.problems]
    own, recipe = _without(found.own, "--recipe")
    own, nproc = _without(own, "--nproc")
    own, out = _without(own, "--out")
    out = given.save_dir or out
    if given.step is not None and given.load_dir is None:
        problems.append("--resume_from_global_step needs --parallel_kv_load_dir, the checkpoint of that step")
    if given.step is not None and any(word.partition("=")[0] == "--init" for word in own):
        problems.append("--init and --resume_from_global_step exclude each other: give one")
    if problems:
        raise ConfigError(problems)
    fields = _canonical(given.fields)
    sets = [part for item in compat.Settings(fields=fields).assignments() for part in ("--set", item)]
    processes = [] if nproc is None else ["--nproc", nproc]
    base = recipe or str(resource("recipes", "training", f"{compat.RECIPE_NAME}.toml"))
    ranks = [] if recipe is not None else _ranks(nproc, torchrun, environ)
    if given.step is None:
        if recipe is None:
            out = out or _place(fields, environ)
        start = [] if given.load_dir is None else ["--init", given.load_dir]
        place = [] if out is None else ["--out", out]
        return ["train", base, *place, *processes, *start, *ranks, *sets, *own], list(given.warnings)
    assert given.load_dir is not None, "checked above"
    rest = [*processes, *sets, *own]
    call = _resumed(given.load_dir, given.step, base=base, out=out, ranks=ranks, rest=rest)
    return call, list(given.warnings)


def _resumed(
    given: str, step: int, *, base: str, out: str | None, ranks: Sequence[str], rest: Sequence[str]
) -> list[str]:
    """An exact resume where there is a training state, in the run itself or in a new one; else its place in the order."""
    from parallel_synthesis.training.continuation import find_source

    source = find_source(given, step=step)
    own = source.run if source is not None and source.ours else None
    if own is not None and (out is None or Path(out).resolve() == own.resolve()):
        return ["resume", str(own), "--step", str(step), *rest]
    if out is None:
        raise ConfigError(["--parallel_kv_save_dir is missing: the new run that goes on from the checkpoint"])
    if source is not None:
        more = [] if source.ours else ["--recipe", base]
        return ["resume", source.given, "--step", str(step), *more, "--out", out, *rest]
    order = ["--order-from-step", str(step), "--recipe", base]
    return ["resume", given, *order, "--out", out, *ranks, *rest]


def _ranks(nproc: str | None, torchrun: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The reference's order is made for its number of processes; a `--set run.ranks` that follows wins."""
    if torchrun and nproc is None:
        return []
    count = environ.get("WORLD_SIZE") or nproc or "1"
    return ["--set", f"run.ranks={count}"]


def _place(fields: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    if environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            ["--parallel_kv_save_dir is missing: the processes of a run must be given the same directory"]
        )
    model = fields.get("backbone.model") or environ.get("MODEL_NAME", "")
    now = f"{datetime.now():%Y%m%d_%H%M%S}"
    return compat.save_directory(fields, model=model, tasks=fields.get("data.tasks", []), now=now)


def _canonical(fields: Mapping[str, Any]) -> dict[str, Any]:
    from parallel_synthesis.data.tasks import canonical_name

    tasks = fields.get("data.tasks")
    return dict(fields) if tasks is None else {**fields, "data.tasks": [canonical_name(t) for t in tasks]}


def _without(words: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The words without an option that takes a value, and its last value."""
    kept: list[str] = []
    value = None
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.partition("=")
        if name != option:
            kept.append(word)
        elif equals:
            value = text
        elif waiting:
            value = waiting.pop(0)
    return kept, value


def _options() -> dict[str, bool]:
    """Our own options of train and resume -> True for those that take a value."""
    import typer

    from pscli.main import app

    commands: Any = typer.main.get_command(app)
    found = {}
    for name in ("train", "resume"):
        for parameter in commands.commands[name].params:
            for option in getattr(parameter, "opts", ()):
                if option.startswith("--"):
                    found[option] = not parameter.is_flag
    return found


def _help() -> str:
    own = (
        ("--recipe R", "a shipped recipe or a file: its values are the defaults in the place of those below"),
        ("--nproc N", "processes on this machine [1]; without --recipe their number is run.ranks"),
        ("--out DIR", "the run's directory, as --parallel_kv_save_dir, which goes first"),
        ("--set FIELD=VALUE", "any field of a recipe, after the flags"),
        ("--init CKPT", "components to start from, as --parallel_kv_load_dir"),
    )
    rows = [(f"--{name}", _meaning(name, flag)) for name, flag in compat.FLAGS.items()]
    return (
        f"Usage: {PROGRAM} [FLAGS] [OPTIONS of `ps train` and `ps resume`] [-- torchrun's]\n\n"
        "The reference implementation's command: it runs the `ps train` or `ps resume` that its flags mean.\n\n"
        "Our own options, of which `ps train --help` has the others:\n\n"
        + table(own, indent=2)
        + "\n\nThe reference's flags, the recipe fields they set, and [their defaults]:\n\n"
        + table(rows, indent=2)
    )


def _meaning(name: str, flag: compat.Flag) -> str:
    if flag.target is None:
        mark = "refused above 0: " if flag.refused else "ignored: " if flag.why else ""
        return mark + (flag.why or _DIRECTORIES[name])
    section, key, *inner = flag.target.split(".", 2)
    default = getattr(getattr(Config(), section), key)
    if inner:
        shown = "the task's usual file"
    elif default is None:
        shown = "not set" + (": all of them" if key in ("max_rows", "steps_per_epoch") else "")
    elif default in ("", ()):
        shown = "must be given"
    elif section == "guards" and default == OFF:
        shown = "off"
    else:
        shown = str(default).lower() if isinstance(default, bool) else str(default)
    hint = sections()[section][key]
    choices = f", one of {', '.join(get_args(hint))}" if get_origin(hint) is Literal else ""
    off = ", -1 = off" if section == "guards" else ""
    return f"{flag.target}{choices}{off} [{shown}]"


_DIRECTORIES = {
    "parallel_kv_save_dir": "the run's directory, --out [checkpoints/mixed_train_METHOD_TASKS_MODEL_TIME]",
    "parallel_kv_load_dir": "components to start from, --init; with --resume_from_global_step the run to go on with",
    "resume_from_global_step": "go on after this step: exactly where a training state is there, else with the order alone",
}

if __name__ == "__main__":
    from pscli.start import run_compat

    run_compat()
