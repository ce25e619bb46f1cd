"""The training loop: from a resolved recipe to a committed, complete run. One loop for any number of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.errors import NonFiniteError, PeerError, StoppedError
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.device import cuda_memory_gib, memory_gib
from parallel_synthesis.training.evaluate import evaluate
from parallel_synthesis.training.events import Evaluation, Observer, RankBatch, StepDigest, StepRecord, TrainResult
from parallel_synthesis.training.guards import Skip
from parallel_synthesis.training.prepare import PreparedStep
from parallel_synthesis.training.progress import perplexity
from parallel_synthesis.training.ranks import PEER_PAUSE_SECONDS
from parallel_synthesis.training.setup import Run, set_up
from parallel_synthesis.training.signals import StopRequest, stop_requests
from parallel_synthesis.training.step import StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Notice:
    """What a process tells the others before anybody computes."""

    stop: str | None
    batches: tuple[RankBatch, ...]
    rng: tuple[str, ...]


def train(
    resolved: Resolved,
    *,
    out: Path,
    observer: Observer,
    init: str | None = None,
    overwrite: bool = False,
    argv: Sequence[str] = (),
) -> TrainResult:
    """Trains the recipe into `out` and returns how it ended.

    Collective: under torchrun every process calls it. init: a checkpoint whose components the run starts from.
    Raises the errors of parallel_synthesis.errors; StoppedError after a stop signal and a complete save.
    """
    run = set_up(resolved, out=out, observer=observer, init=init, overwrite=overwrite, argv=argv)
    try:
        return _run_to_end(run)
    finally:
        run.close()


def _run_to_end(run: Run) -> TrainResult:
    run.saver.save()
    run.saver.wait()  # a full disk or a missing right shows here, in the first minute
    run.observer.started(run.started())
    with stop_requests() as request:  # from here on there is a checkpoint to stop at
        evaluations = _evaluations(run, "before")
        _steps(run, request)
        run.saver.finish()
    evaluations += _evaluations(run, "after")
    run.saver.write_summary(evaluations)
    result = run.result(evaluations)
    run.observer.finished(result)
    return result


def _steps(run: Run, request: StopRequest) -> None:
    """Every remaining step; raises StoppedError when any process was asked to stop."""
    progress = run.progress
    last_end = time.monotonic()
    for prepared in run.preparer.steps(progress.step + 1, run.total_steps):
        run.saver.raise_if_failed()
        notices = run.processes.exchange(
            _Notice(
                stop=request.signal,
                batches=prepared.batches,
                rng=tuple(run.streams.digest(rank) for rank in run.processes.mine),
            )
        )
        stop = next((notice.stop for notice in notices if notice.stop), None)
        if stop is not None:
            _stop(run, stop)
        record = _step(run, prepared, notices, last_end)
        last_end = time.monotonic()
        epoch_done = progress.add(record)
        if run.log is not None:
            run.log.step(record)
            memory = cuda_memory_gib(run.device)
            if memory is not None:
                run.log.cuda_memory(0, record.step, memory)
            if epoch_done is not None:
                run.log.epoch_done(
                    record.epoch,
                    loss=epoch_done["avg_loss"],
                    perplexity=epoch_done["perplexity"],
                    target_tokens=epoch_done["target_tokens"],
                )
        run.observer.step(record)
        if run.saver.is_due(record.step):
            run.saver.save(record)


def _step(run: Run, prepared: PreparedStep, notices: Sequence[_Notice], last_end: float) -> StepRecord:
    """Skips on every process what a guard skips on any; else computes and, when all is finite, updates."""
    batches = tuple(batch for notice in notices for batch in notice.batches)
    skips = {batch.rank: batch.skip for batch in batches if batch.skip is not None}
    outcome: StepOutcome | None = None
    if not skips:
        outcome = run.stepper.compute(prepared.tokens)
        skips = _non_finite(outcome, batches)
        if skips and run.config.log.on_nonfinite == "stop":
            _stop_non_finite(run, prepared.step, skips)
        if not skips:
            run.stepper.update()
    targets = [batch.target_tokens for batch in batches]
    loss = math.nan
    if outcome is not None and not skips:
        loss = sum(loss * count for loss, count in zip(outcome.losses, targets, strict=True)) / sum(targets)
    counts = [count for batch in batches for count in batch.counts]
    return StepRecord(
        epoch=prepared.epoch_index + 1,
        step=prepared.step,
        batches=batches,
        skips=skips,
        loss=loss,
        perplexity=perplexity(loss),
        target_tokens=sum(targets),
        prefill_tokens=sum(count.prefill for count in counts),
        live_tokens=sum(count.live for count in counts),
        seconds=time.monotonic() - last_end,
        memory_gib=memory_gib(run.device),
        gradient_norm=outcome.norm if outcome is not None else math.nan,
        digest=StepDigest(
            rows=tuple(batch.rows for batch in batches),
            loss=outcome.loss_bits if outcome is not None else (),
            gradient=outcome.gradients if outcome is not None else (),
            rng=tuple(digest for notice in notices for digest in notice.rng),
            reduced=outcome.reduced if outcome is not None else "",
        ),
    )


def _non_finite(outcome: StepOutcome, batches: Sequence[RankBatch]) -> dict[int, Skip]:
    """The ranks whose loss or gradient is nan or inf; every rank when only their sum overflows."""
    skips = {}
    for batch in batches:
        loss, finite = outcome.losses[batch.rank], outcome.finite[batch.rank]
        if finite and outcome.norm_finite:
            continue
        what = "gradient" if math.isfinite(loss) else "loss"
        skips[batch.rank] = Skip(
            reason=f"nonfinite_{what}", numbers=f"loss={loss}", message=f"{what} not finite, rows {', '.join(batch.places)}"
        )
    if outcome.norm_finite:
        return skips
    named = {rank: skip for rank, skip in skips.items() if not outcome.finite[rank]}
    return named or skips


def _stop_non_finite(run: Run, step: int, skips: dict[int, Skip]) -> None:
    found = "; ".join(f"rank {rank}: {skip.numbers}, {skip.message}" for rank, skip in sorted(skips.items()))
    message = (
        f"step {step}: a loss or gradient is not finite: {found}. The optimizer has not seen it. "
        f'Look at the rows, lower optim.learning_rate, or set log.on_nonfinite = "skip"'
    )
    if run.log is not None:
        run.log.line(f"[error] step={step} {message}")
        raise NonFiniteError(message)
    time.sleep(PEER_PAUSE_SECONDS)
    raise PeerError(message)


def _stop(run: Run, signal: str) -> None:
    step = run.progress.step
    run.saver.save_if_new()
    run.saver.wait()
    checkpoint = run.paths.step(step)
    if run.log is not None:
        run.log.line(f"[stop] signal={signal} step={step} checkpoint={checkpoint.relative_to(run.paths.out)}")
    raise StoppedError(
        f"stopped by {signal} after step {step} of {run.total_steps}; {checkpoint} is complete", step=step
    )


def _evaluations(run: Run, when: str) -> list[Evaluation]:
    if run.held_out is None:
        return []
    kinds = [("before", True)] if when == "before" else [("after", True), ("after, branches removed", False)]
    found = []
    for name, with_branches in kinds:
        evaluation = evaluate(
            run.synthesizer,
            run.held_out,
            run.processes,
            when=name,
            step=run.progress.step,
            with_branches=with_branches,
        )
        run.observer.evaluated(evaluation)
        found.append(evaluation)
    return found
