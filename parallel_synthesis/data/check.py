"""Input files against what a manifest says of them: bytes, sha256 and rows, gzip packed and unpacked (no torch)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from parallel_synthesis.data.cache import Entry, Identity, cache_directory
from parallel_synthesis.data.index import Loose, loose_among
from parallel_synthesis.data.manifests import ManifestEntry, entries_of, manifest_entry
from parallel_synthesis.data.source import GZIP_MAGIC, GzipSource, PlainSource, Source, chunks_ahead
from parallel_synthesis.data.tasks import find_task, task_path
from parallel_synthesis.errors import CheckpointError, DataError, ManifestError, StorageError
from parallel_synthesis.provenance.problems import Problem, ProblemKind
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.recipe import load_recipe
from parallel_synthesis.resources import resource

if TYPE_CHECKING:
    from typing import BinaryIO

    from parallel_synthesis.data.index import RowFile

TRAINING_DATA = resource("manifests", "training_data.json")
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A file and what it must be. entry: None when no manifest speaks of it; says: the manifest that does."""

    task: str
    path: Path
    entry: ManifestEntry | None
    says: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came out for one file. rows: lines that are not blank, None when they were not counted.

    loose: branches whose extract is not the end of its context, None where no index of this content is in the cache.
    """

    task: str
    path: Path
    problems: tuple[Problem, ...]
    bytes: int | None = None
    sha256: str | None = None
    rows: int | None = None
    unpacked_bytes: int | None = None
    unpacked_sha256: str | None = None
    loose: Loose | None = None


def wanted_files(what: str, *, root: Path | None = None) -> list[Wanted]:
    """The files meant by `what`: a recipe (name or .toml), a data manifest (.json), a run, or one data file.

    root: where a manifest's relative paths begin, in the place of the recipe's data.root or the current
    directory. Raises ConfigError, DataError or ManifestError for what is none of these.
    """
    path = Path(what).expanduser()
    if path.is_dir():
        return _of_run(path, root)
    if path.suffix == ".json" and path.exists():
        return _of_manifest(path, root)
    if path.exists() and path.suffix != ".toml":
        return [_of_file(path)]
    return _of_recipe(what, root)


def _of_manifest(path: Path, root: Path | None) -> list[Wanted]:
    document = load_json(path, "data_manifest", error=lambda message: ManifestError([message]))
    return [
        Wanted(task=entry.task, path=(root or Path()) / entry.path, entry=entry, says=str(path))
        for entry in entries_of(document)
    ]


def _of_run(run: Path, root: Path | None) -> list[Wanted]:
    try:
        record = load_json(run / "run_args.json", "run_args")
    except StorageError as error:
        raise DataError(
            f"{run}: expected a run (with run_args.json), a recipe, a manifest or a file"
        ) from error
    data = record.get("data")
    if not isinstance(data, dict) or not data:
        raise DataError(f"{run}: its run_args.json records no data; name the recipe or the files")
    return [
        Wanted(
            task=task,
            path=Path(known["path"]) if root is None else root / known["path"],
            entry=ManifestEntry(
                task=task,
                path=known["path"],
                # The rows in use are fewer than the lines where rows were left out.
                rows=None,
                bytes=known["bytes"],
                sha256=known["sha256"],
                unpacked_sha256=known.get("unpacked_sha256"),
            ),
            says=str(run / "run_args.json"),
        )
        for task, known in data.items()
    ]


def _of_file(path: Path) -> Wanted:
    """A single file, recognised by the end of its path; by its name alone where only one entry has that name."""
    entries = entries_of(read_json(TRAINING_DATA), released=True)
    parts = path.absolute().parts
    fitting = [entry for entry in entries if Path(entry.path).name in (path.name, f"{path.name}.gz")]
    exact = [entry for entry in fitting if _tail(parts, entry.path) >= 2]
    found = exact or (fitting if len(fitting) == 1 else [])
    if not found:
        return Wanted(task=path.stem, path=path, entry=_beside(path, path.stem), says=_says(path))
    best = max(found, key=lambda entry: _tail(parts, entry.path))
    return Wanted(task=best.task, path=path, entry=best, says=TRAINING_DATA.name)


def _tail(parts: Sequence[str], path: str) -> int:
    """How many names at their ends two paths share; a missing .gz does not count."""
    shared = 0
    for ours, listed in zip(reversed(parts), reversed(Path(path).parts), strict=False):
        if ours != listed and f"{ours}.gz" != listed:
            break
        shared += 1
    return shared


def _of_recipe(what: str, root: Path | None) -> list[Wanted]:
    config = load_recipe(what).config
    wanted = []
    for name in config.data.tasks:
        task = find_task(name, own=config.data.files)
        path = task_path(task, root=str(root or config.data.root), files=config.data.files)
        entry = manifest_entry(task.name)
        says: str | None = TRAINING_DATA.name
        if entry is None or _tail(path.parts, entry.path) < 2:
            entry, says = _beside(path, task.name), _says(path)
        wanted.append(Wanted(task=task.name, path=path, entry=entry, says=says))
    return wanted


def _manifests_beside(path: Path) -> list[tuple[Path, str]]:
    """(manifest.json, name of the file in it) in the file's own directory and the one above."""
    return [
        (path.parent / "manifest.json", path.name),
        (path.parent.parent / "manifest.json", f"{path.parent.name}/{path.name}"),
    ]


def _says(path: Path) -> str | None:
    return next((str(place) for place, name in _manifests_beside(path) if _listed(place, name)), None)


def _beside(path: Path, task: str) -> ManifestEntry | None:
    for place, name in _manifests_beside(path):
        known = _listed(place, name)
        if known:
            return ManifestEntry(
                task=task, path=name, rows=known.get("rows"), bytes=known["bytes"], sha256=known["sha256"]
            )
    return None


def _listed(place: Path, name: str) -> Mapping[str, Any]:
    if not place.is_file():
        return {}
    try:
        document = read_json(place)
    except CheckpointError:
        return {}
    files = document.get("files") if isinstance(document, dict) else None
    known = files.get(name) if isinstance(files, dict) else None
    return known if isinstance(known, dict) and {"bytes", "sha256"} <= known.keys() else {}


def check_files(
    wanted: Sequence[Wanted], *, quick: bool = False, jobs: int = 1, progress: Progress | None = None
) -> list[Found]:
    """Checks the files, `jobs` at a time, each read once. quick: sizes only. progress: bytes read, from any thread."""

    def one(item: Wanted) -> Found:
        return _check(item, quick=quick, progress=progress)

    with ThreadPoolExecutor(max(1, jobs), thread_name_prefix="verify-data") as pool:
        return list(pool.map(one, wanted))


def difference(file: RowFile) -> str | None:
    """The cheap check of a run's start, on what indexing knows already: why a usual file is not what the manifest
    says, None when it is or no manifest speaks of it. Rows are compared where none are left out."""
    entry = manifest_entry(file.task)
    if entry is None or _tail(file.path.absolute().parts, entry.path) < 2:
        return None
    text = file.path.name != Path(entry.path).name  # the unpacked text of a file that is listed packed
    size, sha256 = (entry.unpacked_bytes, entry.unpacked_sha256) if text else (entry.bytes, entry.sha256)
    if file.bytes != size:
        return f"{file.path}: {file.bytes:,} bytes; {TRAINING_DATA.name} says {size:,}"
    if file.sha256 != sha256:
        return f"{file.path}: sha256 {file.sha256[:16]}...; {TRAINING_DATA.name} says {str(sha256)[:16]}..."
    return None


def _check(item: Wanted, *, quick: bool, progress: Progress | None) -> Found:
    path, entry = item.path, item.entry
    if entry is not None and not path.exists() and path.suffix == ".gz" and path.with_suffix("").exists():
        path = path.with_suffix("")  # its text lies there unpacked
    say = _Said(path)
    if entry is None:
        say("manifest", "no manifest says what this file must be, so nothing was checked")
        return Found(task=item.task, path=path, problems=tuple(say.found))
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - before opening: opening a pipe would wait for its writer
        if not stat.S_ISREG(mode):
            say("not a regular file", "expected a file")
            return Found(task=item.task, path=path, problems=tuple(say.found))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        say("missing", "missing")
        return Found(task=item.task, path=path, problems=tuple(say.found))
    except OSError as error:
        say("unreadable", f"cannot be read: {error.strerror}")
        return Found(task=item.task, path=path, problems=tuple(say.found))
    try:
        return _compare(item.task, path, fd, entry, say, quick=quick, progress=progress)
    except DataError as error:
        say("structure", str(error).removeprefix(f"{path}: "))
    except (StorageError, OSError) as error:
        say("unreadable", str(error))
    finally:
        os.close(fd)
    return Found(task=item.task, path=path, problems=tuple(say.found))


def _compare(
    task: str,
    path: Path,
    fd: int,
    entry: ManifestEntry,
    say: _Said,
    *,
    quick: bool,
    progress: Progress | None,
) -> Found:
    before = os.fstat(fd)
    size = before.st_size
    packed = os.pread(fd, len(GZIP_MAGIC), 0) == GZIP_MAGIC
    as_text = entry.path.endswith(".gz") and not packed and path.suffix != ".gz"
    if as_text and entry.unpacked_sha256 is not None:
        entry = ManifestEntry(
            task=entry.task,
            path=path.name,
            rows=entry.rows,
            bytes=entry.unpacked_bytes,
            sha256=entry.unpacked_sha256,
        )
    if entry.bytes is not None:
        say.differs("size", "bytes", entry.bytes, size)
    if quick or say.found:
        return Found(task=task, path=path, problems=tuple(say.found), bytes=size)
    source: Source = PlainSource(fd, path)
    text: GzipSource | None = None
    if packed:
        source = text = GzipSource(fd, path, cast("BinaryIO", _Nowhere()))
    rows = _rows(source, progress)
    sha256 = source.sha256()
    after = os.fstat(fd)
    if (after.st_size, after.st_mtime_ns, after.st_ctime_ns) != (
        size,
        before.st_mtime_ns,
        before.st_ctime_ns,
    ):
        say("changed", "changed while it was read; run this again when nobody writes to it")
    say.differs("digest", "sha256", entry.sha256, sha256)
    if text is not None and entry.unpacked_sha256 is not None:
        say.differs("digest", "sha256 of the unpacked text", entry.unpacked_sha256, text.text_sha256())
        if entry.unpacked_bytes is not None:
            say.differs("size", "bytes of the unpacked text", entry.unpacked_bytes, text.text_bytes)
    if entry.rows is not None:
        say.differs("structure", "rows", entry.rows, rows)
    return Found(
        task=task,
        path=path,
        problems=tuple(say.found),
        bytes=size,
        sha256=sha256,
        rows=rows,
        unpacked_bytes=text.text_bytes if text is not None else None,
        unpacked_sha256=text.text_sha256() if text is not None else None,
        loose=_loose(task, path, fd, sha256),
    )


def _loose(task: str, path: Path, fd: int, sha256: str) -> Loose | None:
    """What indexing has found, where it is known: to look into every row here would double the time."""
    entry = Entry(cache_directory(), path, find_task(task, own=(task,)))
    index = entry.load(Identity.of(fd))
    if index is None or index.sha256 != sha256:
        return None
    return loose_among(index.rows, len(index.rows.offsets))


def _rows(source: Source, progress: Progress | None) -> int:
    """Lines that are not blank; a last one need not end."""
    rows, told, started = 0, 0, False

    def done() -> None:
        nonlocal told
        if progress is not None:
            progress(source.bytes_read - told)
            told = source.bytes_read

    for chunk in chunks_ahead(source, done):
        first, *rest = chunk.split(b"\n")
        started = started or not (not first or first.isspace())
        for line in rest:
            rows += started
            started = not (not line or line.isspace())
    return rows + started


class _Said:
    """Collects the problems of one file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self.found: list[Problem] = []

    def __call__(
        self, kind: ProblemKind, detail: str, *, expected: object = None, actual: object = None
    ) -> None:
        self.found.append(
            Problem(path=self._path, kind=kind, detail=detail, expected=expected, actual=actual)
        )

    def differs(self, kind: ProblemKind, what: str, expected: object, actual: object) -> None:
        if expected != actual:
            self(kind, f"{what}: expected {expected}, found {actual}", expected=expected, actual=actual)


class _Nowhere:
    """Takes the unpacked text, which is hashed and counted on its way and not kept."""

    def write(self, data: bytes) -> int:
        return len(data)
