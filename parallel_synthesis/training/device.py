"""The device of a process: choice, deterministic algorithms, threads, memory figures."""

from __future__ import annotations

import os
import resource

import torch

from parallel_synthesis.config import BackboneConfig
from parallel_synthesis.model.backbone import resolve_device

GIB = 2**30


def choose_device(config: BackboneConfig, *, local_index: int) -> torch.device:
    """The config's device; a CUDA device without a number is that of the process's local index on its machine."""
    name = config.device
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        name = f"cuda:{local_index}"
    return resolve_device(name)


def device_name(device: torch.device) -> str:
    """Kind of device, as far as it decides the bits of a result: "cpu" or the CUDA device's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def prepare_device(config: BackboneConfig, device: torch.device) -> None:
    """Threads and deterministic algorithms, before any computation of this process."""
    torch.set_num_threads(config.threads_per_rank)
    torch.use_deterministic_algorithms(config.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.deterministic:
            # cuBLAS is repeatable only with a fixed workspace; read when its first handle is made.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False


def memory_gib(device: torch.device) -> float:
    """Peak allocated CUDA memory of this process, else its peak resident set size; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def cuda_memory_gib(device: torch.device) -> tuple[float, float, float, float] | None:
    """(allocated, reserved, peak allocated, peak reserved) in GiB; None on a CPU."""
    if device.type != "cuda":
        return None
    return (
        torch.cuda.memory_allocated(device) / GIB,
        torch.cuda.memory_reserved(device) / GIB,
        torch.cuda.max_memory_allocated(device) / GIB,
        torch.cuda.max_memory_reserved(device) / GIB,
    )
