"""Does a training_state.pt of version 2 hold all that a run goes on from? Judged by its pickle alone (no torch).

One judgement for `ps verify` and for `ps resume --out`: what this calls sound can be continued from, and what can not
be is named here. Values come from provenance.torch_file, so that tensors and arrays have a shape and no content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard

from parallel_synthesis.checkpoint.moments import Trained, optimizer_problems
from parallel_synthesis.checkpoint.plain_values import (
    is_count,
    is_number,
    is_small,
    is_whole,
    numpy_state,
    shown,
)
from parallel_synthesis.provenance.torch_file import ArrayLook, TensorLook

VERSION = 2
_TOLD = 50  # problems of one state
_STREAMS = ("python", "numpy", "torch_cpu", "torch_cuda")
_PYTHON_WORDS, _NUMPY_WORDS = 625, 624
_TORCH_CPU_BYTES, _TORCH_CUDA_BYTES = 5056, (8, 16)  # of torch's generators


def rank_number(key: Any) -> int | None:
    """The rank that a key of rank_state_by_rank means: a number, or its text. None for something else."""
    if type(key) is str and key.isascii() and key.isdigit() and len(key) < 10:
        return int(key)
    return key if is_whole(key) else None


def state_problems(state: Any, trained: Trained | None) -> list[str]:
    """All that keeps a run from going on from a state, at most some dozens. trained: None when it can not be told."""
    found = list(islice(_problems(state, trained), _TOLD + 1))
    return found if len(found) <= _TOLD else [*found[:_TOLD], "and more"]


def loop_key(state: Mapping[str, Any]) -> str:
    many = "rank_state_by_rank" in state or "distributed_loop_state" in state
    return "distributed_loop_state" if many else "single_loop_state"


def epochs_of(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The 1-based epochs that a checkpoint of this state can say it is of; () where that can not be told."""
    loop = state.get(loop_key(state))
    if not isinstance(loop, dict):
        return ()
    epoch, within = loop.get("epoch_idx"), loop.get("next_batch_idx_in_epoch")
    if not is_whole(epoch) or not is_whole(within):
        return ()
    return (epoch, epoch + 1) if within == 0 else (epoch + 1,)  # 0: an epoch's last step has been done


def tensors_of(state: Any) -> tuple[set[str], set[str], set[str]]:
    """Entries of the file whose content must be finite, those that must not be negative besides, generators' states."""
    first: set[str] = set()
    second: set[str] = set()
    optimizer = state.get("optimizer_state") if isinstance(state, dict) else None
    moments = optimizer.get("state") if isinstance(optimizer, dict) else None
    for kept in moments.values() if isinstance(moments, dict) else ():
        for name, value in kept.items() if isinstance(kept, dict) else ():
            if isinstance(value, TensorLook) and value.dtype == "F32":
                (first if name == "exp_avg" else second).add(value.storage)
    generators = set()
    for _, streams in _all_streams(state) if isinstance(state, dict) else ():
        value = streams.get("torch_cpu") if isinstance(streams, dict) else None
        if isinstance(value, TensorLook):
            generators.add(value.storage)
    return first | second, second - first, generators


def is_generator(raw: bytes) -> bool:
    """Whether these bytes are a state of torch's CPU generator: at the start a seed, then left, seeded and next."""
    if len(raw) != _TORCH_CPU_BYTES:
        return False
    left, seeded = (int.from_bytes(raw[at : at + 4], "little") for at in (8, 12))
    following = int.from_bytes(raw[16:24], "little")
    return seeded == 1 and 0 < left <= _NUMPY_WORDS and following <= _NUMPY_WORDS


def _problems(state: Any, trained: Trained | None) -> Iterator[str]:
    if not isinstance(state, dict):
        yield f"expected a dict, found {shown(state)}"
        return
    version = state.get("checkpoint_version")
    if type(version) is not int or version != VERSION:
        yield f"checkpoint_version: expected {VERSION}, found {shown(version)}; only that layout is known"
        return
    if not is_whole(state.get("global_step")):
        yield f"global_step: expected a whole number, found {shown(state.get('global_step'))}"
    key = loop_key(state)
    loop = state.get(key)
    if isinstance(loop, dict):
        yield from _loop_problems(state, loop, key)
    else:
        yield f"{key}: missing"
        loop = {}
    if key == "distributed_loop_state":
        yield from _rank_problems(state, loop)
    for where, streams in _all_streams(state):
        yield from _stream_problems(streams, where)
    updates = loop.get("optimizer_steps" if key == "single_loop_state" else "optimizer_sync_steps_local")
    yield from optimizer_problems(state.get("optimizer_state"), trained, updates)


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(type(key) is str and is_whole(n) for key, n in value.items())


Check = Callable[[Any], bool]


def _fields(where: str, values: Mapping[str, Any], wanted: Mapping[str, tuple[Check, str]]) -> Iterator[str]:
    for name, (accepts, what) in wanted.items():
        if name not in values:
            yield f"{where}.{name}: missing; expected {what}"
        elif not accepts(values[name]):
            yield f"{where}.{name}: expected {what}, found {shown(values[name])}"


_WHOLE: tuple[Check, str] = (is_whole, "a whole number")
_COUNT: tuple[Check, str] = (is_count, "a count")
_NUMBER: tuple[Check, str] = (is_number, "a number")
_COUNTS: tuple[Check, str] = (_is_counts, "a count for each task")


def _loop_problems(state: Mapping[str, Any], loop: Mapping[str, Any], key: str) -> Iterator[str]:
    many = key == "distributed_loop_state"
    end, sync = ("_global", "sync_steps_local") if many else ("", "steps")
    wanted = {
        "epoch_idx": _WHOLE,
        "next_batch_idx_in_epoch": _WHOLE,
        "global_step": _WHOLE,
        f"optimizer_{sync}": _WHOLE,
        f"total_weighted_loss{end}": _NUMBER,
        f"total_target_tokens{end}": _COUNT,
    }
    if not many:
        wanted |= dict.fromkeys(("skipped_steps", "skipped_samples"), _WHOLE)
        wanted |= dict.fromkeys(("per_task_steps", "per_task_seen_samples"), _COUNTS)
    yield from _fields(key, loop, wanted)
    last = loop.get("last_step_loss")
    if last is not None and not is_number(last):
        yield f"{key}.last_step_loss: expected a number, found {shown(last)}"
    partial = loop.get("current_epoch_partial")
    yield from _fields(
        f"{key}.current_epoch_partial",
        partial if isinstance(partial, dict) else {},
        {
            f"epoch_attempted_{sync}": _WHOLE,
            f"epoch_optimizer_{sync}": _WHOLE,
            f"epoch_skipped_{sync}": _WHOLE,
            f"epoch_weighted_loss{end}": _NUMBER,
            f"epoch_target_tokens{end}": _COUNT,
        },
    )
    done = loop.get("epoch_summaries")
    if not isinstance(done, list | tuple) or not is_small(done) or not all(isinstance(e, dict) for e in done):
        yield f"{key}.epoch_summaries: expected a list of each epoch's figures, found {shown(done)}"
    before = loop.get("current_epoch_rng_state_before_build")
    if before is not None and not _is_python_state(before):
        yield f"{key}.current_epoch_rng_state_before_build: expected Python's random state, found {shown(before)}"
    yield from _place_problems(state, loop, key)
    if many and not _is_names(loop.get("tasks")):
        yield f"{key}.tasks: expected the tasks' names, found {shown(loop.get('tasks'))}"


def _place_problems(state: Mapping[str, Any], loop: Mapping[str, Any], key: str) -> Iterator[str]:
    outside, step = state.get("global_step"), loop.get("global_step")
    epoch, within = loop.get("epoch_idx"), loop.get("next_batch_idx_in_epoch")
    if not (is_whole(outside) and is_whole(step) and is_whole(epoch) and is_whole(within)):
        return  # told already
    if outside != step:
        yield f"{key}.global_step: expected {outside} as outside, found {step}"
        return
    # Every epoch has the same number of steps, and none is begun before its predecessor's end.
    begun = step - within
    length, rest = divmod(begun, epoch) if epoch else (step, begun)
    if begun < 0 or rest or within > length:
        yield (
            f"{key}.next_batch_idx_in_epoch: step {step} can not be step {within} of epoch_idx {epoch}, "
            f"whatever the length of an epoch"
        )


def _is_names(value: Any) -> TypeGuard[Sequence[str]]:
    named = isinstance(value, list | tuple) and all(type(name) is str and name for name in value)
    return named and 0 < len(value) == len(set(value))


def _all_streams(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if loop_key(state) == "single_loop_state":
        yield "process_rng_state", state.get("process_rng_state")
        return
    for rank, saved in _ranks(state):
        if isinstance(saved, dict):
            yield f"rank_state_by_rank[{shown(rank)}].process_rng_state", saved.get("process_rng_state")


def _ranks(state: Mapping[str, Any]) -> Sequence[tuple[Any, Any]]:
    given = state.get("rank_state_by_rank")
    if isinstance(given, list | tuple):
        return list(enumerate(given))
    return list(given.items()) if isinstance(given, dict) else []


def _rank_problems(state: Mapping[str, Any], loop: Mapping[str, Any]) -> Iterator[str]:
    ranks = _ranks(state)
    if not ranks:
        yield "rank_state_by_rank: expected a state for each rank"
        return
    size, said = len(ranks), loop.get("world_size")
    if is_whole(said) and said:
        size = said
    else:
        yield f"distributed_loop_state.world_size: expected the number of ranks, found {shown(said)}"
    numbers = [rank_number(key) for key, _ in ranks]
    # The lengths first: world_size is what a file says.
    if len(ranks) != size or set(numbers) != set(range(size)):
        listed = ", ".join(shown(key) for key, _ in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        yield f"rank_state_by_rank: expected the ranks 0 to {size - 1}, found {listed}"
    tasks = loop.get("tasks")
    known = set(tasks) if _is_names(tasks) else None
    for (key, saved), number in zip(ranks, numbers, strict=True):
        where = f"rank_state_by_rank[{shown(key)}]"
        if not isinstance(saved, dict):
            yield f"{where}: expected a dict, found {shown(saved)}"
            continue
        if number is not None and (type(saved.get("rank")) is not int or saved["rank"] != number):
            yield f"{where}: is the state of rank {shown(saved.get('rank'))}"
        wanted = dict.fromkeys(("skipped_sync_steps_local", "skipped_samples_local"), _WHOLE)
        wanted |= dict.fromkeys(("per_task_steps_local", "per_task_seen_samples_local"), _COUNTS)
        yield from _fields(where, saved, wanted)
        counted = saved.get("per_task_steps_local")
        if known is not None and isinstance(counted, dict) and _is_counts(counted):
            foreign = sorted(counted.keys() - known)
            if foreign:
                yield f"{where}.per_task_steps_local: counts {shown(foreign[0])}, which is not among the run's tasks"


def _stream_problems(streams: Any, where: str) -> Iterator[str]:
    if not isinstance(streams, dict):
        yield f"{where}: missing"
        return
    wanted: Mapping[str, tuple[Check, str]] = {
        "python": (_is_python_state, "Python's random state (random.getstate())"),
        "numpy": (_is_numpy_state, 'numpy\'s random state ("MT19937", 624 words, pos, has_gauss, gauss)'),
        "torch_cpu": (_is_torch_cpu, f"a tensor of {_TORCH_CPU_BYTES} bytes"),
        "torch_cuda": (_is_torch_cuda, "None, a tensor of 16 bytes or a list of such"),
    }
    for name in _STREAMS:
        accepts, what = wanted[name]
        if name not in streams:
            yield f"{where}.{name}: missing"
        elif not accepts(streams[name]):
            yield f"{where}.{name}: expected {what}, found {shown(streams[name])}"


def _is_words(value: Any, count: int) -> bool:
    if isinstance(value, ArrayLook):
        return value.dtype == "u4" and value.shape == (count,)
    sized = isinstance(value, list | tuple) and len(value) == count
    return sized and all(type(word) is int and 0 <= word < 2**32 for word in value)


def _is_python_state(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    version, words, gauss = value
    if version != 3 or isinstance(words, ArrayLook) or not _is_words(words, _PYTHON_WORDS):
        return False
    return bool(words[-1] <= _NUMPY_WORDS) and (gauss is None or type(gauss) is float)


def _is_numpy_state(value: Any) -> bool:
    value = numpy_state(value)
    if not isinstance(value, list | tuple) or len(value) != 5:
        return False
    name, words, position, has_gauss, cached = value
    sound = name == "MT19937" and _is_words(words, _NUMPY_WORDS)
    sound = sound and is_whole(position) and position <= _NUMPY_WORDS
    return sound and type(has_gauss) is int and has_gauss in (0, 1) and is_number(cached)


def _is_torch_cpu(value: Any) -> bool:
    return isinstance(value, TensorLook) and value.dtype == "U8" and value.shape == (_TORCH_CPU_BYTES,)


def _is_torch_cuda(value: Any) -> bool:
    many = value if isinstance(value, list | tuple) else [value]
    return value is None or all(
        isinstance(each, TensorLook)
        and each.dtype == "U8"
        and each.shape in [(n,) for n in _TORCH_CUDA_BYTES]
        for each in many
    )
