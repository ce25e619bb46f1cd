"""One difference between what is there and what should be, as data that prints and that a program can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ProblemKind = Literal[
    "manifest",  # malformed, of an unknown version, or not there: nothing could be judged by it
    "missing",
    "unreadable",  # an I/O error: not checked, and so never OK
    "not a regular file",
    "escapes",
    "size",
    "digest",
    "changed",  # while it was read
    "extra",
    "schema",
    "structure",
    "identity",
    "backbone",  # a sound checkpoint, of another backbone than the one that the manifest is of
    "incomplete",  # a run that has not come to its planned end, where an end was asked for
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`path` is relative to the directory that was checked (or names the file given). expected, actual: JSON types."""

    path: str
    kind: ProblemKind
    detail: str
    expected: Any = None
    actual: Any = None

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"
