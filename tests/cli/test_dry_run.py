"""What a dry run says of the checkpoint to start from, the processes and the LoRA's modules: what the start would say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Recipe = Callable[..., Path]


@pytest.fixture(scope="module")
def recipe(module_recipe: Recipe) -> Path:
    return module_recipe()


@pytest.fixture(scope="module")
def run(recipe: Path, module_ps: Any) -> Path:
    out = recipe.parent / "run"
    done = module_ps("train", recipe, "--out", out, "--max-steps", 2)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.lane
def test_the_checkpoint_to_start_from_is_named(ps: Any, recipe: Path, run: Path) -> None:
    done = ps("train", str(recipe), "--dry-run", "--init", str(run))
    assert done.returncode == 0, done.stderr
    assert f"starts      from the components of {run} (recipe tiny, step 2)" in done.stdout
    found = json.loads(ps("train", str(recipe), "--dry-run", "--init", str(run), "--json").stdout)["plan"]
    assert found["init"] == {"source": str(run), "directory": str(run), "step": 2, "recipe": "tiny"}
    plain = json.loads(ps("train", str(recipe), "--dry-run", "--json").stdout)["plan"]
    assert plain["init"] is None


@pytest.mark.parametrize("given", ["./no/such/run", "RUN@nope"])
def test_a_misspelt_checkpoint_is_refused(ps: Any, recipe: Path, run: Path, given: str) -> None:
    given = given.replace("RUN", str(run))
    done = ps("train", str(recipe), "--dry-run", "--init", given)
    assert done.returncode == 2 and given.rpartition("@")[2].removeprefix("./") in done.stderr
    assert "steps" not in done.stdout


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["lora.r=8"], "r = 4, expected 8, the run's lora.r; set that to 4"),
        (
            ["mapper.hidden_dim=16"],
            "hidden_dim = 32, expected 16, the run's mapper.hidden_dim; set that to 32",
        ),
        (
            ['lora.target_modules=["q_proj"]'],
            "expected ['q_proj'], the run's lora.target_modules; set that to ",
        ),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_as_the_start_would(
    ps: Any, module_ps: Any, recipe: Path, run: Path, sets: list[str], said: str
) -> None:
    more = [part for item in sets for part in ("--set", item)]
    done = ps("train", str(recipe), "--dry-run", "--init", str(run), *more, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 2 and said in document["error"]["message"]
    assert document["plan"]["refused"][0]["type"] == "CheckpointError"
    start = module_ps("train", recipe, "--out", recipe.parent / "never", "--init", run, *more)
    assert start.returncode == 2 and said in start.stderr


def test_tensors_of_another_backbone_are_refused(
    ps: Any, recipe: Path, run: Path, tiny_backbone: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_backbone, other)
    config = json.loads((other / "config.json").read_text())
    for name, value, said in (
        ("hidden_size", 48, "lora_A of k_proj in layer 0 has shape [4, 32], expected [4, 48]"),
        ("num_hidden_layers", 3, "8 missing, 0 unknown (such as lora_A of k_proj in layer 2)"),
    ):
        (other / "config.json").write_text(json.dumps(config | {name: value}))
        done = ps(
            "train",
            str(recipe),
            "--dry-run",
            "--init",
            str(run),
            "--set",
            f"backbone.model={other}",
            "--json",
        )
        assert done.returncode == 2 and said in done.stderr


def test_processes_that_can_not_carry_the_ranks_are_refused(ps: Any, recipe: Path) -> None:
    for words in (["--dry-run", "--nproc", "3"], ["--dry-run", "--", "--nproc-per-node", "3"]):
        done = ps("train", str(recipe), *words)
        assert done.returncode == 2
        assert "3 processes can not carry run.ranks = 4: expected one of 1, 2, 4" in done.stderr
    assert ps("train", str(recipe), "--dry-run", "--nproc", "2").returncode == 0


@pytest.mark.parametrize("modules", ['["q_prj"]', '["q_proj", "q_prj"]'])
def test_modules_that_the_backbone_has_not(ps: Any, module_ps: Any, recipe: Path, modules: str) -> None:
    """PEFT itself would attach what it finds of a list, and not say what it does not."""
    sets = ["--set", f"lora.target_modules={modules}"]
    done = ps("train", str(recipe), "--dry-run", *sets)
    assert done.returncode == 2
    assert "refused     lora.target_modules = ['q_prj']: cannot be attached to " in done.stdout
    assert "down_proj" in done.stdout and "q_proj" in done.stdout
    assert "disk        unknown: the number of trained parameters is not known" in done.stdout
    start = module_ps("train", recipe, "--out", recipe.parent / "never", *sets)
    assert start.returncode == 2 and "lora.target_modules = ['q_prj']: cannot be attached to" in start.stderr


def test_modules_of_a_backbone_that_is_not_at_hand(ps: Any) -> None:
    """The shapes of the release's backbone are known without its files."""
    done = ps("train", "general", "--dry-run", "--set", 'lora.target_modules=["q_prj"]')
    assert done.returncode == 2 and "cannot be attached to Qwen/Qwen3-14B" in done.stdout
    unknown = ps("train", "general", "--dry-run", "--set", "backbone.model=owner/unknown")
    assert unknown.returncode == 0 and "cannot be attached" not in unknown.stdout


def test_a_hub_checkpoint_is_named_at_its_commit(
    hub_server: Any, hub_environment: dict[str, str], recipe: Path, run: Path, tmp_path: Path
) -> None:
    commit = hub_server.publish("my-lab/general", run)
    for given, code, said in (
        ("my-lab/general", 0, f"from the components of hf://my-lab/general@{commit} (recipe tiny, step 2)"),
        ("my-lab/generl", 2, "no such repository"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pscli", "train", str(recipe), "--dry-run", "--init", given],
            cwd=tmp_path, env=hub_environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code and said in done.stdout + done.stderr
