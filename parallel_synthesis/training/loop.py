"""The training loop: from a resolved recipe to a committed, complete run. One loop for any number of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.errors import DivergenceError, NonFiniteError, StoppedError
from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.device import cuda_memory_gib, memory_gib
from parallel_synthesis.training.evaluate import evaluate
from parallel_synthesis.training.events import Observer, RankBatch, StepDigest, StepRecord, TrainResult
from parallel_synthesis.training.guards import Skip
from parallel_synthesis.training.prepare import PreparedStep, with_generated
from parallel_synthesis.training.progress import perplexity
from parallel_synthesis.training.ranks import fail_together
from parallel_synthesis.training.repeats import step_ranges
from parallel_synthesis.training.run import Run
from parallel_synthesis.training.setup import start_run
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
    order_from_step: int = 0,
) -> TrainResult:
    """Trains the recipe into `out` and returns how it ended.

    Collective: under torchrun every process calls it. init: a checkpoint whose components the run starts from.
    order_from_step: take the data order up after this global step, with a fresh optimizer (not exact).
    Raises the errors of parallel_synthesis.errors; StoppedError after a stop signal and a complete save.
    """
    run = start_run(
        resolved,
        out=out,
        observer=observer,
        init=init,
        overwrite=overwrite,
        argv=argv,
        order_from_step=order_from_step,
    )
    try:
        run.saver.save()
        run.saver.wait()  # a full disk or a missing right shows here, in the first minute
        return run_to_end(run)
    finally:
        run.close()


def run_to_end(run: Run) -> TrainResult:
    """All remaining steps of a run whose state is on the disk, then its final checkpoint and summary."""
    run.observer.started(run.started())
    with stop_requests() as request:  # from here on there is a checkpoint to stop at
        if run.engine.progress.totals.attempted == 0 and not run.evaluations:
            _evaluate(run, [("before", True)])
        for record in steps(run, request, last=run.engine.total_steps):
            _after_step(run, record)
        run.saver.wait()
        _evaluate(run, [("after", True), ("after, branches removed", False)])
        run.saver.write_summary()
        run.saver.finish()  # last: until its manifest is there the run is not complete, and a resume does the rest
    result = run.result()
    run.observer.finished(result)
    return result


def steps(run: Run, request: StopRequest, *, last: int) -> Iterator[StepRecord]:
    """Does every step up to `last`; saves and raises StoppedError when any process was asked to stop."""
    engine = run.engine
    last_end = time.monotonic()
    for prepared in engine.preparer.steps(engine.progress.step + 1, last):
        run.saver.raise_if_failed()
        notices = engine.processes.exchange(
            _Notice(
                stop=request.signal,
                batches=prepared.batches,
                rng=tuple(engine.streams.digest(rank) for rank in engine.processes.mine),
            )
        )
        stop = next((notice.stop for notice in notices if notice.stop), None)
        if stop is not None:
            _stop(run, stop)
        record = _step(run, prepared, notices, last_end)
        last_end = time.monotonic()
        yield record


def _after_step(run: Run, record: StepRecord) -> None:
    """Compares with an earlier attempt, counts, logs, shows, and saves what is due."""
    _check_repeat(
        run, record
    )  # first: a step that stops the run for its difference does not supersede the one logged
    epoch_done = run.engine.progress.add(record)
    if run.log is not None:
        run.log.step(record)
        memory = cuda_memory_gib(run.engine.device)
        if memory is not None:
            run.log.cuda_memory(0, record.step, memory)
        if epoch_done is not None:
            run.log.epoch_done(
                record.epoch,
                loss=epoch_done["avg_loss"],
                perplexity=epoch_done["perplexity"],
                target_tokens=epoch_done["target_tokens"],
            )
    if record.step == run.repeats.last and not run.repeats.differs:
        text = f"steps {step_ranges(run.repeats.reproduced)} reproduced"
        if run.log is not None:
            run.log.line(f"[resume] attempt={run.attempt} {text}")
        run.observer.note(text)
    run.observer.step(record)
    if run.saver.is_due(record.step):
        run.saver.save(record)


def _check_repeat(run: Run, record: StepRecord) -> None:
    difference = run.repeats.check(record.step, record.digest)
    if difference is not None:
        if run.log is not None:
            run.log.line(f"[error] divergence {difference}")
        message = f"a repeated step is not the one in the log: {difference}"
        if run.repeats.stops:
            fail_together(
                run.engine.processes,
                DivergenceError(
                    f"{message}. Something that decides the result has changed since; compare run_args.json "
                    f"with this machine, or go on by --set log.on_divergence=warn"
                ),
            )
        run.observer.warning(message)


def _step(run: Run, prepared: PreparedStep, notices: Sequence[_Notice], last_end: float) -> StepRecord:
    """Skips on every process what a guard skips on any; else computes and, when all is finite, updates."""
    workers = run.engine.workers
    batches = tuple(batch for notice in notices for batch in notice.batches)
    skips = _guarded(batches)
    rows = prepared.tokens
    if not skips and workers is not None:
        rows = run.engine.stepper.generate(rows, workers)
        mine = with_generated(prepared.batches, rows, workers=workers.count, guards=run.engine.config.guards)
        batches = tuple(batch for part in run.engine.processes.exchange(mine) for batch in part)
        skips = _guarded(batches)
    outcome: StepOutcome | None = None
    if not skips:
        outcome = run.engine.stepper.compute(rows)
        skips = _non_finite(outcome, batches)
        if skips and run.engine.config.log.on_nonfinite == "stop":
            _stop_non_finite(run, prepared.step, skips)
        if not skips:
            run.engine.stepper.update()
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
        generated_tokens=None if workers is None else sum(count.past for count in counts),
        dropped_workers=None if workers is None else sum(count.dropped for count in counts),
        seconds=time.monotonic() - last_end,
        memory_gib=memory_gib(run.engine.device),
        gradient_norm=outcome.norm if outcome is not None else math.nan,
        digest=StepDigest(
            rows=tuple(batch.rows for batch in batches),
            loss=outcome.loss_bits if outcome is not None else (),
            gradient=outcome.gradients if outcome is not None else (),
            rng=tuple(digest for notice in notices for digest in notice.rng),
            reduced=outcome.reduced if outcome is not None else "",
        ),
    )


def _guarded(batches: Sequence[RankBatch]) -> dict[int, Skip]:
    """Logical rank -> its skip: one stops the step on all."""
    return {batch.rank: batch.skip for batch in batches if batch.skip is not None}


def _non_finite(outcome: StepOutcome, batches: Sequence[RankBatch]) -> dict[int, Skip]:
    """The ranks whose loss or gradient is nan or inf; every rank when only their sum overflows."""
    skips = {}
    for batch in batches:
        loss, finite = outcome.losses[batch.rank], outcome.finite[batch.rank]
        if finite and outcome.norm_finite:
            continue
        what = "gradient" if math.isfinite(loss) else "loss"
        skips[batch.rank] = Skip(
            reason=f"nonfinite_{what}",
            numbers=f"loss={loss}",
            message=f"{what} not finite, rows {', '.join(batch.places)}",
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
    fail_together(run.engine.processes, NonFiniteError(message))


def _stop(run: Run, signal: str) -> None:
    step = run.engine.progress.step
    run.saver.save_if_new()
    run.saver.wait()
    checkpoint = run.paths.step(step)
    if run.log is not None:
        run.log.line(f"[stop] signal={signal} step={step} checkpoint={checkpoint.relative_to(run.paths.out)}")
    raise StoppedError(
        f"stopped by {signal} after step {step} of {run.engine.total_steps}; {checkpoint} is complete; "
        f"go on by `ps resume {run.paths.out}`",
        step=step,
    )


def _evaluate(run: Run, kinds: Sequence[tuple[str, bool]]) -> None:
    engine = run.engine
    for when, with_branches in kinds if engine.held_out is not None else ():
        assert engine.held_out is not None
        evaluation = evaluate(
            engine.synthesizer,
            engine.held_out,
            engine.processes,
            when=when,
            step=engine.progress.step,
            with_branches=with_branches,
            workers=engine.workers,
        )
        run.observer.evaluated(evaluation)
        run.evaluations.append(evaluation)
