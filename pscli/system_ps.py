"""Hands a call that is not ours to the system's `ps`, which an active virtual environment hides."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMANDS = ("train", "resume", "merge", "snapshot", "inspect", "verify")
LATER: tuple[str, ...] = ()  # ours by design, not in this version
OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
COMPLETION_VARIABLE = "_PS_COMPLETE"


def is_ours(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True for a subcommand or a near miss of one, one of our options, and a shell asking for completions."""
    if COMPLETION_VARIABLE in environ:
        return True
    if not arguments:
        return False
    first = arguments[0]
    return first in OPTIONS or first in COMMANDS or first in LATER or near_miss(first) is not None


def near_miss(word: str) -> str | None:
    """The subcommand that was meant, or None. `ps`'s own words (aux, axjf, -ef) are never near."""
    if len(word) < 4 or not word.isalpha():
        return None
    close = difflib.get_close_matches(word.lower(), (*COMMANDS, *LATER), n=1, cutoff=0.7)
    return close[0] if close and close[0] != word else None


def hand_over(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replaces this process by the system's ps. Returns only when there is none on PATH."""
    found = system_ps(environ.get("PATH", os.defpath))
    if found is not None:
        sys.stdout.flush()
        os.execv(found, ["ps", *arguments])


def system_ps(path: str) -> Path | None:
    """The first `ps` on PATH that is not one of ours, whichever environment it was installed into."""
    for directory in path.split(os.pathsep):
        candidate = Path(directory or ".") / "ps"
        if candidate.is_file() and os.access(candidate, os.X_OK) and not _is_our_script(candidate):
            return candidate
    return None


def _is_our_script(candidate: Path) -> bool:
    """An installed console script is a few lines of Python that import pscli."""
    try:
        with candidate.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return head.startswith(b"#!") and b"pscli" in head
