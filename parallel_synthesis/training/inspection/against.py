"""Where two runs part: the first step that differs and in what, and how their configs and environments differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.layout import (
    ADAPTER_MODEL,
    CACHE_MAPPER,
    CHECKPOINT_META,
    RunPaths,
    newest_committed,
)
from parallel_synthesis.errors import ParallelSynthesisError
from parallel_synthesis.provenance import drift, manifest
from parallel_synthesis.provenance.schema import load_json, read_json
from parallel_synthesis.training.inspection.repeats import Version, difference, version
from parallel_synthesis.training.inspection.run import find_log, is_run
from parallel_synthesis.training.inspection.runlog import RunLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first step that differs: in what, and the lines of both logs."""

    step: int
    difference: str
    line: int
    other_line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting, data file, library or machine that differs. kind: what it can do to a result; None: not known."""

    name: str
    one: str
    other: str
    kind: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """compared: steps that both logs have; proven: those of them with equal digests. only_*: steps one log has alone.

    same_start: both began with the same weights; None where the checkpoints do not tell. What they began from, where
    it is not the same, is among the settings: `start` (the checkpoint) and `weights at step N`.
    differs: a step differs, or the logs do not end at the same step, or have no step in common.
    """

    one: Path
    other: Path
    differs: bool
    compared: int
    proven: int
    differing: int
    parting: Parting | None
    last_step: int
    other_last_step: int
    only_one: int
    only_other: int
    same_start: bool | None
    settings: tuple[SettingDifference, ...]


def compare(given: str, other: str) -> Comparison:
    """Compares the steps that count of two logs, by what both of them have of each step."""
    logs = RunLog(find_log(given)), RunLog(find_log(other))
    for log in logs:
        log.update()
    names = logs[0].tasks.names, logs[1].tasks.names
    compared = proven = differing = only_one = only_other = 0
    parting: Parting | None = None
    left, right = _steps(logs[0]), _steps(logs[1])
    one, two = next(left, None), next(right, None)
    while one is not None or two is not None:
        if two is None or (one is not None and one[0] < two[0]):
            only_one += 1
            one = next(left, None)
            continue
        if one is None or two[0] < one[0]:
            only_other += 1
            two = next(right, None)
            continue
        compared += 1
        found = difference(one[0], one[1], two[1], names)
        if found is not None:
            differing += 1
            if parting is None:
                parting = Parting(step=one[0], difference=found, line=one[1].line, other_line=two[1].line)
        else:
            proven += bool(one[1].proof and two[1].proof)
        one, two = next(left, None), next(right, None)
    runs = Path(given).expanduser(), Path(other).expanduser()
    begun = _start(runs[0]), _start(runs[1])
    return Comparison(
        one=logs[0].path,
        other=logs[1].path,
        differs=bool(differing or only_one or only_other or not compared),
        compared=compared,
        proven=proven,
        differing=differing,
        parting=parting,
        last_step=logs[0].last_step,
        other_last_step=logs[1].last_step,
        only_one=only_one,
        only_other=only_other,
        same_start=_same_weights(*begun),
        settings=(*_start_differences(*begun), *_settings(*runs)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A run's oldest checkpoint. parents: what it was started from or goes on from; weights: file -> sha256."""

    step: int
    parents: Sequence[Mapping[str, Any]]
    weights: Mapping[str, str]


def _start(run: Path) -> _Start | None:
    """What a run began with, by its oldest checkpoint; None for a bare log, and where no checkpoint tells."""
    if not is_run(run):
        return None
    steps = newest_committed(run)
    if not steps:
        return None
    step, place = steps[-1]
    try:
        files = manifest.listing(place).files
        parents = load_json(place / CHECKPOINT_META, "checkpoint_meta").get("parents", [])
        record = read_json(RunPaths(run).run_args) if RunPaths(run).run_args.is_file() else {}
    except ParallelSynthesisError:  # damaged: that is for `ps verify` to say
        return None
    if record.get("continued_from") is not None:
        parents = [record["continued_from"]]
    weights = {name: files[name].sha256 or "" for name in (CACHE_MAPPER, ADAPTER_MODEL) if name in files}
    return _Start(step=step, parents=parents, weights=weights)


def _same_weights(one: _Start | None, other: _Start | None) -> bool | None:
    if one is None or other is None or one.step != other.step:
        return None
    return one.weights == other.weights


def _start_differences(one: _Start | None, other: _Start | None) -> Iterator[SettingDifference]:
    if one is None or other is None:
        return
    same = _same_weights(one, other)
    if [parent["components"] for parent in one.parents] != [parent["components"] for parent in other.parents]:
        yield SettingDifference(name="start", one=_parents(one), other=_parents(other), kind=drift.DATA)
    if same is False:
        weights = [", ".join(_named(start.weights)) for start in (one, other)]
        yield SettingDifference(
            name=f"weights at step {one.step}", one=weights[0], other=weights[1], kind=drift.DATA
        )


def _parents(start: _Start) -> str:
    told = [f"{parent['source']} ({', '.join(_named(parent['components']))})" for parent in start.parents]
    return ", ".join(told) or "fresh weights"


def _named(files: Mapping[str, str]) -> list[str]:
    return [f"{name.rpartition('/')[2].partition('.')[0]} {sha256[:12]}" for name, sha256 in files.items()]


def _steps(log: RunLog) -> Iterator[tuple[int, Version]]:
    """The steps that count, in order; a chunk at a time is in memory."""
    last = -1
    for chunk in log.chunks_with(0, 2**62):
        for place in log.live(chunk).nonzero()[0].tolist():
            step = int(chunk.step[place])
            if step > last:
                last = step
                yield step, version(chunk, place)


def _settings(one: Path, other: Path) -> Iterator[SettingDifference]:
    """Differences of the runs' records; nothing where one of them is a bare log."""
    places = RunPaths(one).run_args, RunPaths(other).run_args
    if not all(place.is_file() for place in places):
        return
    records: tuple[Mapping[str, Any], ...] = tuple(load_json(place, "run_args") for place in places)
    if all("config" in record and "backbone" in record for record in records):
        for item in drift.compare(*records):
            yield SettingDifference(name=item.name, one=item.saved, other=item.now, kind=item.kind)
        return
    flat = [dict(_flat(record.get("config", record))) for record in records]
    for name in sorted(flat[0].keys() | flat[1].keys()):
        if flat[0].get(name) != flat[1].get(name):
            yield SettingDifference(
                name=name, one=_short(flat[0].get(name)), other=_short(flat[1].get(name)), kind=None
            )


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
