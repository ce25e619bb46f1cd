"""The bytes of directories against what a manifest lists: every problem, by sizes alone or by content."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from parallel_synthesis.provenance.digests import Progress, Stretch, hash_all
from parallel_synthesis.provenance.inside import Inside, Stamp, folders_of
from parallel_synthesis.provenance.problems import Problem

WHOLE = "sha256"  # names of what was compared
PARTS = "header and tensors"
NOTHING = "size only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of a file with a digest of its own. label: "header" or "tensor NAME"."""

    label: str
    start: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file must be. bytes: None where the manifest does not say (sha256sum's format)."""

    sha256: str
    bytes: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def parts_cover_all(self) -> bool:
        """The parts are the whole file: together they prove what its sha256 proves."""
        at = 0
        for part in sorted(self.parts, key=lambda part: (part.start, part.start + part.bytes)):
            if part.start != at:
                return False
            at += part.bytes
        return bool(self.parts) and at == self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory to check. extra: names that are neither listed nor `known` are problems.

    known: says which names are accounted for without being listed (the manifest itself, a run's other parts).
    """

    inside: Inside
    files: Mapping[str, Expected]
    extra: bool = True
    known: Callable[[str], bool] = frozenset[str]().__contains__


@dataclass(kw_only=True)
class Checked:
    """What came out for one directory. digests: for each file that is there, what was compared.

    unlisted: names that are accounted for, but not by this manifest.
    """

    problems: list[Problem] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Result:
    """places: in the order given. bytes_hashed: bytes read; files that are one inode are read once."""

    places: tuple[Checked, ...]
    bytes_hashed: int


def default_jobs() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check(
    places: Sequence[Place],
    *,
    quick: bool = False,
    full: bool = False,
    jobs: int | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> Result:
    """Checks all files of all places.

    quick: existence, kind and size only. full: the sha256 of a whole file even where the digests of its header
    and tensors, which several cores can compute at once, prove the same. progress: called once with the bytes to
    hash, returns what is told of each block. Nothing is raised for what is damaged or can not be read.
    """
    checked = [Checked() for _ in places]
    wanted: dict[Stretch, tuple[Inside, str]] = {}
    compare: list[tuple[Checked, str, Expected, Stamp, bool]] = []
    for place, result in zip(places, checked, strict=True):
        for name, expected in sorted(place.files.items()):
            stamp = _stamp(place.inside, name, expected)
            if isinstance(stamp, Problem):
                result.problems.append(stamp)
                continue
            by_parts = expected.parts_cover_all
            if quick:
                result.digests[name] = NOTHING
                continue
            result.digests[name] = f"{PARTS}, {WHOLE}" if by_parts and full else PARTS if by_parts else WHOLE
            compare.append((result, name, expected, stamp, by_parts))
            for stretch in _stretches(expected, stamp, by_parts=by_parts, whole=full or not by_parts):
                wanted.setdefault(stretch, (place.inside, name))
    total = sum(stretch.length for stretch in wanted)
    found = hash_all(wanted, jobs=jobs or default_jobs(), progress=progress(total) if progress else None)
    for result, name, expected, stamp, by_parts in compare:
        result.problems += _compare(name, expected, stamp, found, by_parts=by_parts, full=full)
    for place, result in zip(places, checked, strict=True):
        result.problems.sort(key=lambda problem: problem.path)
        result.problems += _extra(place, result)
    return Result(places=tuple(checked), bytes_hashed=total)


def _stamp(inside: Inside, name: str, expected: Expected) -> Stamp | Problem:
    fd = inside.open(name)
    if isinstance(fd, Problem):
        return fd
    try:
        stamp = Stamp.of(os.fstat(fd))
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    if expected.bytes is not None and stamp.size != expected.bytes:
        return Problem(
            path=name,
            kind="size",
            detail=f"{stamp.size} bytes; expected {expected.bytes}",
            expected=expected.bytes,
            actual=stamp.size,
        )
    return stamp


def _stretches(expected: Expected, stamp: Stamp, *, by_parts: bool, whole: bool) -> Iterator[Stretch]:
    if by_parts:
        yield from (Stretch(stamp, part.start, part.bytes) for part in expected.parts)
    if whole:
        yield Stretch(stamp, 0, stamp.size)


def _compare(
    name: str,
    expected: Expected,
    stamp: Stamp,
    found: Mapping[Stretch, str | Problem],
    *,
    by_parts: bool,
    full: bool,
) -> Iterator[Problem]:
    damaged: list[tuple[str, str, str]] = []
    wanted = [(part.label, part.start, part.bytes, part.sha256) for part in expected.parts if by_parts]
    if full or not by_parts:
        wanted.append(("", 0, stamp.size, expected.sha256))
    for label, start, length, sha256 in wanted:
        actual = found[Stretch(stamp, start, length)]
        if isinstance(actual, Problem):
            yield Problem(path=name, kind=actual.kind, detail=actual.detail)
            return
        if actual != sha256:
            damaged.append((label, sha256, actual))
    if damaged:
        labels = [label for label, _, _ in damaged if label]
        where = f" (damaged: {', '.join(labels[:5])}{' ...' if len(labels) > 5 else ''})" if labels else ""
        yield Problem(
            path=name,
            kind="digest",
            detail=f"content differs from its sha256{where}",
            expected=damaged[0][1],
            actual=damaged[0][2],
        )


def _extra(place: Place, result: Checked) -> list[Problem]:
    listed = set(place.files)
    found = []
    for name in place.inside.unlisted(listed, folders_of(listed)):
        if isinstance(name, Problem):
            found += [name] if place.extra else []
        elif place.extra and not place.known(name):
            found.append(Problem(path=name, kind="extra", detail="not listed in the manifest"))
        else:
            result.unlisted.append(name)
    return sorted(found, key=lambda problem: problem.path)
