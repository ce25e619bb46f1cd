"""A new run that goes on from another run's checkpoint: one of ours (copied) or the reference's (converted).

Nothing of the source is changed. The new directory is made under a hidden name and renamed when it is whole; then an
ordinary resume takes it up, so that whatever follows has the promises of a run of ours. The settings are those that the
checkpoint was provably made with (training.origin), or those of a recipe that the user names; never a guess.
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
from parallel_synthesis.checkpoint.structure import refuse_unsound
from parallel_synthesis.errors import CheckpointError, ConfigError, DataError, StorageError
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.recipe import Resolved, load_recipe, load_record
from parallel_synthesis.resources import resource
from parallel_synthesis.training.log import LogWriter, count_attempts
from parallel_synthesis.training.origin import Origin, origin_of, run_around
from parallel_synthesis.training.plan import missing_inputs, refuse_existing
from parallel_synthesis.training.records import parent_record
from parallel_synthesis.training.task_names import with_canonical_tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint with a training state.

    name: what records keep of it: RUN@NAME, a directory, a Hub id at its commit. origin: the run that made it, as far
    as that is proved.
    """

    given: str
    name: str
    checkpoint: Path
    step: int
    origin: Origin

    @property
    def run(self) -> Path | None:
        """The directory of the run that made it, where that is at hand."""
        return self.origin.run

    @property
    def ours(self) -> bool:
        """One of ours that needs no recipe: its run's record is known."""
        return self.origin.record is not None


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
    origin = origin_of(found[wanted])
    name = _name(given, found[wanted], origin)
    return Source(given=given, name=name, checkpoint=found[wanted], step=wanted, origin=origin)


def _name(given: str, checkpoint: Path, origin: Origin) -> str:
    """`given`, or where that is a run the form that goes on meaning this checkpoint of it: RUN@NAME."""
    run = Path(given).expanduser()
    if origin.run is None or not run.is_dir() or run.resolve() != origin.run.resolve():
        return given
    step = _step(checkpoint)
    names = [name for name, kept in layout.committed_milestones(run).items() if _step(kept) == step]
    if layout.is_committed(layout.RunPaths(run).step(step)):
        names.append(layout.step_name(step))
    return f"{run}@{names[0]}" if names else given


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

    recipe: the settings of a checkpoint whose run is not known; what a reference run's own flags are laid over
    (milestones, for instance). Not read for a checkpoint whose settings are known. sets: over all.
    environ: read only where the source has no run_args.json. Raises RunExistsError when `out` is taken, ConfigError
    where it is not known how the checkpoint was made and no recipe says it.
    """
    paths = layout.RunPaths(out)
    refuse_existing(paths)
    refuse_unknown(source, out, recipe=recipe)
    hidden = layout.RunPaths(out.absolute().with_name(f".{out.name}.continuation"))
    try:
        if hidden.out.exists():  # of an earlier call that was killed
            shutil.rmtree(hidden.out)
        hidden.step_checkpoints.mkdir(parents=True)
        if source.ours:
            said = _copy(source, hidden, sets, argv)
        elif source.origin.ours:
            assert recipe is not None, "refuse_unknown says so"
            said = _adopt(source, hidden, recipe=recipe, sets=sets, environ=environ or {}, argv=argv)
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


def refuse_unknown(source: Source, out: Path, *, recipe: str | None) -> None:
    """ConfigError where nothing proves with which settings the checkpoint was made, and no recipe is given."""
    if recipe is not None or source.ours or (source.run is not None and not source.origin.ours):
        return
    why = f" ({source.origin.doubt})" if source.origin.doubt else ""
    raise ConfigError(
        [
            f"{source.name} does not say with which settings it was made{why}: give its recipe by --recipe R (with --set "
            f"for what was set), or name a checkpoint in its run's own directory: "
            f"`ps resume RUN --step {source.step} --out {out}`"
        ]
    )


def settings_from(source: Source, recipe: str | None) -> str:
    """In words, where the settings of the new run come from."""
    if source.ours:
        inside = source.run is not None and run_around(source.checkpoint) is not None
        return f"those of {source.run}" if inside else "those that the checkpoint carries"
    given = f"those of recipe {recipe}"
    if source.run is not None:
        return f"those of {source.run}" + ("" if recipe is None else f", over {given}")
    return given + (f"; {source.origin.doubt}" if source.origin.doubt else "")


def _copy(source: Source, hidden: layout.RunPaths, sets: Sequence[str], argv: Sequence[str]) -> list[str]:
    record = source.origin.record
    assert record is not None
    where = (source.checkpoint if source.run is None else source.run) / layout.RUN_ARGS
    missing = missing_inputs(load_record(record, path=where, sets=sets).config)
    if missing:  # said before anything is made: on another machine the places are others
        listed = "".join(f"\n  - {text}" for text in missing)
        raise DataError(
            f"what the run of {source.name} was trained on is not where it was:{listed}\nsay where it is by "
            f"--set data.root=DIR, data.files.TASK=FILE or backbone.model=MODEL; its content is compared, not its place"
        )
    link_checkpoint(source.checkpoint, hidden.step(source.step), copy=True)
    kept = {"argv": list(argv), **record, "continued_from": parent_record(source.name, source.checkpoint)}
    replace_json(hidden.run_args, kept, "run_args")
    return []


def _adopt(
    source: Source,
    hidden: layout.RunPaths,
    *,
    recipe: str,
    sets: Sequence[str],
    environ: Mapping[str, str],
    argv: Sequence[str],
) -> list[str]:
    """One of ours from before checkpoints carried their run's record: the same bytes, the settings of a recipe."""
    # Here, not at the top: torch is not needed to find out what there is.
    from parallel_synthesis.training.conversion import adopt

    meta = load_json(source.checkpoint / layout.CHECKPOINT_META, "checkpoint_meta")
    resolved, said = _resolve(source, meta["ranks"], recipe, sets, environ)
    record, more = adopt(source.checkpoint, meta, resolved, argv=argv)
    link_checkpoint(source.checkpoint, hidden.step(source.step), copy=True)
    parent = parent_record(source.name, source.checkpoint)
    document = dataclasses.replace(record, continued_from=parent).document()
    replace_json(hidden.run_args, document, "run_args")
    return [*said, *more]


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

    refuse_unsound(source.checkpoint)
    state, said = read_reference_state(source.checkpoint / layout.TRAINING_STATE)
    by_rank = state.get("rank_state_by_rank")
    resolved, more = _resolve(source, len(by_rank) if by_rank else 1, recipe, sets, environ)
    said += more
    converted: Converted = convert(
        source.checkpoint, state, resolved, given=source.name, out=paths.out, argv=argv
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


def _is_ours(run: Path) -> bool:
    return not compat.is_reference_record(read_json(layout.RunPaths(run).run_args))
