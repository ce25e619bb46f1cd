"""A checkpoint's content: the host copy taken at a save, and the six component entries written from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.disk import DISK, Disk
from parallel_synthesis.checkpoint.safetensors_file import TensorBytes, write_safetensors
from parallel_synthesis.checkpoint.state import host_copy, load_pt, save_pt, tensor_bytes
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.schema import finite_or_null

_SAFETENSORS_DTYPE: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


@dataclass(frozen=True, kw_only=True)
class HostState:
    """Everything a checkpoint holds, detached from the training: made by `capture`, written later by any
    thread.

    step: global step. mapper: state dict of the cache mapper. mapper_config: {hidden_dim, metadata_features}.
    adapter: PEFT's file keys -> tensors. adapter_config: content of adapter_config.json. training_state: the
    container of checkpoint/state.py. meta: content of checkpoint_meta.json.
    """

    step: int
    mapper: Mapping[str, torch.Tensor]
    mapper_config: Mapping[str, Any]
    adapter: Mapping[str, torch.Tensor]
    adapter_config: Mapping[str, Any]
    training_state: Mapping[str, Any]
    meta: Mapping[str, Any]

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors; a checkpoint is this and some KiB more."""
        return _nbytes(self.mapper) + _nbytes(self.adapter) + _nbytes(self.training_state)


def capture(
    *,
    step: int,
    mapper: Mapping[str, torch.Tensor],
    mapper_config: Mapping[str, Any],
    adapter: Mapping[str, torch.Tensor],
    adapter_config: Mapping[str, Any],
    training_state: Mapping[str, Any],
    meta: Mapping[str, Any],
    into: HostState | None = None,
) -> HostState:
    """Copies everything to host memory once; training may go on as soon as it returns. Draws from no
    generator.

    into: a host state that has been written and is not needed any more; its memory is used again, which is
    several times quicker. With a background writer keep two and take turns, so that the one being written is
    left alone. TypeError naming the place of a value that could not be loaded safely again.
    """
    return HostState(
        step=step,
        mapper=host_copy(mapper, into=into and into.mapper, where="mapper"),
        mapper_config=host_copy(mapper_config, where="mapper_config"),
        adapter=host_copy(adapter, into=into and into.adapter, where="adapter"),
        adapter_config=sorted_lists(adapter_config),
        training_state=host_copy(training_state, into=into and into.training_state, where="training_state"),
        meta=finite_or_null(meta),
    )


def write_checkpoint(destination: Path, state: HostState, *, disk: Disk = DISK) -> dict[str, Any]:
    """Commits a checkpoint directory; returns its manifest. Errors as `commit`. Equal content is equal
    bytes."""
    if state.meta.get("global_step") != state.step:
        raise ValueError(f"meta.global_step is {state.meta.get('global_step')!r}; expected {state.step}")

    def fill(staging: Staging) -> None:
        with staging.open(layout.CACHE_MAPPER) as file:
            save_pt(file, state.mapper)
        staging.write_json(layout.CACHE_MAPPER_CONFIG, state.mapper_config, "cache_mapper_config")
        staging.write_json(layout.ADAPTER_CONFIG, state.adapter_config, "adapter_config")
        write_adapter(staging, state.adapter)
        with staging.open(layout.TRAINING_STATE) as file:
            save_pt(file, state.training_state)
        staging.write_json(layout.CHECKPOINT_META, state.meta, "checkpoint_meta")

    return commit(destination, step=state.step, fill=fill, disk=disk)


def write_adapter(staging: Staging, adapter: Mapping[str, torch.Tensor]) -> None:
    """Streams judger_lora/adapter_model.safetensors and enters its header's and tensors' hashes into the
    manifest."""
    with staging.open(layout.ADAPTER_MODEL) as file:
        details = write_safetensors(file, {name: as_bytes(tensor) for name, tensor in adapter.items()})
    staging.describe(layout.ADAPTER_MODEL, details)


def as_bytes(tensor: torch.Tensor) -> TensorBytes:
    """A CPU tensor as the safetensors writer takes it (a view, no copy)."""
    if tensor.dtype not in _SAFETENSORS_DTYPE:
        raise CheckpointError(
            f"a tensor of {tensor.dtype} has no safetensors form; expected one of the usual dtypes"
        )
    return TensorBytes(
        dtype=_SAFETENSORS_DTYPE[tensor.dtype], shape=tuple(tensor.shape), data=tensor_bytes(tensor)
    )


def read_mapper(directory: Path) -> dict[str, torch.Tensor]:
    """The cache mapper's state dict of a checkpoint; CheckpointError naming the file when it is something
    else."""
    path = directory / layout.CACHE_MAPPER
    state = load_pt(path)
    if not isinstance(state, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path}: expected a state dict (name -> tensor); use another checkpoint")
    return dict(state)


def sorted_lists(value: Any) -> Any:
    """A copy of a PEFT config's content with mappings as dicts and every list (or set) of strings sorted.

    PEFT keeps target_modules and the like as sets, whose order changes from process to process.
    """
    if isinstance(value, Mapping):
        return {key: sorted_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [sorted_lists(item) for item in value]
        return sorted(items) if all(isinstance(item, str) for item in items) else items
    return value


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return 0
