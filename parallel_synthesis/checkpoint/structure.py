"""A checkpoint without a manifest, such as the reference implementation's: what can be told of it all the same (no torch).

Nothing recorded says what its bytes were, so that nothing here proves them. Its parts can be held against each other,
its .pt files against the CRC-32 that their zip format carries (torch does not look at them), its weights can be counted.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.parts import MERGE_META, check_parts
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.digests import Progress
from parallel_synthesis.provenance.inside import Inside, folders_of
from parallel_synthesis.provenance.manifest import MANIFEST
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.safetensors_header import Header, read_header
from parallel_synthesis.provenance.schema import parse_json
from parallel_synthesis.provenance.torch_file import Named, TensorLook, look

REQUIRED = (layout.CACHE_MAPPER, layout.ADAPTER_CONFIG, layout.ADAPTER_MODEL)
HELD = (layout.CACHE_MAPPER, layout.ADAPTER_MODEL, layout.TRAINING_STATE)  # those with tensors
OF_A_STEP = (layout.TRAINING_STATE, layout.CHECKPOINT_META)  # what a run of theirs saves besides
_JSON = (layout.CACHE_MAPPER_CONFIG, layout.CHECKPOINT_META, layout.ADAPTER_CONFIG, MERGE_META)
_OURS = ("schema_version", "recipe", "parents")  # theirs has global_step, epoch, source_run_dir, metrics
_JSON_LIMIT = 64 << 20
_CHUNK = 1 << 20
_STREAMS = ("python", "numpy", "torch_cpu", "torch_cuda")
_VERSION = 2
_MAPPER = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
_BROKEN = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """looked: file -> what was looked at in it. not_checked: what is there, or is not, and why nothing was checked."""

    problems: Sequence[Problem]
    looked: Mapping[str, str]
    not_checked: Sequence[str]


def is_theirs(directory: Path) -> bool:
    """A checkpoint that never had a manifest: nothing in it or around it says that it is of ours.

    One of ours without its manifest was never committed, or is about to be removed; that is never passed over.
    """
    here = Inside.of(directory)
    if here.has(MANIFEST):
        return False
    for run in (directory, directory.parent.parent):
        record = _json(Inside(run), layout.RUN_ARGS)
        if record is not None and not is_reference_record(record):
            return False
    for name in (layout.CHECKPOINT_META, MERGE_META):
        if any(key in (_json(here, name) or {}) for key in _OURS):
            return False
    state = _look(here, layout.TRAINING_STATE)
    return not (isinstance(state, dict) and "ranks" in state)


def check_structure(
    inside: Inside,
    *,
    of_step: bool = False,
    quick: bool = False,
    progress: Callable[[int], Progress] | None = None,
) -> Structure:
    """All that can be told of one checkpoint's directory. Nothing is raised for what is damaged.

    of_step: a step checkpoint of a run, which must have a training state and its meta. quick: headers and small files
    only. progress: see provenance.check.
    """
    wanted = (*REQUIRED, *(OF_A_STEP if of_step else ()))
    problems = [
        Problem(path=name, kind="missing", detail="missing") for name in wanted if not inside.has(name)
    ]
    problems += [problem for problem in check_parts(inside) if problem.kind != "missing"]
    state = _look(inside, layout.TRAINING_STATE)
    if state is not None:
        problems += [
            Problem(path=layout.TRAINING_STATE, kind="structure", detail=detail)
            for detail in _state_problems(state, _shapes(inside))
        ]
    looked = {name: "schema" for name in _JSON if inside.has(name)}
    looked |= {name: "structure" for name in (layout.CACHE_MAPPER, layout.TRAINING_STATE) if inside.has(name)}
    if inside.has(layout.ADAPTER_MODEL):
        looked[layout.ADAPTER_MODEL] = "header"
    if not quick:
        # What is no file of its kind at all has been told, and is not read to its end.
        told = {problem.path for problem in problems}
        for name, how in (
            (layout.CACHE_MAPPER, "structure, CRC-32, finite values"),
            (layout.TRAINING_STATE, "structure, CRC-32"),
            (layout.ADAPTER_MODEL, "header, finite values"),
        ):
            if name in looked and name not in told:
                looked[name] = how
                problems += damage(inside, name, progress=progress)
    absent = [f"{name}: not there" for name in OF_A_STEP if not inside.has(name) and name not in wanted]
    others = inside.unlisted(looked, folders_of(looked))
    return Structure(
        problems=problems,
        looked=looked,
        not_checked=[*absent, *(str(name) for name in others)],
    )


def damage(inside: Inside, name: str, *, progress: Callable[[int], Progress] | None = None) -> list[Problem]:
    """What is wrong with a component's content as far as the file itself can say: a .pt file's CRC-32, inf and nan."""
    fd = inside.open(name)
    if isinstance(fd, Problem):
        return [fd]
    tell = progress(os.fstat(fd).st_size) if progress is not None else None
    try:
        if name.endswith(".safetensors"):
            return list(_nonfinite(fd, name, tell))
        return list(_zip_damage(fd, name, tell, floats=name == layout.CACHE_MAPPER))
    except OSError as error:
        return [Problem(path=name, kind="unreadable", detail=f"cannot be read: {error.strerror}")]
    finally:
        os.close(fd)


def _zip_damage(fd: int, name: str, tell: Progress | None, *, floats: bool) -> Iterator[Problem]:
    # Here: it loads numpy, which a checkpoint with a manifest has no use for.
    from parallel_synthesis.checkpoint.merge_average import count_nonfinite

    bad = 0
    try:
        with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as data:
                    while chunk := data.read(_CHUNK):
                        if floats and "/data/" in entry.filename:
                            bad += count_nonfinite(chunk, "F32")
                        if tell is not None:
                            tell(len(chunk))
    except _BROKEN as error:  # arbitrary bytes are read
        yield Problem(path=name, kind="digest", detail=f"damaged: {str(error)[:120] or type(error).__name__}")
    if bad:
        yield Problem(path=name, kind="structure", detail=f"{bad} weights are inf or nan")


def _nonfinite(fd: int, name: str, tell: Progress | None) -> Iterator[Problem]:
    from parallel_synthesis.checkpoint.merge_average import FLOATS, count_nonfinite

    for key, tensor in read_header(fd).tensors.items():
        bad = 0
        for at in range(0, tensor.bytes, _CHUNK):
            data = os.pread(fd, min(_CHUNK, tensor.bytes - at), tensor.start + at)
            if tensor.dtype in FLOATS:
                bad += count_nonfinite(data, tensor.dtype)
            if tell is not None:
                tell(len(data))
        if bad:
            yield Problem(path=name, kind="structure", detail=f"{key}: {bad} weights are inf or nan")


def _json(inside: Inside, name: str) -> dict[str, Any] | None:
    """A document that can be read, else None: what is wrong with it is told elsewhere."""
    raw = inside.read(name, limit=_JSON_LIMIT)
    if isinstance(raw, Problem):
        return None
    try:
        document = parse_json(raw, name)
    except CheckpointError:
        return None
    return document if isinstance(document, dict) else None


def _look(inside: Inside, name: str) -> Any:
    """The plain value of a .pt file, None when it can not be told."""
    fd = inside.open(name)
    if isinstance(fd, Problem):
        return None
    try:
        return look(fd).value
    except OSError:
        return None
    finally:
        os.close(fd)


Shape = tuple[int, ...]


def _shapes(inside: Inside) -> tuple[list[Shape], list[Shape]] | None:
    """Of the mapper's parameters in their order and of the LoRA's; None when they can not be told."""
    mapper = _look(inside, layout.CACHE_MAPPER)
    fd = inside.open(layout.ADAPTER_MODEL)
    if isinstance(fd, Problem):
        return None
    try:
        header: Header = read_header(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not isinstance(mapper, dict) or not all(isinstance(mapper.get(key), TensorLook) for key in _MAPPER):
        return None
    lora = [tensor.shape for name, tensor in header.tensors.items() if ".lora_" in name]
    return [mapper[key].shape for key in _MAPPER], lora


def _state_problems(state: Any, shapes: tuple[list[Shape], list[Shape]] | None) -> Iterator[str]:
    """training_state.pt, version 2 of formats.md. What numpy wrote (numbers, states) is seen, not read."""
    if not isinstance(state, dict):
        yield "expected a dict"
        return
    version = state.get("checkpoint_version")
    if version != _VERSION and not isinstance(version, Named):
        yield f"checkpoint_version: expected {_VERSION}, found {version!r}; only that layout is known"
        return
    many = "rank_state_by_rank" in state or "distributed_loop_state" in state
    yield from _loop_problems(state, "distributed_loop_state" if many else "single_loop_state")
    if many:
        yield from _rank_problems(state)
    else:
        yield from _stream_problems(state.get("process_rng_state"), "process_rng_state")
    yield from _optimizer_problems(state.get("optimizer_state"), shapes)


def _loop_problems(state: Mapping[str, Any], key: str) -> Iterator[str]:
    loop = state.get(key)
    if not isinstance(loop, dict):
        yield f"{key}: missing"
        return
    for name in ("epoch_idx", "next_batch_idx_in_epoch", "global_step"):
        value = loop.get(name)
        if not isinstance(value, Named) and (type(value) is not int or value < 0):
            yield f"{key}.{name}: expected a whole number, found {str(value)[:60]}"
    steps = [state.get("global_step"), loop.get("global_step")]
    if all(type(step) is int for step in steps) and steps[0] != steps[1]:
        yield f"{key}.global_step: expected {steps[0]} as outside, found {steps[1]}"


def _rank_problems(state: Mapping[str, Any]) -> Iterator[str]:
    given = state.get("rank_state_by_rank")
    ranks = dict(enumerate(given)) if isinstance(given, list) else given
    if not isinstance(ranks, dict) or not ranks:
        yield "rank_state_by_rank: expected a state for each rank"
        return
    loop = state.get("distributed_loop_state")
    size = loop.get("world_size") if isinstance(loop, dict) else None
    count = size if type(size) is int and size > 0 else len(ranks)
    if {str(rank) for rank in ranks} != {str(rank) for rank in range(count)}:
        yield f"rank_state_by_rank: expected the ranks 0 to {count - 1}, found {sorted(map(str, ranks))}"
    for rank, saved in ranks.items():
        where = f"rank_state_by_rank[{rank}]"
        if not isinstance(saved, dict):
            yield f"{where}: expected a dict"
            continue
        if type(saved.get("rank")) is int and str(saved["rank"]) != str(rank):
            yield f"{where}: is the state of rank {saved['rank']}"
        yield from _stream_problems(saved.get("process_rng_state"), f"{where}.process_rng_state")


def _stream_problems(streams: Any, where: str) -> Iterator[str]:
    if not isinstance(streams, dict):
        yield f"{where}: missing"
        return
    yield from (f"{where}.{name}: missing" for name in _STREAMS if name not in streams)
    torch_cpu = streams.get("torch_cpu")
    if "torch_cpu" in streams and not (isinstance(torch_cpu, TensorLook) and torch_cpu.dtype == "U8"):
        yield f"{where}.torch_cpu: expected a tensor of bytes"


def _optimizer_problems(optimizer: Any, shapes: tuple[list[Shape], list[Shape]] | None) -> Iterator[str]:
    """Moments of another number of parameters, or of other shapes, would be taken for those of the wrong ones."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    moments = optimizer.get("state") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list) or not isinstance(moments, dict):
        yield "optimizer_state: expected a dict with state and param_groups"
        return
    numbers = [number for group in groups if isinstance(group, dict) for number in group.get("params") or ()]
    if shapes is None:
        return
    mapper, lora = shapes
    trained = [(mapper, lora), (mapper, []), ([], lora)]  # both, mapper_only, lora_only
    if len(numbers) not in [len(first) + len(rest) for first, rest in trained]:
        yield (
            f"optimizer_state: is of {len(numbers)} parameters; the mapper has {len(mapper)}, the LoRA {len(lora)}"
        )
        return
    found: list[Shape | None] = []
    for number in numbers:
        kept = moments.get(number)
        parts = [kept.get(name) for name in ("exp_avg", "exp_avg_sq")] if isinstance(kept, dict) else []
        given = {part.shape for part in parts if isinstance(part, TensorLook)}
        if len(given) > 1:
            yield f"optimizer_state[{number}]: its two moments have the shapes {sorted(given)}"
        found.append(next(iter(given), None))
    if None in found:  # before the first update there are none
        return
    if not any(
        found[: len(first)] == first and Counter(found[len(first) :]) == Counter(rest)
        for first, rest in trained
    ):
        yield "optimizer_state: its moments have other shapes than the parameters of the mapper and the LoRA"
