"""One JSON file of a run (run_args.json, the summary) replaced as a whole: readers see the old or the new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.disk import DISK, Disk, hidden_name, storage_errors, write_all
from parallel_synthesis.provenance.schema import dump_json, validate


def replace_json(path: Path, document: Mapping[str, Any], schema: str, *, disk: Disk = DISK) -> None:
    """Validates, writes beside, fsyncs, renames. StorageError leaves the old file as it was."""
    validate(document, schema, str(path))
    hidden = path.parent / hidden_name(path.name)
    with storage_errors("write", path):
        fd = disk.create(hidden)
        try:
            try:
                write_all(disk, fd, dump_json(document))
                disk.fsync(fd)
            finally:
                os.close(fd)
            disk.rename(hidden, path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise
        disk.fsync_directory(path.parent)
