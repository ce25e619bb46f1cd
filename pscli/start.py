"""Entry of the installed scripts and of `python -m pscli`, and what a stop signal does from there to the very end.

SIGINT, SIGTERM and SIGUSR1 (Slurm) end a call with a word, with --json a document, and code 130: while the imports of
the first second go on, while the call is read, while a command works. Once the end is known and is being told, a signal
changes nothing any more. What can stop in a better way (training, which saves first; the parent of a torchrun) puts its
own handlers over these for as long as it can.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = 130
AT_ONCE_AFTER = 2.0  # seconds; torchrun and Slurm send a signal twice, somebody who means it waits
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(KeyboardInterrupt):
    """A stop signal came. A kind of its own: Python would kill itself by SIGINT at its end, whatever the exit code,
    where a plain KeyboardInterrupt has passed through an exec() (dataclasses have one)."""


class Stops:
    """The stop signals of one call. came: one did, while it still mattered; settled: the call's end is known.

    The exception that a signal raises may be lost on its way (torch's C code goes on without numpy where importing
    that fails; typer makes a silent exit of it; destructors drop it), so that `came` is looked at again: by `check`
    after imports, by `settle` before a success is told.
    """

    def __init__(self) -> None:
        self.came = False
        self.settled = False
        self._first: float | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now
            if not self.settled:
                self.came = True
                raise Interrupted
        elif now - self._first >= AT_ONCE_AFTER:  # what it waits for takes too long
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def check(self) -> None:
        """Raises Interrupted if a signal came, and was lost or not."""
        if self.came and not self.settled:
            raise Interrupted

    def settle(self) -> None:
        """Before a success is told: `check`, and signals that come later are too late. In this order no signal between
        the two is forgotten: either it raises here, or it has come after the end."""
        self.settled = True
        if self.came:
            self.settled = False  # nothing has been told yet
            raise Interrupted

    def forget(self) -> None:
        """For who has caught the exception and takes it for the ordinary end of waiting."""
        self.came, self._first = False, None

    @contextmanager
    def installed(self) -> Iterator[Stops]:
        """The handlers, for the block. A signal that whoever started us wants ignored stays so."""
        before = self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install(self) -> dict[signal.Signals, Any]:
        """For good; what was there before."""
        before: dict[signal.Signals, Any] = {}
        for number in NUMBERS:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, self.handle)
        return before


def run() -> None:
    """Entry of `ps` and `pscli`: never returns."""

    def main(stops: Stops) -> None:
        from pscli.main import run

        run(stops)

    enter(main)


def run_compat() -> None:
    """Entry of `parallel-synthesis-train`: never returns."""

    def main(stops: Stops) -> None:
        from pscli.compat_train import run

        run(stops)

    enter(main)


def enter(main: Callable[[Stops], None]) -> None:
    """Runs `main`, which ends in SystemExit, under the handlers."""
    stops = Stops()
    try:
        before = stops.install()
        # Python puts the system's own handlers back at its end, and a late signal would kill it after all is said.
        # What was registered first runs last.
        atexit.register(ignore, *before)
        if os.environ.get("PSCLI_REPORT_DIRECTORY"):  # a worker begins with them blocked, see launch.py
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*NUMBERS, signal.SIGHUP))
        main(stops)
    except KeyboardInterrupt:  # before there was anybody to tell of it
        stops.settled = True
        _tell(sys.argv[1:])
        raise SystemExit(INTERRUPTED) from None


def ignore(*numbers: int) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _tell(arguments: list[str]) -> None:
    """As Output.failure would, which may not be there yet. A worker is quiet: its parent tells."""
    if os.environ.get("PSCLI_REPORT_DIRECTORY"):
        return
    message = "interrupted while it started"
    sys.stderr.write(f"{message}\n")
    if "--json" in arguments and os.environ.get("RANK", "0") in ("", "0"):
        import json

        error = {"type": "KeyboardInterrupt", "message": message}
        document = {"ok": False, "exit_code": INTERRUPTED, "error": error}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        sys.stdout.flush()
