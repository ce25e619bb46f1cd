"""A checkpoint or model named by a Hub id: found in the local cache or fetched into it, always at one commit.

huggingface_hub does the work (its cache, its token, its locks, its offline mode). Here is decided which commit is
meant and which files are fetched, and that what is handed out is whole. A branch or tag is asked of the Hub each time;
a full commit whose files are in the cache needs no network. hub_names.py tells an id from a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.errors import CheckpointError, RefusedError, StorageError
from parallel_synthesis.provenance import hub_errors
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.hub_errors import Request
from parallel_synthesis.provenance.hub_names import SCHEME as SCHEME
from parallel_synthesis.provenance.hub_names import hub_id as hub_id
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.safetensors_header import read_header

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = 4 << 20  # bytes; a cached file up to this is hashed even by a quick look, which takes milliseconds
_SHOWN = 8  # names in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The files of a repository that are needed, and nothing else is fetched.

    required: without them it is refused. optional: taken where the repository has them. also: further names, by a
    rule; they can not be known from the cache alone. exact: optional files of which it must be known offline whether
    the repository has them; any other one that is not cached counts as not there, as after a download of everything.
    what: for messages.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    also: Callable[[str], bool] | None = None
    exact: Collection[str] = ()
    what: str = "checkpoint"

    def choose(self, names: Iterable[str]) -> list[str]:
        """Those of a repository's files that are wanted."""
        listed = {*self.required, *self.optional}
        return [name for name in names if name in listed or (self.also is not None and self.also(name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A repository at one commit, in the local cache: `directory` holds the files that were fetched so far."""

    repository: str
    commit: str
    directory: Path

    @property
    def name(self) -> str:
        """The Hub id that means these bytes for ever, on any machine; what records keep."""
        return f"{SCHEME}{self.repository}@{self.commit}"

    @property
    def inside(self) -> Inside:
        return Inside.of(self.directory)


def cached(repository: str, revision: str | None = None, names: Collection[str] = ()) -> Snapshot | None:
    """The snapshot known locally of a repository (of main, or of `revision`) that has `names`; else None."""
    wanted = revision or "main"
    commit = _commit(wanted) or _reference(repository, wanted)
    if commit is None:
        return None
    snapshot = _snapshot(repository, commit)
    there = snapshot.directory.is_dir() and all((snapshot.directory / name).is_file() for name in names)
    return snapshot if there else None


def fetched(
    given: str,
    wanted: Wanted,
    *,
    refused: type[RefusedError] = CheckpointError,
    check: bool = True,
    quick: bool = False,
) -> Snapshot:
    """The snapshot that a Hub id (`hub_id(given)` is not None) means, with what is wanted of it.

    refused: raised for a repository, revision or files that are not there or not allowed; StorageError for all that
    may be better next time: offline, no connection, a download cut off, a full disk, a damaged cache.
    check: hash the cached bytes, so that a damaged file is named here; False for callers that hash them all.
    quick: of the big files look at the header alone, for callers that only show what there is.
    Safe in several processes at once: huggingface_hub's locks let one of them download.
    """
    named = hub_id(given)
    assert named is not None, "the caller has asked hub_id"
    repository, revision = named
    request = Request(
        given=given,
        repository=repository,
        revision=revision,
        what=wanted.what,
        refused=refused,
        known=is_known(repository),
    )
    commit = _commit(revision)
    if commit is not None and wanted.also is None and _is_complete(_snapshot(repository, commit), wanted):
        snapshot = _snapshot(repository, commit)
    else:
        hub_errors.check_endpoint()
        ask = _offline if hub_errors.offline() else _online
        snapshot = ask(request, wanted)
    if check:
        _check(snapshot, wanted, quick=quick)
    return snapshot


def _online(request: Request, wanted: Wanted) -> Snapshot:
    """Asks which commit is meant, and fetches what is not there yet."""
    from huggingface_hub import HfApi, constants  # here: it costs start-up time

    repository, revision = request.repository, request.revision or "main"
    try:
        with hub_errors.explained(request, lambda: _hint(request, wanted), answer=True):
            info = HfApi().model_info(repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except StorageError as error:
        # A commit is what it was when it was fetched: what HF_HUB_OFFLINE would take is as right without the Hub.
        snapshot = _snapshot(repository, revision)
        if _commit(revision) and hub_errors.is_unanswered(error) and not _missing(snapshot, wanted):
            return snapshot
        raise
    names = [file.rfilename for file in info.siblings or ()]
    commit = _commit(info.sha)
    if commit is None or not all(isinstance(name, str) for name in names):
        raise hub_errors.no_hub(request, f"it names no commit of {repository}, or no files")
    snapshot = _snapshot(repository, commit)
    lacking = sorted(set(wanted.required) - set(names))
    if lacking:
        raise request.refused(_lacking(request, snapshot, lacking, names))
    chosen = wanted.choose(names)
    _download(request, snapshot, [name for name in chosen if not (snapshot.directory / name).is_file()])
    if revision != commit and _reference(repository, revision) != commit:
        _note_reference(snapshot, revision)
    _mark_absent(snapshot, {name for name in wanted.optional if not _settled(snapshot, name, wanted)})
    return snapshot


def _download(request: Request, snapshot: Snapshot, names: Sequence[str]) -> None:
    """Fetches files one after another, in this thread: snapshot_download's threads would go on to the end of all of
    them before a stop signal could be obeyed."""
    from huggingface_hub import hf_hub_download

    _refuse_others(snapshot, names)
    with hub_errors.explained(request, None, fetching=True):
        for name in names:
            hf_hub_download(request.repository, name, revision=snapshot.commit, cache_dir=_cache())
    _refuse_others(snapshot, names)  # a blob that was there already may be none
    missing = [name for name in names if not (snapshot.directory / name).is_file()]
    if missing:
        raise StorageError(hub_errors.half(request, f"{', '.join(missing)} did not arrive"))


def _refuse_others(snapshot: Snapshot, names: Iterable[str]) -> None:
    """StorageError where the cache has something that is no file in the place of one: huggingface_hub takes it."""
    for name in names:
        path = snapshot.directory / name
        if path.exists() and not path.is_file():
            what = "a directory" if path.is_dir() else "no regular file"
            raise StorageError(
                f"{path.resolve()}: {what} in the local Hub cache, expected the file {name} of {snapshot.name}; "
                f"remove it and run the same call again, which fetches the file"
            )


def _note_reference(snapshot: Snapshot, revision: str) -> None:
    """Notes in the cache, as huggingface_hub does, which commit a branch or tag is, for HF_HUB_OFFLINE. Only when its
    files are there: until then the older commit is what can be used without the Hub."""
    path = _folder(snapshot.repository) / "refs" / revision
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a cache that is read-only serves as well
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(snapshot.commit, "ascii")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _offline(request: Request, wanted: Wanted) -> Snapshot:
    """What the cache has; StorageError saying what it lacks."""
    snapshot = cached(request.repository, request.revision)
    if snapshot is None:
        others = ", ".join(_commits(request.repository))
        raise hub_errors.not_cached(request, f" (which has its commits {others})" if others else "")
    missing = _missing(snapshot, wanted)
    _refuse_others(snapshot, missing)
    if missing:
        dangling = [name for name in missing if (snapshot.directory / name).is_symlink()]
        why = f" ({dangling[0]} is a link to a blob that is not there)" if dangling else ""
        raise StorageError(
            f"{request}: the local Hub cache has it only in part: missing {', '.join(missing[:_SHOWN])}{why}, and "
            f"HF_HUB_OFFLINE is set; unset it, or complete it where there is a network by `{request.download}`"
        )
    return snapshot


def is_known(repository: str) -> bool:
    """The local cache has something of it, so that the text which named it meant no path."""
    return bool(_commits(repository))


def _missing(snapshot: Snapshot, wanted: Wanted) -> list[str]:
    """What the cache lacks of the files that nothing can be done without. Other optional files that it has not count
    as not there: a plain `hf download` fetches all there is and leaves no note of what there is not."""
    if not snapshot.directory.is_dir():
        return [*wanted.required, *wanted.exact] or ["everything"]
    return [name for name in (*wanted.required, *wanted.exact) if not _settled(snapshot, name, wanted)]


def _is_complete(snapshot: Snapshot, wanted: Wanted) -> bool:
    """Of every wanted file the cache has it, or knows that the repository has none of the name."""
    return all(_settled(snapshot, name, wanted) for name in (*wanted.required, *wanted.optional))


def _settled(snapshot: Snapshot, name: str, wanted: Wanted) -> bool:
    if (snapshot.directory / name).is_file():
        return True
    folder = snapshot.directory.parent.parent / ".no_exist" / snapshot.commit
    return name not in wanted.required and (folder / name).is_file()


def _mark_absent(snapshot: Snapshot, names: Iterable[str]) -> None:
    """Lets huggingface_hub note in its cache that the repository has no such files: a later call need not ask."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in sorted(names):
        # Without the note the next call asks again, no more; so no failure here is one of the call.
        with contextlib.suppress(EntryNotFoundError, OSError, *hub_errors.transport()):
            hf_hub_download(snapshot.repository, name, revision=snapshot.commit, cache_dir=_cache())


def _check(snapshot: Snapshot, wanted: Wanted, *, quick: bool) -> None:
    """The cached files are what their names in the cache say."""
    names = [*wanted.required, *wanted.optional]
    if wanted.also is not None:
        below = (path.relative_to(snapshot.directory) for path in snapshot.directory.rglob("*"))
        names += wanted.choose(sorted(path.as_posix() for path in below))
    for name in dict.fromkeys(names):
        path = snapshot.directory / name
        if not path.is_file():
            continue
        try:
            problem = _damage(path, quick=quick)
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
        if problem is not None:
            raise StorageError(
                f"{path.resolve()}: damaged in the local Hub cache: {problem}. It is {name} of {snapshot.name}; remove "
                f"this file and run the same call again, which fetches it anew"
            )


def _damage(path: Path, *, quick: bool) -> str | None:
    """A blob is named by its sha256, or by git's sha1 of it; big files have the former."""
    blob, size = path.readlink().name if path.is_symlink() else "", path.stat().st_size
    found = None
    if re.fullmatch(r"[0-9a-f]{64}", blob) and (size <= _SMALL or not quick):
        found = sha256_file(path)
    elif re.fullmatch(r"[0-9a-f]{40}", blob) and size <= _SMALL:
        raw = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
    if found is not None:
        return None if found == blob else f"its {size:,} bytes are not those that its name stands for"
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = read_header(file.fileno())
        return header.problems[0] if header.problems else None
    return None


def _lacking(request: Request, snapshot: Snapshot, lacking: Sequence[str], names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    below = sorted({name.removesuffix(lacking[0]) for name in names if name.endswith(f"/{lacking[0]}")})
    hint = (
        f"download it by `{request.download} --local-dir DIR` and name DIR/{below[0].strip('/')}"
        if below
        else ""
    )
    return (
        f"{request}: the repository is no {request.what}: at commit {snapshot.commit} it lacks {', '.join(lacking)}; "
        f"it holds {shown or 'nothing'}. Expected the files of a {request.what} at its root; "
        f"{hint or 'name another repository or revision'}"
    )


def _hint(request: Request, wanted: Wanted) -> str | None:
    """What the cache could serve while the Hub can not be reached: said, not silently taken."""
    snapshot = cached(request.repository, request.revision)
    if snapshot is None or request.revision == snapshot.commit or _missing(snapshot, wanted):
        return None
    return f"{snapshot.name} is in the local cache: name it so, or set HF_HUB_OFFLINE=1"


def _commit(revision: str | None) -> str | None:
    """A revision that is a full commit."""
    return revision if isinstance(revision, str) and _COMMIT.fullmatch(revision) else None


def _snapshot(repository: str, commit: str) -> Snapshot:
    return Snapshot(
        repository=repository, commit=commit, directory=_folder(repository) / "snapshots" / commit
    )


def _reference(repository: str, revision: str) -> str | None:
    """The commit that a branch or tag was, when it was last asked for."""
    try:
        commit = (_folder(repository) / "refs" / revision).read_text("ascii").strip()
    except (OSError, UnicodeError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _commits(repository: str) -> list[str]:
    try:
        return sorted(path.name for path in (_folder(repository) / "snapshots").iterdir())
    except OSError:
        return []


def _folder(repository: str) -> Path:
    return _cache() / f"models--{repository.replace('/', '--')}"


def _cache() -> Path:
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if own:
        return Path(own).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"
