"""What to say of a path that is not there: where it stops, and what there is of a similar name."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from parallel_synthesis.errors import CheckpointError, ParallelSynthesisError, RefusedError, StorageError
from parallel_synthesis.provenance.hub_names import SCHEME, is_form

CHECKPOINT = "a checkpoint, a run directory or RUN@NAME"
_SHOWN = 8


def nothing_at(
    given: str, *, expected: str = CHECKPOINT, refused: type[RefusedError] = CheckpointError
) -> ParallelSynthesisError:
    """The error for a local path that is not there. StorageError where it can not be looked for."""
    missing = Path(given).expanduser()
    while not _is_there(missing.parent) and missing.parent != missing:
        missing = missing.parent
    place = missing.parent
    try:
        missing.stat()
    except PermissionError:
        return StorageError(f"{given}: permission denied in {place}; check its permissions")
    except OSError:
        pass
    return refused(f"{given}: {_why(missing, place)}. Expected {expected}{_hub(given)}")


def _why(missing: Path, place: Path) -> str:
    link = _link(missing)
    if link is not None:
        return f"no such directory: {missing} is a link to {link}, which is not there"
    if not place.is_dir():
        return f"no such directory: {place} is a file"
    here = _names(place)
    close = difflib.get_close_matches(missing.name.partition("@")[0], here, n=3)
    names = close or [name for name in here if (place / name).is_dir()]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    told = ", ".join(names[:_SHOWN]) + more
    where = "here" if place == Path() else f"in {place}"
    return f"no such directory; {where} there " + (f"are: {told}" if told else "is none")


def _link(path: Path) -> Path | None:
    try:
        return path.readlink()
    except OSError:  # no link; not there at all; a name too long
        return None


def _names(place: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(place) if not name.startswith("."))
    except OSError:
        return []


def _hub(given: str) -> str:
    """A text in the form of OWNER/NAME may have meant a repository after all."""
    return f"; {SCHEME}{given} would be a repository of the Hub" if is_form(given) else ""


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory that must not be entered, a name too long
        return False
