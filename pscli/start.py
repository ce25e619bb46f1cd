"""Entry of the installed scripts and of `python -m pscli`: a stop signal ends a call with a word and code 130.

From here on, that is also while the imports of a first second go on. What can stop in a better way (training, which
saves first; torchrun's parent) puts its own handlers over these.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
AT_ONCE_AFTER = 2.0  # seconds; torchrun and Slurm send a signal twice, somebody who means it waits


def run() -> None:
    """Entry of `ps` and `pscli`: never returns."""

    def main() -> None:
        from pscli.main import run

        run()

    _interruptible(main)


def run_compat() -> None:
    """Entry of `parallel-synthesis-train`: never returns."""

    def main() -> None:
        from pscli.compat_train import run

        run()

    _interruptible(main)


def _interruptible(main: Callable[[], None]) -> None:
    _install()
    try:
        main()
    except KeyboardInterrupt:  # before there was anybody to tell of it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        _tell(sys.argv[1:])
        raise SystemExit(INTERRUPTED) from None


def _install() -> None:
    """SIGTERM and SIGUSR1 (Slurm) act as Ctrl-C does, unless whoever started us wants them ignored."""
    first: list[float] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        first.append(time.monotonic())
        if len(first) == 1:
            raise KeyboardInterrupt
        if first[-1] - first[0] >= AT_ONCE_AFTER:  # what it waits for takes too long
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)


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
