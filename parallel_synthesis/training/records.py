"""What a run writes down about itself: run_args.json, the checkpoint's meta, the summary. Plain documents (no torch)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis import __version__
from parallel_synthesis.checkpoint.layout import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    CACHE_MAPPER,
    CACHE_MAPPER_CONFIG,
    CHECKPOINT_META,
    RunPaths,
    is_committed,
)
from parallel_synthesis.checkpoint.replace import replace_json
from parallel_synthesis.config import Config
from parallel_synthesis.data.index import RowFile
from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.check import Expected, Place, check
from parallel_synthesis.provenance.environment import fingerprint
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.manifest import listing
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.resources import resolve_path
from parallel_synthesis.training.events import Evaluation
from parallel_synthesis.training.progress import Progress, finite

_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".gguf")
_BAD_ROWS_LISTED = 1000
# What a run reads of the checkpoint that it starts from.
_TAKEN = (CACHE_MAPPER, CACHE_MAPPER_CONFIG, ADAPTER_CONFIG, ADAPTER_MODEL, CHECKPOINT_META)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What fixes a run's data and loss, as run_args.json holds it. continued_from: the checkpoint of another run that
    it went on from, as `parent_record` describes it."""

    config: Config
    recipe_sha256: str
    argv: Sequence[str]
    origins: Mapping[str, str]
    environment: Mapping[str, Any]
    data: Mapping[str, Mapping[str, Any]]
    backbone: Mapping[str, Any]
    total_steps: int
    accepted_drift: Sequence[str] = ()
    attempts: Sequence[Mapping[str, Any]] = ()
    continued_from: Mapping[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "version": __version__,
            "recipe": self.config.recipe,
            "recipe_sha256": self.recipe_sha256,
            "argv": list(self.argv),
            "config": self.config.to_dict(),
            "config_sha256": config_sha256(self.config.to_dict()),
            "origins": dict(self.origins),
            "environment": dict(self.environment),
            "data": {task: dict(entry) for task, entry in self.data.items()},
            "backbone": dict(self.backbone),
            "total_steps": self.total_steps,
            "accepted_drift": list(self.accepted_drift),
            "attempts": [dict(attempt) for attempt in self.attempts],
            **({} if self.continued_from is None else {"continued_from": dict(self.continued_from)}),
        }

    def carried(self) -> dict[str, Any]:
        """What a checkpoint carries of it: all that decides how the run goes on, not who typed what and when."""
        document = self.document()
        for key in ("argv", "origins", "attempts", "continued_from"):
            document.pop(key, None)
        document["data"] = {
            task: {key: value for key, value in entry.items() if key != "bad_rows_first"}
            for task, entry in self.data.items()
        }
        return document

    def write(self, paths: RunPaths) -> None:
        replace_json(paths.run_args, self.document(), "run_args")

    def summary(
        self,
        paths: RunPaths,
        progress: Progress,
        *,
        evaluations: Sequence[Evaluation],
        train_seconds: float,
        total_seconds: float,
    ) -> dict[str, Any]:
        """train_mixed_summary.json with the reference's keys and our evaluations."""
        config = self.config
        return {
            "mode": "train_mixed",
            "method": config.run.method,
            "model_name": config.backbone.model,
            "tasks": list(config.data.tasks),
            "train_sample_caps": dict.fromkeys(config.data.tasks, config.data.max_rows),
            "train_split": config.data.split,
            "save_dir": str(paths.out),
            "args": config.to_dict(),
            "world_size": config.run.ranks,
            "train_metrics": progress.train_metrics(),
            "train_time_sec": train_seconds,
            "total_time_sec": total_seconds,
            "evaluations": [_evaluation_record(evaluation) for evaluation in evaluations],
        }


def _evaluation_record(evaluation: Evaluation) -> dict[str, Any]:
    record = {key: finite(value) for key, value in dataclasses.asdict(evaluation).items()}
    return record | {"tasks": {task: finite(loss) for task, loss in evaluation.tasks.items()}}


def read_evaluations(paths: RunPaths, *, until: int) -> list[Evaluation]:
    """Held-out losses of a run's summary from before `until`; those of the end of step `until` are measured again."""
    if not paths.summary.exists():
        return []
    known = load_json(paths.summary, "train_mixed_summary").get("evaluations", [])
    return [
        Evaluation(**record | {"loss": math.nan if record["loss"] is None else record["loss"]})
        for record in known
        if record["step"] < until or record["when"] == "before"
    ]


def config_sha256(config: Mapping[str, Any]) -> str:
    """Digest of a config as run_args.json holds it, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def run_record(
    config: Config,
    *,
    recipe_sha256: str,
    origins: Mapping[str, str],
    files: Mapping[str, RowFile],
    backbone: Mapping[str, Any],
    total_steps: int,
    argv: Sequence[str],
) -> RunRecord:
    """Collects the record. `backbone`: see `backbone_record`."""
    return RunRecord(
        config=config,
        recipe_sha256=recipe_sha256,
        argv=argv,
        origins=origins,
        environment=fingerprint(),
        data={task: _data_record(file) for task, file in files.items()},
        backbone=backbone,
        total_steps=total_steps,
    )


def _data_record(file: RowFile) -> dict[str, Any]:
    bad = [{"line": row.line, "problem": row.problem} for row in file.bad]
    return {
        "path": str(file.path),
        "rows": file.rows,
        "bytes": file.bytes,
        "sha256": file.sha256,
        "unpacked_sha256": file.unpacked_sha256,
        "bad_rows": len(bad),
        "bad_rows_sha256": hashlib.sha256(json.dumps([row["line"] for row in bad]).encode()).hexdigest(),
        "bad_rows_first": bad[:_BAD_ROWS_LISTED],
    }


def backbone_record(
    model: str, *, revision: str | None, device: str, dtype: str, resized_from: int | None
) -> dict[str, Any]:
    """Identity of the backbone: the sha256 of each of its files when it is local, else the Hub revision."""
    path = resolve_path(model)
    files = {}
    if path.is_file():
        files = {path.name: sha256_file(path)}
    elif path.is_dir():
        files = {
            child.name: sha256_file(child)
            for child in sorted(path.iterdir())
            if child.is_file() and child.suffix in _MODEL_FILES
        }
    return {
        "model": model,
        "revision": revision,
        "files": files,
        "device": device,
        "dtype": dtype,
        "resized_from": resized_from,
    }


def parent_record(given: str, components: Path) -> dict[str, Any]:
    """A parent of a checkpoint: where it was, its step (None when it does not say), the sha256 of its components.

    What a run takes of it is read in full and compared with its manifest, where it has one: `checked` says whether.
    Raises CheckpointError for a damaged file, StorageError for one that can not be read.
    """
    listed = _check_parent(given, components) if is_committed(components) else {}
    meta = components / CHECKPOINT_META
    weights = (CACHE_MAPPER, ADAPTER_MODEL)
    return {
        "source": given,
        "step": read_json(meta).get("global_step") if meta.is_file() else None,
        "components": {
            name: listed[name].sha256 if name in listed else sha256_file(components / name)
            for name in weights
        },
        "checked": all(name in listed for name in weights),
    }


def _check_parent(given: str, components: Path) -> Mapping[str, Expected]:
    """What the manifest lists of the files that a run starts from, all of them as it says."""
    listed = {name: file for name, file in listing(components).files.items() if name in _TAKEN}
    problems = check([Place(inside=Inside.of(components), files=listed, extra=False)]).places[0].problems
    if problems:
        kind = StorageError if problems[0].kind == "unreadable" else CheckpointError
        raise kind(
            f"{components / problems[0].path} is not what the manifest beside it says: {problems[0].detail}; nothing was "
            f"started. `ps verify {given}` tells more; restore it from a good copy, or name another checkpoint"
        )
    return listed
