"""Which run made a checkpoint, and with which settings: proved, or not used (no torch).

A checkpoint of ours carries its run's record (`run` of checkpoint_meta.json), so that it can go on without the run's
directory. Older ones and the reference's only name a directory, `source_run_dir`, usually relative: on another machine,
or in another working directory, that is a run like any other. It counts only where it holds the very same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.compat import is_reference_record
from parallel_synthesis.errors import CheckpointError, ParallelSynthesisError
from parallel_synthesis.provenance import drift
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.schema import load_json, read_json, validate

# What only one run can have made: its optimizer's moments, counters and random streams. An adapter may have been
# exported with embeddings that it was saved without.
_PROOF = (layout.TRAINING_STATE, layout.CACHE_MAPPER)
_OURS = ("schema_version", "recipe", "parents")  # of checkpoint_meta.json; the reference's has none of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """run: the directory of the run that made the checkpoint. record: its settings, as run_args.json has them, when
    it is a run of ours. doubt: why the directory that the checkpoint names is not used, empty where nothing is named.
    ours: the checkpoint is one of ours, by its files.
    """

    run: Path | None
    record: Mapping[str, Any] | None
    doubt: str
    ours: bool


def origin_of(checkpoint: Path) -> Origin:
    """Looks at the checkpoint's own record, the run it lies in, and the run it names.

    Raises CheckpointError where it lies in a run that can not have made it.
    """
    meta = read_json(checkpoint / layout.CHECKPOINT_META)
    own = meta.get("run")
    if own is not None:
        own = {**own, "argv": own.get("argv", [])}
        validate(own, "run_args", f"{checkpoint / layout.CHECKPOINT_META}: run")
    ours = layout.is_committed(checkpoint) and any(key in meta for key in _OURS)
    run, doubt = run_around(checkpoint), ""
    if run is None:
        run, doubt = _named(checkpoint, meta.get("source_run_dir"))
    record = None if run is None else _record(run)
    if own is None or not ours:
        return Origin(run=run, record=record if ours else None, doubt=doubt, ours=ours)
    if run is None or run_around(checkpoint) is None:
        return Origin(run=run, record=own, doubt=doubt, ours=True)
    if record is None:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of ours, and {run} is a run of the reference implementation: they do not "
            f"belong together; give the checkpoint in a directory of its own"
        )
    known = (
        own if own.get("backbone") else {**own, "backbone": record.get("backbone", {})}
    )  # of a conversion: not known
    found = drift.refused(drift.compare(known, record), record.get("accepted_drift", ()))
    if found:
        listed = "".join(f"\n  {item.name}  {item.saved}  {item.now}" for item in found)
        raise CheckpointError(
            f"{run / layout.RUN_ARGS} is not the record of the run that made {checkpoint}:{listed}\n"
            f"Restore the record, or give the checkpoint in a directory of its own: it carries its run's settings"
        )
    return Origin(run=run, record=record, doubt="", ours=True)


def run_around(checkpoint: Path) -> Path | None:
    """The run in whose layout a checkpoint lies. A directory that happens to lie below a run is not part of it."""
    inside = checkpoint.resolve()
    above = inside.parent
    run = None
    if (inside / layout.RUN_ARGS).is_file():
        run = inside
    elif above.name in (layout.STEP_CHECKPOINTS, layout.MILESTONES):
        run = above.parent
    elif above.parent.name == layout.SUPERSEDED:
        run = above.parent.parent
    elif inside.name == layout.LATEST:
        run = above
    return run if run is not None and (run / layout.RUN_ARGS).is_file() else None


def _named(checkpoint: Path, given: Any) -> tuple[Path | None, str]:
    """The run that a checkpoint names, if it is proved to be its run; else why not."""
    if not isinstance(given, str) or not given:
        return None, ""
    run = Path(given)
    if not (run / layout.RUN_ARGS).is_file():
        return None, f"there is no run at {given}, which it names as its own"
    if any(_is_same(checkpoint, place) for place in _checkpoints(run)):
        return run, ""
    return None, f"the run at {given}, which it names as its own, does not hold this checkpoint"


def _checkpoints(run: Path) -> Iterator[Path]:
    yield run
    yield run / layout.LATEST
    for folder in (layout.STEP_CHECKPOINTS, layout.MILESTONES, f"{layout.SUPERSEDED}/*"):
        yield from sorted(run.glob(f"{folder}/*"))


def _is_same(checkpoint: Path, place: Path) -> bool:
    """The same step and the same bytes of what only one run can have made."""
    files = [(checkpoint / name, place / name) for name in _PROOF]
    meta = place / layout.CHECKPOINT_META
    if not meta.is_file() or not all(other.is_file() for _, other in files):
        return False
    try:
        if (
            read_json(meta).get("global_step")
            != read_json(checkpoint / layout.CHECKPOINT_META)["global_step"]
        ):
            return False
    except ParallelSynthesisError:
        return False
    return all(
        one.stat().st_size == other.stat().st_size and sha256_file(one) == sha256_file(other)
        for one, other in files
    )


def _record(run: Path) -> Mapping[str, Any] | None:
    path = layout.RunPaths(run).run_args
    if is_reference_record(read_json(path)):
        return None
    record: Mapping[str, Any] = load_json(path, "run_args")
    return record
