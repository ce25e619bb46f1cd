"""Does a training state stand where this run's shuffled order has that step? By seed, rows, epoch length (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parallel_synthesis.errors import CheckpointError


def loop_key(ranks: int) -> str:
    """The key of training_state.pt under which a run of so many logical ranks keeps its loop's counters."""
    return "distributed_loop_state" if ranks > 1 else "single_loop_state"


def check_place(
    checkpoint: Path, loop: Mapping[str, Any], *, steps_per_epoch: int, epoch_rng_state: Callable[[int], Any]
) -> None:
    """Refuses where the same step would take other rows here: another length of an epoch, seed or number of rows.

    loop: the state's loop counters. epoch_rng_state: of an epoch (from 0) here, before its order is built. Raises
    CheckpointError. Other rows are noticed from the second epoch on; in the first, another number of steps is.
    """
    epoch, within, step = (loop.get(key) for key in ("epoch_idx", "next_batch_idx_in_epoch", "global_step"))
    if not isinstance(epoch, int) or not isinstance(within, int) or not isinstance(step, int):
        raise CheckpointError(f"{checkpoint}: the training state does not say where in its epoch it stands")
    if epoch * steps_per_epoch + within != step or within > steps_per_epoch:
        raise CheckpointError(
            f"{checkpoint}: step {step} is step {within} of epoch {epoch + 1} there, and an epoch has "
            f"{steps_per_epoch} steps here: these are not the run's data files, batch size or steps_per_epoch"
        )
    saved = _python_state(loop.get("current_epoch_rng_state_before_build"))
    if saved is not None and saved != _python_state(epoch_rng_state(epoch)):
        raise CheckpointError(
            f"{checkpoint}: epoch {epoch + 1} was shuffled from another state than here, so the order of the rows "
            f"would not be the run's: give its seed, its data files and its order of the tasks"
        )


def _python_state(given: Any) -> tuple[Any, ...] | None:
    if not isinstance(given, list | tuple) or len(given) != 3:
        return None
    return (given[0], tuple(given[1]), given[2])
