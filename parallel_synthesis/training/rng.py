"""One set of random streams (python, numpy, torch, cuda) per logical rank."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parallel_synthesis.errors import CheckpointError


@dataclass(slots=True)
class _Streams:
    """The four global generators' states, in the form their setters take back quickly."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None


class RankStreams:
    """The random streams of the logical ranks that this process carries.

    Rank r starts from seed + r. Between `active` blocks the global generators belong to nobody: what saving,
    logging or indexing might draw there can not reach a rank.
    """

    def __init__(self, ranks: Iterable[int], *, seed: int, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, _Streams] = {}
        for rank in ranks:
            random.seed(seed + rank)
            np.random.seed((seed + rank) % 2**32)
            torch.manual_seed(seed + rank)  # seeds CUDA too
            self._states[rank] = self._read()

    @contextmanager
    def active(self, rank: int) -> Iterator[None]:
        """Makes the rank's streams the global ones; what is drawn inside is remembered."""
        self._write(self._states[rank])
        try:
            yield
        finally:
            self._states[rank] = self._read()

    def digest(self, rank: int) -> str:
        """16 hex digits over the rank's streams as they are now."""
        state = self._states[rank]
        hasher = hashlib.sha256(array("Q", state.python[1]).tobytes())
        hasher.update(repr((state.python[2], *state.numpy[2:])).encode())
        hasher.update(state.numpy[1].tobytes())
        hasher.update(state.torch_cpu.numpy().tobytes())
        if state.torch_cuda is not None:
            hasher.update(state.torch_cuda.numpy().tobytes())
        return hasher.hexdigest()[:16]

    def saved(self, rank: int) -> dict[str, Any]:
        """The rank's streams as training_state.pt holds them (formats.md, process_rng_state); loads with weights_only."""
        state = self._states[rank]
        name, keys, position, has_gauss, cached = state.numpy
        return {
            "python": state.python,
            "numpy": (str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
            "torch_cpu": state.torch_cpu.clone(),
            "torch_cuda": None if state.torch_cuda is None else state.torch_cuda.clone(),
        }

    def restore(self, rank: int, saved: Mapping[str, Any]) -> None:
        """Puts back what `saved` gave. Raises CheckpointError naming the stream that is missing."""
        missing = {"python", "numpy", "torch_cpu", "torch_cuda"} - saved.keys()
        if missing:
            raise CheckpointError(f"rank {rank}: the saved random state lacks {', '.join(sorted(missing))}")
        if self._device.type == "cuda" and saved["torch_cuda"] is None:
            raise CheckpointError(
                f"rank {rank}: the random state was saved without CUDA; resume on the device kind it ran on"
            )
        try:
            self._restore(rank, saved)
            self._write(
                self._states[rank]
            )  # the generators themselves say whether these are states of theirs
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"rank {rank}: the saved random state is not one of a generator: {error}; use another checkpoint"
            ) from error

    def _restore(self, rank: int, saved: Mapping[str, Any]) -> None:
        version, keys, gauss = saved["python"]
        name, numpy_keys, position, has_gauss, cached = saved["numpy"]
        self._states[rank] = _Streams(
            python=(version, tuple(keys), gauss),
            numpy=(name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached),
            torch_cpu=saved["torch_cpu"].clone(),
            torch_cuda=saved["torch_cuda"].clone() if self._device.type == "cuda" else None,
        )

    def _read(self) -> _Streams:
        numpy_state = np.random.get_state(legacy=True)
        assert isinstance(numpy_state, tuple)
        return _Streams(
            python=random.getstate(),
            numpy=numpy_state,
            torch_cpu=torch.get_rng_state(),
            torch_cuda=torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        )

    def _write(self, state: _Streams) -> None:
        random.setstate(state.python)
        np.random.set_state(state.numpy)
        torch.set_rng_state(state.torch_cpu)
        if state.torch_cuda is not None:
            torch.cuda.set_rng_state(state.torch_cuda, self._device)
