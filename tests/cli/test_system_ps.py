"""Which calls are ours and which go to the system's ps, with real scripts named ps on PATH."""

from __future__ import annotations

import os
import subprocess

import pytest

from pscli import system_ps

OUR_SCRIPT = "import sys\nfrom pscli.start import run\nif __name__ == '__main__':\n    sys.exit(run())\n"
FAKE_SYSTEM = "import sys\nprint('SYSTEM', *sys.argv[1:], sep='|')\nsys.exit(7)\n"


@pytest.fixture
def installed(script, clean_environment):
    """`ps` of ours first on PATH, that of another environment of ours second, the system's last."""
    first = script(OUR_SCRIPT, ["venv", "bin", "ps"])
    script(OUR_SCRIPT, ["venv", "bin", "pscli"])
    second = script(OUR_SCRIPT, ["other", "bin", "ps"])
    last = script(FAKE_SYSTEM, ["system", "ps"])
    path = os.pathsep.join(str(place.parent) for place in (first, second, last))

    def run(*command: str, path: str = path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(first.parent / command[0]), *command[1:]],
            env=clean_environment(PATH=path), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    "arguments",
    [[], ["aux"], ["-ef"], ["axjf"], ["-o", "pid,args"], ["--forest"], ["-p", "1", "--help"], ["train2x"]],
)
def test_foreign_calls_go_to_the_system_unchanged(installed, arguments):
    done = installed("ps", *arguments)
    assert done.returncode == 7
    assert done.stdout == "|".join(["SYSTEM", *arguments]) + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["--help"], 0, "Usage: ps"),
        (["--version"], 0, "parallel-synthesis"),
        (["train", "--list"], 0, "general"),
        (["trian"], 2, "did you mean `ps train`?"),
        (["snapshto"], 2, "did you mean `ps snapshot`?"),
        (["merge", "a"], 2, "--out is missing"),
    ],
)
def test_our_calls_stay_ours(installed, arguments, code, shown):
    done = installed("ps", *arguments)
    assert done.returncode == code
    assert shown in done.stdout + done.stderr


def test_pscli_never_hands_over(installed):
    done = installed("pscli", "aux")
    assert done.returncode == 2
    assert "SYSTEM" not in done.stdout


def test_without_a_system_ps_it_says_so(installed, tmp_path):
    done = installed("ps", "aux", path=str(tmp_path / "venv" / "bin"))
    assert done.returncode == 2
    assert "no system ps" in done.stderr


@pytest.mark.parametrize("word", ["aux", "ax", "-ef", "axms", "fax", "train", "lax", "r", "u", "axfj", "alx"])
def test_words_of_ps_are_no_near_miss(word):
    assert system_ps.near_miss(word) is None


@pytest.mark.parametrize(
    ("word", "meant"),
    [("trian", "train"), ("trains", "train"), ("Train", "train"), ("resmue", "resume"), ("verfy", "verify")],
)
def test_near_misses(word, meant):
    assert system_ps.near_miss(word) == meant
