"""recipes/training/*.sh: the environment variables, arguments in both spellings, and two global steps on 4 processes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.resources import resource

SCRIPTS = {path.name[:2]: path for path in sorted(resource("recipes", "training").glob("*.sh"))}


def launch(
    number: str,
    *args: str | Path,
    environment: Mapping[str, str],
    cwd: Path,
    python: str = sys.executable,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SCRIPTS[number], *map(str, args)],
        env={**environment, "PYTHON": python, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def echo(tmp_path: Path) -> str:
    """In place of Python: prints the words that it was given, one a line."""
    path = tmp_path / "echo"
    path.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_all_three_are_there_and_clean() -> None:
    assert sorted(path.name for path in SCRIPTS.values()) == [
        "01_train_general.sh",
        "02_train_browsecomp.sh",
        "03_merge_release_checkpoint.sh",
    ]
    for path in SCRIPTS.values():
        assert os.access(path, os.X_OK)
        assert "set -euo pipefail" in path.read_text()
        subprocess.run(["bash", "-n", path], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", path], check=True)


@pytest.mark.parametrize(
    ("number", "env", "args", "expected"),
    [
        ("01", {}, [], "-m pscli.compat_train --recipe general --nproc 4 --out runs/general"),
        (
            "01",
            {"NPROC_PER_NODE": "2", "OUTPUT_DIR": "my runs/a"},
            ["--seed", "3", "--set", "a=b c"],
            "-m pscli.compat_train --recipe general --nproc 2 --out|my runs/a|--seed 3 --set|a=b c",
        ),
        (
            "02",
            {},
            [],
            "-m pscli.compat_train --recipe browsecomp --nproc 4 --out runs/browsecomp"
            " --init runs/general@general_step_176175",
        ),
        (
            "02",
            {"GENERAL_CHECKPOINT": "g h"},
            ["--dry-run"],
            "-m pscli.compat_train --recipe browsecomp --nproc 4 --out runs/browsecomp --init|g h|--dry-run",
        ),
        (
            "02",
            {},
            ["--parallel_kv_load_dir", "c", "--resume_from_global_step", "9"],
            "-m pscli.compat_train --recipe browsecomp --nproc 4 --out runs/browsecomp"
            " --parallel_kv_load_dir c --resume_from_global_step 9",
        ),
        (
            "03",
            {"BROWSECOMP_CHECKPOINT": "a", "GENERAL_EARLY_CHECKPOINT": "b", "OUTPUT_DIR": "m"},
            ["--dry-run"],
            "-m pscli merge a b --recipe release-merge --out m --dry-run",
        ),
        (
            "03",
            {},
            [],
            "-m pscli merge runs/browsecomp runs/general@general_step_95060 --recipe release-merge --out runs/release",
        ),
    ],
)
def test_the_call(
    number: str,
    env: dict[str, str],
    args: list[str],
    expected: str,
    environment: dict[str, str],
    echo: str,
    tmp_path: Path,
) -> None:
    result = launch(number, *args, environment=environment, cwd=tmp_path, python=echo, **env)
    assert result.returncode == 0, result.stderr
    words = [
        w
        for part in expected.split("|")
        for w in ([part] if part in ("my runs/a", "a=b c", "g h") else part.split())
    ]
    assert result.stdout.splitlines() == words


@pytest.mark.parametrize("number", ["01", "02", "03"])
def test_a_python_without_the_package_is_told_what_to_do(
    number: str, environment: dict[str, str], tmp_path: Path
) -> None:
    header = SCRIPTS[number].read_text().partition("set -euo")[0]
    assert "PYTHON" in header and "--set" not in header.partition("ps merge")[2]
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    result = launch(number, environment=environment, cwd=tmp_path, python=str(bare))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"error: {bare} does not have this package: activate its environment" in result.stderr


def test_two_global_steps_on_four_processes_then_stage_two(
    world: dict[str, Any], environment: dict[str, str], tiny_backbone: Path, tmp_path: Path
) -> None:
    """The whole way in with real processes: `STEPS_PER_EPOCH=2 SAVE_EVERY_STEPS=0`, then BrowseComp from its end."""
    for name in ("first", "second"):
        shutil.copyfile(world["root"] / f"{name}.jsonl", tmp_path / f"{name}.jsonl")
    shutil.copytree(world["root"] / "data", tmp_path / "data")
    common = {"MODEL_NAME": str(tiny_backbone), "STEPS_PER_EPOCH": "2", "SAVE_EVERY_STEPS": "0"}
    small = ["--device", "cpu", "--parallel_kv_lora_r", "4", "--set", "lora.alpha=8", "--quiet"]
    result = launch(
        "01",
        "--tasks",
        "flan",
        "wildchat",
        *small,
        environment=environment,
        cwd=tmp_path,
        OUTPUT_DIR="g",
        **common,
    )
    assert result.returncode == 0, result.stderr
    meta = json.loads((tmp_path / "g" / "checkpoint_meta.json").read_text())
    assert (meta["global_step"], meta["ranks"], meta["recipe"]) == (2, 4, "general")
    steps = sorted(path.name for path in (tmp_path / "g" / "step_checkpoints").glob("step_*"))
    assert steps == ["step_000000000", "step_000000002"]
    log = (tmp_path / "g" / "train.log").read_text()
    assert [f" step={step} " in log for step in (1, 2, 3)] == [True, True, False]
    result = launch(
        "02", *small, environment=environment, cwd=tmp_path, OUTPUT_DIR="b", GENERAL_CHECKPOINT="g",
        DATA_FILE=str(tmp_path / "first.jsonl"), NPROC_PER_NODE="1", **common,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    meta = json.loads((tmp_path / "b" / "checkpoint_meta.json").read_text())
    assert (meta["global_step"], meta["ranks"], meta["recipe"]) == (2, 4, "browsecomp")
    assert meta["parents"][0]["source"] == "g"
    assert meta["data"].keys() == {"browsecomp_textmas_toolcall"}
    result = launch(
        "03", environment=environment, cwd=tmp_path, BROWSECOMP_CHECKPOINT="b", GENERAL_EARLY_CHECKPOINT="g",
        OUTPUT_DIR="m",
    )  # fmt: skip
    merged = tmp_path / "m"
    assert (merged / "cache_mapper.pt").read_bytes() == (tmp_path / "g" / "cache_mapper.pt").read_bytes(), (
        result.stderr
    )
