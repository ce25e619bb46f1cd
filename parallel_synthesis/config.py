"""The config of a run: frozen, keyword-only dataclasses; each field says its unit and meaning.

The names are those of a recipe's TOML tables and of `--set section.field=value`. Ranges are checked by `problems`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Method = Literal["fixed_parallel_kv", "parallel_kv"]
Components = Literal["both", "mapper_only", "lora_only"]
MetadataFeatures = Literal["both", "length", "num_agents", "none"]
OFF = -1  # the value that switches a guard off


def _f(default: Any, meaning: str, unit: str = "") -> Any:
    """A field with its documentation; a mapping default becomes a factory."""
    metadata = {"meaning": meaning, "unit": unit}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    method: Method = _f("fixed_parallel_kv", "data route: prefill given contexts, or let workers generate")
    components: Components = _f("both", "which components are trained")
    seed: int = _f(42, "seed of the data order, the initial weights and the RNG streams")
    ranks: int = _f(
        4,
        "logical ranks: defines data order and RNG streams; any number of processes that divides it",
        "ranks",
    )
    epochs: int = _f(1, "passes over the data")
    steps_per_epoch: int | None = _f(None, "shorten an epoch to this many global steps", "global steps")
    max_steps: int | None = _f(None, "planned end of the run, skipped steps included", "global steps")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    model: str = _f("", "frozen causal LM: Hub id, directory, package:PATH or .gguf file")
    revision: str | None = _f(None, "Hub revision (commit hash)")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _f(
        "auto", "auto: bfloat16 on CUDA, float32 on a CPU"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = _f("sdpa", "attention implementation")
    device: str = _f("auto", "auto, cpu, cuda or cuda:N")
    threads_per_rank: int = _f(
        1, "CPU threads of a process; part of what makes CPU runs bit-equal", "threads"
    )
    deterministic: bool = _f(
        True, "deterministic algorithms only; off is quicker on CUDA and not repeatable to the bit"
    )


@dataclass(frozen=True, kw_only=True)
class MapperConfig:
    hidden_dim: int = _f(32, "width of the cache mapper's hidden layer")
    metadata_features: MetadataFeatures = _f("both", "which inputs besides the layer the mapper sees")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    r: int = _f(16, "rank of the synthesizer LoRA")
    alpha: int = _f(32, "LoRA scale numerator: the delta is alpha / r * B @ A")
    dropout: float = _f(0.0, "LoRA dropout probability")
    target_modules: tuple[str, ...] = _f(("q_proj", "k_proj", "v_proj", "o_proj"), "modules that get a LoRA")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    tasks: tuple[str, ...] = _f((), "tasks of the mix, in order (the order is part of the data order)")
    root: str = _f(".", "directory of the data files")
    files: Mapping[str, str] = _f({}, "task -> file, relative to root; default is the task's usual file")
    batch_size: int = _f(1, "rows per logical rank and step", "rows")
    max_rows: int | None = _f(None, "use only the first N valid rows of each task", "rows")
    split: str = _f("train", "name of the split, recorded in the summary")
    on_bad_row: Literal["refuse", "skip"] = _f(
        "refuse", "a row that is not valid: refuse the run, or skip and count it"
    )


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    prefill_tokens: int = _f(
        OFF,
        "skip a step whose branches prefill more, summed over the batch (-1 = off; fixed_parallel_kv only)",
        "tokens",
    )
    live_tokens: int = _f(OFF, "skip a step with a longer live sequence (-1 = off)", "tokens")
    attention_area: int = _f(OFF, "skip a step with larger live * (past + live) (-1 = off)", "tokens squared")
    total_tokens: int = _f(OFF, "skip a step with larger past + live (-1 = off)", "tokens")


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    count: int = _f(3, "workers that generate a branch each (parallel_kv only)")
    max_new_tokens: int = _f(4096, "longest branch a worker generates", "tokens")
    temperature: float = _f(0.6, "sampling temperature; 0 is greedy")
    top_p: float = _f(0.95, "nucleus sampling probability")
    think: bool = _f(False, "append <think> to the synthesizer's prompt")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    learning_rate: float = _f(1e-4, "AdamW learning rate, constant")
    weight_decay: float = _f(0.0, "AdamW weight decay")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = _f(5, "save every N global steps (0 = only the start and the end)", "global steps")
    keep_last: int = _f(2, "step checkpoints kept besides milestones and keep_every")
    keep_every: int | None = _f(None, "also keep every step checkpoint at a multiple of N", "global steps")
    milestones: tuple[int, ...] = _f(
        (), "global steps kept for ever, saved even when skipped", "global steps"
    )
    background: bool = _f(True, "write, hash and fsync in a background writer")
    embeddings: Literal["keep", "drop"] = _f(
        "keep",
        "embeddings that the adapter of --init carries: write them into every checkpoint, or leave them out "
        "(ps snapshot --export puts them back)",
    )
    shutdown_timeout: int = _f(600, "how long torchrun waits for the save after a signal", "seconds")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    every: int = _f(1, "show every Nth step on the screen; train.log has every step", "global steps")
    on_nonfinite: Literal["stop", "skip"] = _f(
        "stop", "a nan or inf loss or gradient: stop, or skip the step and count it"
    )
    on_divergence: Literal["stop", "warn"] = _f("stop", "a repeated step with another digest: stop, or warn")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    files: Mapping[str, str] = _f({}, "task -> held-out file, relative to data.root; empty = no evaluation")
    max_rows: int | None = _f(None, "use only the first N held-out rows of each task", "rows")
    blind_floor: float | None = _f(
        None, "loss no reader that ignores the branches can get below", "nats per target token"
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run. `recipe` is the name it came from; it names milestones."""

    recipe: str = _f("custom", "name of the recipe")
    run: RunConfig = field(default_factory=RunConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    mapper: MapperConfig = field(default_factory=MapperConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, sections as in a recipe."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


AT_LEAST: dict[str, int] = {
    "run.ranks": 1,
    "run.epochs": 1,
    "run.steps_per_epoch": 1,
    "run.max_steps": 1,
    "run.seed": 0,
    "backbone.threads_per_rank": 1,
    "mapper.hidden_dim": 1,
    "lora.r": 1,
    "lora.alpha": 1,
    "data.batch_size": 1,
    "data.max_rows": 1,
    "guards.prefill_tokens": OFF,
    "guards.live_tokens": OFF,
    "guards.attention_area": OFF,
    "guards.total_tokens": OFF,
    "workers.count": 1,
    "workers.max_new_tokens": 1,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 1,
    "checkpoint.shutdown_timeout": 1,
    "log.every": 1,
    "evaluate.max_rows": 1,
}
_AT_MOST: dict[str, int] = {
    "run.seed": 2**32 - 1,
    "run.ranks": 2**16,
    "backbone.threads_per_rank": 1024,
    "mapper.hidden_dim": 2**16,
    "lora.r": 2**16,
    "lora.alpha": 2**20,
    "data.batch_size": 2**20,
}
_IN_RANGE: dict[str, tuple[Callable[[float], bool], str]] = {
    "lora.dropout": (lambda x: 0 <= x < 1, "0 <= dropout < 1"),
    "optim.learning_rate": (lambda x: 0 < x <= 1e6, "0 < learning_rate <= 1e6"),
    "optim.weight_decay": (lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0"),
    "workers.temperature": (lambda x: math.isfinite(x) and x >= 0, "a finite number >= 0"),
    "workers.top_p": (lambda x: 0 < x <= 1, "0 < top_p <= 1"),
}


def problems(config: Config) -> list[str]:
    """Every value out of range, as `section.field = value: expected ...`."""
    found = []
    for name, least in AT_LEAST.items():
        value = _get(config, name)
        if value is not None and value < least:
            found.append(f"{name} = {value}: expected {least} or more")
    for name, most in _AT_MOST.items():
        if _get(config, name) > most:
            found.append(f"{name} = {_get(config, name)}: expected {most} or less")
    for name, (accepts, expected) in _IN_RANGE.items():
        value = _get(config, name)
        if not accepts(value):
            found.append(f"{name} = {value}: expected {expected}")
    if not config.backbone.model:
        found.append("backbone.model is missing: expected a Hub id, a directory or a .gguf file")
    if not config.data.tasks:
        found.append("data.tasks is missing: expected a list of task names")
    found += [
        f"checkpoint.milestones: {step} is not a step: expected 1 or more"
        for step in config.checkpoint.milestones
        if step < 1
    ]
    repeated = {task for task in config.data.tasks if config.data.tasks.count(task) > 1}
    found += [f"data.tasks names {task} more than once" for task in sorted(repeated)]
    return found


def _get(config: Config, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)
