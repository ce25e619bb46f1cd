"""Sizes from a config.json alone, against the release's figures and against what is really built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.model.sizes import mapper_parameters, read_shapes, trainable_sizes

MLP = ("gate_proj", "up_proj", "down_proj")


def test_the_release() -> None:
    shapes = read_shapes("Qwen/Qwen3-14B")
    assert shapes is not None
    sizes = trainable_sizes(shapes, LoraConfig(), MapperConfig())
    assert sizes is not None
    assert (sizes.lora, sizes.lora_tensors, sizes.mapper) == (20_971_520, 320, 260)


@pytest.mark.lane
@pytest.mark.parametrize("features", ["both", "length", "num_agents", "none"])
def test_sizes_equal_what_is_built(tools: Any, features: Any) -> None:
    from parallel_synthesis.model.synthesizer import Synthesizer

    backbone = tools.make_backbone("qwen3")
    lora = LoraConfig(r=3, target_modules=("q_proj", "v_proj", "o_proj", *MLP))
    mapper = MapperConfig(hidden_dim=5, metadata_features=features)
    reader = Synthesizer(backbone, mapper=mapper, lora=lora, seed=0)
    sizes = trainable_sizes(backbone.model.config.to_dict(), lora, mapper)
    assert sizes is not None
    assert sizes.lora == sum(part.numel() for _, part in reader.lora_parameters())
    assert sizes.lora_tensors == len(reader.lora_parameters())
    assert (
        sizes.mapper == mapper_parameters(mapper) == sum(part.numel() for part in reader.mapper.parameters())
    )


def test_shapes_of_a_directory(tmp_path: Path) -> None:
    assert read_shapes(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert read_shapes(str(tmp_path)) == {"hidden_size": 8}
    (tmp_path / "config.json").write_text("{")
    assert read_shapes(str(tmp_path)) is None


def test_shapes_of_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert read_shapes("owner/name", "abc") == {"hidden_size": 16}
    assert read_shapes("owner/name", "other") is None
    assert read_shapes("not a hub id!") is None


def test_unknown_shapes_and_modules_give_none() -> None:
    shapes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    assert trainable_sizes(shapes, LoraConfig(target_modules=("dense",)), MapperConfig()) is None
    assert trainable_sizes({}, LoraConfig(), MapperConfig()) is None
    sizes = trainable_sizes(shapes, LoraConfig(r=1, target_modules=("q_proj",)), MapperConfig())
    assert sizes is not None
    assert sizes.lora == 16
