"""A sound checkpoint made by hand: its files by torch and the safetensors library, its manifest by hashlib alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Path]
STEP, HIDDEN, RANK, LAYERS, WIDTH = 5, 4, 2, 3, 6


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry_of(path: Path) -> dict[str, Any]:
    """A manifest entry, computed apart from the code under test."""
    data = path.read_bytes()
    entry: dict[str, Any] = {"bytes": len(data), "sha256": sha(data)}
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(data[:8], "little")
        entry["header_sha256"] = sha(data[:start])
        entry["tensors"] = {}
        for name, field in json.loads(data[8:start]).items():
            begin, end = (start + offset for offset in field["data_offsets"])
            entry["tensors"][name] = {"offset": begin, "bytes": end - begin, "sha256": sha(data[begin:end])}
    return entry


def write_manifest(directory: Path, **changes: Any) -> None:
    """manifest.json for what is there now."""
    names = sorted(
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    )
    document = {
        "schema_version": 1,
        "kind": "checkpoint",
        "global_step": STEP,
        "files": {name: entry_of(directory / name) for name in names},
    }
    (directory / "manifest.json").write_text(json.dumps(document | changes))


def write_checkpoint(directory: Path) -> Path:
    """The six component entries of one step, which belong together."""
    import torch
    from safetensors.torch import save_file

    (directory / "judger_lora").mkdir(parents=True)
    mapper = {
        "net.0.weight": torch.ones(HIDDEN, 3),
        "net.0.bias": torch.ones(HIDDEN),
        "net.2.weight": torch.zeros(4, HIDDEN),
        "net.2.bias": torch.zeros(4),
    }
    torch.save(mapper, directory / "cache_mapper.pt")
    torch.save({"global_step": STEP, "optimizer_state": {}}, directory / "training_state.pt")
    adapter = {}
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            adapter[f"{prefix}.lora_A.weight"] = torch.full((RANK, WIDTH), float(layer + 1))
            adapter[f"{prefix}.lora_B.weight"] = torch.full((WIDTH, RANK), float(-layer))
    save_file(adapter, directory / "judger_lora" / "adapter_model.safetensors")
    documents: dict[str, Any] = {
        "judger_lora/adapter_config.json": {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": 4,
            "lora_dropout": 0.0,
            "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": "tiny",
        },
        "cache_mapper_config.json": {"hidden_dim": HIDDEN, "metadata_features": "both"},
        "checkpoint_meta.json": {
            "global_step": STEP,
            "epoch": 1,
            "source_run_dir": "runs/a",
            "metrics": {},
            "recipe": "tiny",
            "parents": [],
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))
    write_manifest(directory)
    return directory


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; tests copy it."""
    return write_checkpoint(tmp_path_factory.mktemp("pristine") / f"step_{STEP:09d}")


@pytest.fixture
def sound(pristine: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(pristine, tmp_path / "holder" / pristine.name))


@pytest.fixture
def relist() -> Callable[..., None]:
    """relist(directory, **changes): the manifest says what is there now, so that only the parts can be wrong."""
    return write_manifest
