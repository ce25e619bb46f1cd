"""Do a checkpoint's configs fit a run's? And are a LoRA's modules the backbone's? For a start, and for a plan (no torch)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.model.sizes import cached_file
from parallel_synthesis.model.source import looks_like_path
from parallel_synthesis.provenance.safetensors_header import read_header
from parallel_synthesis.resources import resolve_path

MAPPER_CONFIG_FILE = "cache_mapper_config.json"
ADAPTER_CONFIG_FILE = "judger_lora/adapter_config.json"
# Variants of LoRA that change the function; the method uses none of them.
_PLAIN = {"use_rslora": False, "use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
# Model types whose linear modules are these, where no file of weights tells.
_USUAL = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", "smollm3")
_USUAL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_mapper_config(directory: Path, expected: MapperConfig) -> None:
    """CheckpointError where a checkpoint's mapper is another one. A missing config file means 32 and "both"."""
    path = directory / MAPPER_CONFIG_FILE
    config = read_object(path) if path.exists() else {"hidden_dim": 32, "metadata_features": "both"}
    for key in ("hidden_dim", "metadata_features"):
        wanted = getattr(expected, key)
        if config.get(key) != wanted:
            raise CheckpointError(
                f"{path}: {key} = {config.get(key)!r}, expected {wanted!r}, the run's mapper.{key}; set that to "
                f"{config.get(key)!r}, or use another checkpoint"
            )


def check_adapter_config(directory: Path, expected: LoraConfig) -> None:
    """CheckpointError where a checkpoint's LoRA has another rank, alpha, modules or variant."""
    path = directory / ADAPTER_CONFIG_FILE
    config = read_object(path)
    for key, wanted, setting in (("r", expected.r, "lora.r"), ("lora_alpha", expected.alpha, "lora.alpha")):
        if config.get(key) != wanted:
            raise CheckpointError(
                f"{path}: {key} = {config.get(key)!r}, expected {wanted}, the run's {setting}; set that to "
                f"{config.get(key)!r}, or use another checkpoint"
            )
    modules = config.get("target_modules") or []
    if isinstance(modules, str) or set(modules) != set(expected.target_modules):
        raise CheckpointError(
            f"{path}: target_modules = {modules!r}, expected {sorted(expected.target_modules)}, the run's "
            f"lora.target_modules; set that to {modules!r}, or use another checkpoint"
        )
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise CheckpointError(
                f"{path}: {key} = {config[key]!r}, expected {plain!r}: this LoRA variant is not used here"
            )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file; CheckpointError where it is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); expected a checkpoint's components"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def unknown_modules(targets: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Targets that no module of the backbone is (PEFT's rule: its whole name, or the end of it after a dot)."""
    names = [f".{module}" for module in modules]
    return [target for target in targets if not any(name.endswith(f".{target}") for name in names)]


def target_problem(targets: Sequence[str], linear: Iterable[str], name: str) -> str:
    """What is said of `targets` that can not get a LoRA in the backbone `name`, whose linear modules are `linear`."""
    there = ", ".join(sorted({module.rpartition(".")[2] for module in linear}))
    return (
        f"lora.target_modules = {list(targets)}: cannot be attached to {name}; "
        f"expected some of its linear modules: {there}"
    )


def linear_modules(model: str, revision: str | None, shapes: Mapping[str, Any]) -> list[str] | None:
    """Names of a backbone's linear modules, from its weights' names; None where no file at hand tells.

    Files are the directory's or the Hub cache's; without any, the usual names of model types that are known to have
    them. shapes: its config.json (`read_shapes`). No network; of weights no more than the header is read.
    """
    names = _weights(model, revision)
    if names is not None:
        return sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    return list(_USUAL_MODULES) if shapes.get("model_type") in _USUAL else None


def _weights(model: str, revision: str | None) -> list[str] | None:
    """Names of the matrices in a backbone's safetensors files; of an index, whose shapes it does not tell, of all."""
    path = resolve_path(model)
    local = path.exists() or looks_like_path(model)

    def find(name: str) -> Path | None:
        found = path / name if local else cached_file(model, revision, name)
        return found if found is not None and found.is_file() else None

    index = find("model.safetensors.index.json")
    if index is not None:
        try:
            return list(json.loads(index.read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError):  # loading the backbone names the broken file
            return None
    single = find("model.safetensors")
    if single is None:
        return None
    fd = os.open(single, os.O_RDONLY)
    try:
        header = read_header(fd)
    finally:
        os.close(fd)
    if header.problems:
        return None
    return [
        name
        for name, tensor in header.tensors.items()
        if len(tensor.shape) == 2 and not name.endswith(("embed_tokens.weight", "embed_in.weight"))
    ]
