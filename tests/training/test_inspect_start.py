"""`ps inspect --against`: runs that part because they did not begin with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance.schema import problems


@pytest.fixture(scope="module")
def runs(module_recipe: Callable[..., Path], module_ps: Any) -> dict[str, Path]:
    """Of one recipe: from fresh weights, from those of another run, and from the same under another name."""
    recipe = module_recipe(run={"max_steps": 2})
    found = {name: recipe.parent / name for name in ("fresh", "first", "from", "again")}
    more: dict[str, list[Any]] = {
        "fresh": [],
        "first": ["--set", "run.seed=5"],
        "from": ["--init", found["first"]],
        "again": ["--init", f"{found['first']}@kept"],
    }
    for name, words in more.items():
        done = module_ps("train", recipe, "--out", found[name], *words)
        assert done.returncode == 0, done.stderr
        if name == "first":
            assert module_ps("snapshot", found["first"], "--name", "kept").returncode == 0
    return found


def against(ps: Any, one: Path, other: Path, code: int) -> tuple[dict[str, Any], str]:
    done = ps("inspect", one, "--against", other, "--json")
    assert done.returncode == code, done.stderr
    document = json.loads(done.stdout)
    assert problems(document, "inspect") == []
    return document["against"], ps("inspect", one, "--against", other).stdout


def test_what_they_were_started_from_is_named(ps: Any, runs: dict[str, Path]) -> None:
    found, shown = against(ps, runs["fresh"], runs["from"], 1)
    assert found["same_start"] is False and found["parting"]["step"] == 1
    settings = {item["name"]: item for item in found["settings"]}
    parents = json.loads((runs["from"] / "checkpoint_meta.json").read_text())["parents"]
    adapter = parents[0]["components"]["judger_lora/adapter_model.safetensors"]
    assert settings["start"]["one"] == "fresh weights"
    assert settings["start"]["other"].startswith(f"{runs['first']} (cache_mapper ")
    assert f"adapter_model {adapter[:12]}" in settings["start"]["other"]
    assert f"adapter_model {adapter[:12]}" in settings["weights at step 0"]["other"]
    assert settings["start"]["kind"] == "changes the data or the loss"
    assert "they did not start from the same weights" in shown
    assert "what differs" in shown and str(runs["first"]) in shown


def test_another_seed_is_another_start(ps: Any, runs: dict[str, Path]) -> None:
    found, _ = against(ps, runs["fresh"], runs["first"], 1)
    names = {item["name"] for item in found["settings"]}
    assert (
        found["same_start"] is False and {"weights at step 0", "run.seed"} <= names and "start" not in names
    )


def test_the_same_bytes_under_another_name_are_the_same_start(ps: Any, runs: dict[str, Path]) -> None:
    found, shown = against(ps, runs["from"], runs["again"], 0)
    assert found["same_start"] is True and not {"start", "weights at step 0"} & {
        item["name"] for item in found["settings"]
    }
    assert "the same weights" not in shown
    bare, _ = against(ps, runs["from"], runs["again"] / "train.log", 0)
    assert bare["same_start"] is None
