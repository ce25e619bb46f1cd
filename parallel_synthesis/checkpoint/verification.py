"""`ps verify` in the library: a run with all its checkpoints, one checkpoint, or any directory against a manifest.

Reads only; nothing is raised for what is damaged. What no manifest speaks of is named as not checked.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.disk import is_hidden_name
from parallel_synthesis.checkpoint.layout import find_components
from parallel_synthesis.checkpoint.parts import MERGE_META, check_parts, facts_of
from parallel_synthesis.errors import CheckpointError, ManifestError, StorageError
from parallel_synthesis.provenance import lineage
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.check import Place, check
from parallel_synthesis.provenance.digests import Progress
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.manifest import MANIFEST, Listing, is_manifest
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.schema import parse_json, problems

_JSON_LIMIT = 64 << 20
_RUN_FOLDERS = (layout.STEP_CHECKPOINTS, layout.MILESTONES)
_RUN_ENTRIES = (layout.RUN_ARGS, layout.TRAIN_LOG, layout.SUMMARY, layout.SUPERSEDED, *_RUN_FOLDERS)
# What stands beside released components and is no part of them; said to be not checked.
_COMPANIONS = (MANIFEST, MERGE_META, layout.CHECKPOINT_META, layout.CACHE_MAPPER_CONFIG, "README.md", "LICENSE",
               ".gitattributes", f"{layout.JUDGER_LORA}/README.md")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """quick: sizes and headers only. full: whole-file sha256 too where tensors prove the same. allow_extra: files
    that are not listed are named, not refused. complete: a run that is not complete is a problem. progress: see
    provenance.check."""

    quick: bool = False
    full: bool = False
    jobs: int | None = None
    allow_extra: bool = False
    complete: bool = False
    progress: Callable[[int], Progress] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found. manifest: the file judged by, with its sha256; of a run that of its root, else of its newest
    checkpoint. digests: file -> what was compared. not_checked: what is there and no manifest speaks of. complete:
    None for what is no run."""

    target: Path
    manifest: str | None
    manifest_sha256: str | None
    content_checked: bool
    checkpoints: tuple[str, ...]
    digests: Mapping[str, str]
    bytes_hashed: int
    seconds: float
    problems: tuple[Problem, ...]
    not_checked: tuple[str, ...]
    complete: bool | None = None

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {"checkpoints": len(self.checkpoints), "files": len(self.digests)}
        found |= {"problems": len(self.problems), "not_checked": len(self.not_checked)}
        for problem in self.problems:
            found[problem.kind] = found.get(problem.kind, 0) + 1
        return found


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A directory with its manifest. prefix: what its paths get in a report, "" or "step_checkpoints/step_.../"."""

    prefix: str
    inside: Inside
    listing: Listing
    known: Callable[[str], bool] = is_manifest


def verify_path(given: str, options: Options) -> Report:
    """A run, one of its checkpoints or milestones, RUN@NAME, or any directory with a manifest.json.

    CheckpointError when there is nothing to judge by, ManifestError when its one manifest is malformed.
    """
    path = Path(given).expanduser()
    if is_run(path):
        return _verify_run(path, options)
    # A directory without components can have a manifest too.
    place = path if path.is_dir() and Inside(path).has(MANIFEST) else find_components(given)
    try:
        return verify_directory(Inside(place), manifests.listing(place), options)
    except StorageError as error:
        raise ManifestError([str(error)]) from error


def is_run(path: Path) -> bool:
    """A run, complete or not: it has run_args.json and folders of checkpoints."""
    here = Inside(path)
    return path.is_dir() and here.has(layout.RUN_ARGS) and any(map(here.has, _RUN_FOLDERS))


def verify_directory(inside: Inside, listing: Listing, options: Options) -> Report:
    """A directory against one manifest: its own, a release's, or a list of sha256sum."""
    foreign = listing.source != str(inside.directory / MANIFEST)
    known = _companion if foreign else is_manifest
    subject = _Subject(prefix="", inside=inside, listing=listing, known=known)
    began = time.monotonic()
    report = _verify([subject], inside.directory, options)
    if inside.has(MERGE_META) and not foreign:
        more, unverified = _verify_merge(inside, listing, options)
        report = replace(
            report,
            problems=(*report.problems, *more),
            not_checked=(*report.not_checked, *unverified),
            seconds=time.monotonic() - began,
        )
    return report


def _verify_run(run: Path, options: Options) -> Report:
    subjects: list[_Subject] = []
    found: list[Problem] = []
    unlisted: list[str] = []
    entries = _Entries(Inside(run), options)
    for prefix in entries.checkpoints():
        place = Inside(run / prefix)
        try:
            subjects.append(
                _Subject(prefix=f"{prefix}/", inside=place, listing=manifests.listing(place.directory))
            )
        except (CheckpointError, StorageError) as error:
            found.append(_manifest_problem(f"{prefix}/{MANIFEST}", place, error))
    root: Listing | None = None
    if entries.inside.has(MANIFEST):
        try:
            root = manifests.listing(run)
            subjects.append(_Subject(prefix="", inside=entries.inside, listing=root, known=_of_run))
        except (CheckpointError, StorageError) as error:
            found.append(_manifest_problem(MANIFEST, entries.inside, error))
    if not subjects and not found and not entries.found:
        raise CheckpointError(
            f"{run}: there is no committed checkpoint to verify; expected one with a {MANIFEST}; {_NO_MANIFEST}"
        )
    if root is None:  # with it, the root's own check tells what is extra
        found += entries.extra(unlisted)
    args = entries.json(layout.RUN_ARGS, "run_args")
    if not subjects and args is not None and "schema_version" not in args:
        raise CheckpointError(
            f"{run} is a run of the reference implementation and has no manifest; {_NO_MANIFEST}"
        )
    entries.json(layout.SUMMARY, "train_mixed_summary")
    entries.regular(layout.TRAIN_LOG)
    report = _verify(subjects, run, options)
    found = [*entries.found, *found, *report.problems]
    end = (args or {}).get("total_steps")
    complete = root is not None and end is not None and root.document["global_step"] == end
    if options.complete and not complete:
        newest = max((subject.listing.document["global_step"] for subject in subjects), default=None)
        found.append(
            Problem(
                path=".",
                kind="incomplete",
                detail=f"the run is not complete: expected a final checkpoint of step {end}; the newest one is of "
                f"step {newest}",
                expected=end,
                actual=newest,
            )
        )
    parts = [name for name in (layout.TRAIN_LOG, layout.SUPERSEDED) if entries.inside.has(name)]
    not_checked = dict.fromkeys([*parts, *unlisted, *report.not_checked])
    for name in (layout.RUN_ARGS, layout.SUMMARY, *_RUN_FOLDERS):  # these were looked at, above
        not_checked.pop(name, None)
    return replace(report, problems=tuple(found), complete=complete, not_checked=tuple(not_checked))


def _verify(subjects: list[_Subject], target: Path, options: Options) -> Report:
    began = time.monotonic()
    places = [
        Place(
            inside=subject.inside,
            files=subject.listing.files,
            extra=not options.allow_extra,
            known=subject.known,
        )
        for subject in subjects
    ]
    result = check(
        places, quick=options.quick, full=options.full, jobs=options.jobs, progress=options.progress
    )
    found: list[Problem] = []
    digests: dict[str, str] = {}
    not_checked: list[str] = []
    for subject, checked in zip(subjects, result.places, strict=True):
        document = subject.listing.document
        parts = check_parts(
            subject.inside,
            listed=subject.listing.files,
            listed_step=document.get("global_step"),
            facts=facts_of(document) if subject.listing.form == "release_manifest" else None,
        )
        told = {problem.path for problem in checked.problems}
        # A file that can not be opened is told once.
        parts = [problem for problem in parts if problem.path not in told or problem.kind not in _OPENING]
        found += [
            replace(problem, path=subject.prefix + problem.path) for problem in (*checked.problems, *parts)
        ]
        digests |= {subject.prefix + name: how for name, how in checked.digests.items()}
        not_checked += [subject.prefix + name for name in checked.unlisted if name != MANIFEST]
    judged = subjects[-1].listing if subjects else None
    return Report(
        target=target,
        manifest=judged.source if judged is not None else None,
        manifest_sha256=judged.sha256 if judged is not None else None,
        content_checked=not options.quick and bool(subjects),
        checkpoints=tuple(subject.prefix.rstrip("/") or "." for subject in subjects),
        digests=digests,
        bytes_hashed=result.bytes_hashed,
        seconds=time.monotonic() - began,
        problems=tuple(found),
        not_checked=tuple(not_checked),
    )


_NO_MANIFEST = "check one of its checkpoints by --manifest FILE, or make a manifest of it by --write-manifest"
_OPENING = ("missing", "unreadable", "not a regular file", "escapes")


def _verify_merge(inside: Inside, listing: Listing, options: Options) -> tuple[list[Problem], list[str]]:
    """A merge output against its metadata, and its metadata against the sources that are at hand."""
    found: list[Problem] = []
    raw = inside.read(MERGE_META, limit=_JSON_LIMIT)
    try:
        document = parse_json(raw, MERGE_META) if isinstance(raw, bytes) else {}
    except CheckpointError:
        document = {}
    if not isinstance(document, dict) or problems(document, "checkpoint_merge_meta"):
        return [], [f"sources: {MERGE_META} can not be read"]  # told by its schema already
    for name, sha256 in document.get("components", {}).items():
        listed = listing.files.get(name)
        if listed is None or listed.sha256 != sha256:
            actual = None if listed is None else listed.sha256
            detail = f"{name} is not the output that this file describes"
            found.append(
                Problem(path=MERGE_META, kind="identity", detail=detail, expected=sha256, actual=actual)
            )
    unverified = []
    if options.quick:
        return found, ["sources: contents not read"]
    tree = lineage.read(inside.directory, find=find_components, jobs=options.jobs)
    for parent in tree.parents:
        if parent.edge == "differs":
            detail = f"the source {parent.source} is not what was merged: {parent.reason}"
            found.append(
                Problem(path=MERGE_META, kind="identity", detail=detail, expected=dict(parent.components))
            )
        elif parent.edge != "verified":
            unverified.append(f"source {parent.source}: {parent.reason}")
    if not tree.parents:
        unverified.append("sources: the checkpoint records none")
    return found, unverified


class _Entries:
    """The entries of a run directory: its checkpoints, and what does not belong there."""

    def __init__(self, inside: Inside, options: Options) -> None:
        self.inside = inside
        self._options = options
        self.found: list[Problem] = []

    def checkpoints(self) -> Iterator[str]:
        """Relative paths of all step checkpoints, oldest first, and milestones; what else is there is noted."""
        for folder in _RUN_FOLDERS:
            for name, mode in self._listed(folder):
                path = f"{folder}/{name}"
                if folder == layout.STEP_CHECKPOINTS and name == layout.LATEST:
                    self._latest(path)
                elif is_hidden_name(name):
                    continue
                elif stat.S_ISDIR(mode) and (
                    folder == layout.MILESTONES or layout.parse_step(name) is not None
                ):
                    yield path
                elif not self._options.allow_extra:
                    self.found.append(Problem(path=path, kind="extra", detail="is no checkpoint"))

    def extra(self, unlisted: list[str]) -> Iterator[Problem]:
        """What lies in the root beside a run's entries; without a root manifest components there count for nothing."""
        for name in self.inside.unlisted((), ()):
            if isinstance(name, Problem):
                yield name
            elif name in layout.COMPONENT_ENTRIES or name == MERGE_META:
                unlisted.append(name)
            elif not _of_run(name):
                if self._options.allow_extra:
                    unlisted.append(name)
                else:
                    yield Problem(path=name, kind="extra", detail="is no part of a run")

    def json(self, name: str, schema: str) -> dict[str, Any] | None:
        raw = self.inside.read(name, limit=_JSON_LIMIT)
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
        if layout.parse_step(target) is None or not self.inside.has(f"{layout.STEP_CHECKPOINTS}/{target}"):
            detail = f"expected a link to a step checkpoint beside it, found {target or 'no link'}"
            self.found.append(Problem(path=path, kind="structure", detail=detail, actual=target))


def _of_run(name: str) -> bool:
    return name in _RUN_ENTRIES or name == MANIFEST or is_hidden_name(name)


def _companion(name: str) -> bool:
    return name in _COMPANIONS or name in _RUN_ENTRIES or name == layout.TRAINING_STATE or name == ".cache"


def _manifest_problem(path: str, inside: Inside, error: Exception) -> Problem:
    if not inside.has(MANIFEST):
        return Problem(
            path=path, kind="missing", detail="missing: this directory was never committed, or was damaged"
        )
    detail = str(error)
    if isinstance(error, ManifestError):
        detail = "; ".join(problem.rsplit(f"{MANIFEST}: ", 1)[-1] for problem in error.problems)
    return Problem(path=path, kind="manifest", detail=detail)


def read_manifest(path: Path) -> Listing:
    """A manifest file of any form, anywhere. ManifestError when it can not be read or is malformed."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= manifests.LIMIT else b""
    except OSError as error:
        raise ManifestError([f"cannot read {path}: {error.strerror}; check the path"]) from error
    if size > manifests.LIMIT:
        raise ManifestError([f"{path}: {size:,} bytes; expected a manifest of at most {manifests.LIMIT:,}"])
    return manifests.parse(raw, str(path))
