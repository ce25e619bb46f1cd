"""What the shipped recipes' data files must be: rows, bytes, hashes (manifests/training_data.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.data.tasks import TASKS, canonical_name
from parallel_synthesis.resources import resource

TRAINING_DATA = ("manifests", "training_data.json")
_SECOND_STAGE = "browsecomp_textmas_toolcall"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One task's usual file. path: relative to data.root. bytes, sha256: of the file as it lies on disk.

    unpacked_bytes, unpacked_sha256: of a gzip file's text, else None. What a manifest does not say is None.
    """

    task: str
    path: str
    rows: int | None
    bytes: int | None
    sha256: str
    unpacked_bytes: int | None = None
    unpacked_sha256: str | None = None


def manifest_entry(task: str) -> ManifestEntry | None:
    """What the usual file of `task` (any of its names) must be; None for a task not in the manifest."""
    name = canonical_name(task)
    document = json.loads(resource(*TRAINING_DATA).read_text(encoding="utf-8"))
    return next((entry for entry in entries_of(document) if entry.task == name), None)


def entries_of(document: Mapping[str, Any], *, released: bool = False) -> list[ManifestEntry]:
    """The files of a data manifest (validated, data_manifest.schema.json); of the second stage the bundled one.

    released: also the second stage's file of the released run, which is not published.
    """
    found = [
        ManifestEntry(**{key: entry[key] for key in ("task", "path", "rows", "bytes", "sha256")})
        for entry in document["general_phase"]
    ]
    second_stage: Mapping[str, Any] = document["browsecomp_trajectory_sft"]
    task = second_stage.get("task", _SECOND_STAGE)
    bundled = second_stage["filtered_variant"]
    found.append(
        ManifestEntry(
            task=task,
            path=bundled.get("path", TASKS[_SECOND_STAGE].usual_file),
            rows=bundled.get("rows"),
            bytes=bundled["compressed_bytes"],
            sha256=bundled["compressed_sha256"],
            unpacked_bytes=bundled["uncompressed_bytes"],
            unpacked_sha256=bundled["uncompressed_sha256"],
        )
    )
    release = second_stage.get("release_checkpoint", {})
    if released and "path" in release:
        keys = ("path", "rows", "bytes", "sha256")
        found.append(ManifestEntry(task=task, **{key: release[key] for key in keys}))
    return found


def manifest_rows(task: str) -> int | None:
    """Rows of the task's usual file, for planning a run before the file is there; None if unknown."""
    entry = manifest_entry(task)
    return None if entry is None else entry.rows
