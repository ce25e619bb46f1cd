"""A stop signal before the command has begun: during the imports, and while it is being prepared."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pscli.start import Stops

# Stands in front of a module: tells that it is being imported, then takes as long as a slow file system would.
SLOW = "import pathlib, time\npathlib.Path({marker!r}).touch()\ntime.sleep(60)\n"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def started(tmp_path: Path, clean_environment) -> Iterator[Start]:
    """started(module, words...): `python -m pscli words`, in the middle of importing that module."""
    marker = tmp_path / "importing"
    running: list[subprocess.Popen[str]] = []

    def start(module: str, *words: str, entry: str = "pscli", **env: str) -> subprocess.Popen[str]:
        marker.unlink(missing_ok=True)
        (tmp_path / "slow").mkdir(exist_ok=True)
        (tmp_path / "slow" / f"{module}.py").write_text(SLOW.format(marker=str(marker)))
        process = subprocess.Popen(
            [sys.executable, "-m", entry, *words],
            env=clean_environment(tmp_path / "slow", PARALLEL_SYNTHESIS_CACHE=str(tmp_path / "cache"), **env),
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        running.append(process)
        until = time.monotonic() + 60
        while not marker.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.05)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("entry", "words"), [("pscli", ["train", "demo"]), ("pscli.compat_train", ["--seed", "3"])]
)
def test_during_the_imports(started: Start, number: int, entry: str, words: list[str]) -> None:
    process = started("typer", *words, "--json", entry=entry)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "interrupted while it started\n"
    document = json.loads(stdout)
    assert (document["ok"], document["exit_code"]) == (False, 130)
    assert document["error"]["type"] == "KeyboardInterrupt"


def test_while_a_command_loads_what_it_needs(started: Start) -> None:
    for module, command in (
        ("torch", ["train", "demo", "--out", "run"]),
        ("orjson", ["train", "demo", "--dry-run"]),
    ):
        process = started(module, *command, "--json")
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (130, "interrupted before a complete save\n")
        assert json.loads(stdout)["exit_code"] == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_an_interrupt_that_loading_lost_is_not_forgotten(number: int) -> None:
    def load() -> None:  # as torch's C code does where numpy's import ends in an exception
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with Stops().installed() as stops:
        stops.check()
        load()
        with pytest.raises(KeyboardInterrupt):
            stops.check()
        with pytest.raises(KeyboardInterrupt):
            stops.settle()
    assert signal.getsignal(number) is before


def test_a_worker_leaves_the_word_to_its_parent(started: Start, tmp_path: Path) -> None:
    process = started("typer", "train", "demo", "--json", RANK="0", PSCLI_REPORT_DIRECTORY=str(tmp_path))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


def test_a_second_signal_that_is_meant_ends_at_once(tmp_path: Path, clean_environment) -> None:
    """Two in a row are one (Slurm, torchrun); after 2 s a call that does not end is ended."""
    code = (
        "import time, sys\n"
        "from pscli import start\n"
        "def slow(stops):\n"
        "    try:\n"
        "        print('up', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        end = time.monotonic() + 30\n"
        "        while time.monotonic() < end: time.sleep(0.1)\n"
        "start.enter(slow)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.terminate()
        time.sleep(0.3)
        process.terminate()
        time.sleep(1.9)
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=10) == -signal.SIGTERM


def test_what_is_ignored_stays_ignored(tmp_path: Path, clean_environment) -> None:
    code = "import signal; from pscli import start; start.Stops().install(); print(signal.getsignal(signal.SIGUSR1))"
    done = subprocess.run(
        f"trap '' USR1; {sys.executable} -c '{code}'",
        shell=True, env=clean_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "Handlers.SIG_IGN\n" or done.stdout == "1\n"
