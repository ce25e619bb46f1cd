"""Merging checkpoints into one: checked first, streamed, committed as every checkpoint, recorded with its parents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis import __version__
from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.disk import DISK, Disk
from parallel_synthesis.checkpoint.layout import free_bytes
from parallel_synthesis.checkpoint.merge_embeddings import embedding_findings, embeddings_record, left_out
from parallel_synthesis.checkpoint.merge_lowrank import LARGE_GAP, Difference, average_gap, summarise
from parallel_synthesis.checkpoint.merge_plan import (
    README,
    Finding,
    MergeInput,
    MergeOptions,
    check_options,
    findings,
    opened,
    refuse,
)
from parallel_synthesis.checkpoint.merge_stream import AdapterStream, Progress
from parallel_synthesis.errors import CheckpointError, ConfigError, StorageError
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.check import Place, check
from parallel_synthesis.provenance.environment import version
from parallel_synthesis.provenance.hashing import HashingFile, sha256_bytes
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.schema import dump_json, finite_or_null
from parallel_synthesis.resources import resource

MERGE_META = "checkpoint_merge_meta.json"
RELEASE = "release"  # names the shipped release manifest
_SPARE = 1 << 20  # bytes beside the adapter: mapper, configs, manifest
# The reference's names for what was done to the LoRA.
_MODES = {"average": "weighted_average", "concat": "delta_concat", "svd": "delta_svd"}


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """What was, or with dry_run would be, written.

    components: path -> {bytes, sha256}; of a dry run too. gap: of `average`, how far it is from the average of the
    deltas. truncation: of `svd`, what the rank leaves out. accepted: findings that were allowed.
    """

    out: Path
    dry_run: bool
    components: Mapping[str, Mapping[str, Any]]
    parents: Sequence[Mapping[str, Any]]
    accepted: Sequence[Finding]
    warnings: Sequence[str]
    gap: Difference | None
    truncation: Difference | None


def merge(
    sources: Sequence[tuple[str, float]],
    out: Path,
    options: MergeOptions,
    *,
    recipe: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    disk: Disk = DISK,
) -> MergeResult:
    """Merges (checkpoint, weight) pairs into the new directory `out`.

    Everything is checked before anything is written: ConfigError for options, CheckpointError with all findings,
    StorageError for a disk that is full or will be. Inputs are only read. A failure or a kill leaves nothing under
    `out`. dry_run does all but the writing, so that the hashes are known and every byte of the inputs was read.
    """
    problems = check_options(options, [weight for _, weight in sources])
    if problems:
        raise ConfigError(problems)
    with opened(sources) as inputs:
        _check_out(out, inputs)
        found = [*findings(inputs, options), *embedding_findings(inputs, options)]
        refuse(found)
        stacked_rank = sum(one.config["r"] for one in inputs)
        if options.rank is not None and options.rank > stacked_rank:
            raise ConfigError(
                [f"--rank {options.rank}: the inputs have {stacked_rank} together; expected no more"]
            )
        gap = average_gap(inputs, options) if options.method == "average" and len(inputs) > 1 else None
        for one in inputs:
            if one.parts:
                one.tensors.hash_parts()
            else:
                one.tensors.hash_whole()
        job = _Job(inputs, options, recipe, found, gap, progress)
        if dry_run:
            job.run(None)
        else:
            _check_space(out, job.stream.nbytes)
            commit(out, step=0, fill=job.run, disk=disk)
        return MergeResult(
            out=out,
            dry_run=dry_run,
            components=job.components,
            parents=job.parents,
            accepted=job.accepted,
            warnings=job.warnings,
            gap=gap,
            truncation=job.truncation,
        )


class _Job:
    """One merge on its way: the content of the new directory and of its records."""

    def __init__(
        self,
        inputs: Sequence[MergeInput],
        options: MergeOptions,
        recipe: str | None,
        found: Sequence[Finding],
        gap: Difference | None,
        progress: Progress | None,
    ) -> None:
        self.stream = AdapterStream(inputs, options)
        self.accepted = [finding for finding in found if finding.allowed]
        self.warnings = _warnings(inputs, options, gap)
        self.components: dict[str, dict[str, Any]] = {}
        self.parents: list[dict[str, Any]] = []
        self.truncation: Difference | None = None
        self._inputs, self._options, self._recipe, self._gap = inputs, options, recipe, gap
        self._progress = progress

    def run(self, staging: Staging | None) -> None:
        """Writes everything; with None only finds out what it would be."""
        self._adapter(staging)
        self._check_inputs()
        for name, data in self._small_files().items():
            self.components[name] = {"bytes": len(data), "sha256": sha256_bytes(data)}
            if staging is not None:
                staging.write_bytes(name, data)
        if staging is not None:
            staging.write_json(MERGE_META, self._merge_meta(), "checkpoint_merge_meta")
            staging.write_json(layout.CHECKPOINT_META, self._checkpoint_meta(), "checkpoint_meta")

    def _adapter(self, staging: Staging | None) -> None:
        name = layout.ADAPTER_MODEL
        if staging is None:
            file = HashingFile(len)
            self.stream.write(file, self._progress)
        else:
            with staging.open(name) as file:
                details = self.stream.write(file, self._progress)
            staging.describe(name, details)
        self.components[name] = {"bytes": file.bytes, "sha256": file.sha256}
        if self.stream.nonfinite:
            listed = ", ".join(f"{name} ({count})" for name, count in sorted(self.stream.nonfinite.items()))
            self.warnings.append(f"inf or nan was let through (--allow-nonfinite) in: {listed}")
        if self.stream.stacked is not None and self._options.method == "svd":
            self.truncation = summarise(self.stream.stacked.errors)

    def _check_inputs(self) -> None:
        """The bytes that were read are still those of the files, and those of the inputs' own manifests."""
        for one in self._inputs:
            components = {
                layout.CACHE_MAPPER: sha256_bytes(one.files[layout.CACHE_MAPPER]),
                layout.ADAPTER_MODEL: self._adapter_sha256(one),
            }
            one.tensors.check_unchanged()
            for name, sha256 in components.items():
                if name in one.recorded and one.recorded[name].sha256 != sha256:
                    raise _damaged(one, name, "its content")
            self.parents.append({"source": one.given, "step": one.step, "components": components})
        if len({parent["components"][layout.ADAPTER_MODEL] for parent in self.parents}) < len(self.parents):
            self.warnings.append("two inputs have the same adapter, byte for byte")

    def _adapter_sha256(self, one: MergeInput) -> str:
        """Of the whole file. Where its manifest has digests of the parts, these are what is checked: those of tensors
        that were copied are known from the output, so that equal embeddings are hashed once and not in each input."""
        if not one.parts:
            return one.tensors.sha256()
        known = {f"tensor {name}": sha256 for name, sha256 in one.tensors.part_digests().items()}
        known |= {f"tensor {name}": self.stream.digests[name] for name in self.stream.copied}
        for part in one.parts:
            sha256 = known.get(part.label) or one.tensors.part_sha256(part.start, part.bytes)
            if sha256 != part.sha256:
                raise _damaged(one, layout.ADAPTER_MODEL, part.label)
        return one.recorded[layout.ADAPTER_MODEL].sha256

    def _small_files(self) -> dict[str, bytes]:
        mapper = self._inputs[self._options.mapper_from]
        config = self._inputs[self._options.config_from]
        files = {
            layout.CACHE_MAPPER: mapper.files[layout.CACHE_MAPPER],
            layout.CACHE_MAPPER_CONFIG: mapper.files.get(
                layout.CACHE_MAPPER_CONFIG, dump_json(mapper.mapper_config)
            ),
            layout.ADAPTER_CONFIG: config.files[layout.ADAPTER_CONFIG],
        }
        if README in config.files:
            files[README] = config.files[README]
        if self.stream.stacked is not None:
            rank = self.stream.stacked.rank  # alpha = r: the scale is 1, the inputs' own are in the factors
            rewritten = {"r": rank, "lora_alpha": rank, "use_rslora": False}
            files[layout.ADAPTER_CONFIG] = dump_json({**config.config, **rewritten})
        return files

    def _merge_meta(self) -> dict[str, Any]:
        inputs, options = self._inputs, self._options
        second = inputs[1] if len(inputs) > 1 else None
        gap, cut = self._gap, self.truncation
        document = {
            "schema_version": 1,
            "merge_type": _MODES[options.method],
            "checkpoint_a": inputs[0].given,
            "checkpoint_b": second.given if second else None,
            "source_b_is_base": False,
            "weight_a": inputs[0].weight,
            "weight_b": second.weight if second else None,
            "missing_policy": options.missing,
            "cache_mapper_source": inputs[options.mapper_from].label.lower(),
            "lora_merge_mode": options.method,
            "method": options.method,
            "merged_artifacts": sorted(self.components),
            "adapter_config_source": inputs[options.config_from].label.lower(),
            "rank": self.stream.stacked.rank if self.stream.stacked else None,
            "weights": {one.label.lower(): one.weight for one in inputs},
            "parents": self.parents,
            "components": {name: entry["sha256"] for name, entry in sorted(self.components.items())},
            "accepted": [{"field": finding.field, "text": finding.text} for finding in self.accepted],
            "allow_mismatch": list(options.allow_mismatch),
            "allow_nonfinite": options.allow_nonfinite,
            "warnings": list(self.warnings),
            "factor_average_gap": None if gap is None else {"overall": gap.overall, "worst": gap.worst},
            "svd_error": None if cut is None else {"overall": cut.overall, "worst": cut.worst},
            "recipe": self._recipe,
            "versions": {"parallel-synthesis": __version__, "numpy": version("numpy")},
        }
        plain: dict[str, Any] = finite_or_null(document)
        return plain

    def _checkpoint_meta(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "global_step": 0,  # no step of any run: what it was merged from is in `parents`
            "epoch": 0,
            "source_run_dir": None,
            "metrics": None,
            "recipe": self._recipe,
            "base_model": self._inputs[self._options.config_from].config.get("base_model_name_or_path"),
            "parents": self.parents,
            "versions": {"parallel-synthesis": __version__},
            **embeddings_record(self._inputs),
        }


def _damaged(one: MergeInput, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{one.directory / name} is damaged: {what} differs from the sha256 in its manifest; use another checkpoint "
        f"in place of {one.label}"
    )


def _check_out(out: Path, inputs: Sequence[MergeInput]) -> None:
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already; a merge writes a new directory; choose another --out")
    place = out.resolve()
    for one in inputs:
        given = Path(one.given).expanduser()
        for inside in (one.directory.resolve(), *([given.resolve()] if given.is_dir() else [])):
            if place.is_relative_to(inside):
                raise CheckpointError(
                    f"{out} lies inside input {one.label} ({inside}), which a merge only reads; choose another --out"
                )


def _check_space(out: Path, nbytes: int) -> None:
    free = free_bytes(out.parent)
    if free < nbytes + _SPARE:
        raise StorageError(
            f"cannot write {out}: it needs {nbytes + _SPARE} bytes and {free} are free there; free some space or "
            f"choose another --out; nothing was written"
        )


def _warnings(inputs: Sequence[MergeInput], options: MergeOptions, gap: Difference | None) -> list[str]:
    found = []
    total = sum(one.weight for one in inputs)
    if abs(total - 1) > 1e-6:
        whole = any(".lora_" not in name for one in inputs for name in one.tensors.entries)
        shares = "; whole matrices (embeddings) are averaged with the weights scaled to sum to 1"
        found.append(
            f"the weights sum to {total:g}, not 1{shares if whole and options.method != 'average' else ''}"
        )
    if gap is not None and not gap.overall <= LARGE_GAP:
        found.append(
            f"averaging the factors is not averaging the deltas: here the two differ by {gap.overall:.1%} of the "
            f"averaged deltas, in one module by {gap.worst:.1%}; --method concat is the exact sum"
        )
    first = inputs[options.config_from]
    other = [
        one.label for one in inputs if one.files[layout.ADAPTER_CONFIG] != first.files[layout.ADAPTER_CONFIG]
    ]
    if other and options.method == "average":
        found.append(
            f"adapter_config.json of {first.label} is taken; that of {' and '.join(other)} has other bytes "
            f"(--config-from takes another)"
        )
    if left_out(inputs):
        found.append(
            "the inputs were saved without their embeddings, and so is the result: `ps snapshot OUT --export DEST` "
            "puts them back"
        )
    return found


def differences(result: MergeResult, manifest: str) -> list[str]:
    """Every way in which a merge's result is not what a manifest lists; files it does not list do not count.

    manifest: a file in any form that can be read, or "release". What was written is read back and hashed; a dry
    run's digests are compared. ConfigError for a manifest that is not there, ManifestError for one that is wrong.
    """
    path = (
        resource("artifacts", "release_checkpoint.json")
        if manifest == RELEASE
        else Path(manifest).expanduser()
    )
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            [
                f"--verify {manifest}: cannot be read ({error.strerror}); expected a manifest file or {RELEASE!r}"
            ]
        ) from error
    expected = manifests.parse(raw, str(path)).files
    if not result.dry_run:
        place = Place(inside=Inside(result.out), files=expected, extra=False)
        return [str(problem) for problem in check([place], quick=False).places[0].problems]
    found = []
    for name, wanted in sorted(expected.items()):
        digest = result.components.get(name, {}).get("sha256")
        if digest != wanted.sha256:
            found.append(f"{name}: would have sha256 {digest}; expected {wanted.sha256}")
    return found
