"""What the shipped recipes' data files must be: rows, bytes, hashes (manifests/training_data.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.data.tasks import canonical_name
from parallel_synthesis.resources import resource

TRAINING_DATA = ("manifests", "training_data.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One task's usual file. path: relative to data.root. bytes, sha256: of the file as it lies on disk.

    unpacked_bytes, unpacked_sha256: of a gzip file's text, else None.
    """

    task: str
    path: str
    rows: int
    bytes: int
    sha256: str
    unpacked_bytes: int | None = None
    unpacked_sha256: str | None = None


def manifest_entry(task: str) -> ManifestEntry | None:
    """What the usual file of `task` (any of its names) must be; None for a task not in the manifest."""
    name = canonical_name(task)
    document = json.loads(resource(*TRAINING_DATA).read_text(encoding="utf-8"))
    for found in document["general_phase"]:
        if found["task"] == name:
            return ManifestEntry(**{key: found[key] for key in ("task", "path", "rows", "bytes", "sha256")})
    second_stage: dict[str, Any] = document["browsecomp_trajectory_sft"]
    if second_stage["task"] != name:
        return None
    bundled = second_stage["filtered_variant"]
    return ManifestEntry(
        task=name,
        path=bundled["path"],
        rows=bundled["rows"],
        bytes=bundled["compressed_bytes"],
        sha256=bundled["compressed_sha256"],
        unpacked_bytes=bundled["uncompressed_bytes"],
        unpacked_sha256=bundled["uncompressed_sha256"],
    )


def manifest_rows(task: str) -> int | None:
    """Rows of the task's usual file, for planning a run before the file is there; None if unknown."""
    entry = manifest_entry(task)
    return None if entry is None else entry.rows
