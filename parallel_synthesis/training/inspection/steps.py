"""One global step of a run: its records, its digest, and the rows it took: the way from a loss spike to the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.data.index import open_rows
from parallel_synthesis.data.tasks import find_task
from parallel_synthesis.errors import DataError, StorageError
from parallel_synthesis.training.inspection.run import Plan, recorded_order
from parallel_synthesis.training.inspection.runlog import RunLog
from parallel_synthesis.training.log_reader import StepLine, parse_line


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A row that a step took. number: among the task's valid rows, from 0. line, id: None when its file is not there."""

    rank: int
    task: str
    number: int
    file: str | None
    line: int | None
    id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A line that tells of the step; counts: no later attempt superseded it. raw: as it is in the log."""

    counts: bool
    attempt: int
    record: StepLine
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A global step. rows_from: where the rows are known from; note: why they are not, or not with their ids."""

    step: int
    logged: tuple[Logged, ...]
    rows: tuple[StepRow, ...]
    rows_from: str | None
    note: str | None


def find_step(log: RunLog, step: int) -> list[Logged]:
    """Every record of a step in the log's last run, in file order. The log has been read."""
    found = []
    for chunk in log.chunks_with(step, step):
        live = log.live(chunk)
        for place in (chunk.step == step).nonzero()[0].tolist():
            line = int(chunk.line[place])
            if line < log.first_line:
                continue
            raw = _line(log.path, chunk.offset, chunk.length, line - chunk.first_line)
            record = parse_line(raw, line).record
            assert isinstance(record, StepLine)
            found.append(
                Logged(
                    counts=bool(live[place]),
                    attempt=log.first_line_of_attempt(line),
                    record=record,
                    raw=raw.decode("utf-8", "replace").rstrip("\r\n"),
                )
            )
    return found


def _line(path: Path, offset: int, length: int, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length).split(b"\n")[number] + b"\n"


def inspect_step(log: RunLog, plan: Plan, step: int) -> StepReport:
    """A step of a run; the rows from the log's record, else from the run's order. DataError for a step it has not."""
    found = find_step(log, step)
    counting = next((one for one in reversed(found) if one.counts), found[-1] if found else None)
    if counting is not None and counting.record.digest is not None:
        tasks = counting.record.tasks
        numbers = [
            (rank, tasks[min(rank, len(tasks) - 1)], number)
            for rank, rows in enumerate(counting.record.digest.rows)
            for number in rows
        ]
        rows_from: str | None = "train.log"
    else:
        numbers = _from_order(plan, step)
        rows_from = "the run's data order" if numbers else None
    if not found and not numbers:
        raise DataError(
            f"{log.path}: step {step} is not in it; it has steps {log.first_step} to {log.last_step}: name one of those"
        )
    rows, note = _with_ids(plan, numbers)
    if not numbers:
        note = "neither the log nor the run's records say which rows a step took (a reference run)"
    return StepReport(step=step, logged=tuple(found), rows=tuple(rows), rows_from=rows_from, note=note)


def _from_order(plan: Plan, step: int) -> list[tuple[int, str, int]]:
    if plan.rows is None or plan.total_steps is None or not 1 <= step <= plan.total_steps:
        return []
    order = recorded_order(plan.config, {task: entry["rows"] for task, entry in plan.data.items()})
    index, place = divmod(step - 1, order.steps_per_epoch)
    epoch = order.epoch(index)
    batches = [(rank, epoch.batch(place, rank)) for rank in range(order.ranks)]
    return [(rank, batch.task, number) for rank, batch in batches for number in batch.rows]


def _with_ids(plan: Plan, numbers: list[tuple[int, str, int]]) -> tuple[list[StepRow], str | None]:
    """The rows with file, line and id, as far as the data files are still what the run took."""
    rows, note = [], None
    files: dict[str, Any] = {}
    for rank, task, number in numbers:
        entry: Mapping[str, Any] = plan.data.get(task, {})
        path = entry.get("path")
        line, name = None, None
        if path is not None:
            try:
                if task not in files:
                    files[task] = open_rows(
                        find_task(task, own=(task,)),
                        Path(path),
                        on_bad_row=plan.config["data"]["on_bad_row"],
                        max_rows=plan.config["data"]["max_rows"],
                    )
                    if files[task].sha256 != entry["sha256"]:
                        note = f"{path} is no longer the file that the run took: lines and ids are not shown"
                        files[task] = None
                if files[task] is not None:
                    row = files[task].read(number)
                    line, name = row.line, row.id
            except (DataError, StorageError, IndexError) as error:
                files[task], note = None, f"lines and ids are not known: {str(error).splitlines()[0]}"
        rows.append(StepRow(rank=rank, task=task, number=number, file=path, line=line, id=name))
    for file in files.values():
        if file is not None:
            file.close()
    return rows, note
