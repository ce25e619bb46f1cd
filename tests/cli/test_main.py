"""The command line as a process: help, usage errors, exit codes, JSON, and what it imports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parallel_synthesis import errors
from pscli import main
from pscli.output import Output

HEAVY = ("torch", "transformers", "peft", "rich", "numpy", "jsonschema", "orjson")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["train", "--help"], ["train", "-h"]])
def test_help_is_on_stdout(ps, arguments):
    done = ps(*arguments)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Usage: ps" in done.stdout
    assert "ps train demo" in done.stdout


def test_help_shows_exit_codes_and_examples(ps):
    assert "75 stopped by a signal" in ps("--help").stdout
    assert "-- --nnodes 2" in ps("train", "--help").stdout


def test_version(ps):
    assert ps("--version").stdout.startswith("parallel-synthesis ")


def test_no_arguments_show_the_help(ps):
    done = ps()
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ps ")  # which is no error of anybody's


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "did you mean `ps train`?"),
        (["resume", "runs/x"], "expected a run directory"),
        (["resume"], "Missing argument"),
        (["train", "demo", "--nprocs", "2"], "No such option: --nprocs"),
        (["train", "demo", "--nproc", "0"], "--nproc"),
        (["train", "genral"], "did you mean general?"),
        (["train"], "which recipe?"),
        (["train", "no/such.toml"], "no such recipe file"),
        (["train", "demo", "extra"], "extra"),
    ],
)
def test_usage_is_refused_with_2_and_no_traceback(ps, arguments, expected):
    done = ps(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["train", "genral", "--json"], ["train", "--bad", "--json"]])
def test_json_is_one_document_on_failure_too(ps, arguments):
    done = ps(*arguments)
    document = json.loads(done.stdout)
    assert (document["ok"], document["exit_code"]) == (False, 2)
    assert document["error"]["message"] in done.stderr


def test_all_config_errors_are_reported_together(ps):
    done = ps(
        "train", "general", "--json", "--set", "optim.lr=1", "--set", "run.ranks=no", "--set", "run.seed=-1",
        "--set", "data.tasks=[\"flan\", \"nope\"]", "--set", "lora.dropout=2",
    )  # fmt: skip
    problems = json.loads(done.stdout)["error"]["problems"]
    assert len(problems) == 5
    for part in ("has learning_rate", "run.ranks=no", "run.seed = -1", "'nope'", "lora.dropout = 2.0"):
        assert any(part in problem for problem in problems), part
    assert done.stderr.count("\n  - ") == 5


def test_debug_shows_the_traceback(ps):
    assert "Traceback" in ps("train", "genral", "--debug").stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["train", "--list"], ["train", "genral"], ["train", "demo", "--bad"],
     ["train", "general", "--show"]],
)  # fmt: skip
def test_quick_answers_import_nothing_heavy(arguments, clean_environment):
    code = (
        "import sys\nfrom pscli.main import call\nsys.stdout.write('')\n"
        f"call({arguments!r})\n"
        f"sys.stderr.write('HEAVY ' + ' '.join(sorted(set({HEAVY!r}) & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1].strip() == "HEAVY"


def test_a_dry_run_imports_no_torch(clean_environment, tmp_path):
    code = (
        "import sys\nfrom pscli.main import call\n"
        "assert call(['train', 'general', '--dry-run', '--rows-at', '5']) == 0\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=clean_environment(), cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CheckFailedError("x"), 1),
        (errors.DivergenceError("x"), 1),
        (errors.NonFiniteError("x"), 1),
        (errors.ConfigError(["x"]), 2),
        (errors.DataError("x"), 2),
        (errors.BackboneError("x"), 2),
        (errors.CheckpointError("x"), 2),
        (errors.RunExistsError("x"), 2),
        (errors.StorageError("x"), 3),
        (errors.PeerError("x"), 3),
        (OSError("x"), 3),
        (RuntimeError("x"), 3),
        (errors.StoppedError("x", step=3), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_exit_code(error, code, monkeypatch, capsys):
    assert main.exit_code(error) == code

    def fail(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr("pscli.commands.train.load_recipe", fail)
    assert main.call(["train", "demo", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == code
    assert not document["ok"]


def test_an_unexpected_error_is_one_line(monkeypatch, capsys):
    def fail(*_arguments: object, **_named: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("pscli.commands.train.load_recipe", fail)
    assert main.call(["train", "demo"]) == 3
    assert capsys.readouterr().err == (
        "error: unexpected ZeroDivisionError: division by zero (--debug shows the traceback)\n"
    )
    assert main.call(["train", "demo", "--debug"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_arguments_after_two_dashes_are_torchruns():
    own, extra = main.split_arguments(["train", "general", "--", "--nnodes", "2", "--", "x"])
    assert own == ["train", "general"]
    assert extra == ("--nnodes", "2", "--", "x")


def test_a_closed_pipe_ends_quietly(clean_environment):
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m pscli train --list --json | true",
        shell=True, executable="/bin/bash", env=clean_environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""


def test_only_rank_0_speaks_but_every_rank_shows_its_errors(capsys):
    quiet_rank = Output.from_call(["--json"], {"RANK": "2"})
    quiet_rank.text("data")
    quiet_rank.document({"a": 1})
    quiet_rank.note("note")
    assert capsys.readouterr() == ("", "")
    quiet_rank.failure(errors.DataError("rows.jsonl:3: no"), 2)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error (rank 2): rows.jsonl:3: no\n"


def test_completion_knows_the_recipes(clean_environment):
    done = subprocess.run(
        [sys.executable, "-m", "pscli"],
        env=clean_environment(_PS_COMPLETE="complete_bash", COMP_WORDS="ps train gen", COMP_CWORD="2"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["general"]
