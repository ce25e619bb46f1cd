"""Fixtures of the checkpoint tests: small checkpoints written without torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.layout import RunPaths


def fill(step: int) -> Callable[[Staging], None]:
    def write(staging: Staging) -> None:
        staging.write_bytes("cache_mapper.pt", b"mapper %d" % step)
        staging.write_json("cache_mapper_config.json", {"hidden_dim": 32, "metadata_features": "both"}, None)
        staging.write_json("judger_lora/adapter_config.json", {"r": 16}, None)
        staging.write_bytes("judger_lora/adapter_model.safetensors", b"adapter %d" % step * 50)
        staging.write_bytes("training_state.pt", b"state %d" % step * 90)
        staging.write_json("checkpoint_meta.json", {"global_step": step}, None)

    return write


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture
def save(run: RunPaths) -> Callable[..., dict[str, Any]]:
    """save(step) commits a small step checkpoint of `run`."""
    return lambda step, **options: commit(run.step(step), step=step, fill=fill(step), **options)
