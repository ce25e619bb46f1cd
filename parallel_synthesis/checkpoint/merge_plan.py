"""What is to be merged, and everything about it that does not fit, found before anything is written (no torch)."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.merge_average import FLOATS
from parallel_synthesis.checkpoint.merge_files import TensorFile, pt_shapes
from parallel_synthesis.errors import CheckpointError, ConfigError, StorageError
from parallel_synthesis.provenance import manifest
from parallel_synthesis.provenance.check import Expected, Part
from parallel_synthesis.provenance.schema import read_json
from parallel_synthesis.values import nearest

Method = Literal["average", "concat", "svd"]
Missing = Literal["error", "copy", "zero"]
METHODS: Mapping[str, Method] = {"average": "average", "concat": "concat", "svd": "svd"}
MISSING: Mapping[str, Missing] = {"error": "error", "copy": "copy", "zero": "zero"}
README = f"{layout.JUDGER_LORA}/README.md"
DEFAULT_MAPPER = {"hidden_dim": 32, "metadata_features": "both"}  # of a checkpoint without the file
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|lm_head|embed_out|wte)(\..*)?\.weight")
# Fields of adapter_config.json that decide what the tensors mean; one that is absent has the value given here.
_COMPARED: Mapping[str, Any] = {
    "r": None,
    "lora_alpha": None,
    "target_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_rslora": False,
    "fan_in_fan_out": False,
    "task_type": None,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "exclude_modules": None,
    "base_model_name_or_path": None,
}
# Variants whose tensors are no plain factors, so that none of the methods is right for them: the plain value.
_PLAIN: Mapping[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "lora_bias": False,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "corda_config": None,
    "eva_config": None,
    "megatron_config": None,
}
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal")  # the others also change the backbone
# What differs by design when factors are stacked: each input's own rank and scale are folded in.
_FOLDED_IN = ("r", "lora_alpha", "use_rslora")
_RECORD = {"saved", "rows", "tensors"}  # of checkpoint_meta.json's embeddings
ALLOWABLE = (*_COMPARED, "revision", "mapper", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge. mapper_from, config_from: which input (0-based) gives the cache mapper, and adapter_config.json.

    missing: a tensor that some inputs lack is refused, taken from those that have it with their weights scaled to
    sum to 1, or counted as zeros. allow_mismatch: fields of ALLOWABLE. rank: of method svd.
    """

    method: Method = "average"
    rank: int | None = None
    mapper_from: int = 0
    config_from: int = 0
    missing: Missing = "error"
    allow_mismatch: tuple[str, ...] = ()
    allow_nonfinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way in which the inputs do not fit. allowed: by --allow-mismatch or --missing."""

    field: str
    text: str
    allowed: bool = False

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class MergeInput:
    """An opened input. `tensors` stays open until the merge ends; small files are read once, here.

    given: as it was given; a Hub id at the commit that was read.
    """

    label: str
    given: str
    directory: Path
    weight: float
    step: int | None
    config: Mapping[str, Any]
    tensors: TensorFile
    files: Mapping[str, bytes] = field(repr=False)  # name -> content of the small files there are
    mapper_config: Mapping[str, Any]
    mapper_shapes: Mapping[str, tuple[int, ...]]
    recorded: Mapping[str, Expected]  # what its own manifest, where it has one, says of its files
    embeddings: Mapping[str, Any] | None  # its meta's record of its adapter's: {saved, rows, tensors}

    @property
    def parts(self) -> Sequence[Part]:
        """The digests of the adapter's header and tensors, where they prove what its whole sha256 proves."""
        expected = self.recorded.get(layout.ADAPTER_MODEL)
        return expected.parts if expected is not None and expected.parts_cover_all else ()

    @property
    def scale(self) -> float:
        """What a LoRA's B @ A is multiplied by."""
        rank, alpha = self.config["r"], self.config["lora_alpha"]
        return float(alpha / rank**0.5 if self.config.get("use_rslora") else alpha / rank)


def resolve_input(given: str) -> layout.Located:
    """The components meant by one argument, a directory, a run, RUN@NAME or a Hub id, and its name for the records."""
    return layout.locate(given, more=(README,))


@contextlib.contextmanager
def opened(sources: Sequence[tuple[str, float]]) -> Iterator[list[MergeInput]]:
    """Opens (argument, weight) pairs. CheckpointError for one that is no checkpoint, is damaged, or is given twice."""
    if not sources:
        raise ConfigError(["nothing to merge: give two checkpoints, or --input CKPT=WEIGHT for each"])
    located = [resolve_input(given) for given, _ in sources]
    with contextlib.ExitStack() as stack:
        inputs: list[MergeInput] = []
        for number, ((_, weight), (name, directory)) in enumerate(zip(sources, located)):
            label = chr(ord("A") + number) if number < 26 else str(number + 1)
            tensors = stack.enter_context(TensorFile(directory / layout.ADAPTER_MODEL))
            for other in inputs:
                if tensors.path.samefile(other.tensors.path):
                    raise CheckpointError(
                        f"{other.label} and {label} are the same checkpoint ({directory}): its average is itself; "
                        f"name two different ones"
                    )
            inputs.append(_open(label, name, directory, weight, tensors))
        yield inputs


def _open(label: str, given: str, directory: Path, weight: float, tensors: TensorFile) -> MergeInput:
    files: dict[str, bytes] = {}
    for name in (layout.CACHE_MAPPER, layout.CACHE_MAPPER_CONFIG, layout.ADAPTER_CONFIG, README):
        path = directory / name
        if path.exists() or name in (layout.CACHE_MAPPER, layout.ADAPTER_CONFIG):
            try:
                files[name] = path.read_bytes()
            except OSError as error:
                raise StorageError(
                    f"cannot read {path}: {error.strerror}; expected a file of input {label}"
                ) from error
    config = _object(files[layout.ADAPTER_CONFIG], directory / layout.ADAPTER_CONFIG)
    mapper_config = DEFAULT_MAPPER
    if layout.CACHE_MAPPER_CONFIG in files:
        mapper_config = _object(files[layout.CACHE_MAPPER_CONFIG], directory / layout.CACHE_MAPPER_CONFIG)
    path = directory / layout.CHECKPOINT_META
    meta = read_json(path) if path.is_file() else {}
    record = meta.get("embeddings")
    recorded = manifest.listing(directory).files if layout.is_committed(directory) else {}
    return MergeInput(
        label=label,
        given=given,
        directory=directory,
        weight=weight,
        step=meta.get("global_step"),
        config=config,
        tensors=tensors,
        files=files,
        mapper_config=mapper_config,
        mapper_shapes=pt_shapes(directory / layout.CACHE_MAPPER),
        recorded=recorded,
        embeddings=record if isinstance(record, Mapping) and record.keys() >= _RECORD else None,
    )


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}; use another checkpoint") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object; use another checkpoint")
    return document


def lora_modules(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """module -> {"A": tensor name, "B": tensor name} of the LoRA factors of a file."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        if match := _LORA.fullmatch(name):
            found.setdefault(match["module"], {})[match["side"]] = name
    return found


def check_options(options: MergeOptions, weights: Sequence[float]) -> list[str]:
    """Problems of the options and weights themselves, for ConfigError."""
    count = len(weights)
    found = [
        f"weight {weight} of input {place}: expected a finite number"
        for place, weight in enumerate(weights, 1)
        if not math.isfinite(weight)
    ]
    for name in options.allow_mismatch:
        if name not in ALLOWABLE:
            found.append(
                f"--allow-mismatch {name}: expected one of {', '.join(ALLOWABLE)}{nearest(name, ALLOWABLE)}"
            )
    if (options.method == "svd") != (options.rank is not None):
        found.append("--rank goes with --method svd, and svd needs it: the rank of the result")
    if options.rank is not None and options.rank < 1:
        found.append(f"--rank {options.rank}: expected 1 or more")
    for flag, place in (("--mapper-from", options.mapper_from), ("--config-from", options.config_from)):
        if not 0 <= place < count:
            found.append(f"{flag}: there is no input {place + 1}, there are {count}")
    return found


def findings(inputs: Sequence[MergeInput], options: MergeOptions) -> list[Finding]:
    """Everything that does not fit, in one list. Nothing but headers and configs is read."""
    found: list[Finding] = []
    for one in inputs:
        found += _unsupported(one, options)
    first = inputs[0]
    for other in inputs[1:]:
        found += _config_differences(first, other, options)
        found += _mapper_differences(first, other)
    found += _tensor_differences(inputs, options)
    return [
        Finding(field=f.field, text=f.text, allowed=f.allowed or f.field in options.allow_mismatch)
        for f in found
    ]


def refuse(found: Sequence[Finding]) -> None:
    """CheckpointError with every finding that is not allowed; none: nothing happens."""
    stopping = [finding for finding in found if not finding.allowed]
    if stopping:
        listed = "".join(f"\n  - {finding}" for finding in stopping)
        raise CheckpointError(
            f"the inputs do not fit, {len(stopping)} finding{'s' * (len(stopping) > 1)}; nothing was written:{listed}\n"
            f"merge checkpoints of one recipe and backbone; --allow-mismatch FIELD and --missing copy|zero accept "
            f"what may be accepted, and are recorded"
        )


def _unsupported(one: MergeInput, options: MergeOptions) -> Iterator[Finding]:
    config = one.config
    kind = config.get("peft_type")
    if kind != "LORA":
        yield Finding(field="unsupported", text=f"{one.label} has peft_type {kind!r}; expected LORA")
        return
    for name, plain in _PLAIN.items():
        value = config.get(name, plain)
        if value != plain and value:
            yield Finding(
                field="unsupported",
                text=f"{one.label} has {name} = {value!r}; expected {plain!r}: not mergeable",
            )
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        yield Finding(
            field="unsupported",
            text=f"{one.label} has init_lora_weights = {init!r}, which also changes its backbone",
        )
    for name, tensor in one.tensors.entries.items():
        if tensor.dtype not in FLOATS:
            yield Finding(
                field="unsupported",
                text=f"{one.label} has {name} in {tensor.dtype}; expected one of {', '.join(FLOATS)}",
            )
    if not all(isinstance(config.get(key), int | float) and config[key] > 0 for key in ("r", "lora_alpha")):
        shown = {key: config.get(key) for key in ("r", "lora_alpha")}
        yield Finding(field="unsupported", text=f"{one.label} has {shown}; expected two numbers above 0")
    if options.method != "average":
        for name in ("rank_pattern", "alpha_pattern"):
            if config.get(name):
                yield Finding(
                    field="unsupported",
                    text=f"{one.label} has a {name}; {options.method} has one rank for all modules",
                )
        for name, tensor in one.tensors.entries.items():
            if ".lora_" in name and (not _LORA.fullmatch(name) or len(tensor.shape) != 2):
                yield Finding(
                    field="unsupported",
                    text=f"{one.label} has {name} {list(tensor.shape)}; {options.method} knows linear modules only",
                )


def _config_differences(first: MergeInput, other: MergeInput, options: MergeOptions) -> Iterator[Finding]:
    pair = f"{first.label} has {{}}, {other.label} has {{}}"
    for name, absent in _COMPARED.items():
        if options.method != "average" and name in _FOLDED_IN:
            continue
        mine, theirs = (_comparable(one.config.get(name, absent)) for one in (first, other))
        if mine != theirs and (mine or theirs):
            yield Finding(field=name, text=pair.format(_shown(mine), _shown(theirs)))
    mine, theirs = first.config.get("revision"), other.config.get("revision")
    if mine and theirs and mine != theirs:
        yield Finding(field="revision", text=pair.format(repr(mine), repr(theirs)))


def _mapper_differences(first: MergeInput, other: MergeInput) -> Iterator[Finding]:
    for name, default in DEFAULT_MAPPER.items():
        mine, theirs = (one.mapper_config.get(name, default) for one in (first, other))
        if mine != theirs:
            yield Finding(
                field="mapper", text=f"{first.label} has {name} {mine!r}, {other.label} has {theirs!r}"
            )
    if first.mapper_shapes != other.mapper_shapes:
        names = sorted(
            name
            for name in first.mapper_shapes.keys() | other.mapper_shapes.keys()
            if first.mapper_shapes.get(name) != other.mapper_shapes.get(name)
        )
        shapes = [one.mapper_shapes.get(names[0], "no such tensor") for one in (first, other)]
        yield Finding(
            field="mapper",
            text=f"{len(names)} shapes differ, e.g. {names[0]}: {first.label} {shapes[0]}, {other.label} {shapes[1]}",
        )


def _tensor_differences(inputs: Sequence[MergeInput], options: MergeOptions) -> Iterator[Finding]:
    every = {name for one in inputs for name in one.tensors.entries}
    shared = set(every)
    parts = []
    for one in inputs:
        shared &= one.tensors.entries.keys()
        others = {name for other in inputs if other is not one for name in other.tensors.entries}
        only = sorted(one.tensors.entries.keys() - others)
        if only and len(inputs) > 1:
            parts.append(f"{len(only)} tensors only in {one.label} (e.g. {', '.join(only[:2])})")
    if shared != every:
        text = (
            "; ".join(parts) or f"{len(every - shared)} tensors are not in all (e.g. {min(every - shared)})"
        )
        yield Finding(field="keys", text=text, allowed=options.missing != "error")
    for module, sides in sorted(lora_modules(every).items()):
        if len(sides) != 2:
            yield Finding(
                field="keys", text=f"{module} has only {next(iter(sides.values()))} of its two factors"
            )
    different: dict[str, list[str]] = {"shape": [], "vocabulary": [], "dtype": []}
    for name in sorted(every):
        having = [(one.label, one.tensors.entries[name]) for one in inputs if name in one.tensors.entries]
        stacked = options.method != "average" and _LORA.fullmatch(name) is not None
        label, mine = having[0]
        for other_label, theirs in having[1:]:
            pair = f"{name}: {label} {{}}, {other_label} {{}}"
            if not _fits(mine.shape, theirs.shape, stacked=stacked, side=name.removesuffix(".weight")[-1]):
                rows = _EMBEDDING.fullmatch(name) and mine.shape[1:] == theirs.shape[1:]
                kind = "vocabulary" if rows else "shape"
                different[kind].append(pair.format(list(mine.shape), list(theirs.shape)))
            if mine.dtype != theirs.dtype:
                different["dtype"].append(pair.format(mine.dtype, theirs.dtype))
    for kind, found in different.items():
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield Finding(field=kind, text=f"{found[0]}{more}")


def _fits(mine: tuple[int, ...], theirs: tuple[int, ...], *, stacked: bool, side: str) -> bool:
    """Same shape; factors that are stacked may differ in the rank (the rows of A, the columns of B)."""
    if stacked and len(mine) == len(theirs) == 2:
        return mine[1] == theirs[1] if side == "A" else mine[0] == theirs[0]
    return mine == theirs


def _comparable(value: Any) -> Any:
    return (
        sorted(value) if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value) else value
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
