"""The training state: its container (version 2 of the formats), safe .pt files, host copies and the canonical
digest.

Everything in it is a tensor or a plain value, so that it loads with weights_only=True and nothing is ever
executed.
"""

from __future__ import annotations

import errno
import hashlib
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import Bytes, HashingFile

CHECKPOINT_VERSION = 2
_ZIP_MAGIC = b"PK\x03\x04"
# What torch.load raises on damaged or hostile input: the weights-only unpickler is fed arbitrary bytes.
_LOAD_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    MemoryError,
    struct.error,
)

Scalar = None | bool | int | float | str | bytes


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major; a view of its memory when it is on the CPU and contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def host_copy(value: Any, *, into: Any = None, where: str = "state") -> Any:
    """An independent copy in host memory, in one canonical form: equal content gives equal .pt bytes.

    Tensors become plain contiguous CPU tensors with memory of their own; mappings become dicts (in the same
    order); lists and tuples stay what they are; equal strings become one object (pickle writes identity).
    into: an earlier copy nobody needs any more; the memory of its tensors is written over where place, shape
    and dtype agree, which saves the time the kernel takes to hand out fresh pages (most of the copy's).
    TypeError, naming the place, for what weights_only=True would not load (numpy arrays, sets, objects).
    """
    if isinstance(value, torch.Tensor):
        return _host_memory(value, into).copy_(value.detach())
    if isinstance(value, Mapping):
        old: Any = into if isinstance(into, dict) else {}
        return {
            host_copy(key, where=where): host_copy(item, into=old.get(key), where=f"{where}.{key}")
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        old = into if type(into) is type(value) and len(into) == len(value) else [None] * len(value)
        return type(value)(
            [host_copy(item, into=old[at], where=f"{where}[{at}]") for at, item in enumerate(value)]
        )
    if type(value) is str:
        return sys.intern(value)
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    raise TypeError(
        f"{where}: {type(value).__name__} cannot be saved safely; expected tensors and plain values"
    )


def _host_memory(like: torch.Tensor, old: Any) -> torch.Tensor:
    if isinstance(old, torch.Tensor) and old.shape == like.shape and old.dtype == like.dtype:
        return old
    # empty, then copy_, not clone: no strides of a view, no requires_grad, no subclass, one transfer.
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


class _QuietSink:
    """Stands between torch and the disk: a failed write is remembered and raised after torch has let go.

    torch's zip writer answers an exception in write() by writing its directory all the same and then raising
    an error of its own, which hides the path and the reason.
    """

    def __init__(self, file: HashingFile) -> None:
        self._file = file
        self.failure: StorageError | OSError | None = None

    def write(self, data: Bytes) -> int:
        size = memoryview(data).nbytes
        if self.failure is None:
            try:
                self._file.write(data)
            except (StorageError, OSError) as error:
                self.failure = error
        return size

    def flush(self) -> None:
        """Nothing to do: the staged file is flushed when it is closed."""


def save_pt(file: HashingFile, value: Any) -> None:
    """Writes a value in torch's format into a file object (a path would put the file's name inside).

    The value should come from `host_copy`, so that equal content is equal bytes.
    """
    sink = _QuietSink(file)
    torch.save(value, cast(IO[bytes], sink))
    if sink.failure is not None:
        raise sink.failure


def load_pt(path: Path) -> Any:
    """The value in a .pt file, on the CPU, loaded with weights_only=True: code in it is never executed.

    CheckpointError naming the file when it is damaged, not torch's zip format, or needs more than plain
    values; StorageError when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _ZIP_MAGIC:
                raise CheckpointError(
                    f"{path}: expected a torch file in zip format; restore it or use another checkpoint"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        if (
            error.errno != errno.EINVAL
        ):  # a seek before the start: the zip directory of a file that was cut short
            raise StorageError(
                f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
            ) from error
        raise _damaged(path, error) from error
    except _LOAD_ERRORS as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().split("\n", 1)[0][:200] or type(error).__name__
    return CheckpointError(
        f"{path}: expected tensors and plain values only (weights_only=True), found: {reason}; "
        f"the file is damaged or not safe; use another checkpoint"
    )


def canonical_digest(state: Any) -> str:
    """SHA-256 over every leaf of a nested state: path, type, dtype, shape, bytes, in sorted order of the
    paths.

    The order of a mapping's keys does not count; a list and a tuple, 1 and 1.0 and True, 0.0 and -0.0 are
    different. Times and paths have no place in a training state, so none are left out. TypeError for other
    kinds of values.
    """
    leaves: list[tuple[bytes, bytes]] = []
    _leaves(state, b"", leaves)
    digest = hashlib.sha256()
    for path, content in sorted(leaves):
        digest.update(struct.pack("<QQ", len(path), len(content)) + path + content)
    return digest.hexdigest()


def _leaves(value: Any, path: bytes, found: list[tuple[bytes, bytes]]) -> None:
    """Appends (path, content) of every leaf; a path's parts carry their type and length, so no two paths are
    alike."""
    if isinstance(value, torch.Tensor):
        data = hashlib.sha256(tensor_bytes(value)).digest()
        found.append((path, f"tensor {value.dtype} {list(value.shape)} ".encode() + data))
    elif isinstance(value, Mapping):
        found.append((path, b"mapping %d" % len(value)))
        for key, item in value.items():
            _leaves(item, path + _part(_scalar(key)), found)
    elif isinstance(value, list | tuple):
        found.append((path, b"%s %d" % (type(value).__name__.encode(), len(value))))
        for at, item in enumerate(value):
            _leaves(item, path + _part(b"@%d" % at), found)
    else:
        found.append((path, _scalar(value)))


def _part(name: bytes) -> bytes:
    return struct.pack(">I", len(name)) + name


def _scalar(value: Scalar) -> bytes:
    if value is None or isinstance(value, bool | int):
        return f"{type(value).__name__} {value}".encode()
    if isinstance(value, float):
        return b"float " + struct.pack("<d", value)
    if isinstance(value, str):
        return b"str " + value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"bytes " + value
    raise TypeError(f"{type(value).__name__} has no canonical form; expected tensors and plain values")


def training_state(
    *,
    global_step: int,
    ranks: int,
    optimizer_state: Mapping[str, Any],
    loop_state: Mapping[str, Any],
    rank_states: Mapping[int, Mapping[str, Any]],
    versions: Mapping[str, str | None],
) -> dict[str, Any]:
    """The container of training_state.pt. One logical rank: process_rng_state (that of rank_states[0]) and
    single_loop_state; several: distributed_loop_state and rank_state_by_rank {rank: state}. Ours adds ranks,
    versions.
    """
    state: dict[str, Any] = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "global_step": global_step,
        "optimizer_state": optimizer_state,
        "lr_scheduler_state": None,
        "amp_scaler_state": None,
        "ema_state": None,
        "ranks": ranks,
        "versions": dict(versions),
    }
    if ranks == 1:
        return state | {
            "process_rng_state": rank_states[0]["process_rng_state"],
            "single_loop_state": loop_state,
        }
    return state | {
        "distributed_loop_state": loop_state,
        "rank_state_by_rank": {rank: rank_states[rank] for rank in range(ranks)},
    }


def read_training_state(path: Path, *, ranks: int | None = None, step: int | None = None) -> dict[str, Any]:
    """A validated training_state.pt; `path` is the file or the checkpoint directory's.

    ranks, step: what this run expects inside. CheckpointError with every missing or foreign piece named.
    """
    state = load_pt(path)
    found = state_problems(state, ranks=ranks, step=step)
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise CheckpointError(
            f"{path} is not a training state of this run:\n{listed}\nuse another checkpoint"
        )
    return cast(dict[str, Any], state)


def state_problems(state: Any, *, ranks: int | None = None, step: int | None = None) -> list[str]:
    """Everything that is missing in a training state or belongs to another rank, step or version."""
    if not isinstance(state, dict):
        return [f"expected a dict, found {type(state).__name__}"]
    if state.get("checkpoint_version") != CHECKPOINT_VERSION:
        return [
            f"checkpoint_version: expected {CHECKPOINT_VERSION}, found {state.get('checkpoint_version')!r}"
        ]
    found = [f"{key}: missing" for key in ("global_step", "optimizer_state") if key not in state]
    saved_step = state.get("global_step")
    if step is not None and saved_step != step:
        found.append(f"global_step: expected {step}, found {saved_step!r}")
    optimizer = state.get("optimizer_state", {})
    if not isinstance(optimizer, dict) or not {"state", "param_groups"} <= optimizer.keys():
        found.append("optimizer_state: expected a dict with state and param_groups")
    distributed = "rank_state_by_rank" in state or "distributed_loop_state" in state
    loop_key = "distributed_loop_state" if distributed else "single_loop_state"
    found += _loop_problems(state.get(loop_key), loop_key, saved_step)
    if distributed:
        found += _rank_problems(state.get("rank_state_by_rank"), ranks)
    else:
        found += rng_problems(state.get("process_rng_state"), "process_rng_state")
        if ranks not in (None, 1):
            found.append(f"ranks: expected the states of {ranks}, found that of a single one")
    return found


def _loop_problems(loop: Any, where: str, saved_step: Any) -> list[str]:
    if not isinstance(loop, dict):
        return [f"{where}: missing"]
    found = [f"{where}.{key}: missing" for key in ("epoch_idx", "next_batch_idx_in_epoch") if key not in loop]
    if loop.get("global_step") != saved_step:
        found.append(
            f"{where}.global_step: expected {saved_step!r} as outside, found {loop.get('global_step')!r}"
        )
    return found


def _rank_problems(by_rank: Any, ranks: int | None) -> list[str]:
    if not isinstance(by_rank, dict) or not by_rank:
        return ["rank_state_by_rank: missing"]
    expected = len(by_rank) if ranks is None else ranks
    found = [f"rank_state_by_rank[{rank}]: missing" for rank in range(expected) if rank not in by_rank]
    for rank, state in by_rank.items():
        where = f"rank_state_by_rank[{rank!r}]"
        if rank not in range(expected):
            found.append(f"{where}: foreign; expected the ranks 0 to {expected - 1}")
        elif not isinstance(state, dict):
            found.append(f"{where}: expected a dict, found {type(state).__name__}")
        else:
            if state.get("rank") != rank:
                found.append(f"{where}: is the state of rank {state.get('rank')!r}")
            found += rng_problems(state.get("process_rng_state"), f"{where}.process_rng_state")
    return found


def rng_problems(rng: Any, where: str) -> list[str]:
    """What is wrong with {python, numpy, torch_cpu, torch_cuda}; each stream must be whole to be restored
    exactly."""
    if not isinstance(rng, dict):
        return [f"{where}: missing"]
    checks = {
        "python": (_is_python_rng, "random.getstate()'s tuple"),
        "numpy": (_is_numpy_rng, '("MT19937", list of 624, pos, has_gauss, cached_gaussian)'),
        "torch_cpu": (_is_byte_tensor, "a uint8 tensor"),
        "torch_cuda": (_is_cuda_rng, "None, a uint8 tensor or a list of them"),
    }
    return [
        f"{where}.{key}: expected {wanted}" + ("" if key in rng else ", found none")
        for key, (accepts, wanted) in checks.items()
        if key not in rng or not accepts(rng[key])
    ]


def _is_python_rng(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 3
        and isinstance(value[1], tuple)
        and len(value[1]) == 625
        and all(type(word) is int for word in value[1])
    )


def _is_numpy_rng(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 5
        and value[0] == "MT19937"
        and isinstance(value[1], list)
        and len(value[1]) == 624
        and all(type(word) is int for word in value[1])
    )


def _is_byte_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() > 0


def _is_cuda_rng(value: Any) -> bool:
    many: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    return value is None or all(map(_is_byte_tensor, many))
