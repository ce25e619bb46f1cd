"""The entries of a run directory, for `ps verify`: its checkpoints, its documents, and what does not belong there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.disk import is_hidden_name
from parallel_synthesis.checkpoint.parts import MERGE_META
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.manifest import MANIFEST
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.schema import parse_json, problems

JSON_LIMIT = 64 << 20
RUN_FOLDERS = (layout.STEP_CHECKPOINTS, layout.MILESTONES)
RUN_ENTRIES = (layout.RUN_ARGS, layout.TRAIN_LOG, layout.SUMMARY, layout.SUPERSEDED, *RUN_FOLDERS)


def of_run(name: str) -> bool:
    """A name that is accounted for in a run directory."""
    return name in RUN_ENTRIES or name == MANIFEST or is_hidden_name(name)


class Entries:
    """The entries of a run directory: its checkpoints, and what does not belong there."""

    def __init__(self, inside: Inside, *, allow_extra: bool) -> None:
        self.inside = inside
        self.found: list[Problem] = []
        self.args = self.json(layout.RUN_ARGS, "run_args")
        self.theirs = is_reference_record(self.args)  # a run of the reference implementation
        # What else theirs writes is not known.
        self._allow_extra = allow_extra or self.theirs

    def checkpoints(self) -> Iterator[str]:
        """Relative paths of all step checkpoints, oldest first, and milestones; what else is there is noted."""
        for folder in RUN_FOLDERS:
            for name, mode in self._listed(folder):
                path = f"{folder}/{name}"
                if folder == layout.STEP_CHECKPOINTS and name == layout.LATEST:
                    if self.theirs and stat.S_ISDIR(mode):
                        yield path
                    else:
                        self._latest(path)
                elif is_hidden_name(name):
                    continue
                elif stat.S_ISDIR(mode) and (
                    folder == layout.MILESTONES or layout.parse_step(name) is not None
                ):
                    yield path
                elif not self._allow_extra:
                    self.found.append(Problem(path=path, kind="extra", detail="is no checkpoint"))

    def extra(self, unlisted: list[str]) -> Iterator[Problem]:
        """What lies in the root beside a run's entries; without a root manifest components there count for nothing."""
        for name in self.inside.unlisted((), ()):
            if isinstance(name, Problem):
                yield name
            elif name in layout.COMPONENT_ENTRIES or name == MERGE_META:
                unlisted.append(name)
            elif not of_run(name):
                if self._allow_extra:
                    unlisted.append(name)
                else:
                    yield Problem(path=name, kind="extra", detail="is no part of a run")

    def json(self, name: str, schema: str) -> dict[str, Any] | None:
        raw = self.inside.read(name, limit=JSON_LIMIT)
        if isinstance(raw, Problem):
            if raw.kind != "missing" or name == layout.RUN_ARGS:
                self.found.append(raw)
            return None
        try:
            document = parse_json(raw, name)
        except CheckpointError as error:
            self.found.append(Problem(path=name, kind="schema", detail=str(error).removeprefix(f"{name}: ")))
            return None
        wrong = problems(document, schema)
        self.found += [Problem(path=name, kind="schema", detail=problem) for problem in wrong]
        return None if wrong or not isinstance(document, dict) else document

    def regular(self, name: str) -> None:
        fd = self.inside.open(name)
        if isinstance(fd, Problem):
            self.found.append(fd)
        else:
            os.close(fd)

    def _listed(self, folder: str) -> list[tuple[str, int]]:
        place = self.inside.directory / folder
        try:
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                detail = "is not a directory of its own; expected one"
                self.found.append(Problem(path=folder, kind="not a regular file", detail=detail))
                return []
            with os.scandir(place) as scan:
                return sorted((entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in scan)
        except FileNotFoundError:
            return []
        except OSError as error:
            detail = f"cannot be listed: {error.strerror}"
            self.found.append(Problem(path=folder, kind="unreadable", detail=detail))
            return []

    def _latest(self, path: str) -> None:
        """`latest` is the one link of a run; it is read, not followed."""
        place = self.inside.directory / path
        target = os.readlink(place) if place.is_symlink() else ""
        if self.theirs:  # they may write the whole path
            target = Path(target).name
        if layout.parse_step(target) is None or not self.inside.has(f"{layout.STEP_CHECKPOINTS}/{target}"):
            detail = f"expected a link to a step checkpoint beside it, found {target or 'no link'}"
            self.found.append(Problem(path=path, kind="structure", detail=detail, actual=target))
