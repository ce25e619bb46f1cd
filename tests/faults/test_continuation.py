"""A new run from a checkpoint that lies apart from its run: whose settings, order and log it takes, and what it records."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.training.records import config_sha256

Ps = Any  # tests/conftest.py, Calls
Hashes = Callable[[Path], dict[str, str]]
RUN = Path("runs/demo")  # relative, as users type it, and so as checkpoints record it


@pytest.fixture(scope="module")
def recipe(module_recipe: Callable[..., Path]) -> Path:
    return module_recipe(run={"epochs": 2}, checkpoint={"every": 2, "milestones": [7]})


@pytest.fixture(scope="module")
def home(module_ps: Ps, recipe: Path) -> Path:
    """Where the run was made, as runs/demo. Nobody writes into it."""
    result = module_ps("train", recipe, "--out", RUN, "--json")
    assert result.returncode == 0, result.stderr
    place: Path = module_ps._directory
    assert json.loads((place / RUN / "checkpoint_meta.json").read_text())["source_run_dir"] == str(RUN)
    return place


@pytest.fixture(scope="module")
def exported(module_ps: Ps, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain copy of the checkpoint of step 7, which is in the second epoch."""
    out = tmp_path_factory.mktemp("exported") / "checkpoint"
    assert module_ps("snapshot", f"{RUN}@tiny_step_7", "--export", out).returncode == 0
    return out


@pytest.fixture
def old(exported: Path, tmp_path: Path) -> Path:
    """The same as an earlier version saved it: without its run's record."""
    out = tmp_path / "old"
    shutil.copytree(exported, out)
    meta = json.loads((out / "checkpoint_meta.json").read_text())
    rewrite(out, {key: value for key, value in meta.items() if key != "run"})
    return out


def rewrite(checkpoint: Path, meta: dict[str, Any]) -> None:
    """Another checkpoint_meta.json, which the manifest vouches for."""
    raw = json.dumps(meta).encode()
    (checkpoint / "checkpoint_meta.json").unlink()
    (checkpoint / "checkpoint_meta.json").write_bytes(raw)
    listed = json.loads((checkpoint / "manifest.json").read_text())
    listed["files"]["checkpoint_meta.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").write_text(json.dumps(listed))


@pytest.fixture
def stranger(ps: Ps, recipe: Path, tmp_path: Path) -> Path:
    """Another run that lies where the checkpoint says that its own was."""
    result = ps("train", recipe, "--out", RUN, "--set", "run.seed=7", "--max-steps", 2)
    assert result.returncode == 0, result.stderr
    return tmp_path / RUN


@pytest.mark.lane
def test_a_stranger_at_the_recorded_place_is_not_taken_for_its_run(
    ps: Ps, home: Path, exported: Path, stranger: Path, hashes: Hashes, tmp_path: Path
) -> None:
    result = ps("resume", exported, "--out", "on")
    assert result.returncode == 0, result.stderr
    assert "the settings are those that the checkpoint carries" in result.stderr
    assert hashes(tmp_path / "on") == hashes(home / RUN)
    record = json.loads((tmp_path / "on" / "run_args.json").read_text())
    assert record["config"]["run"]["seed"] == 3
    steps = [line for line in (tmp_path / "on" / "train.log").read_text().splitlines() if " step=" in line]
    assert not [line for line in steps if " step=1 " in line]  # the stranger's log is not its log
    assert ps("verify", tmp_path / "on", "--replay", 1).returncode == 0


def test_without_a_record_nothing_is_guessed(ps: Ps, old: Path, stranger: Path, tmp_path: Path) -> None:
    result = ps("resume", old, "--out", "on")
    assert result.returncode == 2 and not (tmp_path / "on").exists()
    assert f"the run at {RUN}, which it names as its own, does not hold this checkpoint" in result.stderr
    assert "--recipe R" in result.stderr
    shutil.rmtree(stranger)
    result = ps("resume", old, "--out", "on")
    assert result.returncode == 2 and not (tmp_path / "on").exists()
    assert f"there is no run at {RUN}" in result.stderr and "--recipe R" in result.stderr


def test_its_own_run_is_known_by_the_checkpoint_that_it_holds(
    ps: Ps, recipe: Path, old: Path, home: Path, hashes: Hashes, tmp_path: Path
) -> None:
    shutil.copytree(home / "runs", tmp_path / "runs", symlinks=True)
    result = ps("resume", old, "--out", "on", "--recipe", recipe)
    assert result.returncode == 0, result.stderr
    assert f"recipe {recipe} is not read" in result.stderr
    assert "steps 8-10 reproduced" in result.stderr  # its log came along
    assert hashes(tmp_path / "on") == hashes(home / RUN)


def test_a_recipe_takes_an_older_checkpoint_on_exactly(
    ps: Ps, recipe: Path, old: Path, stranger: Path, home: Path, hashes: Hashes, tmp_path: Path
) -> None:
    result = ps("resume", old, "--out", "on", "--recipe", recipe)
    assert result.returncode == 0, result.stderr
    assert f"the settings are those of recipe {recipe}" in result.stderr
    assert "did not keep its run's settings" in result.stderr
    assert hashes(tmp_path / "on") == hashes(home / RUN)


@pytest.mark.parametrize(
    ("name", "sets", "said"),
    [
        ("seed", ["run.seed=4"], "was shuffled from another state"),
        ("rows", ["data.max_rows=8"], "these are not the run's data files"),
        ("optim", [], "learning_rate = 0.01, tiny has 0.02: this is not its recipe"),
        ("end", [], "the planned end, in steps = 10, tiny has 15"),
        ("data", [], "was made with data of task first"),
    ],
)
def test_a_recipe_that_can_not_be_its_own_is_noticed(
    ps: Ps, recipe: Path, old: Path, tmp_path: Path, name: str, sets: list[str], said: str
) -> None:
    place = tmp_path / "recipe"
    shutil.copytree(recipe.parent, place, ignore=shutil.ignore_patterns("cache"))
    text = recipe.read_text().replace(str(recipe.parent), str(place))
    if name == "optim":
        text = text.replace("learning_rate = 0.01", "learning_rate = 0.02")
    if name == "end":
        text = text.replace("epochs = 2", "epochs = 3")
    if name == "data":
        path = place / "first.jsonl"
        path.write_text(path.read_text().replace("word1 ", "word2 "))
    (place / "tiny.toml").write_text(text)
    more = [part for item in sets for part in ("--set", item)]
    result = ps("resume", old, "--out", "on", "--recipe", place / "tiny.toml", *more)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert not (tmp_path / "on").exists() and not list(tmp_path.glob(".on*"))


def test_what_is_set_is_said_and_done(ps: Ps, recipe: Path, old: Path, tmp_path: Path) -> None:
    sets = ["--set", "optim.learning_rate=0.02"]
    result = ps("resume", old, "--out", "on", "--recipe", recipe, "--max-steps", 8, *sets)
    assert result.returncode == 0, result.stderr
    assert (
        "optim.learning_rate was 0.01 in the checkpoint's run and is 0.02 now, as it was set" in result.stderr
    )
    assert "the planned end, in steps was 10 in the checkpoint's run and is 8 now" in result.stderr


def test_a_run_beside_a_checkpoint_of_another_is_refused(
    ps: Ps, exported: Path, stranger: Path, tmp_path: Path
) -> None:
    """As it is published when a checkpoint and a run_args.json are put into one directory by hand."""
    mixed = tmp_path / "mixed"
    shutil.copytree(exported, mixed)
    shutil.copyfile(stranger / "run_args.json", mixed / "run_args.json")
    result = ps("resume", mixed, "--out", "on")
    assert result.returncode == 2 and "is not the record of the run that made" in result.stderr
    assert "run.seed  3  7" in result.stderr


def test_a_checkpoint_below_another_run_is_not_part_of_it(
    ps: Ps, exported: Path, stranger: Path, home: Path, hashes: Hashes, tmp_path: Path
) -> None:
    shutil.copytree(exported, stranger / "copies")
    result = ps("resume", stranger / "copies", "--out", "on")
    assert result.returncode == 0, result.stderr
    assert hashes(tmp_path / "on") == hashes(home / RUN)


def test_a_resume_in_place_notices_another_order(ps: Ps, home: Path, stranger: Path, tmp_path: Path) -> None:
    name = "step_checkpoints/step_000000008"
    shutil.rmtree(stranger / "step_checkpoints")
    shutil.copytree(home / RUN / name, stranger / name)
    (stranger / "manifest.json").unlink()
    result = ps("resume", RUN, "--max-steps", 9)
    assert result.returncode == 2, result.stderr
    assert "epoch 2 was shuffled from another state" in result.stderr


def test_data_that_lie_elsewhere_are_asked_for_before_anything_is_made(
    ps: Ps, exported: Path, recipe: Path, home: Path, hashes: Hashes, tmp_path: Path
) -> None:
    moved = tmp_path / "exported"
    shutil.copytree(exported, moved)
    meta = json.loads((moved / "checkpoint_meta.json").read_text())
    meta["run"]["config"]["data"]["root"] = "/nowhere"
    meta["run"]["config_sha256"] = config_sha256(meta["run"]["config"])
    rewrite(moved, meta)
    result = ps("resume", moved, "--out", "on")
    assert result.returncode == 2 and not (tmp_path / "on").exists()
    assert "/nowhere/first.jsonl" in result.stderr and "--set data.root=DIR" in result.stderr
    result = ps("resume", moved, "--out", "on", "--set", f"data.root={recipe.parent}")
    assert result.returncode == 0, result.stderr
    assert hashes(tmp_path / "on") == hashes(home / RUN)


def tree(ps: Ps, *args: str | Path) -> dict[str, Any]:
    result = ps("inspect", *args, "--lineage", "--json")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["lineage"]
    return found


def test_the_lineage_of_a_continuation(ps: Ps, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs", tmp_path / "runs", symlinks=True)
    assert ps("resume", RUN, "--step", 7, "--out", "on").returncode == 0
    assert ps("resume", "on", "--step", 8).returncode == 0  # a later attempt does not forget it
    assert ps("resume", "on", "--step", 10, "--out", "more", "--set", "run.epochs=3").returncode == 0
    parent = tree(ps, "on")["parents"]
    assert [(node["source"], node["step"], node["edge"]) for node in parent] == [
        (f"{RUN}@tiny_step_7", 7, "verified")
    ]
    taken_over = tree(ps, "on/step_checkpoints/step_000000007")["parents"]
    assert [node["source"] for node in taken_over] == [f"{RUN}@tiny_step_7"]
    above = tree(ps, "more")["parents"]
    assert [node["source"] for node in above] == ["on@step_000000010"] and above[0]["edge"] == "verified"
    assert [node["source"] for node in above[0]["parents"]] == [f"{RUN}@tiny_step_7"]
    assert ps("verify", "on").returncode == 0


def test_a_checkpoint_of_the_hub(
    ps: Ps,
    hub_server: Any,
    hub_environment: dict[str, str],
    exported: Path,
    stranger: Path,
    home: Path,
    hashes: Hashes,
    tmp_path: Path,
) -> None:
    commit = hub_server.publish("my-lab/general", exported)

    def hub_ps(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pscli", *args],
            cwd=tmp_path, env=hub_environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    result = hub_ps("resume", "my-lab/general", "--out", "on")
    assert result.returncode == 0, result.stderr
    assert f"on goes on from hf://my-lab/general@{commit}, step 7" in result.stderr
    assert hashes(tmp_path / "on") == hashes(home / RUN)
    shown = hub_ps("inspect", "on", "--lineage")
    assert f"└─ hf://my-lab/general@{commit}  (recipe tiny, step 7, " in shown.stdout
    assert "verified" in shown.stdout
