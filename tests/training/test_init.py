"""What a run is started from (--init, --order-from-step): read in full and compared with its manifest first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ps = Callable[..., subprocess.CompletedProcess[str]]
Recipe = Callable[..., Path]


def ok(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stderr
    return result


def damage(path: Path, *, from_end: int = 5) -> None:
    """Flips a bit."""
    raw = bytearray(path.read_bytes())
    raw[-from_end] ^= 1
    path.chmod(0o644)
    path.write_bytes(raw)


def test_init_refuses_a_checkpoint_that_is_not_what_its_manifest_says(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    ok(ps("train", recipe, "--out", tmp_path / "first", "--max-steps", 1))
    step, out = tmp_path / "first" / "step_checkpoints" / "step_000000001", tmp_path / "out"
    for number, name in enumerate(
        (
            "judger_lora/adapter_model.safetensors",
            "cache_mapper.pt",
            "judger_lora/adapter_config.json",
            "cache_mapper_config.json",
            "checkpoint_meta.json",
        )
    ):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(step, copy)
        damage(copy / name)
        calls = [("train", recipe, "--init", copy, "--out", out, "--max-steps", 1)]
        if number == 0:  # an order alone is taken up in the same way, and a run of two processes looks once
            order = ("--order-from-step", 1, "--recipe", recipe, "--out", out)
            calls += [("resume", copy, *order), (*calls[0], "--nproc", 2)]
        for call in calls:
            result = ps(*call)
            assert (result.returncode, result.stdout) == (2, "")
            assert result.stderr.count("is not what the manifest beside it says") == 1
            assert str(copy / name) in result.stderr
            assert f"ps verify {copy}" in result.stderr
            assert not out.exists()


def test_a_record_says_whether_a_start_was_checked_and_lineage_calls_nothing_damaged_verified(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe()
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))

    def parent(run: Path) -> dict[str, Any]:
        (found,) = json.loads((run / "checkpoint_meta.json").read_text())["parents"]
        return dict(found)

    def lineage(run: Path) -> str:
        return str(ok(ps("inspect", run, "--lineage")).stdout.splitlines()[1])

    ok(ps("train", recipe, "--out", first, "--max-steps", 1))
    start = tmp_path / "start"
    shutil.copytree(first / "step_checkpoints" / "step_000000001", start)
    ok(ps("train", recipe, "--out", second, "--max-steps", 1, "--init", start))
    assert parent(second)["checked"] is True
    assert lineage(second).endswith("  verified")
    whole = (start / "manifest.json").read_text()
    (start / "manifest.json").unlink()
    ok(ps("train", recipe, "--out", third, "--max-steps", 1, "--init", start))
    assert parent(third) == parent(second) | {"checked": False}
    assert lineage(third).endswith("verified, as the child took it: it had no manifest to be compared with")
    # As older versions took it: what the child recorded is what is there, and it was damaged.
    adapter = "judger_lora/adapter_model.safetensors"
    (start / "manifest.json").write_text(whole.replace(parent(second)["components"][adapter], "0" * 64))
    assert f"UNVERIFIED: {adapter} is what the child recorded, but not what" in lineage(third)
    damage(start / adapter)
    assert "DIFFERS" in lineage(third)


def test_a_damaged_checkpoint_of_the_hub_is_refused(
    ps: Ps, tiny_recipe: Recipe, tmp_path: Path, hub_server: Any, hub_environment: dict[str, str]
) -> None:
    recipe = tiny_recipe()
    ok(ps("train", recipe, "--out", tmp_path / "first", "--max-steps", 1))
    place = tmp_path / "published"
    shutil.copytree(tmp_path / "first" / "step_checkpoints" / "step_000000001", place)
    damage(place / "judger_lora" / "adapter_model.safetensors")
    hub_server.publish("owner/name", place)
    result = subprocess.run(  # not forked: huggingface_hub reads the environment when it is imported
        [sys.executable, "-m", "pscli", "train", recipe, "--init", "hf://owner/name", "--out", "out"],
        env=hub_environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert "judger_lora/adapter_model.safetensors is not what the manifest beside it says" in result.stderr
    assert "ps verify hf://owner/name@" in result.stderr
