"""The launcher, with the real torchrun and workers that only pretend (one test has a real worker)."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_synthesis.errors import ConfigError
from pscli.launch import check_processes, torchrun_arguments

WORKER = """
import os, signal, sys, time
from pathlib import Path
from parallel_synthesis.errors import DataError, PeerError, StoppedError
from pscli.main import exit_code
from pscli.output import Output

how, out = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
output = Output.from_call(sys.argv, os.environ)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # as pscli/start.py does
(out / f"pid-{rank}").write_text(str(os.getpid()))
(out / f"omp-{rank}").write_text(os.environ["OMP_NUM_THREADS"])

def end(error):
    code = exit_code(error)
    output.failure(error, code)
    sys.exit(code)

def commit(step):
    from parallel_synthesis.checkpoint.commit import commit
    place = out / "step_checkpoints" / f"step_{step:09d}"
    commit(place, step=step, fill=lambda staging: staging.write_bytes("cache_mapper.pt", b"abc"))
    if how == "stop_damaged":
        os.chmod(place, 0o755)
        (place / "cache_mapper.pt").unlink()
    with (out / "train.log").open("a") as log:
        log.write(f"[stop] signal=SIGTERM step={step} checkpoint=step_checkpoints/{place.name}\\n")

if how == "done":
    output.text("trained")
    output.document({"out": str(out)})
elif how == "refused" and rank == 1:
    end(DataError("rows.jsonl:3: field gold: expected a string; mend the row"))
elif how == "refused":
    time.sleep(2)
    end(PeerError("another rank ended"))
elif how == "same":
    end(DataError("the same for all"))
elif how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "killed":
    time.sleep(2)
    end(PeerError("another rank ended"))
elif how.startswith("stop"):
    def stop(number, frame):
        (out / f"signals-{rank}").open("a").write(f"{number} ")
        if rank == 0:
            commit(7)
        end(StoppedError("stopped by SIGTERM after step 7", step=7))
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, stop)
    (out / f"ready-{rank}").touch()
    time.sleep(60)
elif how == "stubborn":
    seen = []
    def interrupt(number, frame):
        seen.append(number)
        (out / f"signals-{rank}").open("a").write(f"{number} ")
        if len(seen) == 2:
            end(KeyboardInterrupt())
    signal.signal(signal.SIGINT, interrupt)
    (out / f"ready-{rank}").touch()
    while True:
        time.sleep(0.1)
elif how == "unprepared":
    (out / f"ready-{rank}").touch()
    time.sleep(60)
"""
DRIVER = """
import sys
from pathlib import Path
from pscli.launch import launch
from pscli.output import Output
out = Path(sys.argv[2])
modes = sys.argv[3:]
sys.exit(launch(
    Output.from_call(modes, {}), out=out, nproc=2, extra=[], arguments=[sys.argv[1], str(out), *modes],
    argv=["train"], shutdown_timeout=30, threads=3, module="fake_worker",
))
"""


@pytest.fixture
def start(tmp_path, clean_environment):
    """Starts two workers that behave as told; the process is the parent (`ps`)."""
    (tmp_path / "fake_worker.py").write_text(WORKER, "utf-8")
    out = tmp_path / "out"
    out.mkdir()

    def begin(how: str, *modes: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, how, str(out), *modes],
            env=clean_environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return process, out

    return begin


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"not there: {paths}"
        time.sleep(0.05)


def test_done(start):
    process, out = start("done")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "trained\n")
    assert "error" not in stderr
    assert (out / "omp-1").read_text() == "3"


def test_done_prints_one_document(start):
    process, out = start("done", "--json")
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout) == {"ok": True, "exit_code": 0, "out": str(out)}


def test_the_failing_ranks_error_and_code_are_those_of_the_call(start):
    process, _ = start("refused", "--json")
    began = time.monotonic()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert time.monotonic() - began < 45
    document = json.loads(stdout)
    assert document["exit_code"] == 2
    assert document["error"]["type"] == "DataError"
    errors = [line for line in stderr.splitlines() if "error" in line]  # torch may warn about the host
    assert errors == ["error (rank 1): rows.jsonl:3: field gold: expected a string; mend the row"]


def test_the_same_error_of_all_ranks_is_shown_once(start):
    process, _ = start("same")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.count("the same for all") == 1
    assert "Traceback" not in stderr


def test_debug_shows_torchruns_account(start):
    process, _ = start("same", "--debug")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Root Cause" in stderr


def test_a_killed_rank_is_named(start):
    process, _ = start("killed", "--json")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "error: rank 1 was killed by signal 9 (out of memory?)" in stderr.splitlines()
    assert json.loads(stdout)["error"]["message"].startswith("rank 1 was killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_with_a_complete_save_is_75(start, number):
    process, out = start("stop", "--json")
    wait_for(out / "ready-0", out / "ready-1")
    process.send_signal(number)
    process.send_signal(number)  # schedulers send it twice
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 75
    assert stderr.splitlines().count("stopped by SIGTERM after step 7") == 1
    document = json.loads(stdout)
    assert (document["ok"], document["exit_code"], document["error"]["type"]) == (False, 75, "StoppedError")
    expected = signal.SIGTERM if number == signal.SIGHUP else number
    assert (out / "signals-0").read_text().split() == [str(int(expected))]


def test_a_stop_whose_checkpoint_is_damaged_is_not_75(start):
    process, out = start("stop_damaged")
    wait_for(out / "ready-0", out / "ready-1")
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "is not whole" in stderr


def test_a_stop_record_of_an_earlier_attempt_does_not_count(start):
    process, out = start("unprepared")
    (out / "train.log").write_text(
        "[stop] signal=SIGTERM step=7 checkpoint=step_checkpoints/step_000000007\n"
    )
    wait_for(out / "ready-0", out / "ready-1")
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted before a save" in stderr.splitlines()


def test_only_a_second_interrupt_after_a_while_reaches_the_workers_again(start):
    process, out = start("stubborn")
    wait_for(out / "ready-0", out / "ready-1")
    process.send_signal(signal.SIGINT)
    wait_for(out / "signals-0", out / "signals-1")
    process.send_signal(signal.SIGINT)  # at once: a bounce
    time.sleep(2.1)
    assert (out / "signals-0").read_text().split() == ["2"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out / "signals-1").read_text().split() == ["2", "2"]


def test_a_killed_parent_takes_the_run_down(start):
    process, out = start("unprepared")
    wait_for(out / "ready-0", out / "ready-1")
    process.kill()
    process.communicate(timeout=60)
    pids = [int((out / f"pid-{rank}").read_text()) for rank in (0, 1)]
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the workers went on without their parent"
        time.sleep(0.1)


def test_arguments_for_one_machine():
    arguments = torchrun_arguments(
        nproc=4, extra=[], shutdown_timeout=600, module="pscli", arguments=["train", "x"]
    )
    assert arguments[-4:] == ["-m", "pscli", "train", "x"]
    assert "--standalone" in arguments
    pairs = list(itertools.pairwise(arguments))
    assert ("--nproc-per-node", "4") in pairs
    assert ("--shutdown-timeout", "600") in pairs
    assert ("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT") in pairs


@pytest.mark.parametrize(
    "extra", [["--nnodes", "2"], ["--rdzv_endpoint=h:1"], ["--rdzv-backend", "c10d"], ["--master-addr=h"]]
)
def test_arguments_for_more_machines_are_passed_on(extra):
    arguments = torchrun_arguments(
        nproc=None, extra=extra, shutdown_timeout=9, module="pscli", arguments=["train"]
    )
    assert "--standalone" not in arguments
    assert "--nproc-per-node" not in arguments
    at = arguments.index(extra[0])
    assert arguments[at : at + len(extra)] == extra


@pytest.mark.parametrize(
    ("nproc", "extra", "problem"),
    [
        (3, [], "3 processes can not carry run.ranks = 4"),
        (2, ["--nnodes=3"], "6 processes"),
        (None, ["--nproc_per_node", "3"], "3 processes"),
        (2, ["--nproc-per-node=2"], "say the same"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_refused(nproc, extra, problem):
    with pytest.raises(ConfigError, match=problem):
        check_processes(nproc=nproc, extra=extra, ranks=4)


@pytest.mark.parametrize(
    ("nproc", "extra"), [(4, []), (2, ["--nnodes", "2"]), (2, ["--nnodes", "1:4"]), (None, [])]
)
def test_a_number_of_processes_that_fits(nproc, extra):
    check_processes(nproc=nproc, extra=extra, ranks=4)


def test_a_real_worker_that_refuses_its_data_gives_2(ps, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q"}\n')
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'[run]\nranks = 2\n[backbone]\nmodel = "{backbone}"\ndevice = "cpu"\n'
        f'[data]\ntasks = ["own"]\nroot = "{tmp_path}"\nfiles = {{ own = "rows.jsonl" }}\n'
    )
    done = ps("train", str(recipe), "--nproc", "2", "--out", str(tmp_path / "out"), "--json")
    assert done.returncode == 2, done.stderr
    document = json.loads(done.stdout)
    assert document["error"]["type"] == "DataError"
    assert "rows.jsonl:1" in document["error"]["message"]
    assert done.stderr.count("rows.jsonl:1") == 1
    assert not (tmp_path / "out").exists()


def test_a_worker_of_somebody_else_launches_nothing(ps):
    done = ps("train", "demo", "--nproc", "2", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "RANK is set" in done.stderr
    done = ps("train", "demo", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.returncode == 2
    assert "--out is missing" in done.stderr
