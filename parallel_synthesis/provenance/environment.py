"""What a run ran on: versions, platform and the variables that can change its bits. No torch import, no names
of machines, users or directories."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "parallel-synthesis",
    "torch",
    "transformers",
    "peft",
    "numpy",
    "tokenizers",
    "safetensors",
)
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)


def fingerprint() -> dict[str, Any]:
    """Plain JSON types: python, implementation, platform, machine, libc, cpu_model, cpu_count, packages
    {name: version or null}, variables {name: value}, only those that are set. The same on every call of a
    process."""
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu_model": cpu_model(),
        "cpu_count": os.cpu_count(),
        "packages": {name: version(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def version(package: str) -> str | None:
    """Installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as the kernel gives it, else the platform's word for it, else None."""
    try:
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or None
