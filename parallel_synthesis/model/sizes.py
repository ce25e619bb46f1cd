"""Sizes of a run's trainable parts from a backbone's config.json alone, for a plan that loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.model.source import looks_like_path
from parallel_synthesis.resources import resolve_path, resource


@dataclass(frozen=True, kw_only=True)
class TrainableSizes:
    """Numbers of trainable parameters (all stored in fp32, 4 bytes each)."""

    mapper: int
    lora: int
    lora_tensors: int


def mapper_parameters(mapper: MapperConfig) -> int:
    """Weights and biases of the cache mapper (design.md, "Mapper"); 260 for the release's."""
    return mapper.hidden_dim * (mapper_inputs(mapper) + 1) + 4 * (mapper.hidden_dim + 1)


def mapper_inputs(mapper: MapperConfig) -> int:
    """How many numbers describe a branch to the cache mapper."""
    return {"both": 3, "length": 2, "num_agents": 2, "none": 1}[mapper.metadata_features]


def trainable_sizes(
    shapes: Mapping[str, Any], lora: LoraConfig, mapper: MapperConfig
) -> TrainableSizes | None:
    """Sizes for a config.json's content. None when a shape or a target module is not known here.

    Reads hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim and
    intermediate_size.
    """
    ends = linear_sizes(shapes)
    if ends is None or any(module not in ends for module in lora.target_modules):
        return None
    layers = int(shapes["num_hidden_layers"])
    modules = set(lora.target_modules)
    per_layer = sum(lora.r * sum(ends[module]) for module in modules)
    return TrainableSizes(
        mapper=mapper_parameters(mapper), lora=layers * per_layer, lora_tensors=2 * layers * len(modules)
    )


def linear_sizes(shapes: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    """module -> (inputs, outputs) of a layer's usual linear modules; None when a shape is not known."""
    try:
        hidden, _, heads = (
            int(shapes[key]) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
    except (KeyError, TypeError, ValueError):
        return None
    head_dim = shapes.get("head_dim") or hidden // heads
    queries, pairs = heads * head_dim, (shapes.get("num_key_value_heads") or heads) * head_dim
    inner = shapes.get("intermediate_size")
    ends = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, pairs),
        "v_proj": (hidden, pairs),
        "o_proj": (queries, hidden),
    }
    if inner:
        ends |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    return ends


def read_shapes(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """config.json of a backbone: its directory's, else the Hub cache's, else from manifests/backbones.json.

    No network. None when it is nowhere to be found (a .gguf file has none either).
    """
    path = resolve_path(model)
    if path.exists() or looks_like_path(model):
        return _read(path / "config.json")
    shapes = _read(cached_file(model, revision, "config.json"))
    if shapes is None:
        shipped = _read(resource("manifests", "backbones.json")) or {}
        shapes = shipped.get("backbones", {}).get(model)
    return shapes


def cached_file(model: str, revision: str | None, name: str) -> Path | None:
    """A file of a model in the local Hub cache, None when it is not there or `model` is no Hub id."""
    from huggingface_hub import try_to_load_from_cache  # here: it costs start-up time
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, name, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _read(path: Path | None) -> dict[str, Any] | None:
    if path is None or not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except ValueError:  # a plan goes on without sizes; loading the backbone names the broken file
        return None
    return content if isinstance(content, dict) else None
