"""What the commands that compute share: which role this process has, torchrun's start, the typed call."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel_synthesis.config import Config
from parallel_synthesis.errors import ConfigError
from parallel_synthesis.recipe import Resolved
from pscli.context import Call
from pscli.output import ARGV_FILE


def role(call: Call, nproc: int | None) -> tuple[bool, bool]:
    """(this process is a worker of a run, it is to launch one). Both at once are refused."""
    worker = os.environ.get("RANK", "") != ""
    if worker:
        end_with_parent()  # a killed torchrun must not leave ranks that train on unseen: they save and stop
    launching = bool(call.torchrun) or (nproc or 1) > 1
    if worker and launching:
        raise ConfigError(
            ["RANK is set, so this process is one of a run already: unset it, or drop --nproc and `-- ...`"]
        )
    return worker, launching


def launched(call: Call, config: Config, *, out: Path, nproc: int | None, arguments: Sequence[str]) -> int:
    """Runs the same command as workers under torchrun; its exit code. arguments: a worker's, without the modes."""
    from pscli import launch

    launch.check_processes(nproc=nproc, extra=call.torchrun, ranks=config.run.ranks)
    output = call.output
    modes = [] if output.mode == "human" else [f"--{output.mode}"]
    return launch.launch(
        output,
        out=out,
        nproc=nproc,
        extra=call.torchrun,
        arguments=[*arguments, *modes, *(["--debug"] if output.debug else [])],
        argv=call.argv,
        shutdown_timeout=config.checkpoint.shutdown_timeout,
        threads=config.backbone.threads_per_rank,
    )


def typed_arguments(call: Call) -> list[str]:
    """The call as the user typed it, for the run's records; a worker learns it from the process that started it."""
    if call.output.reports is None:
        return list(call.argv)
    return list(json.loads((call.output.reports / ARGV_FILE).read_text(encoding="utf-8")))


def end_with_parent() -> None:
    """On Linux: SIGTERM for this process when its parent is killed."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGTERM))


def trained(
    call: Call,
    resolved: Resolved,
    out: Path,
    *,
    init: str | None,
    overwrite: bool = False,
    order_from_step: int = 0,
) -> None:
    """Trains a new run in this process, or its part in it, and shows how it ended."""
    from pscli import reports
    from pscli.progress import Watcher

    watcher = Watcher(call.output, log_every=resolved.config.log.every)
    # Here, not at the top: this loads torch.
    from parallel_synthesis.training import loop

    call.output.stops.check()  # loading torch may lose an interrupt
    try:
        result = loop.train(
            resolved,
            out=out,
            observer=watcher,
            init=init,
            overwrite=overwrite,
            argv=typed_arguments(call),
            order_from_step=order_from_step,
        )
    finally:
        watcher.close()
    call.output.text(reports.ending(resolved, result))
    call.output.document(reports.result_document(resolved, result))
