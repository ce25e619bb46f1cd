"""The names of tasks in a config: aliases become the one name, and what names no task is told."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from parallel_synthesis.config import Config
from parallel_synthesis.data.tasks import TASKS, canonical_name, find_task
from parallel_synthesis.errors import DataError
from parallel_synthesis.values import nearest


def with_canonical_tasks(config: Config, listed: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The config with every task under its one name, and the problems of its task names.

    listed: the tasks that the recipe itself lists, of which the run may take fewer.
    """
    found = []
    own = {canonical_name(name) for name in config.data.files}
    names = tuple(canonical_name(name) for name in config.data.tasks)
    for written in config.data.tasks:
        try:
            find_task(written, own=own)
        except DataError as error:
            found.append(str(error))
    for name in sorted({name for name in names if names.count(name) > 1}):
        if not any(config.data.tasks.count(written) > 1 for written in config.data.tasks):
            found.append(f"data.tasks names {name} more than once, by different names")
    for table, files in (("data.files", config.data.files), ("evaluate.files", config.evaluate.files)):
        twice = [name for name, count in Counter(map(canonical_name, files)).items() if count > 1]
        found += [f"{table} names {name} more than once, by different names; keep one" for name in twice]
    data = dataclasses.replace(config.data, tasks=names, files=_by_name(config.data.files))
    evaluate = dataclasses.replace(config.evaluate, files=_by_name(config.evaluate.files))
    if not found:  # beside a mistyped task the file of the one that was meant would be told of too
        found += _mistyped_files(data.files, evaluate.files, [*names, *map(canonical_name, listed)])
    return dataclasses.replace(config, data=data, evaluate=evaluate), found


def _mistyped_files(
    training: Mapping[str, str], held_out: Mapping[str, str], tasks: Sequence[str]
) -> list[str]:
    """Entries of data.files and evaluate.files that are no task's: the run would silently read another file, or none.

    A shared recipe may name files of known tasks that a run does not take. A name that both tables have is no slip
    either: so the held-out data of a task that is not trained on is named.
    """
    fine = {*tasks, *TASKS, *(training.keys() & held_out.keys())}
    expected = f"; expected one of them ({', '.join(dict.fromkeys(tasks))}) or of the release's tasks"
    return [
        f"{table}.{name}: no such task in data.tasks{nearest(name, [*tasks, *TASKS]) or expected}"
        for table, files in (("data.files", training), ("evaluate.files", held_out))
        for name in files
        if name not in fine
    ]


def _by_name(files: Mapping[str, str]) -> dict[str, str]:
    return {canonical_name(name): path for name, path in files.items()}
