"""The app, the table from error to exit code, and the hand-over of foreign calls to the system's `ps`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel_synthesis import __version__
from parallel_synthesis.errors import (
    CheckFailedError,
    ParallelSynthesisError,
    RefusedError,
    StoppedError,
)
from pscli import system_ps
from pscli.commands.inspect import inspect
from pscli.commands.merge import merge
from pscli.commands.resume import resume
from pscli.commands.snapshot import snapshot
from pscli.commands.train import train
from pscli.commands.verify import verify
from pscli.context import Call
from pscli.output import Output
from pscli.start import INTERRUPTED, Interrupted, Stops

DONE, CHECK_FAILED, REFUSED, UNEXPECTED, STOPPED = 0, 1, 2, 3, 75
EXIT_CODES: Sequence[tuple[type[BaseException], int]] = (
    (CheckFailedError, CHECK_FAILED),
    (RefusedError, REFUSED),
    (StoppedError, STOPPED),
    (ParallelSynthesisError, UNEXPECTED),  # StorageError, PeerError
    (KeyboardInterrupt, INTERRUPTED),
    (OSError, UNEXPECTED),
)
_EPILOG = """Exit codes: 0 done; 1 a check failed; 2 refused (usage, config, input); 3 I/O failure or
unexpected; 75 stopped by a signal after a complete save; 130 interrupted before that."""
# typer vendors click or depends on it, by version; its own exports lead to the classes in both cases.
_UsageError: Any = typer.BadParameter.__bases__[0]
_ClickError: Any = _UsageError.__bases__[0]


app = typer.Typer(
    rich_markup_mode=None,  # plain help: rich would double the start-up time
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"parallel-synthesis {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train, and later prove, a cache mapper and a synthesizer LoRA on a frozen backbone.

    \b
    First try:   ps train demo
    Recipes:     ps train --list
    What a run would do:   ps train general --dry-run
    Go on with a run:      ps resume runs/a
    Keep a checkpoint:     ps snapshot runs/a --name good
    Merge two:             ps merge runs/b runs/a@general_step_95060 --out merged
    What a run covered:    ps inspect runs/a
    Check and prove a run: ps verify runs/a --replay 20

    Any other call, such as `ps aux`, goes to the system's own ps.
    """


app.command("train", epilog="Everything after `--` is passed to torchrun.")(train)
app.command("resume", epilog="Everything after `--` is passed to torchrun.")(resume)
app.command("snapshot")(snapshot)
app.command("merge")(merge)
app.command("inspect")(inspect)
app.command("verify")(verify)


def run(stops: Stops) -> None:
    """Runs the call in sys.argv, or hands it over (pscli/start.py): never returns."""
    arguments = sys.argv[1:]
    if Path(sys.argv[0]).name == "ps" and not system_ps.is_ours(arguments, os.environ):
        system_ps.hand_over(arguments, os.environ)
        sys.stderr.write("error: no system ps on PATH to hand this call to; ours is `ps --help`\n")
        raise SystemExit(REFUSED)
    raise SystemExit(call(arguments, stops=stops))


def call(arguments: Sequence[str], *, typed: Sequence[str] | None = None, stops: Stops | None = None) -> int:
    """Runs one call of ours and returns its exit code. typed: what the user typed, where that was other words.

    stops: the entry's; without one the handlers are there for the call alone.
    """
    if stops is None:
        with Stops().installed() as stops:
            return call(arguments, typed=typed, stops=stops)
    own, extra = split_arguments(arguments)
    output = Output.from_call(own, os.environ, stops=stops)
    try:
        try:
            stops.check()
            return _run(own, Call(output=output, argv=tuple(typed or arguments), torchrun=extra))
        except Exception as error:  # noqa: BLE001 - the one place where a defect becomes an exit code
            return _failed(output, own, error)
    except KeyboardInterrupt:
        return _interrupted(output, own)


def _run(own: Sequence[str], context: Call) -> int:
    output = context.output
    if not output.progress:  # huggingface_hub's bars and remarks; the variables are read when it is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not output.debug:
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    refuse_unknown_word(own)
    command = typer.main.get_command(app)
    code = command.main(
        args=list(own),
        prog_name="ps",
        standalone_mode=False,
        complete_var=system_ps.COMPLETION_VARIABLE,
        obj=context,
    )
    if code == INTERRUPTED and not output.stops.settled:  # typer's, of a KeyboardInterrupt
        raise Interrupted
    output.stops.settle()
    return code if isinstance(code, int) else DONE


def _failed(output: Output, own: Sequence[str], error: Exception) -> int:
    """Tells how a call ended that raised, and returns its exit code."""
    output.stops.settle()  # an interrupt may have become another error on its way out
    if isinstance(error, typer.Abort):
        return _interrupted(output, own)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
        output.note(error.format_message())  # type: ignore[attr-defined]
        return REFUSED
    if isinstance(error, _ClickError):
        output.failure(error, REFUSED, message=_usage_message(error, own))
        return REFUSED
    if isinstance(error, BrokenPipeError):
        # The reader of our output went away (`| head`); nothing can be said to it, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    if isinstance(error, ParallelSynthesisError | OSError):
        code = exit_code(error)
        output.failure(error, code, message=_message(error))
        return code
    text = f"unexpected {type(error).__name__}: {error}"
    output.failure(
        error, UNEXPECTED, message=text + ("" if output.debug else " (--debug shows the traceback)")
    )
    return UNEXPECTED


def _interrupted(output: Output, own: Sequence[str]) -> int:
    message = "interrupted before a complete save" if own[:1] in (["train"], ["resume"]) else "interrupted"
    output.failure(KeyboardInterrupt(), INTERRUPTED, message=message)
    return INTERRUPTED


def exit_code(error: BaseException) -> int:
    """The exit code of an error, by the table."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), UNEXPECTED)


def _message(error: BaseException) -> str:
    """The error's own words; the system's errors as every other tool has them, without number and quotes."""
    if isinstance(error, OSError) and error.strerror:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
        return f"{' -> '.join(names)}: {error.strerror}" if names else error.strerror
    return str(error)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Ours, and torchrun's: what follows the first `--`."""
    if "--" not in arguments:
        return list(arguments), ()
    at = list(arguments).index("--")
    return list(arguments[:at]), tuple(arguments[at + 1 :])


def refuse_unknown_word(arguments: Sequence[str]) -> None:
    """A command that is planned but not there, or a near miss, gets its own answer."""
    word = arguments[0] if arguments else ""
    if word in system_ps.LATER:
        raise _UsageError(f"`{word}` is not in this version; it has: {', '.join(system_ps.COMMANDS)}")
    meant = system_ps.near_miss(word)
    if meant is not None and word not in system_ps.COMMANDS:
        raise _UsageError(f"no command {word!r}; did you mean `ps {meant}`?")


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    command = next((f" {word}" for word in arguments[:1] if word in system_ps.COMMANDS), "")
    return f"{error.format_message().rstrip('.')}; see `ps{command} --help`"
