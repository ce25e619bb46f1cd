"""What a config makes of its data files: the rows it opens, their order, and how many steps that gives (no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parallel_synthesis.config import Config
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.tasks import find_task, task_path

if TYPE_CHECKING:
    from parallel_synthesis.data.index import RowFile


def open_files(
    config: Config, files: Mapping[str, str], tasks: Sequence[str], *, max_rows: int | None = None
) -> dict[str, RowFile]:
    """The tasks' files, indexed and validated whole. `files`: task -> path, as the recipe writes them."""
    from parallel_synthesis.data.index import open_rows  # here: `ps train --show` plans without reading rows

    opened = {}
    for name in tasks:
        task = find_task(name, own=files)
        opened[name] = open_rows(
            task,
            task_path(task, root=config.data.root, files=files),
            on_bad_row=config.data.on_bad_row,
            max_rows=max_rows if max_rows is not None else config.data.max_rows,
        )
    return opened


def order_of(config: Config, rows: Mapping[str, int]) -> Order:
    """The run's order. rows: task -> valid rows, in the order of the config's tasks. DataError when they fill no step."""
    return Order(
        rows,
        ranks=config.run.ranks,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        steps_per_epoch=config.run.steps_per_epoch,
    )


def total_steps(config: Config, steps_per_epoch: int) -> int:
    """Global steps of the run, skipped ones too; run.max_steps only ever shortens it."""
    total = steps_per_epoch * config.run.epochs
    return total if config.run.max_steps is None else min(total, config.run.max_steps)
