"""Starts the processes of a run through torchrun: builds its argv, forwards signals, finds the exit code.

`ps` (here: the parent) starts `python -m pscli.launch`, a thin entry around torchrun in a process group of
its own, so that a Ctrl-C reaches the parent only. torchrun starts the workers, `python -m pscli train ...`.
Workers hand their document to the parent as a file in a private directory; their stderr is the terminal's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from parallel_synthesis.errors import ConfigError
from pscli.output import ARGV_FILE, REPORT_DIRECTORY, RESULT_FILE, Output
from pscli.running import end_with_parent
from pscli.start import INTERRUPTED, ignore

DEATHS_FILE = "deaths.json"
DEBUG = "PSCLI_LAUNCH_DEBUG"
SIGNALS = "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOP_AT_ONCE_AFTER = 2.0  # seconds between two SIGINTs that mean it
_MORE_THAN_ONE_MACHINE = ("--nnodes", "--rdzv", "--master", "--node-rank", "--standalone")
_STOP = re.compile(r"\[stop\] signal=(\S+) step=(\d+) checkpoint=(\S+)")


def torchrun_arguments(
    *, nproc: int | None, extra: Sequence[str], shutdown_timeout: int, module: str, arguments: Sequence[str]
) -> list[str]:
    """torchrun's argv. extra: options of the user's, which win over ours. nproc: None leaves it to them."""
    given = {_option(word) for word in extra if word.startswith("--")}
    built = ["--signals-to-handle", SIGNALS, "--shutdown-timeout", str(shutdown_timeout)]
    if nproc is not None:
        built += ["--nproc-per-node", str(nproc)]
    if not any(option.startswith(_MORE_THAN_ONE_MACHINE) for option in given):
        built.append("--standalone")
    return [*built, *extra, "-m", module, *arguments]


def check_processes(*, nproc: int | None, extra: Sequence[str], ranks: int) -> None:
    """Refuses what can be known to be wrong before torchrun starts. Raises ConfigError."""
    per_node = _value(extra, "--nproc-per-node")
    if nproc is not None and per_node is not None:
        raise ConfigError([f"--nproc {nproc} and --nproc-per-node {per_node} say the same: give one of them"])
    nodes = _value(extra, "--nnodes") or "1"
    local = str(nproc) if nproc is not None else per_node or "1"
    if local.isdigit() and nodes.isdigit():
        processes = int(local) * int(nodes)
        if processes < 1 or ranks % processes:
            fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise ConfigError(
                [f"{processes} processes can not carry run.ranks = {ranks}: expected one of {fitting}"]
            )


def launch(
    output: Output,
    *,
    out: Path,
    nproc: int | None,
    extra: Sequence[str],
    arguments: Sequence[str],
    argv: Sequence[str],
    shutdown_timeout: int,
    threads: int,
    module: str = "pscli",
) -> int:
    """Runs the workers to their end and returns the exit code of the whole, errors already shown.

    arguments: a worker's. argv: the call as typed, for the run's records. module: what the workers run.
    """
    output.stops.check()
    log = out / "train.log"
    before = log.stat() if log.is_file() else None
    with tempfile.TemporaryDirectory(prefix="pscli-") as name:
        reports = Path(name)
        (reports / ARGV_FILE).write_text(json.dumps(list(argv)), encoding="utf-8")
        command = torchrun_arguments(
            nproc=nproc, extra=extra, shutdown_timeout=shutdown_timeout, module=module, arguments=arguments
        )
        environment = {**os.environ, REPORT_DIRECTORY: name, "OMP_NUM_THREADS": str(threads)}
        if output.debug:
            environment[DEBUG] = "1"
        forwarder = _Forwarder()
        with forwarder.installed():
            with _blocked():  # and so for the child, until it has handlers of its own (main, below)
                forwarder.child = child = subprocess.Popen(
                    [sys.executable, "-m", "pscli.launch", *command],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                )
            forwarder.forward_waiting()
            code = child.wait()
            output.stops.settle()  # how it ended is what the child says
        return _conclude(
            output, code, reports=reports, out=out, log_before=before, signalled=bool(forwarder.seen)
        )


@contextmanager
def _blocked() -> Iterator[None]:
    """Stop signals wait until the end of the block; those to a process that is started in it, until it wants them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(slots=True)
class _Forwarder:
    """Passes stop signals to torchrun, each once; a second SIGINT that is meant goes to the workers."""

    child: subprocess.Popen[bytes] | None = None
    seen: dict[int, float] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {}
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in the background, stays so
                before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def forward_waiting(self) -> None:
        """Signals that came before the child was there."""
        for number in self.waiting:
            self._send(number)
        self.waiting.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # A closed terminal ends a run like SIGTERM does: after a save.
        number = signal.SIGTERM if number == signal.SIGHUP else number
        now = time.monotonic()
        if number not in self.seen:
            self.seen[number] = now
            self._send(number)
        elif number == signal.SIGINT and now - self.seen[number] >= STOP_AT_ONCE_AFTER:
            self._interrupt_workers()

    def _send(self, number: int) -> None:
        if self.child is None:
            self.waiting.append(number)
        elif self.child.poll() is None:
            self.child.send_signal(number)

    def _interrupt_workers(self) -> None:
        if self.child is None or self.child.poll() is not None:
            return
        workers = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children")
        try:
            pids = [int(pid) for pid in workers.read_text().split()]
        except OSError:
            self.child.kill()
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGINT)
            except ProcessLookupError:
                continue


def _conclude(
    output: Output, code: int, *, reports: Path, out: Path, log_before: os.stat_result | None, signalled: bool
) -> int:
    """The exit code, and what has not been said yet."""
    result = reports / RESULT_FILE
    errors = _errors(reports)
    finished = result.is_file()
    if code == 0 or (finished and signalled and code in (130, -signal.SIGTERM)):
        if output.mode == "json" and finished:
            output.raw(result.read_text(encoding="utf-8"))
        elif output.mode == "json":
            output.document({"out": out, "rank0": False})
        return 0
    stopped = next((e for e in errors if e["error"]["type"] == "StoppedError"), None)
    stop = _stop_record(out / "train.log", log_before)
    if stop is not None:
        problem = _checkpoint_problem(out / stop[2])
        if problem is None:
            text = f"stopped by {stop[0]} after step {stop[1]}; {out / stop[2]} is complete"
            return _fail(output, 75, stopped or _document("StoppedError", text), said=stopped is not None)
        return _fail(output, 3, _document("StorageError", problem), said=False)
    if stopped is not None and not (out / "train.log").exists():  # another machine holds the log
        return _fail(output, 75, stopped, said=True)
    if code < 0 or code == INTERRUPTED:
        if signalled:
            said = any(error["exit_code"] == INTERRUPTED for error in errors)
            document = _document("KeyboardInterrupt", "interrupted before a save")
            return _fail(output, INTERRUPTED, document, said=said)
        return _fail(output, 3, _document("PeerError", f"torchrun was killed by signal {-code}"), said=False)
    deaths = reports / DEATHS_FILE
    if deaths.is_file():
        return _fail(output, 3, _document("PeerError", json.loads(deaths.read_text())), said=False)
    if code == 75:
        return _fail(
            output, 3, _document("StorageError", f"{out}: stopped, but no stop record is there"), said=False
        )
    own = sorted(errors, key=lambda e: (e["exit_code"] != code, e["error"]["type"] == "PeerError"))
    if own:
        return _fail(output, code, own[0], said=own[0]["error"]["type"] != "PeerError")
    return _fail(output, code, _document("PeerError", f"a worker ended with exit code {code}"), said=False)


def _fail(output: Output, code: int, document: Mapping[str, Any], *, said: bool) -> int:
    output.worker_failure({**document, "ok": False, "exit_code": code}, said=said)
    return code


def _document(kind: str, message: str) -> dict[str, Any]:
    return {"ok": False, "exit_code": 3, "error": {"type": kind, "message": message}}


def _errors(reports: Path) -> list[dict[str, Any]]:
    """The errors that workers wrote, oldest first."""
    files = sorted(reports.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = []
    for path in files:
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:  # its writer was killed while writing
            continue
    return found


def _stop_record(log: Path, before: os.stat_result | None) -> tuple[str, str, str] | None:
    """(signal, step, checkpoint) when the log ends with a stop record that this attempt wrote."""
    try:
        now = log.stat()
        with log.open("rb") as file:
            written_before = before.st_size if before is not None and before.st_ino == now.st_ino else 0
            file.seek(max(written_before, now.st_size - 65536))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return None
    found = _STOP.match(lines[-1]) if lines else None
    return (found[1], found[2], found[3]) if found is not None else None


def _checkpoint_problem(checkpoint: Path) -> str | None:
    """Why a checkpoint can not be resumed from, by its manifest and the sizes of its files."""
    from parallel_synthesis.provenance.manifest import verify_quick

    problems = verify_quick(checkpoint)
    if not problems:
        return None
    return f"stopped, but {checkpoint} is not whole: {problems[0]}; resume takes an earlier checkpoint"


def _option(word: str) -> str:
    return word.split("=", 1)[0].replace("_", "-")


def _value(words: Sequence[str], option: str) -> str | None:
    """The value of an option among torchrun's, written `--x v` or `--x=v`; the last one counts."""
    found = None
    for index, word in enumerate(words):
        if word.startswith("--") and _option(word) == option:
            found = word.split("=", 1)[1] if "=" in word else "".join(words[index + 1 : index + 2])
    return found


def main(arguments: Sequence[str]) -> int:
    """The thin entry: torchrun without its own traceback, and with the exit code of the rank at fault."""
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # At once: there is nothing to end yet, and loading torch may lose an exception and go on.
            signal.signal(number, _end_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    import logging

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    debug = bool(os.environ.pop(DEBUG, ""))
    end_with_parent()  # a killed `ps` must leave no run that goes on unseen
    if not debug:  # the workers say what happened; torchrun's own account would bury it
        for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed.launcher"):
            logger = logging.getLogger(name)
            logger.addHandler(logging.NullHandler())
            logger.propagate = False
    usage = torchrun.get_args_parser().format_usage()
    _take_signals_aside()
    try:
        try:
            torchrun.main(_known_only(list(arguments), usage))
        finally:
            ignore(*_STOP_SIGNALS)  # the workers have ended
    except ChildFailedError as error:
        if debug:
            sys.stderr.write(f"{error}\n")
        return _first_failure({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    except (RendezvousError, RuntimeError, ValueError, OSError) as error:
        if debug:
            raise
        sys.stderr.write(f"torchrun: {type(error).__name__}: {error} (--debug shows the traceback)\n")
        return 3
    return 0


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def _take_signals_aside() -> None:
    """Has a thread take the stop signals (their handlers run in the main thread all the same), so that the main thread
    can block them, and with it the workers that it starts: until these have handlers (pscli/start.py), a signal waits."""
    threading.Thread(target=threading.Event().wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _known_only(arguments: list[str], usage: str) -> list[str]:
    """Leaves out those of our own options that the installed torchrun does not have yet."""
    for option in ("--signals-to-handle", "--shutdown-timeout"):
        if option not in usage and option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return arguments


def _first_failure(codes: Mapping[int, int]) -> int:
    """The code of the rank at fault: ranks that waited for it exit 3, or are ended by SIGTERM."""
    own = [code for code in codes.values() if code > 0 and code != 3]
    if own:
        return own[0]
    killed = {rank: -code for rank, code in codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, number = next(iter(killed.items()))
        why = " (out of memory?)" if number == signal.SIGKILL else ""
        text = f"rank {rank} was killed by signal {number}{why}"
        reports = os.environ.get(REPORT_DIRECTORY)
        if reports:
            (Path(reports) / DEATHS_FILE).write_text(json.dumps(text), encoding="utf-8")
    return 3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
