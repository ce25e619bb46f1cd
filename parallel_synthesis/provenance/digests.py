"""Many stretches of many files hashed on all cores; a file that changes meanwhile is told, not misjudged.

One thread a core, each reading and hashing 1 MiB at a time (that stays in the core's own cache). A stretch that
is most of the work by itself is read ahead by a second thread, because SHA-256 of one stretch can not be divided.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from parallel_synthesis.provenance.hashing import read_ahead
from parallel_synthesis.provenance.inside import Inside, Stamp
from parallel_synthesis.provenance.problems import Problem

BLOCK = 1 << 20

Progress = Callable[[int], None]  # bytes hashed since the last call; from any thread


@dataclass(frozen=True, slots=True)
class Stretch:
    """`length` bytes of a file from byte `start`. Equal stretches of one inode are hashed once."""

    stamp: Stamp
    start: int
    length: int


class Stopped(Exception):
    """Another stretch failed badly, or the user interrupted."""


def hash_all(
    wanted: Mapping[Stretch, tuple[Inside, str]], *, jobs: int, progress: Progress | None = None
) -> dict[Stretch, str | Problem]:
    """SHA-256 of each stretch, or the problem (changed, unreadable, missing ...) that its file has by now."""
    total = sum(stretch.length for stretch in wanted)
    by_size = sorted(wanted, key=lambda stretch: stretch.length, reverse=True)
    # More than a core's share: the other cores would wait for it anyway.
    ahead = {stretch for stretch in by_size[:1] if jobs > 1 and stretch.length * jobs > 1.5 * total}
    stop = threading.Event()

    def work(stretch: Stretch) -> str | Problem:
        inside, name = wanted[stretch]
        return _hash(inside, name, stretch, ahead=stretch in ahead, stop=stop, progress=progress)

    pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="verify")
    try:
        return dict(zip(by_size, pool.map(work, by_size), strict=True))
    finally:
        stop.set()  # nothing is left to do, unless this is an interrupt
        pool.shutdown(cancel_futures=True)


def _hash(
    inside: Inside,
    name: str,
    stretch: Stretch,
    *,
    ahead: bool,
    stop: threading.Event,
    progress: Progress | None,
) -> str | Problem:
    fd = inside.open(name)
    if isinstance(fd, Problem):
        return fd
    try:
        digest, done = hashlib.sha256(), 0
        if stretch.stamp.still_is(Stamp.of(os.fstat(fd))):
            for piece in _pieces(fd, stretch, ahead=ahead):
                if stop.is_set():
                    raise Stopped
                digest.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(len(piece))
        if done != stretch.length or not stretch.stamp.still_is(Stamp.of(os.fstat(fd))):
            return Problem(
                path=name,
                kind="changed",
                detail="changed while it was read; run this again when nobody writes to it",
            )
    except OSError as error:
        return Problem(path=name, kind="unreadable", detail=f"cannot be read: {error.strerror}")
    finally:
        os.close(fd)
    return digest.hexdigest()


def _pieces(fd: int, stretch: Stretch, *, ahead: bool) -> Iterable[memoryview]:
    end = stretch.start + stretch.length
    if ahead and stretch.length > BLOCK:
        yield from read_ahead(fd, stretch.start, end)
        return
    buffer = memoryview(bytearray(min(BLOCK, stretch.length)))
    at = stretch.start
    while at < end and (count := os.preadv(fd, [buffer[: end - at]], at)):
        at += count
        yield buffer[:count]
