"""What a planned run starts from: is the checkpoint there, does it fit, are the LoRA's modules known (no torch)?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.layout import ADAPTER_MODEL, CACHE_MAPPER, CHECKPOINT_META, locate
from parallel_synthesis.config import Config
from parallel_synthesis.errors import BackboneError, CheckpointError
from parallel_synthesis.model.fit import (
    check_adapter_config,
    check_mapper_config,
    linear_modules,
    target_problem,
    unknown_modules,
)
from parallel_synthesis.model.sizes import linear_sizes, mapper_inputs
from parallel_synthesis.provenance.safetensors_header import read_header
from parallel_synthesis.provenance.schema import read_json
from parallel_synthesis.provenance.torch_file import TensorLook, look

_LORA = re.compile(r".*\.layers\.([0-9]+)\..*?([^.]+)\.lora_([AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, kw_only=True)
class InitPlan:
    """source: as a record will keep it, a Hub id at its commit. step, recipe: as the checkpoint says, if it does."""

    source: str
    directory: Path
    step: int | None
    recipe: str | None


def look_at_init(
    given: str, config: Config, shapes: Mapping[str, Any]
) -> tuple[InitPlan, list[CheckpointError]]:
    """Finds the components that `--init` means, and all that a start would refuse of them as far as files tell.

    shapes: the backbone's config.json, empty where it is not known. Raises CheckpointError when there are none. Of a
    Hub repository the components are fetched, as the start would.
    """
    source, directory = locate(given)
    path = directory / CHECKPOINT_META
    meta = read_json(path) if path.is_file() else {}
    found: list[CheckpointError] = []
    try:
        check_mapper_config(directory, config.mapper)
    except CheckpointError as error:
        found.append(error)
    try:
        check_adapter_config(directory, config.lora)
    except CheckpointError as error:
        found.append(error)
    if not found:  # another rank makes all shapes differ
        found += [
            CheckpointError(text)
            for text in (*_mapper(directory, config), *_adapter(directory, config, shapes))
        ]
    left_out = meta.get("embeddings") or {}
    if left_out.get("saved") is False and config.checkpoint.embeddings == "keep":
        found.append(
            CheckpointError(
                f"{directory}: its adapter was saved without its embeddings; put them back by `ps snapshot {directory} "
                f'--export DEST`, or set checkpoint.embeddings = "drop"'
            )
        )
    plan = InitPlan(
        source=source, directory=directory, step=meta.get("global_step"), recipe=meta.get("recipe")
    )
    return plan, found


def unattached(config: Config, shapes: Mapping[str, Any]) -> BackboneError | None:
    """What a start would say of target modules that the backbone has not, where its modules are known."""
    model, targets = config.backbone.model, config.lora.target_modules
    there = linear_modules(model, config.backbone.revision, shapes)
    unknown = [] if there is None else unknown_modules(targets, there)
    return BackboneError(target_problem(unknown, there or (), model)) if unknown else None


def _mapper(directory: Path, config: Config) -> Iterator[str]:
    path, hidden = directory / CACHE_MAPPER, config.mapper.hidden_dim
    seen = _opened(path, look)
    inputs = mapper_inputs(config.mapper)
    wanted = {
        "net.0.weight": (hidden, inputs),
        "net.0.bias": (hidden,),
        "net.2.weight": (4, hidden),
        "net.2.bias": (4,),
    }
    if seen.problems or not isinstance(seen.value, dict):
        yield f"{path}: {'; '.join(seen.problems) or 'expected a state dict of tensors'}; use another checkpoint"
        return
    there = {name: part.shape for name, part in seen.value.items() if isinstance(part, TensorLook)}
    if there != wanted:
        yield f"{path}: holds {_short(there)}, expected {_short(wanted)}; use another checkpoint"


def _adapter(directory: Path, config: Config, shapes: Mapping[str, Any]) -> Iterator[str]:
    """The LoRA's tensors against the backbone's layers, where its shapes and the modules are known."""
    path = directory / ADAPTER_MODEL
    header = _opened(path, read_header)
    if header.problems:
        yield f"{path}: {header.problems[0]}; use another checkpoint"
        return
    ends = linear_sizes(shapes)
    targets = config.lora.target_modules
    if ends is None or any(target not in ends for target in targets):
        return
    wanted: dict[tuple[int, str, str], tuple[int, int]] = {}
    for layer in range(int(shapes["num_hidden_layers"])):
        for target in targets:
            inputs, outputs = ends[target]
            wanted[layer, target, "A"] = (config.lora.r, inputs)
            wanted[layer, target, "B"] = (outputs, config.lora.r)
    there = {}
    for name, tensor in header.tensors.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            there[int(match[1]), match[2], match[3]] = tensor.shape
    missing, extra = sorted(wanted.keys() - there.keys()), sorted(there.keys() - wanted.keys())
    if missing or extra:
        yield (
            f"{path}: tensors do not fit this run: {len(missing)} missing, {len(extra)} unknown "
            f"(such as {_lora_name((missing or extra)[0])}); expected the {len(wanted)} of this backbone and config"
        )
    for key in sorted(wanted.keys() & there.keys()):
        if there[key] != wanted[key]:
            yield f"{path}: {_lora_name(key)} has shape {list(there[key])}, expected {list(wanted[key])}"
            return


def _lora_name(key: tuple[int, str, str]) -> str:
    return f"lora_{key[2]} of {key[1]} in layer {key[0]}"


def _short(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "no tensors"


def _opened(path: Path, read: Any) -> Any:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read(fd)
    finally:
        os.close(fd)
