"""A checkpoint named by a Hub id: found in the local cache, or fetched into it; its entries are links to blobs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from parallel_synthesis.errors import StorageError
from parallel_synthesis.provenance.inside import Inside

_ID = re.compile(r"(?:hf://)?(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w.-]+))?")


def hub_id(given: str) -> tuple[str, str | None] | None:
    """(owner/name, revision) of a text in the form of a Hub id, when there is no such local path; else None."""
    match = _ID.fullmatch(given)
    if match is None:
        return None
    if not given.startswith("hf://") and any(map(os.path.lexists, (given, given.partition("@")[0]))):
        return None  # a local path, or RUN@NAME
    return match["id"], match["revision"]


def cached(repository: str, revision: str | None = None) -> Inside | None:
    """The newest snapshot known locally of a repository (or that of `revision`); None when there is none."""
    folder = _cache() / f"models--{repository.replace('/', '--')}"
    wanted = revision or "main"
    try:
        commit = (folder / "refs" / wanted).read_text("ascii").strip()
    except (OSError, UnicodeError):
        commit = wanted
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not (folder / "snapshots" / commit).is_dir():
        return None
    return Inside(folder / "snapshots" / commit, blobs=folder / "blobs")


def fetched(repository: str, revision: str | None = None) -> Inside:
    """`cached`, after a download when needed. StorageError when it can not be had."""
    found = cached(repository, revision)
    if found is not None:
        return found
    from huggingface_hub import snapshot_download  # here: it costs start-up time
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(repository, revision=revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StorageError(
            f"{repository}: not in the local Hub cache and not to be fetched "
            f"({str(error).splitlines()[0][:200]}); download it first, or name a directory"
        ) from error
    return Inside(place, blobs=place.parent.parent / "blobs")


def _cache() -> Path:
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"
