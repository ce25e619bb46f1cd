"""A new run that goes on from another run's checkpoint: one of ours (copied) or the reference's (converted).

Nothing of the source is changed. The new directory is made under a hidden name and renamed when it is whole; then an
ordinary resume takes it up, so that whatever follows has the promises of a run of ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis import compat
from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.commit import link_checkpoint, set_latest
from parallel_synthesis.checkpoint.replace import replace_json
from parallel_synthesis.errors import CheckpointError, ConfigError, StorageError
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.recipe import Resolved, load_recipe
from parallel_synthesis.resources import resource
from parallel_synthesis.training.log import LogWriter, count_attempts
from parallel_synthesis.training.plan import refuse_existing, with_canonical_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint with a training state. run: the run it is of, when its run_args.json is there. ours: by its files."""

    given: str
    checkpoint: Path
    step: int
    run: Path | None
    ours: bool


def find_source(given: str, *, step: int | None = None) -> Source | None:
    """The checkpoint that `given` (a run, a checkpoint, RUN@NAME, a Hub id) means: that of `step`, else the newest.

    None where there are components without a training state. Raises CheckpointError where there is no such checkpoint.
    """
    path = Path(given).expanduser()
    if not path.is_dir():  # of a Hub repository its run's record too, which tells whose checkpoint it is
        given, path = layout.locate(given, more=(layout.TRAINING_STATE, layout.RUN_ARGS))
    places = [path, path / layout.LATEST]
    if (path / layout.STEP_CHECKPOINTS).is_dir():
        places += sorted((path / layout.STEP_CHECKPOINTS).iterdir())
    places += layout.committed_milestones(path).values()
    found: dict[int, Path] = {}
    for place in places:
        of_run = layout.RunPaths(path).run_args.exists() and place.parent.name == layout.STEP_CHECKPOINTS
        if not _can_continue(place) or (of_run and _is_ours(path) and not layout.is_committed(place)):
            continue
        found.setdefault(_step(place), place.resolve())
    if not found:
        layout.find_components(path)  # its error says what was expected
        return None
    wanted = max(found) if step is None else step
    if wanted not in found:
        there = ", ".join(map(str, sorted(found)))
        raise CheckpointError(f"{given} has no training state of step {wanted}; there are those of: {there}")
    run = _run_of(found[wanted])
    ours = layout.is_committed(found[wanted]) and run is not None and _is_ours(run)
    return Source(given=given, checkpoint=found[wanted], step=wanted, run=run, ours=ours)


def begin(
    source: Source,
    out: Path,
    *,
    recipe: str | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] = (),
) -> list[str]:
    """Makes `out` a run that stands at the source's step; returns what could not be carried over, one sentence each.

    recipe: what a reference run's own flags are laid over (milestones, for instance). sets: over both.
    environ: read only where the source has no run_args.json. Raises RunExistsError when `out` is taken.
    """
    paths = layout.RunPaths(out)
    refuse_existing(paths)
    hidden = layout.RunPaths(out.absolute().with_name(f".{out.name}.continuation"))
    try:
        if hidden.out.exists():  # of an earlier call that was killed
            shutil.rmtree(hidden.out)
        hidden.step_checkpoints.mkdir(parents=True)
        if source.ours:
            said = _copy(source, hidden)
        else:
            said = _convert(source, hidden, paths, recipe=recipe, sets=sets, environ=environ or {}, argv=argv)
        set_latest(hidden.step_checkpoints, source.step)
        _copy_log(source, hidden, said)
        if out.is_dir():
            out.rmdir()  # empty: refuse_existing has looked
        hidden.out.rename(out)
    except OSError as error:
        raise StorageError(f"{out}: {error.strerror}; check permissions and space") from error
    finally:
        shutil.rmtree(hidden.out, ignore_errors=True)
    return said


def wait_for(out: Path) -> bool:
    """True when `begin` has made `out` in another process."""
    return layout.RunPaths(out).run_args.exists()


def _copy(source: Source, hidden: layout.RunPaths) -> list[str]:
    assert source.run is not None
    record = load_json(layout.RunPaths(source.run).run_args, "run_args")
    link_checkpoint(source.checkpoint, hidden.step(source.step), copy=True)
    replace_json(hidden.run_args, record, "run_args")
    return []


def _convert(
    source: Source,
    hidden: layout.RunPaths,
    paths: layout.RunPaths,
    *,
    recipe: str | None,
    sets: Sequence[str],
    environ: Mapping[str, str],
    argv: Sequence[str],
) -> list[str]:
    # Here, not at the top: torch is not needed to find out what there is.
    from parallel_synthesis.checkpoint.reference_state import read_reference_state
    from parallel_synthesis.training.conversion import Converted, convert

    state, said = read_reference_state(source.checkpoint / layout.TRAINING_STATE)
    by_rank = state.get("rank_state_by_rank")
    resolved, more = _resolve(source, len(by_rank) if by_rank else 1, recipe, sets, environ)
    said += more
    converted: Converted = convert(
        source.checkpoint, state, resolved, given=source.given, out=paths.out, argv=argv
    )
    said += converted.said
    converted.write(hidden.step(source.step))
    replace_json(hidden.run_args, converted.record.document(), "run_args")
    return said


def _resolve(
    source: Source, ranks: int, recipe: str | None, sets: Sequence[str], environ: Mapping[str, str]
) -> tuple[Resolved, list[str]]:
    """The config: recipe, then the reference's flags, then what its files say of themselves, then `sets`."""
    record: Mapping[str, Any] = {}
    sha256 = None
    if source.run is not None:
        path = layout.RunPaths(source.run).run_args
        record = read_json(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        if not compat.is_reference_record(record):
            raise CheckpointError(
                f"{source.checkpoint} has no manifest, so it is not a whole checkpoint of the run {source.run}"
            )
    flags = compat.settings(record, recorded=True)
    if flags.problems:
        raise ConfigError([f"{source.run}/{layout.RUN_ARGS}: {problem}" for problem in flags.problems])
    known = [*flags.assignments(), *_from_files(source.checkpoint), f"run.ranks={ranks}"]
    resolved = load_recipe(
        recipe or str(resource("recipes", "training", f"{compat.RECIPE_NAME}.toml")),
        sets=[*known, *sets],
        environ={} if record else environ,
        complete=with_canonical_tasks,
    )
    if resolved.config.run.ranks != ranks:
        raise ConfigError(
            [f"run.ranks = {resolved.config.run.ranks}: the training state is of {ranks} ranks"]
        )
    return dataclasses.replace(resolved, sha256=sha256 or resolved.sha256), list(flags.warnings)


def _from_files(checkpoint: Path) -> list[str]:
    """What a checkpoint's own files say, as `--set` takes it."""
    adapter = read_json(checkpoint / layout.ADAPTER_CONFIG)
    found = [f"lora.target_modules={json.dumps(sorted(adapter.get('target_modules') or []))}"]
    for key, name in (("r", "r"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")):
        if adapter.get(key) is not None:
            found.append(f"lora.{name}={json.dumps(adapter[key])}")
    path = checkpoint / layout.CACHE_MAPPER_CONFIG
    if path.is_file():
        config = read_json(path)
        found += [f"mapper.{key}={json.dumps(config[key])}" for key in ("hidden_dim", "metadata_features")]
    return found


def _copy_log(source: Source, hidden: layout.RunPaths, said: Sequence[str]) -> None:
    """The log so far goes along; steps after the source's are superseded by the resume that follows."""
    old = None if source.run is None else layout.RunPaths(source.run).train_log
    if old is not None and old.is_file():
        shutil.copyfile(old, hidden.train_log)
    log = LogWriter(hidden.train_log, ranks=2)  # the number of ranks only rules the tags of step lines
    attempt = max(1, count_attempts(hidden.train_log)) + 1  # remarks on the attempt that follows
    log.line(f"[resume] attempt={attempt} taken over at step {source.step} from {source.checkpoint}")
    for text in said:
        log.line(f"[resume] attempt={attempt} not carried over: {text}")
    log.close()


def _can_continue(place: Path) -> bool:
    names = (layout.CACHE_MAPPER, layout.ADAPTER_MODEL, layout.TRAINING_STATE, layout.CHECKPOINT_META)
    return not place.name.startswith(".") and all((place / name).is_file() for name in names)


def _step(checkpoint: Path) -> int:
    step: int = load_json(checkpoint / layout.CHECKPOINT_META, "checkpoint_meta")["global_step"]
    return step


def _run_of(checkpoint: Path) -> Path | None:
    """The run a checkpoint lies in; else the one it says it is of, when that is there."""
    inside = checkpoint.resolve()
    for place in (inside, inside.parent, inside.parent.parent):
        if (place / layout.RUN_ARGS).is_file():
            return place
    meta = checkpoint / layout.CHECKPOINT_META
    says = read_json(meta).get("source_run_dir") if meta.is_file() else None
    if isinstance(says, str) and says and (Path(says) / layout.RUN_ARGS).is_file():
        return Path(says)
    return None


def _is_ours(run: Path) -> bool:
    return not compat.is_reference_record(read_json(layout.RunPaths(run).run_args))
