"""training_state.pt of the reference implementation: a pickle with numpy objects, read without executing anything.

torch's weights_only loader refuses every type that is not listed; the few numpy types below are all that it is allowed
besides. What comes out is then made plain (lists, numbers, tensors), so that nothing of numpy's reaches our own files.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parallel_synthesis.checkpoint.plain_values import numpy_state, shown
from parallel_synthesis.checkpoint.state import CHECKPOINT_VERSION, load_pt
from parallel_synthesis.checkpoint.state_structure import rank_number
from parallel_synthesis.errors import CheckpointError

# How numpy's arrays and scalars say in a pickle what they are; numpy 1 had them under another module's name.
_RECONSTRUCT = np.zeros(1, dtype=np.uint32).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
_KINDS = ("bool", "uint8", "uint32", "uint64", "int32", "int64", "float32", "float64")
NUMPY_TYPES: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(kind)) for kind in _KINDS),
    *(
        (made_by, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for made_by, name in ((_RECONSTRUCT, "_reconstruct"), (_SCALAR, "scalar"))
    ),
]
_OPTIONAL_STATES = ("lr_scheduler_state", "amp_scaler_state", "ema_state")


def read_reference_state(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The state in plain values and our forms of the random streams, and what in it has no place here (sentences).

    Keys are those of formats.md, "training_state.pt (version 2)"; `rank_state_by_rank` has whole numbers as keys.
    CheckpointError naming the file and the place for anything else; nothing in the file is ever executed.
    """
    with torch.serialization.safe_globals(NUMPY_TYPES):
        loaded = load_pt(path)
    try:
        state = _plain(loaded, "state", {})
    except (TypeError, RecursionError) as error:
        reason = error if isinstance(error, TypeError) else "nested too deeply to be a training state"
        raise CheckpointError(f"{path}: {reason}; use another checkpoint") from error
    version = state.get("checkpoint_version") if isinstance(state, dict) else state
    if not isinstance(state, dict) or type(version) is not int or version != CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{path}: checkpoint_version is {shown(version)}, expected {CHECKPOINT_VERSION}; only that layout is known"
        )
    said = [
        f"{name} has no counterpart here (the learning rate is constant, the weights are fp32)"
        for name in _OPTIONAL_STATES
        if state.get(name) is not None
    ]
    if "rank_state_by_rank" in state or "distributed_loop_state" in state:
        by_rank = _by_rank(path, state.get("rank_state_by_rank"))
        for rank, saved in by_rank.items():
            saved["process_rng_state"] = _streams(saved.get("process_rng_state"), rank)
        state["rank_state_by_rank"] = by_rank
    else:
        state["process_rng_state"] = _streams(state.get("process_rng_state"), 0)
    return state, said


def refuse_streams(path: Path, state: Mapping[str, Any]) -> None:
    """CheckpointError where a generator does not take its state: only the generators themselves can tell.

    state: of read_reference_state, or of ours. The generators tried are new ones; the process's own are not touched.
    """
    by_rank = state.get("rank_state_by_rank") or {0: state}
    for rank, saved in by_rank.items():
        try:
            _restore(saved["process_rng_state"])
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{path}: the random state of rank {rank} is not one of a generator: {error}; use another checkpoint"
            ) from error


def _restore(streams: Mapping[str, Any]) -> None:
    name, keys, *rest = streams["numpy"]
    random.Random().setstate(streams["python"])
    np.random.RandomState().set_state((name, np.array(keys, np.uint32), *rest))
    torch.Generator().set_state(streams["torch_cpu"].clone())


def _plain(value: Any, where: str, made: dict[int, Any]) -> Any:
    """Numpy's arrays and scalars as lists and numbers. TypeError naming the place of what is something else.

    made: what lists and dicts have become, by id. One that appears a thousand times is converted once: lists of the
    same lists would have no end.
    """
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "buif":
            raise TypeError(f"{where}: an array of {value.dtype}, expected numbers")
        return value.tolist()
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        made[id(value)] = {
            _plain(key, where, made): _plain(item, f"{where}.{shown(key)}", made)
            for key, item in value.items()
        }
        return made[id(value)]
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{at}]", made) for at, item in enumerate(value)]
        made[id(value)] = tuple(items) if isinstance(value, tuple) else items
        return made[id(value)]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise TypeError(f"{where[:200]}: {type(value).__name__}, expected tensors, numbers and texts")


def _by_rank(path: Path, given: Any) -> dict[int, dict[str, Any]]:
    """Rank -> its state, from a dict (with numbers or their texts as keys) or a list."""
    pairs = list(enumerate(given)) if isinstance(given, list | tuple) else None
    if isinstance(given, dict):
        numbers = [rank_number(key) for key in given]
        known = [number for number in numbers if number is not None]
        if len(set(known)) == len(numbers):
            pairs = sorted(zip(known, given.values(), strict=True), key=lambda pair: pair[0])
    if not pairs or not all(isinstance(saved, dict) for _, saved in pairs):
        raise CheckpointError(
            f"{path}: rank_state_by_rank is not a state for each rank; use another checkpoint"
        )
    return {rank: dict(saved) for rank, saved in pairs}


def _streams(given: Any, rank: int) -> Any:
    """process_rng_state in our forms; what is not recognised stays as it is, for the check of the whole to name."""
    if not isinstance(given, dict):
        return given
    streams = {name: given.get(name) for name in ("python", "numpy", "torch_cpu", "torch_cuda")}
    python, numpy, cuda = streams["python"], numpy_state(streams["numpy"]), streams["torch_cuda"]
    if isinstance(python, list | tuple) and len(python) == 3:
        streams["python"] = (python[0], tuple(python[1]), python[2])
    if isinstance(numpy, list | tuple) and len(numpy) == 5:
        name, keys, position, has_gauss, cached = numpy
        streams["numpy"] = (name, keys, position, has_gauss, cached)
    if isinstance(cuda, list | tuple):  # all visible devices: a rank uses the one of its number
        streams["torch_cuda"] = cuda[rank % len(cuda)] if cuda else None
    return streams
