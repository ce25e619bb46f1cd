"""`ps verify` in the library: a run with all its checkpoints, one checkpoint, or any directory against a manifest.

Reads only; nothing is raised for what is damaged. What no manifest speaks of is named as not checked. Checkpoints of
the reference implementation, which never had one, are checked for structure, and said to be that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.layout import find_components
from parallel_synthesis.checkpoint.parts import MERGE_META, check_parts, facts_of
from parallel_synthesis.checkpoint.run_entries import JSON_LIMIT, RUN_ENTRIES, RUN_FOLDERS, Entries, of_run
from parallel_synthesis.checkpoint.structure import REQUIRED, check_structure, is_theirs
from parallel_synthesis.errors import CheckpointError, ManifestError, StorageError
from parallel_synthesis.provenance import lineage
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.check import Place, check
from parallel_synthesis.provenance.digests import Progress
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.manifest import MANIFEST, Listing, is_manifest
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.schema import parse_json, problems

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
    checkpoint. digests: file -> what was compared or looked at. not_checked: what is there and no manifest speaks of.
    complete: None for what is no run, or does not say where it was to end. structure_only: those of the checkpoints
    that have no recorded hashes."""

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
    structure_only: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {"checkpoints": len(self.checkpoints), "files": len(self.digests)}
        found |= {"problems": len(self.problems), "not_checked": len(self.not_checked)}
        for problem in self.problems:
            found[problem.kind] = found.get(problem.kind, 0) + 1
        return found


@dataclass(frozen=True, kw_only=True)
class _Plain:
    """A checkpoint without a manifest, of the reference implementation. of_step: a step checkpoint of a run."""

    prefix: str
    inside: Inside
    of_step: bool = False


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A directory with its manifest. prefix: what its paths get in a report, "" or "step_checkpoints/step_.../"."""

    prefix: str
    inside: Inside
    listing: Listing
    known: Callable[[str], bool] = is_manifest


def verify_path(given: str, options: Options) -> Report:
    """A run, one of its checkpoints or milestones, RUN@NAME, or any directory with a manifest.json.

    Of a run or a checkpoint of the reference implementation the structure. CheckpointError when there is nothing to judge by, ManifestError when its one manifest is malformed.
    """
    path = Path(given).expanduser()
    if is_run(path):
        return _verify_run(path, options)
    # A directory without components can have a manifest too.
    place = path if path.is_dir() and Inside(path).has(MANIFEST) else find_components(given)
    if is_theirs(place):
        return _verify([], place, options, plain=[_Plain(prefix="", inside=Inside.of(place))])
    try:
        return verify_directory(Inside.of(place), manifests.listing(place), options)
    except StorageError as error:
        raise ManifestError([str(error)]) from error


def is_run(path: Path) -> bool:
    """A run, complete or not: it has run_args.json and folders of checkpoints."""
    here = Inside(path)
    return path.is_dir() and here.has(layout.RUN_ARGS) and any(map(here.has, RUN_FOLDERS))


def verify_directory(inside: Inside, listing: Listing, options: Options) -> Report:
    """A directory against one manifest: its own, a release's, or a list of sha256sum."""
    foreign = listing.source != str(inside.directory / MANIFEST)
    # A Hub repository has a README and the like, whatever its manifest lists.
    known = _companion if foreign or inside.blobs is not None else is_manifest
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
    entries = Entries(Inside(run), allow_extra=options.allow_extra)
    options = replace(options, allow_extra=options.allow_extra or entries.theirs)
    plain: list[_Plain] = []
    for prefix in entries.checkpoints():
        place = Inside(run / prefix)
        if entries.theirs and not place.has(MANIFEST) and not prefix.startswith(layout.MILESTONES):
            plain.append(_Plain(prefix=f"{prefix}/", inside=place, of_step=True))
            continue
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
            subjects.append(_Subject(prefix="", inside=entries.inside, listing=root, known=of_run))
        except (CheckpointError, StorageError) as error:
            found.append(_manifest_problem(MANIFEST, entries.inside, error))
    elif entries.theirs and any(map(entries.inside.has, REQUIRED)):
        plain.append(_Plain(prefix="", inside=entries.inside))
    told = [problem for problem in entries.found if problem.path != layout.RUN_ARGS]
    if not subjects and not plain and not found and not told:
        raise CheckpointError(
            f"{run}: there is no committed checkpoint to verify; expected one with a {MANIFEST}; {_NO_MANIFEST}"
        )
    if root is None:  # with it, the root's own check tells what is extra
        found += entries.extra(unlisted)
    entries.json(layout.SUMMARY, "train_mixed_summary")
    entries.regular(layout.TRAIN_LOG)
    report = _verify(subjects, run, options, plain=plain)
    found = [*entries.found, *found, *report.problems]
    end = (entries.args or {}).get("total_steps")
    complete = root is not None and end is not None and root.document["global_step"] == end
    if options.complete and entries.theirs:
        detail = "a run of the reference implementation does not record the step at which it was to end"
        found.append(Problem(path=".", kind="incomplete", detail=detail))
    elif options.complete and not complete:
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
    looked = [name for name in report.digests if "/" not in name or name.startswith(layout.JUDGER_LORA)]
    for name in (
        layout.RUN_ARGS,
        layout.SUMMARY,
        *RUN_FOLDERS,
        *looked,
        layout.JUDGER_LORA,
    ):  # looked at, above
        not_checked.pop(name, None)
    return replace(
        report,
        problems=tuple(found),
        complete=None if entries.theirs else complete,
        not_checked=tuple(not_checked),
    )


def _verify(
    subjects: list[_Subject], target: Path, options: Options, *, plain: Sequence[_Plain] = ()
) -> Report:
    """plain: checkpoints without a manifest. CheckpointError where hashes are asked for that nobody recorded."""
    if plain and options.full:
        raise CheckpointError(
            f"{target}: --full compares hashes, and none are recorded here ({plain[0].prefix or '.'}); {_RECORD}"
        )
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
    for each in plain:
        seen = check_structure(
            each.inside, of_step=each.of_step, quick=options.quick, progress=options.progress
        )
        found += [replace(problem, path=each.prefix + problem.path) for problem in seen.problems]
        digests |= {each.prefix + name: how for name, how in seen.looked.items()}
        not_checked += [each.prefix + name for name in seen.not_checked]
    unproved = tuple(each.prefix.rstrip("/") or "." for each in plain)
    judged = subjects[-1].listing if subjects else None
    return Report(
        target=target,
        manifest=judged.source if judged is not None else None,
        manifest_sha256=judged.sha256 if judged is not None else None,
        content_checked=not options.quick and bool(subjects) and not plain,
        checkpoints=(*(subject.prefix.rstrip("/") or "." for subject in subjects), *unproved),
        digests=digests,
        bytes_hashed=result.bytes_hashed,
        seconds=time.monotonic() - began,
        problems=tuple(found),
        not_checked=tuple(not_checked),
        structure_only=unproved,
    )


_RECORD = "record them first: ps verify CHECKPOINT --write-manifest, or a copy by ps snapshot CHECKPOINT --export DEST"
_NO_MANIFEST = "check one of its checkpoints by --manifest FILE, or make a manifest of it by --write-manifest"
_OPENING = ("missing", "unreadable", "not a regular file", "escapes")


def _verify_merge(inside: Inside, listing: Listing, options: Options) -> tuple[list[Problem], list[str]]:
    """A merge output against its metadata, and its metadata against the sources that are at hand."""
    found: list[Problem] = []
    raw = inside.read(MERGE_META, limit=JSON_LIMIT)
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


def _companion(name: str) -> bool:
    return name in _COMPANIONS or name in RUN_ENTRIES or name == layout.TRAINING_STATE or name == ".cache"


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
