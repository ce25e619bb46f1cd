"""A checkpoint's components, tensors and metrics, and a data file's rows: read without torch and without unpickling."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.layout import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    CACHE_MAPPER,
    CHECKPOINT_META,
    JUDGER_LORA,
    RUN_ARGS,
    SUMMARY,
    TRAIN_LOG,
)
from parallel_synthesis.data.index import Loose, open_rows
from parallel_synthesis.data.manifests import manifest_entry
from parallel_synthesis.data.tasks import TASKS, Task
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import manifest
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.lineage import MERGE_META
from parallel_synthesis.provenance.safetensors_header import DTYPE_BITS, read_header
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.provenance.torch_file import TensorLook, look

_BAD_LISTED, _SAMPLED = 20, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """bytes: of its data. frozen: no LoRA and no mapper weight, so a copy of the backbone's own."""

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    frozen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """A checkpoint. source: as its user names it, a Hub id at its commit. files: path -> bytes. committed: it has a manifest; problems: sizes or names that do not fit it.

    merge: of a merged one its checkpoint_merge_meta.json, else None; step and epoch are then None, for it is no step of
    any run.
    """

    path: Path
    source: str
    step: int | None
    epoch: int | None
    recipe: str | None
    metrics: Mapping[str, Any]
    parents: tuple[Mapping[str, Any], ...]
    merge: Mapping[str, Any] | None
    versions: Mapping[str, Any]
    committed: bool
    problems: tuple[str, ...]
    files: Mapping[str, int]
    bytes: int
    adapter: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    dtypes: Mapping[str, int]
    tensor_bytes: int
    frozen_tensors: int
    frozen_bytes: int


def inspect_checkpoint(path: Path, *, source: str | None = None) -> CheckpointReport:
    """What a checkpoint directory holds; source: what it is named otherwise (a Hub id). CheckpointError where a component can not be read as what it should be."""
    meta = load_json(path / CHECKPOINT_META, "checkpoint_meta") if (path / CHECKPOINT_META).is_file() else {}
    merge = load_json(path / MERGE_META, "checkpoint_merge_meta") if (path / MERGE_META).is_file() else None
    files = {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted([*path.iterdir(), *(path / JUDGER_LORA).iterdir()])
        if file.is_file() and file.name not in (RUN_ARGS, TRAIN_LOG, SUMMARY)
    }
    tensors = [*_mapper(path / CACHE_MAPPER), *_safetensors(path / ADAPTER_MODEL)]
    adapter = read_json(path / ADAPTER_CONFIG) if (path / ADAPTER_CONFIG).is_file() else {}
    committed = (path / manifest.MANIFEST).is_file()
    found = manifest.verify(path, quick=True, extra=False) if committed else []
    # Of a Hub repository only what is needed was fetched: a file that is not here is none that is missing there.
    cached = Inside.of(path).blobs is not None
    problems = [str(problem) for problem in found if not (cached and problem.kind == "missing")]
    frozen = [tensor for tensor in tensors if tensor.frozen]
    return CheckpointReport(
        path=path,
        source=str(path) if source is None else source,
        step=meta.get("global_step") if merge is None else None,
        epoch=meta.get("epoch") if merge is None else None,
        recipe=meta.get("recipe"),
        metrics=meta.get("metrics") or {},
        parents=tuple(meta.get("parents", ())),
        merge=merge,
        versions=meta.get("versions", {}),
        committed=committed,
        problems=tuple(problems),
        files=files,
        bytes=sum(files.values()),
        adapter={
            key: adapter.get(key)
            for key in ("r", "lora_alpha", "lora_dropout", "target_modules")
            if key in adapter
        },
        tensors=tuple(tensors),
        dtypes=dict(sorted(Counter(tensor.dtype for tensor in tensors).items())),
        tensor_bytes=sum(tensor.bytes for tensor in tensors),
        frozen_tensors=len(frozen),
        frozen_bytes=sum(tensor.bytes for tensor in frozen),
    )


def _safetensors(path: Path) -> list[Tensor]:
    with path.open("rb") as file:
        header = read_header(file.fileno())
    if header.problems:
        raise CheckpointError(f"{path}: {header.problems[0]}; restore it from a good copy")
    return [
        Tensor(
            file=ADAPTER_MODEL,
            name=name,
            dtype=found.dtype,
            shape=found.shape,
            bytes=found.bytes,
            frozen="lora_" not in name,
        )
        for name, found in header.tensors.items()
    ]


def _mapper(path: Path) -> list[Tensor]:
    with path.open("rb") as file:
        looked = look(file.fileno())
    if looked.problems or not isinstance(looked.value, Mapping):
        problem = looked.problems[0] if looked.problems else "no state dict"
        raise CheckpointError(f"{path}: {problem}; restore it from a good copy")
    return [
        Tensor(
            file=CACHE_MAPPER,
            name=str(name),
            dtype=found.dtype,
            shape=found.shape,
            bytes=math.prod(found.shape) * DTYPE_BITS.get(found.dtype, 0) // 8,
            frozen=False,
        )
        for name, found in looked.value.items()
        if isinstance(found, TensorLook)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """A data file. branches, characters (of a row's contexts): least, median, most of `sampled` rows spread over it.

    known_as: the file of the training-data manifest that it is. loose: branches whose extract is not the end of its
    context.
    """

    path: Path
    task: str
    rows: int
    bad: int
    bad_first: tuple[tuple[int, str], ...]
    bytes: int
    sha256: str
    unpacked_bytes: int | None
    unpacked_sha256: str | None
    known_as: str | None
    loose: Loose
    sampled: int
    branches: tuple[int, int, int]
    characters: tuple[int, int, int]


def inspect_data(path: Path) -> DataReport:
    """A .jsonl or .jsonl.gz file under the rows' rules, bad rows counted. DataError when it has no valid row."""
    task = next(
        (task for task in TASKS.values() if task.usual_file and path.as_posix().endswith(task.usual_file)),
        Task(name=path.name.split(".")[0], usual_file=None, contexts_may_stand_in=True),
    )
    with open_rows(task, path, on_bad_row="skip") as file:
        rows = [file.read(place) for place in range(0, file.rows, max(1, file.rows // _SAMPLED))]
        known = None
        for name in TASKS:
            entry = manifest_entry(name)
            if entry is not None and entry.sha256 in (file.sha256, file.unpacked_sha256):
                known = f"{name}: {entry.path}"
        return DataReport(
            path=path,
            task=task.name,
            rows=file.rows,
            bad=len(file.bad),
            bad_first=tuple((bad.line, bad.problem) for bad in file.bad[:_BAD_LISTED]),
            bytes=file.bytes,
            sha256=file.sha256,
            unpacked_bytes=file.unpacked_bytes,
            unpacked_sha256=file.unpacked_sha256,
            known_as=known,
            loose=file.loose,
            sampled=len(rows),
            branches=_spread([len(row.contexts) for row in rows]),
            characters=_spread([sum(map(len, row.contexts)) for row in rows]),
        )


def _spread(values: list[int]) -> tuple[int, int, int]:
    return min(values), int(statistics.median(values)), max(values)
