"""The counters of a run: kept through training_state.pt's layouts, summed as the summary says."""

from __future__ import annotations

import math

import pytest

from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.training.events import RankBatch, StepDigest, StepRecord
from parallel_synthesis.training.guards import RowCounts, Skip
from parallel_synthesis.training.progress import Progress, perplexity

NO_DIGEST = StepDigest(rows=(), loss=(), gradient=(), rng=(), reduced="")
SKIP = Skip(reason="actual_live_tokens_exceeded", numbers="live_tokens=9/8", message="")


def record(
    step: int, *, ranks: int, task: str, loss: float = math.nan, tokens: int = 0, skip: bool = False
) -> StepRecord:
    counts = (RowCounts(prefill=1, past=1, live=1, target=1),) * 2
    return StepRecord(
        epoch=(step - 1) // 3 + 1,
        step=step,
        batches=tuple(
            RankBatch(rank=rank, task=task, rows=(0, 1), places=("", ""), counts=counts, skip=None)
            for rank in range(ranks)
        ),
        skips={ranks - 1: SKIP} if skip else {},
        loss=loss,
        perplexity=perplexity(loss),
        target_tokens=tokens,
        prefill_tokens=0,
        live_tokens=0,
        seconds=0.0,
        memory_gib=0.0,
        gradient_norm=0.0,
        digest=NO_DIGEST,
    )


def records(ranks: int) -> list[StepRecord]:
    return [
        record(1, ranks=ranks, task="a", loss=2.0, tokens=10),
        record(2, ranks=ranks, task="b", skip=True, tokens=99),
        record(3, ranks=ranks, task="b", loss=1.0, tokens=30),
        record(4, ranks=ranks, task="a", loss=3.0, tokens=20),
        record(5, ranks=ranks, task="a", loss=4.0, tokens=40),
    ]


def full(ranks: int) -> Progress:
    progress = Progress(tasks=["a", "b"], ranks=ranks, steps_per_epoch=3)
    for item in records(ranks):
        progress.add(item)
    return progress


@pytest.mark.parametrize("ranks", [1, 4])
def test_totals(ranks: int) -> None:
    progress = full(ranks)
    metrics = progress.train_metrics()
    assert metrics["global_steps"] == 5
    assert metrics["optimizer_steps"] == 4
    assert metrics["skipped_steps" if ranks == 1 else "skipped_sync_steps"] == 1
    assert metrics["skipped_samples"] == 2 * ranks
    assert metrics["per_task_steps"] == {"a": 3, "b": 1}
    assert metrics["per_task_seen_samples"] == {"a": 6 * ranks, "b": 2 * ranks}
    assert metrics["target_tokens"] == 100
    assert metrics["avg_loss"] == pytest.approx((2 * 10 + 1 * 30 + 3 * 20 + 4 * 40) / 100)
    assert metrics["skips_by_reason"] == {"actual_live_tokens_exceeded": 1}
    (epoch,) = metrics["epochs"]
    assert epoch["avg_loss"] == pytest.approx((20 + 30) / 40)
    assert (epoch["steps"], epoch["optimizer_steps"], epoch["skipped_steps"]) == (3, 2, 1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_restored_run_counts_on_as_if_never_stopped(ranks: int) -> None:
    whole = full(ranks)
    for cut in range(6):
        first = Progress(tasks=["a", "b"], ranks=ranks, steps_per_epoch=3)
        for item in records(ranks)[:cut]:
            first.add(item)
        loop = first.loop_state(epoch_rng_state=None)
        state = (
            {"single_loop_state": loop}
            if ranks == 1
            else {
                "distributed_loop_state": loop,
                "rank_state_by_rank": {rank: first.rank_state(rank, {}) for rank in range(ranks)},
            }
        )
        second = Progress(tasks=["a", "b"], ranks=ranks, steps_per_epoch=3)
        second.restore(state)
        for item in records(ranks)[cut:]:
            second.add(item)
        assert second.train_metrics() == whole.train_metrics()
        assert second.loop_state(epoch_rng_state=None) == whole.loop_state(epoch_rng_state=None)


def test_the_loop_state_says_where_the_next_batch_is() -> None:
    progress = full(4)
    state = progress.loop_state(epoch_rng_state="before")
    assert (state["epoch_idx"], state["next_batch_idx_in_epoch"], state["global_step"]) == (1, 2, 5)
    assert state["current_epoch_rng_state_before_build"] == "before"
    assert state["world_size"] == 4


def test_a_state_of_another_layout_is_refused() -> None:
    single = full(1)
    state = {"single_loop_state": single.loop_state(epoch_rng_state=None)}
    with pytest.raises(CheckpointError, match=r"distributed_loop_state.*4 logical ranks"):
        Progress(tasks=["a"], ranks=4, steps_per_epoch=3).restore(state)


def test_perplexity_of_a_huge_loss_is_nan_not_a_crash() -> None:
    assert math.isnan(perplexity(1e6))
    assert math.isnan(perplexity(math.nan))
