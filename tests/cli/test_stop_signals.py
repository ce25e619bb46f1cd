"""A stop signal at every point of a call, from its entry to the end of Python: one word, one document, one exit code.

The signal is raised by the call itself at a given point (an import, a line of the end), so that nothing hangs on time.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# argv[1]: which import it is, counted from the entry on, that a signal comes at; argv[2]: its number; then the call.
AT_IMPORT = """
import signal, sys
at, number, sys.argv[1:] = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
from pscli import start
count = 0
def hook(event, arguments):
    global count
    if event == "import" and count >= 0 and type(signal.getsignal(signal.SIGTERM)) is not signal.Handlers:
        count += 1
        if count == at:
            signal.raise_signal(number)
sys.addaudithook(hook)
import atexit
atexit.register(lambda: (sys.stderr.write(f"imports {count}\\n")))
start.run()
"""
# argv[1]: where in the end of a call a signal comes.
AT_END = """
import signal, sys
where, sys.argv[1:] = sys.argv[1], sys.argv[2:]
from pscli import start, main, output
def come(): signal.raise_signal(signal.SIGTERM)
def around(owner, name, before=False):
    inner = getattr(owner, name)
    def wrapped(*args, **more):
        if before: come()
        try: return inner(*args, **more)
        finally:
            if not before: come()
    setattr(owner, name, wrapped)
if where == "before parsing": around(main.typer.main, "get_command")
elif where == "before the document": around(output.Output, "document", before=True)
elif where == "lost before the document":
    def lose(self, data, inner=output.Output.document):
        try: come()
        except KeyboardInterrupt: pass
        inner(self, data)
    output.Output.document = lose
elif where == "turned into another error":
    def fail(self, data):
        try: come()
        except KeyboardInterrupt: raise ValueError("an import failed")
    output.Output.document = fail
elif where == "in exec":
    def through(self, data): exec("come()", {"come": come})
    output.Output.document = through
elif where == "in the document": around(output.Output, "_write", before=True)
elif where == "after the document": around(output.Output, "_write")
elif where == "after the call": around(main, "call")
elif where == "at exit":
    import atexit
    atexit.register(come)
elif where == "in Python's end":
    class Late:
        def __del__(self, come=signal.raise_signal, number=signal.SIGTERM): come(number)
    sys.modules["late"] = late = Late()
    del late
else: raise SystemExit(where)
start.run()
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, clean_environment: Callable[..., dict[str, str]]) -> Run:
    def call(script: str, *words: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "call_under_test.py").write_text(script, "utf-8")
        return subprocess.run(
            [sys.executable, "-m", "call_under_test", *map(str, words)],
            env=clean_environment(tmp_path, PARALLEL_SYNTHESIS_CACHE=str(tmp_path / "cache")),
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return call


@pytest.fixture
def checkpoint(lora_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    from parallel_synthesis.checkpoint.adopt import write_manifest

    place: Path = lora_checkpoint(tmp_path / "one", seed=1)
    write_manifest(place)
    return place


def told(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], list[str]]:
    """The document, and what was said beside it."""
    return json.loads(done.stdout), [line for line in done.stderr.splitlines() if "imports" not in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_at_any_import(run: Run, checkpoint: Path, number: int) -> None:
    whole = run(AT_IMPORT, 0, number, "verify", checkpoint, "--json")
    assert told(whole)[0]["ok"], whole.stderr
    imports = int(whole.stderr.split()[-1])
    assert imports > 100
    others = {signal.SIGINT: 0, signal.SIGTERM: 1, signal.SIGUSR1: 2}
    for at in range(1 + others[signal.Signals(number)] * 7, imports, imports // 9):
        done = run(AT_IMPORT, at, number, "verify", checkpoint, "--json")
        document, words = told(done)
        assert (at, done.returncode) == (at, 130), done.stderr
        assert (document["ok"], document["exit_code"]) == (False, 130)
        assert document["error"]["type"] == "KeyboardInterrupt"
        assert words in (["interrupted while it started"], ["interrupted"]), (at, done.stderr)


@pytest.mark.parametrize(
    "where",
    [
        "before parsing",
        "before the document",
        "lost before the document",
        "turned into another error",
        "in exec",
    ],
)
def test_before_the_end_is_known(run: Run, checkpoint: Path, where: str) -> None:
    done = run(AT_END, where, "verify", checkpoint, "--json")
    document, words = told(done)
    assert (done.returncode, words) == (130, ["interrupted"])
    assert (document["ok"], document["exit_code"]) == (False, 130)


@pytest.mark.parametrize(
    "where", ["in the document", "after the document", "after the call", "at exit", "in Python's end"]
)
def test_after_the_end_is_known(run: Run, checkpoint: Path, where: str) -> None:
    done = run(AT_END, where, "verify", checkpoint, "--json")
    document, words = told(done)
    assert (done.returncode, words) == (0, [])
    assert document["ok"]


def test_a_second_signal_that_is_meant_ends_a_call_that_can_not_tell_its_end(
    run: Run, checkpoint: Path
) -> None:
    script = (
        "import os, signal, sys, time\n"
        "from pscli import start, output\n"
        "def write(self, text):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(2.1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "output.Output._write = write\n"
        "start.run()\n"
    )
    assert run(script, "verify", checkpoint, "--json").returncode == -signal.SIGTERM


# Stands in front of torch and takes what interrupts its import for numpy's absence, as its C code does.
TORCH = """
import pathlib, time
pathlib.Path({marker!r}).touch()
end = time.monotonic() + 20
while time.monotonic() < end:
    try: time.sleep(20)
    except KeyboardInterrupt: pass
raise RuntimeError("the interrupt was lost")
"""
# At the start of every Python that is a worker, before anything of ours is there.
SITE = """
import os, pathlib, time
if os.environ.get("RANK"):
    pathlib.Path({marker!r} + os.environ["RANK"]).touch()
    time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
@pytest.mark.parametrize(("module", "text", "ranks"), [("torch", TORCH, [""]), ("sitecustomize", SITE, "01")])
def test_while_torchrun_and_its_workers_start(
    tmp_path: Path,
    clean_environment: Callable[..., dict[str, str]],
    module: str,
    text: str,
    ranks: list[str],
    number: int,
) -> None:
    (tmp_path / "front").mkdir()
    (tmp_path / "front" / f"{module}.py").write_text(text.format(marker=str(tmp_path / "there")))
    with subprocess.Popen(
        [sys.executable, "-m", "pscli", "train", "demo", "--nproc", "2", "--out", "run", "--json"],
        env=clean_environment(tmp_path / "front", PARALLEL_SYNTHESIS_CACHE=str(tmp_path / "cache")),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        until = time.monotonic() + 60
        while not all((tmp_path / f"there{rank}").exists() for rank in ranks):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "interrupted before a save\n")
    assert json.loads(stdout)["exit_code"] == 130
    assert not (tmp_path / "run").exists()
