"""The cache of indices: one entry a data file, replaced atomically, trusted only when whole and up to date.

Disk cost: about 24 bytes a row, and for a gzip file its whole unpacked text (rows are read from it at
random). Entries are named by the data file's path, so a changed file replaces its own entry. All can be
deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from parallel_synthesis.data.rows import RULES_VERSION
from parallel_synthesis.data.scan import BadRow, Rows
from parallel_synthesis.data.tasks import Task

CACHE_VARIABLE = "PARALLEL_SYNTHESIS_CACHE"
_MAGIC = f"parallel-synthesis index 2 rules {RULES_VERSION} {sys.byteorder}\n".encode()
_STAMP_SECONDS = 0.02  # a file changed within one tick of the file system's clock keeps its time stamps


@dataclass(frozen=True, slots=True)
class Identity:
    """What changes when a file is written or swapped, and needs no read: size in bytes, times in ns."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> Identity:
        stat = os.fstat(fd)
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The unpacked text of a gzip file; `identity` is that of the file it was unpacked into."""

    bytes: int
    sha256: str
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All that is known of a data file. sha256: of the file as it lies on disk."""

    identity: Identity
    sha256: str
    text: Text | None
    rows: Rows


_COLUMNS = ("offsets", "lengths", "lines", "checks")


def cache_directory() -> Path:
    """$PARALLEL_SYNTHESIS_CACHE, or parallel-synthesis in $XDG_CACHE_HOME or else in ~/.cache."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "parallel-synthesis"
    try:
        return Path.home() / ".cache" / "parallel-synthesis"
    except RuntimeError:  # a user without a home: a place that cannot be written, so that nothing is kept
        return Path(os.devnull) / "parallel-synthesis"


class Entry:
    """The cache's files for one data file and one set of row rules. What cannot be written raises OSError."""

    def __init__(self, directory: Path, path: Path, task: Task) -> None:
        rules = "own" if task.own else "contexts may stand in" if task.contexts_may_stand_in else "standard"
        key = hashlib.sha256(f"{path.resolve()}\0{rules}".encode(errors="surrogateescape")).hexdigest()[:32]
        self._directory = directory
        self._key = key
        self.index_path = directory / f"{key}.index"
        self.text_path = directory / f"{key}.jsonl"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process or thread indexes a file; the others wait and then use what it left.

        A file system without locks gets none: entries are still replaced atomically, the work is done twice.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{self._key}.lock").open("wb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
                for left in self._directory.glob(f"{self._key}.*.tmp"):  # of a process that was killed here
                    left.unlink()
            yield

    @contextlib.contextmanager
    def new_text(self) -> Iterator[BinaryIO]:
        """A new file, open for reading and writing; it becomes the entry's text when the block ends well."""
        with self._replacing(self.text_path) as file:
            yield file

    def keep(self, index: Index) -> None:
        """Puts the index in place."""
        rows = index.rows
        head = {
            "identity": asdict(index.identity),
            "sha256": index.sha256,
            "text": None if index.text is None else asdict(index.text),
            "rows": len(rows.offsets),
            "loose": len(rows.loose),
            "bad": [(bad.line, bad.problem) for bad in rows.bad],
            "lines_read": rows.lines_read,
        }
        columns = [getattr(rows, name).tobytes() for name in (*_COLUMNS, "loose")]
        body = b"".join([json.dumps(head).encode(), b"\n", *columns])
        with self._replacing(self.index_path) as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        fd, name = tempfile.mkstemp(dir=self._directory, prefix=f"{self._key}.", suffix=".tmp")
        temporary = Path(name)
        try:
            with os.fdopen(fd, "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def load(self, identity: Identity) -> Index | None:
        """The index, when there is a whole one of the file that `identity` describes; else None."""
        try:
            content = self.index_path.read_bytes()
        except OSError:
            return None
        digest_end = len(_MAGIC) + 32
        body = content[digest_end:]
        if (
            not content.startswith(_MAGIC)
            or hashlib.sha256(body).digest() != content[len(_MAGIC) : digest_end]
        ):
            return None
        head_end = body.index(b"\n")
        head = json.loads(body[:head_end])
        if Identity(**head["identity"]) != identity:
            return None
        rows = Rows(bad=[BadRow(*bad) for bad in head["bad"]], lines_read=head["lines_read"])
        start = head_end + 1
        for name, count in (*((name, head["rows"]) for name in _COLUMNS), ("loose", head["loose"])):
            column = getattr(rows, name)
            end = start + count * column.itemsize
            column.frombytes(body[start:end])
            start = end
        text = head["text"]
        return Index(
            identity=identity,
            sha256=head["sha256"],
            text=None if text is None else Text(**{**text, "identity": Identity(**text["identity"])}),
            rows=rows,
        )


def settle(identity: Identity) -> None:
    """Waits until the file's last change is old enough that a later one cannot carry the same time stamp."""
    age = time.time() - identity.ctime_ns / 1e9
    if 0 <= age < _STAMP_SECONDS:
        time.sleep(_STAMP_SECONDS - age)
