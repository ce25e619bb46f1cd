"""A whole checkpoint from tensors: its six entries, equal bytes, independence from the training that goes
on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from parallel_synthesis.checkpoint import components, layout
from parallel_synthesis.checkpoint.background import BackgroundWriter
from parallel_synthesis.checkpoint.components import HostState, capture, write_checkpoint
from parallel_synthesis.checkpoint.state import load_pt, training_state
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.manifest import verify

pytestmark = pytest.mark.lane
MODULES = ("v_proj", "q_proj", "o_proj", "k_proj", "up_proj", "gate_proj", "down_proj")


def tensors(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    mapper = {"net.0.weight": (32, 3), "net.0.bias": (32,), "net.2.weight": (4, 32), "net.2.bias": (4,)}
    adapter = {f"layers.{layer}.lora_{side}.weight": (16, 40) for layer in range(2) for side in "AB"}
    return (
        {name: torch.randn(shape, generator=generator) for name, shape in mapper.items()},
        {name: torch.randn(shape, generator=generator) for name, shape in adapter.items()},
    )


def taken(step: int = 0, seed: int = 0, **changed: Any) -> HostState:
    mapper, adapter = tensors(seed)
    loop = {"epoch_idx": 0, "next_batch_idx_in_epoch": 0, "global_step": step}
    arguments: dict[str, Any] = {
        "step": step,
        "mapper": mapper,
        "mapper_config": {"hidden_dim": 32, "metadata_features": "both"},
        "adapter": adapter,
        "adapter_config": {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": set(MODULES),
            "exclude_modules": list(MODULES),
            "peft_type": "LORA",
            "rank_pattern": {},
        },
        "training_state": training_state(
            global_step=step,
            ranks=1,
            optimizer_state={
                "state": {0: {"exp_avg": adapter["layers.0.lora_A.weight"]}},
                "param_groups": [],
            },
            loop_state=loop,
            rank_states={0: {"process_rng_state": {}}},
            versions={},
        ),
        "meta": {
            "global_step": step,
            "epoch": 0,
            "source_run_dir": "run",
            "metrics": {"task": None, "loss": float("nan"), "perplexity": float("inf"), "target_tokens": 0},
            "recipe": "demo",
            "recipe_sha256": "0" * 64,
            "parents": [],
            "ranks": 1,
            "versions": {"torch": "2.13"},
        },
    }
    return capture(**(arguments | changed))


def test_a_checkpoint_of_step_0_has_the_six_entries(tmp_path: Path) -> None:
    mapper, adapter = tensors(0)
    manifest = write_checkpoint(tmp_path / "step_000000000", taken())
    directory = tmp_path / "step_000000000"
    assert {entry.name for entry in directory.iterdir()} == set(layout.COMPONENT_ENTRIES)
    assert verify(directory) == []
    assert (directory / layout.ADAPTER_MODEL).read_bytes() == save(adapter)
    assert set(manifest["files"][layout.ADAPTER_MODEL]["tensors"]) == set(adapter)
    loaded = components.read_mapper(directory)
    assert all(torch.equal(loaded[name], mapper[name]) for name in mapper)
    config = json.loads((directory / layout.ADAPTER_CONFIG).read_text())
    assert config["target_modules"] == config["exclude_modules"] == sorted(MODULES)
    meta = json.loads((directory / layout.CHECKPOINT_META).read_text())
    assert meta["metrics"] == {"task": None, "loss": None, "perplexity": None, "target_tokens": 0}
    assert load_pt(directory / layout.TRAINING_STATE)["global_step"] == 0


def test_equal_content_in_different_places_is_equal_bytes(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "a" / "one", taken())
    other = write_checkpoint(tmp_path / "other_name", taken())
    assert one == other
    for path in (tmp_path / "a" / "one").rglob("*"):
        if path.is_file():
            twin = tmp_path / "other_name" / path.relative_to(tmp_path / "a" / "one")
            assert path.read_bytes() == twin.read_bytes()
    changed = write_checkpoint(tmp_path / "third", taken(seed=1))
    assert changed["files"][layout.CACHE_MAPPER] != one["files"][layout.CACHE_MAPPER]


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    mapper, adapter = tensors(0)
    state = taken(mapper=mapper, adapter=adapter)
    expected = write_checkpoint(tmp_path / "expected", state)
    started = threading.Event()
    changed = threading.Event()

    def job() -> None:
        started.set()
        assert changed.wait(20)
        write_checkpoint(tmp_path / "background", state)

    with BackgroundWriter() as writer:
        writer.submit(job)
        assert started.wait(20)
        for tensor in (*mapper.values(), *adapter.values()):
            tensor.zero_()
        changed.set()
    assert json.loads((tmp_path / "background" / "manifest.json").read_text()) == expected


def test_a_capture_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    taken()
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_is_used_again_only_when_asked(tmp_path: Path) -> None:
    first = taken()
    second = taken(seed=1)
    assert second.mapper["net.0.bias"].data_ptr() != first.mapper["net.0.bias"].data_ptr()
    third = taken(seed=1, into=first)
    assert third.mapper["net.0.bias"].data_ptr() == first.mapper["net.0.bias"].data_ptr()
    assert write_checkpoint(tmp_path / "second", second) == write_checkpoint(tmp_path / "third", third)
    assert third.tensor_nbytes == 4 * (260 + 4 * 640 + 640)


def test_what_does_not_follow_its_schema_is_not_committed(tmp_path: Path) -> None:
    bad = taken(mapper_config={"hidden_dim": 32, "metadata_features": "some"})
    with pytest.raises(CheckpointError, match=r"\$\.metadata_features: expected 'both' or 'length'"):
        write_checkpoint(tmp_path / "bad", bad)
    with pytest.raises(ValueError, match=r"meta\.global_step is 0; expected 5"):
        write_checkpoint(tmp_path / "bad", taken(step=5, meta=taken().meta))
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_mapper_file_is_named(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "cache_mapper.pt")
    with pytest.raises(CheckpointError, match=r"cache_mapper\.pt: expected a state dict"):
        components.read_mapper(tmp_path)
