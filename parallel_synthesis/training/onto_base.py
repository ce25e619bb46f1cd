"""A full model of a backbone and one checkpoint: the LoRA's delta folded into the weights, everything else copied.

Streamed in row blocks without torch; the written model's logits are then compared with backbone + adapter.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis import __version__
from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.layout import free_bytes
from parallel_synthesis.checkpoint.merge import MERGE_META
from parallel_synthesis.checkpoint.merge_plan import MergeOptions, findings, opened, refuse
from parallel_synthesis.checkpoint.merge_stream import Progress
from parallel_synthesis.checkpoint.safetensors_file import TensorChunks, write_safetensors
from parallel_synthesis.errors import CheckFailedError, CheckpointError, ConfigError, StorageError
from parallel_synthesis.provenance.hashing import Bytes, sha256_bytes
from parallel_synthesis.provenance.schema import dump_json
from parallel_synthesis.training.fold_plan import (
    CONFIG,
    INDEX,
    OTHER_WEIGHTS,
    FoldPlan,
    find_model,
    open_base,
)

# Norm of the logits' difference, relative to theirs: what rounding weights and activations to the dtype may cost.
TOLERANCE = {"F32": 1e-4, "F16": 1e-2, "BF16": 5e-2}
_WEIGHTS = (".safetensors", *OTHER_WEIGHTS, INDEX, "README.md")
_SMALL = 256 << 20  # bytes; a tokenizer's files are far below


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    """modules: folded. changed, tensors: of the model. logits: their relative difference (norms), None in a dry run."""

    out: Path
    modules: int
    changed: int
    tensors: int
    scale: float
    dtype: str
    tolerance: float
    logits: float | None
    warnings: tuple[str, ...]


def fold(
    checkpoint: str,
    model: str,
    out: Path,
    *,
    scale: float = 1.0,
    tolerance: float | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> FoldResult:
    """Writes `model` with `scale` (0 to 1) of the checkpoint's delta folded in, in the base's dtype and shards.

    W' = (W + scale * alpha / r * B @ A), rounded once; other tensors are copied byte for byte. Embeddings of the
    adapter replace the base's only where they differ from them. BackboneError or CheckpointError for what cannot be
    folded exactly; the output is committed before its logits are compared, see check_logits.
    """
    if not 0 <= scale <= 1:
        raise ConfigError([f"--scale {scale}: expected a number from 0 to 1"])
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already; a merge writes a new directory; choose another --out")
    base_name, directory = find_model(model)
    with ExitStack() as stack:
        (adapter,) = stack.enter_context(opened([(checkpoint, 1.0)]))
        for place in (directory, adapter.directory):
            if out.resolve().is_relative_to(place.resolve()):
                raise CheckpointError(f"{out} lies inside {place}, which is only read; choose another --out")
        refuse(findings([adapter], MergeOptions(method="concat")))
        base = open_base(directory, stack)
        plan = FoldPlan(adapter, base, scale)
        if not dry_run:
            needed = sum(shard.size for shard in base.shards.values())
            if free_bytes(out.parent) < needed:
                raise StorageError(
                    f"cannot write {out}: it needs {needed} bytes; free some space there first"
                )
            job = _Job(plan, adapter.given, base_name, progress)
            commit(out, step=None, kind="model", fill=job.fill)
    allowed = TOLERANCE[plan.dtype] if tolerance is None else tolerance
    logits = None
    if not dry_run:
        from parallel_synthesis.model.folded import logit_difference  # here: it loads torch

        logits = logit_difference(directory, adapter.directory, out, scale=scale, rows=plan.adapter_rows)
    return FoldResult(
        out=out,
        modules=len(plan.modules),
        changed=len(plan.modules) + len(plan.replaced),
        tensors=len(base.where),
        scale=scale,
        dtype=plan.dtype,
        tolerance=allowed,
        logits=logits,
        warnings=tuple(plan.warnings),
    )


def check_logits(result: FoldResult) -> None:
    """CheckFailedError when the written model's logits are further from backbone + adapter than the tolerance."""
    if result.logits is not None and not result.logits <= result.tolerance:
        raise CheckFailedError(
            f"{result.out} was written, but its logits differ from those of backbone + adapter by "
            f"{result.logits:.2e} of their norm; expected at most {result.tolerance:.0e}; do not use it"
        )


class _Job:
    """Writes the new model."""

    def __init__(self, plan: FoldPlan, checkpoint: str, model: str, progress: Progress | None) -> None:
        self._plan, self._checkpoint, self._model, self._progress = plan, checkpoint, model, progress
        self._done = 0
        self._total = sum(shard.size for shard in plan.base.shards.values())

    def fill(self, staging: Staging) -> None:
        plan, base = self._plan, self._plan.base
        for shard_name, shard in base.shards.items():
            tensors = {
                name: TensorChunks(
                    dtype=place.dtype, shape=plan.shape(name), chunks=self._counted(plan.chunks(name))
                )
                for name, place in shard.entries.items()
            }
            with staging.open(shard_name) as file:
                details = write_safetensors(file, tensors, metadata={"format": "pt"})
            staging.describe(shard_name, details)
            shard.check_unchanged()
        for path in sorted(base.directory.iterdir()):
            if path.name == CONFIG or path.name.endswith(_WEIGHTS) or path.name.startswith("."):
                continue
            if path.is_file() and path.stat().st_size <= _SMALL:
                staging.write_bytes(path.name, path.read_bytes())
        staging.write_bytes(CONFIG, self._config())
        if (base.directory / INDEX).is_file():
            staging.write_bytes(INDEX, self._index())
        adapter = plan.adapter
        for name in (layout.CACHE_MAPPER, layout.CACHE_MAPPER_CONFIG):
            if name in adapter.files:  # the method needs it beside any synthesizer
                staging.write_bytes(name, adapter.files[name])
        sha256 = adapter.tensors.sha256()
        adapter.tensors.check_unchanged()
        staging.write_json(MERGE_META, self._meta(sha256), "checkpoint_merge_meta")

    def _counted(self, chunks: Iterator[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            self._done += len(chunk)
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield chunk

    def _config(self) -> bytes:
        """Byte for byte the base's, unless the vocabulary has other rows now."""
        raw = (self._plan.base.directory / CONFIG).read_bytes()
        rows = {self._plan.shape(name)[0] for name in self._plan.replaced}
        config = json.loads(raw)
        if not rows or rows == {config.get("vocab_size")}:
            return raw
        return dump_json({**config, "vocab_size": rows.pop()})

    def _index(self) -> bytes:
        plan = self._plan
        raw = (plan.base.directory / INDEX).read_bytes()
        if not plan.replaced:
            return raw
        index = json.loads(raw)
        places = {name: plan.base.place(name) for name in plan.base.where}
        total = sum(
            place.bytes // max(1, math.prod(place.shape)) * math.prod(plan.shape(name))
            for name, place in places.items()
        )
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        return dump_json(index)

    def _meta(self, adapter_sha256: str) -> dict[str, Any]:
        adapter = self._plan.adapter
        components = {
            layout.CACHE_MAPPER: sha256_bytes(adapter.files[layout.CACHE_MAPPER]),
            layout.ADAPTER_MODEL: adapter_sha256,
        }
        return {
            "schema_version": 1,
            "merge_type": "folded_into_base",
            "checkpoint_a": self._checkpoint,
            "checkpoint_b": self._model,
            "source_b_is_base": True,
            "weight_a": self._plan.factor / adapter.scale,
            "weight_b": 1.0,
            "missing_policy": "error",
            "cache_mapper_source": "a",
            "lora_merge_mode": "folded",
            "merged_artifacts": sorted(self._plan.base.shards),
            "parents": [{"source": self._checkpoint, "step": adapter.step, "components": components}],
            "warnings": self._plan.warnings,
            "versions": {"parallel-synthesis": __version__},
        }
