"""A checkpoint without a manifest, such as the reference implementation's: what can be told of it all the same (no torch).

Nothing recorded says what its bytes were, so that nothing here proves them. Its parts can be held against each other,
its .pt files against the CRC-32 that their zip format carries (torch does not look at them), its weights can be counted.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.moments import Trained
from parallel_synthesis.checkpoint.parts import MERGE_META, check_parts
from parallel_synthesis.checkpoint.plain_values import shown
from parallel_synthesis.checkpoint.state_structure import epochs_of, is_generator, state_problems, tensors_of
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.digests import Progress
from parallel_synthesis.provenance.inside import Inside, folders_of
from parallel_synthesis.provenance.manifest import MANIFEST
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.safetensors_header import read_header
from parallel_synthesis.provenance.schema import parse_json
from parallel_synthesis.provenance.torch_file import TensorLook, look

REQUIRED = (layout.CACHE_MAPPER, layout.ADAPTER_CONFIG, layout.ADAPTER_MODEL)
HELD = (layout.CACHE_MAPPER, layout.ADAPTER_MODEL, layout.TRAINING_STATE)  # those with tensors
OF_A_STEP = (layout.TRAINING_STATE, layout.CHECKPOINT_META)  # what a run of theirs saves besides
_JSON = (layout.CACHE_MAPPER_CONFIG, layout.CHECKPOINT_META, layout.ADAPTER_CONFIG, MERGE_META)
_OURS = ("schema_version", "recipe", "parents")  # theirs has global_step, epoch, source_run_dir, metrics
_JSON_LIMIT = 64 << 20
_CHUNK = 1 << 20
_MAPPER = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")
_PLAIN = {
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}  # what else is no LoRA, parts.py tells
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
    problems += check_state(inside)
    looked = {name: "schema" for name in _JSON if inside.has(name)}
    looked |= {name: "structure" for name in (layout.CACHE_MAPPER, layout.TRAINING_STATE) if inside.has(name)}
    if inside.has(layout.ADAPTER_MODEL):
        looked[layout.ADAPTER_MODEL] = "header"
    if not quick:
        # What is no file of its kind at all has been told, and is not read to its end.
        told = {problem.path for problem in problems}
        for name, how in (
            (layout.CACHE_MAPPER, "structure, CRC-32, finite values"),
            (layout.TRAINING_STATE, "structure, CRC-32, finite moments"),
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


def refuse_unsound(checkpoint: Path) -> None:
    """CheckpointError with all that `ps verify` finds in a step checkpoint that a run is to go on from."""
    found = check_structure(Inside.of(checkpoint), of_step=True).problems
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        raise CheckpointError(f"{checkpoint} can not be continued from:\n{listed}\nuse another checkpoint")


def check_state(inside: Inside, *, any_layout: bool = False) -> list[Problem]:
    """What keeps a run from going on from the training state, by itself and beside the components and the meta.

    any_layout: one that names no version is not judged; there is nothing to judge it by.
    """
    state = _look(inside, layout.TRAINING_STATE)
    if state is None or (any_layout and isinstance(state, dict) and "checkpoint_version" not in state):
        return []
    found = [
        Problem(path=layout.TRAINING_STATE, kind="structure", detail=detail)
        for detail in state_problems(state, _trained(inside))
    ]
    epoch = (_json(inside, layout.CHECKPOINT_META) or {}).get("epoch")
    epochs = epochs_of(state) if isinstance(state, dict) else ()
    if epochs and type(epoch) is int and epoch not in epochs:
        detail = f"is of epoch {shown(epoch)}; {layout.TRAINING_STATE} stands in epoch {epochs[-1]}"
        found.append(Problem(path=layout.CHECKPOINT_META, kind="identity", detail=detail))
    config = _json(inside, layout.ADAPTER_CONFIG) or {}
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            detail = f"{key}: expected {plain!r}, found {shown(config[key])}: a run with such a LoRA can not go on here"
            found.append(Problem(path=layout.ADAPTER_CONFIG, kind="structure", detail=detail))
    return found


def damage(inside: Inside, name: str, *, progress: Callable[[int], Progress] | None = None) -> list[Problem]:
    """What is wrong with a component's content as far as the file itself can say: a .pt file's CRC-32, inf and nan."""
    fd = inside.open(name)
    if isinstance(fd, Problem):
        return [fd]
    tell = progress(os.fstat(fd).st_size) if progress is not None else None
    try:
        if name.endswith(".safetensors"):
            return list(_nonfinite(fd, name, tell))
        return list(_zip_damage(fd, name, tell))
    except OSError as error:
        return [Problem(path=name, kind="unreadable", detail=f"cannot be read: {error.strerror}")]
    finally:
        os.close(fd)


def _zip_damage(fd: int, name: str, tell: Progress | None) -> Iterator[Problem]:
    # Here: it loads numpy, which a checkpoint with a manifest has no use for.
    from parallel_synthesis.checkpoint.merge_average import count_negative, count_nonfinite

    mapper = name == layout.CACHE_MAPPER
    numbers, squares, generators = (set(), set(), set()) if mapper else tensors_of(look(fd).value)
    what = "weights" if mapper else "numbers of the moments"
    bad = negative = broken = 0
    try:
        with os.fdopen(os.dup(fd), "rb") as file, zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # Not inflated: a few bytes can become any number. The structure's check names it.
                if entry.compress_type != zipfile.ZIP_STORED:
                    yield Problem(
                        path=name, kind="structure", detail=f"{entry.filename[:80]!r} is compressed"
                    )
                    continue
                key = entry.filename.partition("/data/")[2]
                floats = bool(key) and (mapper or key in numbers)
                with archive.open(entry) as data:
                    while chunk := data.read(_CHUNK):
                        if floats:
                            bad += count_nonfinite(chunk, "F32")
                            negative += count_negative(chunk) if key in squares else 0
                        elif key in generators:
                            broken += not is_generator(chunk)
                        if tell is not None:
                            tell(len(chunk))
    except _BROKEN as error:  # arbitrary bytes are read
        yield Problem(path=name, kind="digest", detail=f"damaged: {str(error)[:120] or type(error).__name__}")
    if bad:
        yield Problem(path=name, kind="structure", detail=f"{bad} {what} are inf or nan")
    if negative:
        yield Problem(path=name, kind="structure", detail=f"{negative} mean squares or steps are negative")
    if broken:
        detail = f"torch_cpu: {broken} states are not of torch's generator"
        yield Problem(path=name, kind="structure", detail=detail)


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


def _trained(inside: Inside) -> Trained | None:
    """Shapes of the mapper's parameters in their order and of the LoRA's; None when they can not be told."""
    mapper = _look(inside, layout.CACHE_MAPPER)
    fd = inside.open(layout.ADAPTER_MODEL)
    if isinstance(fd, Problem):
        return None
    try:
        header = read_header(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    if not isinstance(mapper, dict) or not all(isinstance(mapper.get(key), TensorLook) for key in _MAPPER):
        return None
    return Trained(
        mapper=[mapper[key].shape for key in _MAPPER],
        lora={name: tensor.shape for name, tensor in header.tensors.items() if ".lora_" in name},
    )
