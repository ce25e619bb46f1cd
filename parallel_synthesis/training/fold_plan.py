"""What folding a LoRA into a backbone changes, tensor by tensor, and why it may not be possible (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallel_synthesis.checkpoint.merge_average import FLOATS, count_nonfinite, from_bytes, to_bytes
from parallel_synthesis.checkpoint.merge_files import TensorFile
from parallel_synthesis.checkpoint.merge_lowrank import factor
from parallel_synthesis.checkpoint.merge_plan import MergeInput, lora_modules
from parallel_synthesis.checkpoint.merge_stream import CHUNK
from parallel_synthesis.checkpoint.nearby import nothing_at
from parallel_synthesis.errors import BackboneError, CheckpointError
from parallel_synthesis.provenance import hub
from parallel_synthesis.provenance.hashing import Bytes
from parallel_synthesis.provenance.safetensors_header import TensorPlace
from parallel_synthesis.provenance.schema import read_json
from parallel_synthesis.resources import resolve_path

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "lm_head.weight", "embed_out.weight")
_HEADS = _EMBEDDINGS[2:]


@dataclass(frozen=True, kw_only=True)
class Base:
    """The backbone's files. shards: file name -> open file; where: tensor -> its shard."""

    directory: Path
    config: Mapping[str, Any]
    shards: Mapping[str, TensorFile]
    where: Mapping[str, str]

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def place(self, name: str) -> TensorPlace:
        return self.shards[self.where[name]].entries[name]


def find_model(model: str) -> tuple[str, Path]:
    """A backbone's name for the records (a Hub id at its commit) and the directory of its files."""
    name, directory = model, resolve_path(model)
    if not directory.exists() and hub.hub_id(model) is not None:
        snapshot = hub.fetched(model, _MODEL, refused=BackboneError)
        name, directory = snapshot.name, snapshot.directory
    elif not directory.exists():
        raise nothing_at(model, expected="the directory of a model or a Hub id", refused=BackboneError)
    if not directory.is_dir() or not (directory / CONFIG).is_file():
        raise BackboneError(
            f"{model}: expected the directory of a model, with {CONFIG} and safetensors files"
        )
    return name, directory


def _is_of_model(name: str) -> bool:
    """The files of a repository that make up the model: no folders, and no weights of another format."""
    return not name.startswith(".") and "/" not in name and not name.endswith((*OTHER_WEIGHTS, "README.md"))


_MODEL = hub.Wanted(required=(CONFIG,), also=_is_of_model, what="model")


def open_base(directory: Path, stack: ExitStack) -> Base:
    config = read_json(directory / CONFIG, error=BackboneError)
    if config.get("quantization_config") is not None:
        raise BackboneError(f"{directory}: quantised weights cannot take a delta; use the unquantised model")
    if (directory / INDEX).is_file():
        names = sorted(set(read_json(directory / INDEX, error=BackboneError)["weight_map"].values()))
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise BackboneError(
            f"{directory}: expected {SINGLE} or {INDEX}; convert the model to safetensors first"
        )
    shards = {name: stack.enter_context(TensorFile(directory / name)) for name in names}
    where = {tensor: name for name, shard in shards.items() for tensor in shard.entries}
    return Base(directory=directory, config=config, shards=shards, where=where)


class FoldPlan:
    """What changes in the base: modules (weight -> LoRA module) and replaced (embedding -> the adapter's tensor)."""

    def __init__(self, adapter: MergeInput, base: Base, scale: float) -> None:
        self.adapter, self.base = adapter, base
        self.factor = scale * adapter.scale
        self.warnings: list[str] = []
        self.sides = lora_modules(adapter.tensors.entries)
        problems = []
        if adapter.config.get("fan_in_fan_out"):
            problems.append("the adapter has fan_in_fan_out, whose weights are stored transposed")
        self.modules: dict[str, str] = {}
        for module in self.sides:
            name = f"{module.removeprefix(_PREFIX)}.weight"
            problem = self._module_problem(module, name)
            if problem is None:
                self.modules[name] = module
            else:
                problems.append(problem)
        self.replaced: dict[str, str] = {}
        self.adapter_rows: int | None = None
        for name in sorted(adapter.tensors.entries):
            if ".lora_" not in name:
                problems += self._embedding(name)
        problems += self._rows()
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise CheckpointError(
                f"{adapter.given} cannot be folded into {base.directory}:{listed}\nnothing was written"
            )
        self.dtype = next((base.place(name).dtype for name in self.modules), "F32")

    def _module_problem(self, module: str, name: str) -> str | None:
        if name not in self.base.where:
            return f"the base has no tensor {name}, which the adapter changes"
        if self.base.tied and name.endswith(_EMBEDDINGS):
            return f"{name} is tied to the input embedding: a delta for one of the two cannot be folded in"
        place, entries = self.base.place(name), self.adapter.tensors.entries
        shape = (entries[self.sides[module]["B"]].shape[0], entries[self.sides[module]["A"]].shape[1])
        if place.shape != shape or place.dtype not in FLOATS:
            return f"{name} is {place.dtype} {list(place.shape)} in the base; the adapter needs floats {list(shape)}"
        return None

    def _embedding(self, name: str) -> list[str]:
        """A whole matrix in the adapter: the base's own, else its replacement."""
        target = name.removeprefix(_PREFIX)
        if not target.endswith(_EMBEDDINGS) or "modules_to_save" in target:
            return [f"the adapter has {name}, a trained copy of a module, which is not supported"]
        if target not in self.base.where:
            if not self.base.tied or not target.endswith(_HEADS):
                return [f"the base has no tensor {target}, which the adapter holds"]
            target = next(key for key in self.base.where if key.endswith(_EMBEDDINGS[:2]))
        mine, theirs = self.adapter.tensors.entries[name], self.base.place(target)
        if len(mine.shape) != 2 or mine.shape[1:] != theirs.shape[1:] or theirs.dtype not in FLOATS:
            return [f"{name} is {list(mine.shape)}, in the base {theirs.dtype} {list(theirs.shape)}"]
        self.adapter_rows = max(mine.shape[0], self.adapter_rows or 0)
        same = mine.shape[0] <= theirs.shape[0] and self._same_rows(name, target)
        if not same:
            other = self.replaced.setdefault(target, name)
            tensors = self.adapter.tensors
            if other != name and tensors.tensor(other) != tensors.tensor(name):
                return [f"{other} and {name} differ, and the base ties the two"]
        return []

    def _same_rows(self, name: str, target: str) -> bool:
        mine, theirs = self.adapter.tensors.entries[name], self.base.place(target)
        elements, step = math.prod(mine.shape), CHUNK // 4
        for start in range(0, elements, step):
            count = min(step, elements - start)
            a = _part(self.adapter.tensors, mine, start, count)
            if mine.dtype != theirs.dtype:
                a = bytes(to_bytes(from_bytes(a, mine.dtype), theirs.dtype))
            if a != _part(self.base.shards[self.base.where[target]], theirs, start, count):
                return False
        return True

    def _rows(self) -> list[str]:
        """After a replacement all embeddings must have one number of rows."""
        found = {}
        for name in self.base.where:
            if name.endswith(_EMBEDDINGS):
                place = (
                    self.adapter.tensors.entries[self.replaced[name]]
                    if name in self.replaced
                    else self.base.place(name)
                )
                found[name] = place.shape[0]
        if self.replaced and len(set(found.values())) > 1:
            return [f"input and output embedding would have other numbers of rows: {found}"]
        if self.replaced:
            self.warnings.append(
                f"the adapter's own embeddings ({', '.join(sorted(self.replaced))}) replace the base's, which differ"
            )
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.replaced:
            return self.adapter.tensors.entries[self.replaced[name]].shape
        return self.base.place(name).shape

    def chunks(self, name: str) -> Iterator[Bytes]:
        """A tensor of the new model."""
        place = self.base.place(name)
        if name in self.replaced:
            source = self.adapter.tensors.entries[self.replaced[name]]
            elements, step = math.prod(source.shape), CHUNK // 4
            for start in range(0, elements, step):
                raw = _part(self.adapter.tensors, source, start, min(step, elements - start))
                yield (
                    raw
                    if source.dtype == place.dtype
                    else to_bytes(from_bytes(raw, source.dtype), place.dtype)
                )
            return
        shard = self.base.shards[self.base.where[name]]
        if name in self.modules:
            yield from self._folded(name, shard, place)
            return
        for at in range(0, place.bytes, CHUNK):
            yield shard.read(place.start + at, min(CHUNK, place.bytes - at))

    def _folded(self, name: str, shard: TensorFile, place: TensorPlace) -> Iterator[Bytes]:
        sides = self.sides[self.modules[name]]
        a, b = factor(self.adapter, sides["A"]), factor(self.adapter, sides["B"])
        rows, columns = place.shape
        step = max(1, CHUNK // 4 // max(columns, 1))
        for start in range(0, rows, step):
            end = min(start + step, rows)
            raw = _part(shard, place, start * columns, (end - start) * columns)
            weight = from_bytes(raw, place.dtype).reshape(end - start, columns).astype(np.float64)
            data = to_bytes(weight + self.factor * (b[start:end] @ a), place.dtype)
            if count_nonfinite(data, place.dtype):
                raise CheckpointError(
                    f"{name} has inf or nan in the base, the adapter or their sum; nothing was written"
                )
            yield data


def _part(file: TensorFile, place: TensorPlace, start: int, count: int) -> bytes:
    """Elements of a tensor."""
    size = FLOATS[place.dtype]
    return file.read(place.start + start * size, count * size)
