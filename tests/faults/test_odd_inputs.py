"""What a user's file system can do to a command: no permission, no room, names of every kind. One word, one document."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ps = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def finished(
    module_ps: Ps, module_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    result = module_ps("train", module_recipe(), "--out", out)
    assert result.returncode == 0, result.stderr
    return out


def failure(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The message of a call that failed as it should: on stderr, and in the one document."""
    assert result.returncode == code, result.stderr
    document = json.loads(result.stdout)
    assert (document["ok"], document["exit_code"]) == (False, code)
    message: str = document["error"]["message"]
    assert result.stderr == f"error: {message}\n"
    return message


def test_a_recipe_that_is_none(ps: Ps, tmp_path: Path, unprivileged: str) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir.toml").mkdir()
    (tmp_path / "own.toml").write_text("[run]\n")
    (tmp_path / "own.toml").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    long = "x" * 300 + ".toml"
    denied, too_long = os.strerror(errno.EACCES), os.strerror(errno.ENAMETOOLONG)
    for given, code, expected in [
        ("dir", 2, "dir: a directory; expected a recipe file, or a shipped recipe (browsecomp, demo"),
        ("dir.toml", 2, "dir.toml: a directory; expected a recipe file"),
        ("own.toml", 3, f"own.toml: the recipe cannot be read: {denied}"),
        ("closed/own.toml", 3, f"closed/own.toml: the recipe cannot be read: {denied}"),
        (long, 2, f"{long}: no recipe file can be found there: {too_long}"),
        ("рецепт", 2, "no recipe 'рецепт'; shipped: browsecomp, demo"),
        ("", 2, "no recipe ''; shipped: browsecomp, demo"),
    ]:
        assert failure(ps("train", given, "--json", script=unprivileged), code).startswith(expected)


def test_an_error_of_the_system_names_the_file_alone(ps: Ps, tmp_path: Path, unprivileged: str) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    result = ps("inspect", "closed/run", "--json", script=unprivileged)
    assert failure(result, 3) == f"closed/run: {os.strerror(errno.EACCES)}"


@pytest.mark.parametrize(
    "name", ["judger_lora/adapter_model.safetensors", "cache_mapper.pt", "checkpoint_meta.json"]
)
def test_a_merge_input_without_read_permission(
    ps: Ps, tmp_path: Path, lora_checkpoint: Callable[..., Path], unprivileged: str, name: str
) -> None:
    first = lora_checkpoint(tmp_path / "first", seed=1)
    second = lora_checkpoint(tmp_path / "second", seed=2)
    (second / name).chmod(0)
    before = sorted(tmp_path.iterdir())
    message = failure(ps("merge", first, second, "--out", "merged", "--json", script=unprivileged), 3)
    assert str(second / name) in message
    assert os.strerror(errno.EACCES) in message
    assert [path for path in sorted(tmp_path.iterdir()) if not path.name.startswith("std")] == before
    (second / name).chmod(0o644)
    assert ps("merge", first, second, "--out", "merged", script=unprivileged).returncode == 0


def test_a_snapshot_where_nothing_may_be_written(
    ps: Ps, finished: Path, tmp_path: Path, unprivileged: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    (run / "milestones").mkdir(exist_ok=True)
    (run / "milestones").chmod(0o555)
    message = failure(ps("snapshot", run, "--name", "kept", "--json", script=unprivileged), 3)
    assert f"cannot write {run}/milestones" in message
    assert list((run / "milestones").iterdir()) == []
    (run / "milestones").chmod(0o755)
    assert ps("snapshot", run, "--name", "kept", script=unprivileged).returncode == 0


def files_of(directory: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_an_export_to_a_full_disk(ps: Ps, finished: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("96k")
    before = files_of(finished)
    message = failure(ps("snapshot", finished, "--export", disk / "copy", "--json"), 3)
    assert f"cannot write {disk}" in message
    assert os.strerror(errno.ENOSPC) in message
    assert "free some space" in message
    assert list(disk.iterdir()) == []
    assert files_of(finished) == before


def test_a_snapshot_on_a_full_disk_costs_no_room_or_leaves_nothing(
    ps: Ps, finished: Path, small_disk: Callable[[str], Path]
) -> None:
    """Links still fit; a copy, which is what an export and a name on a file system without links is, does not."""
    disk = small_disk("4m")
    run = disk / "run"
    shutil.copytree(finished, run, symlinks=True)
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    result = ps("snapshot", run, "--name", "kept", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["ok"]
    no_links = (
        "import os, sys, errno\n"
        "def link(*_args, **_more): raise OSError(errno.EPERM, 'no links here')\n"
        "os.link = link\n"
        "from pscli.main import call\n"
        "raise SystemExit(call(sys.argv[1:]))\n"
    )
    before = files_of(run)
    for words in (["--name", "second"], ["--export", disk / "copy"]):
        message = failure(ps("snapshot", run, *words, "--json", script=no_links), 3)
        assert os.strerror(errno.ENOSPC) in message
        assert files_of(run) == before
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "run"]
    assert ps("verify", run).returncode == 0
    (disk / "filler").unlink()
    assert ps("snapshot", run, "--name", "second", script=no_links).returncode == 0
    assert ps("verify", f"{run}@second").returncode == 0
