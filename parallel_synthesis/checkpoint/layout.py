"""Names and places: the files of a run and of a checkpoint, how a checkpoint is found, and what disk a run
needs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from parallel_synthesis.checkpoint.nearby import nothing_at
from parallel_synthesis.checkpoint.retention import keep
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.config import CheckpointConfig
from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance import hub
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.lineage import MERGE_META
from parallel_synthesis.provenance.manifest import MANIFEST, listing, verify_quick
from parallel_synthesis.provenance.schema import parse_json

CACHE_MAPPER = "cache_mapper.pt"
CACHE_MAPPER_CONFIG = "cache_mapper_config.json"
JUDGER_LORA = "judger_lora"
ADAPTER_CONFIG = f"{JUDGER_LORA}/adapter_config.json"
ADAPTER_MODEL = f"{JUDGER_LORA}/adapter_model.safetensors"
TRAINING_STATE = "training_state.pt"
CHECKPOINT_META = "checkpoint_meta.json"
COMPONENT_ENTRIES = (
    CACHE_MAPPER,
    CACHE_MAPPER_CONFIG,
    JUDGER_LORA,
    TRAINING_STATE,
    CHECKPOINT_META,
    MANIFEST,
)
# What a checkpoint's user reads of it; a training state is more than twice the size and asked for by name.
HUB_REQUIRED = (CACHE_MAPPER, ADAPTER_CONFIG, ADAPTER_MODEL)
HUB_OPTIONAL = (CACHE_MAPPER_CONFIG, CHECKPOINT_META, MERGE_META, MANIFEST)

RUN_ARGS = "run_args.json"
TRAIN_LOG = "train.log"
SUMMARY = "train_mixed_summary.json"
STEP_CHECKPOINTS = "step_checkpoints"
LATEST = "latest"
MILESTONES = "milestones"
SUPERSEDED = "superseded"

_STEP = re.compile(r"step_([0-9]{9}|[1-9][0-9]{9,})")
_MILESTONE = re.compile(r"(?P<recipe>.+)_step_(?P<step>0|[1-9][0-9]*)", re.DOTALL)


class StepCheckpoint(NamedTuple):
    """A committed step checkpoint of a run."""

    step: int
    path: Path


@dataclass(frozen=True)
class RunPaths:
    """The paths of a run directory; nothing is created or looked at."""

    out: Path

    @property
    def run_args(self) -> Path:
        return self.out / RUN_ARGS

    @property
    def train_log(self) -> Path:
        return self.out / TRAIN_LOG

    @property
    def summary(self) -> Path:
        return self.out / SUMMARY

    @property
    def manifest(self) -> Path:
        """The final manifest: there only when the run is complete."""
        return self.out / MANIFEST

    @property
    def step_checkpoints(self) -> Path:
        return self.out / STEP_CHECKPOINTS

    @property
    def latest(self) -> Path:
        return self.step_checkpoints / LATEST

    @property
    def milestones(self) -> Path:
        return self.out / MILESTONES

    @property
    def superseded(self) -> Path:
        return self.out / SUPERSEDED

    def step(self, step: int) -> Path:
        return self.step_checkpoints / step_name(step)

    def milestone(self, recipe: str, step: int) -> Path:
        return self.milestones / milestone_name(recipe, step)


def step_name(step: int) -> str:
    """95060 -> "step_000095060"; nine digits or more, so that names sort as steps do."""
    if step < 0:
        raise ValueError(f"step {step}: expected 0 or more")
    return f"step_{step:09d}"


def parse_step(name: str) -> int | None:
    """The step of a step directory's name, None for any other name (names are matched whole)."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def milestone_name(recipe: str, step: int) -> str:
    """("general", 95060) -> "general_step_95060". CheckpointError for a recipe name that is no file name."""
    if not recipe or recipe.startswith(".") or not recipe.isprintable() or re.search(r"[/\\@]", recipe):
        raise CheckpointError(
            f"recipe name {recipe!r} cannot name a milestone; expected a name without / \\ @ and leading dot"
        )
    return f"{recipe}_step_{step}"


def parse_milestone(name: str) -> tuple[str, int] | None:
    """(recipe, step) of a milestone directory's name, None for any other name."""
    match = _MILESTONE.fullmatch(name)
    return (match["recipe"], int(match["step"])) if match and not name.startswith(".") else None


def is_committed(directory: Path) -> bool:
    """The directory has a manifest: it was committed (which does not yet say that it is still whole)."""
    manifest = directory / MANIFEST
    # A snapshot of the Hub cache consists of links.
    return manifest.is_file() and (not manifest.is_symlink() or Inside.of(directory).blobs is not None)


def newest_committed(run: Path) -> list[StepCheckpoint]:
    """The committed step checkpoints of a run directory, newest first; empty when there are none.

    StorageError when the directory is there and cannot be listed: that is not the same as having no
    checkpoint.
    """
    found = []
    for name in _names(run / STEP_CHECKPOINTS):
        step = parse_step(name)
        path = run / STEP_CHECKPOINTS / name
        if step is not None and not path.is_symlink() and is_committed(path):
            found.append(StepCheckpoint(step, path))
    return sorted(found, reverse=True)


def committed_milestones(run: Path) -> dict[str, Path]:
    """Name -> directory of every committed milestone or snapshot of a run, sorted by name."""
    places = {name: run / MILESTONES / name for name in _names(run / MILESTONES) if not name.startswith(".")}
    return {name: path for name, path in sorted(places.items()) if is_committed(path)}


class Located(NamedTuple):
    """The components that an argument means. name: what a record keeps of it: the argument, or of a Hub id
    hf://owner/name@commit, which means the same bytes for ever."""

    name: str
    directory: Path


def locate(given: Path | str, *, more: Sequence[str] = (), quick: bool = False) -> Located:
    """`find_components`, with the name to record. more: further files wanted of a Hub repository that has them. quick:
    its big files are not hashed, as they are for whoever uses them or records what they gave."""
    if hub.hub_id(str(given)) is None:
        return Located(str(given), find_components(given))
    wanted = hub.Wanted(required=HUB_REQUIRED, optional=(*HUB_OPTIONAL, *more))
    snapshot = hub.fetched(str(given), wanted, quick=quick)
    return Located(snapshot.name, snapshot.directory)


def locate_whole(given: Path | str) -> Located:
    """`locate`, and of a Hub repository with a manifest every file that it lists."""
    found = locate(given, more=(f"{JUDGER_LORA}/README.md",))
    if hub.hub_id(str(given)) is None or not is_committed(found.directory):
        return found
    return locate(found.name, more=(f"{JUDGER_LORA}/README.md", *listing(found.directory).files))


def find_components(path: Path | str) -> Path:
    """The directory that holds the components meant by `path`; see "Training directory" in the formats.

    A Hub id is fetched into the local cache, which is what is returned; a local path of its form comes first.
    A checkpoint directory is itself. A run directory: its own components, else latest/, else
    step_checkpoints/latest/. In a run of ours its own components count only under a valid final manifest, and
    where `latest` is missing or dangling the newest committed step checkpoint is taken. RUN@NAME is the
    milestone (or step directory) NAME of RUN; an existing path that happens to contain an @ wins.
    CheckpointError saying what was expected and what there is.
    """
    if hub.hub_id(str(path)) is not None:
        return locate(path).directory
    given = Path(path).expanduser()
    if not _exists(given):
        run, at, name = str(given).rpartition("@")
        if at and run and Path(run).is_dir():
            return _named(Path(run), name)
        raise nothing_at(str(path))
    if not given.is_dir():
        raise CheckpointError(
            f"{given} is not a directory; expected a checkpoint, a run directory or RUN@NAME"
        )
    # In a run of the reference implementation some may have been given a manifest; that makes none the newest.
    committed = [] if _is_theirs(given) else newest_committed(given)
    if _has_components(given) and (not committed or not verify_quick(given, extra=False)):
        return given
    for latest in (given / LATEST, given / STEP_CHECKPOINTS / LATEST):
        if _has_components(latest) and (not committed or is_committed(latest)):
            return latest.resolve()
    if committed:
        return committed[0].path
    raise CheckpointError(
        f"{given} holds no components; expected {CACHE_MAPPER} and {ADAPTER_MODEL} in it, "
        f"in {LATEST}/ or in {STEP_CHECKPOINTS}/{LATEST}/; name another directory"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a directory that must not be entered, a name too long: nothing_at says which
        return False


def _named(run: Path, name: str) -> Path:
    for path in (run / MILESTONES / name, run / STEP_CHECKPOINTS / name):
        if name not in ("", ".", "..") and "/" not in name and _has_components(path) and is_committed(path):
            return path
    steps = [step_name(found.step) for found in newest_committed(run)]
    there = ", ".join([*committed_milestones(run), *steps]) or "none"
    raise CheckpointError(f"{run} has no milestone or step checkpoint named {name!r}; there are: {there}")


def _is_theirs(run: Path) -> bool:
    record = Inside(run).read(RUN_ARGS, limit=1 << 20)
    try:
        return isinstance(record, bytes) and is_reference_record(parse_json(record, RUN_ARGS))
    except CheckpointError:
        return False


def _has_components(directory: Path) -> bool:
    return (directory / CACHE_MAPPER).is_file() and (directory / ADAPTER_MODEL).is_file()


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageError(
            f"cannot list {directory}: {error.strerror}; check its permissions and the disk"
        ) from error


def saved_steps(steps_total: int, config: CheckpointConfig) -> list[int]:
    """The global steps at which a run of `steps_total` steps saves: 0, every N, the milestones it reaches,
    the end."""
    regular = range(0, steps_total + 1, config.every) if config.every else range(0)
    return sorted({0, steps_total, *regular, *(step for step in config.milestones if step <= steps_total)})


def kept_steps(steps_total: int, config: CheckpointConfig) -> list[int]:
    """The steps whose bytes are on the disk when they are most: what is kept, and the last save being
    written.

    That is the peak: a save adds one and retention then removes at most one. Milestones share their step's
    bytes.
    """
    *earlier, newest = saved_steps(steps_total, config)
    kept = keep(earlier, last=config.keep_last, every=config.keep_every, named=set(config.milestones))
    return sorted(kept | {newest})


def disk_needed(
    component_bytes: int, steps_total: int, config: CheckpointConfig, *, links: bool = True
) -> int:
    """Bytes of disk that a run's checkpoints take at their peak.

    component_bytes: bytes of one checkpoint. links: hard links work, so that milestones and the final
    components in OUT cost nothing; without them each milestone and the final set are copies.
    """
    copies = 0 if links else 1 + len({step for step in config.milestones if step <= steps_total})
    return component_bytes * (len(kept_steps(steps_total, config)) + copies)


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write on the file system of `path`, which need not exist yet."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        stats = os.statvfs(place)
    except OSError as error:
        raise StorageError(
            f"cannot ask {place} for its free space: {error.strerror}; name another directory"
        ) from error
    return stats.f_bavail * stats.f_frsize
