"""Real runs of a tiny recipe in real processes, and what is compared of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest


def component_hashes(directory: Path) -> dict[str, str]:
    """sha256 of the component files and of the training state's file (same content, same bytes)."""
    names = (
        "cache_mapper.pt",
        "judger_lora/adapter_model.safetensors",
        "judger_lora/adapter_config.json",
        "training_state.pt",
    )
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture
def hashes() -> Callable[[Path], dict[str, str]]:
    return component_hashes
