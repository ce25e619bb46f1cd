"""Reads and checks the two components of a checkpoint: cache_mapper.pt with its config, and judger_lora/."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.fit import check_adapter_config, check_mapper_config, read_object

MAPPER_FILE = "cache_mapper.pt"
ADAPTER_FILE = "judger_lora/adapter_model.safetensors"
META_FILE = "checkpoint_meta.json"
EMBEDDING_ENDS = ("embed_tokens.weight", "embed_in.weight")
HEAD_ENDS = ("lm_head.weight", "embed_out.weight")
_ROWS_AT_ONCE = 8192  # embedding rows that are compared at once, so that no third copy of them exists


def plain_config(config: Any) -> dict[str, Any]:
    """A PEFT config as plain JSON types with sorted lists, so that equal content is equal bytes."""
    content = {key: _plain(value) for key, value in config.to_dict().items()}
    return dict(sorted((content | {"inference_mode": True}).items()))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def embeddings(peft_model: nn.Module) -> dict[str, Tensor]:
    """Input and output embedding under the names PEFT gives them in a file; a tied pair only once."""
    found: dict[str, Tensor] = {}
    model: Any = peft_model
    parts = [model.get_input_embeddings(), model.get_base_model().get_output_embeddings()]
    for name, module in peft_model.named_modules():
        if any(module is part for part in parts):
            weight: Tensor = module.weight.detach()
            if all(weight.data_ptr() != other.data_ptr() for other in found.values()):
                found[f"{name}.weight"] = weight
    return found


def is_embedding(name: str) -> bool:
    """An adapter tensor that is the backbone's own input or output embedding."""
    return name.endswith(EMBEDDING_ENDS + HEAD_ENDS)


def embedding_rows(directory: Path) -> int | None:
    """Rows of the embeddings that a checkpoint's adapter carries, or that were left out of it; None without any.

    CheckpointError when they disagree.
    """
    path, meta = directory / ADAPTER_FILE, directory / META_FILE
    rows = set()
    if meta.is_file():
        left_out = read_object(meta).get("embeddings")
        rows |= {int(left_out["rows"])} if isinstance(left_out, Mapping) and left_out.get("rows") else set()
    try:
        with safe_open(path, framework="pt") as reader:
            names = filter(is_embedding, set(reader.keys()))
            rows |= {reader.get_slice(name).get_shape()[0] for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    if len(rows) > 1:
        raise CheckpointError(
            f"{path}: embeddings of {sorted(rows)} rows; expected one number of rows: use another checkpoint"
        )
    return next(iter(rows), None)


def left_out(directory: Path) -> Mapping[str, Any] | None:
    """What checkpoint_meta.json says of embeddings that are not in the adapter: {saved, rows, tensors}."""
    meta = directory / META_FILE
    found = read_object(meta).get("embeddings") if meta.is_file() else None
    return found if isinstance(found, Mapping) and found.get("saved") is False else None


def read_mapper(directory: Path, expected: MapperConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of cache_mapper.pt, checked against the run's. A missing config file means 32 and "both"."""
    check_mapper_config(directory, expected)
    path = directory / MAPPER_FILE
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read as a torch state dict: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path}: expected a state dict of tensors {sorted(state)}")
    _check_names(path, set(loaded), set(state))
    for name, tensor in loaded.items():
        _check_tensor(path, name, tensor, state[name])
    return loaded


def read_adapter(
    directory: Path, expected: LoraConfig, state: Mapping[str, Tensor], backbone: Backbone
) -> dict[str, Tensor]:
    """All tensors of a checkpoint's adapter, the LoRA's checked against the run's own adapter `state`.

    Embeddings in the file (the release has them) must be the backbone's own, since they are never trained;
    only rows beyond those of the backbone's files are not known there.
    """
    check_adapter_config(directory, expected)
    path = directory / ADAPTER_FILE
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as reader:
            names = set(reader.keys())
            lora = {name for name in state if ".lora_" in name}
            frozen = {name for name in names if is_embedding(name)}
            _check_names(path, names - frozen, lora)
            for name in sorted(names):
                tensors[name] = reader.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error
    for name in lora:
        _check_tensor(path, name, tensors[name], state[name])
    for name in frozen:
        _check_frozen(path, name, tensors[name], backbone)
    return tensors


def _check_names(path: Path, found: set[str], wanted: set[str]) -> None:
    missing, extra = sorted(wanted - found), sorted(found - wanted)
    if missing or extra:
        raise CheckpointError(
            f"{path}: tensors do not fit this run: {len(missing)} missing {missing[:2]}, "
            f"{len(extra)} unknown {extra[:2]}; expected the {len(wanted)} of this backbone and config"
        )


def _check_tensor(path: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise CheckpointError(f"{path}: {name} has shape {list(found.shape)}, expected {list(wanted.shape)}")
    if not found.is_floating_point() or not bool(found.isfinite().all()):
        raise CheckpointError(
            f"{path}: {name} ({found.dtype}) is not all finite floats; use another checkpoint"
        )


def _check_frozen(path: Path, name: str, found: Tensor, backbone: Backbone) -> None:
    model = backbone.model
    is_input = name.endswith(EMBEDDING_ENDS)
    own: Tensor = (model.get_input_embeddings() if is_input else model.get_output_embeddings()).weight
    files_rows = backbone.resized_from or own.shape[0]
    rows = min(files_rows, found.shape[0])
    fits = found.shape[1:] == own.shape[1:] and found.shape[0] <= own.shape[0]
    # In the narrower of the two: a file in bf16 is that of a backbone in fp32 as far as it can say.
    dtype = min(found.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
    pieces = zip(*(torch.split(weight[:rows], _ROWS_AT_ONCE) for weight in (found, own)), strict=True)
    if not fits or not all(torch.equal(one.to(dtype), other.to(dtype).cpu()) for one, other in pieces):
        raise CheckpointError(
            f"{path}: {name} {list(found.shape)} is not the embedding {list(own.shape)} of "
            f"backbone {backbone.name}; use the backbone the adapter was trained on"
        )
