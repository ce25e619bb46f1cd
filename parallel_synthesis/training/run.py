"""A run with its place on the disk: the engine plus log, saver and what is known of earlier attempts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from parallel_synthesis.checkpoint.layout import RunPaths
from parallel_synthesis.training.engine import Engine
from parallel_synthesis.training.events import Evaluation, Observer, RunStarted, TrainResult
from parallel_synthesis.training.log import LogWriter
from parallel_synthesis.training.repeats import Repeats
from parallel_synthesis.training.saving import Saver


@dataclass(slots=True, kw_only=True)
class Run:
    """`log` is None in all processes but the first. `repeats`: what superseded log lines say of the steps to come."""

    engine: Engine
    paths: RunPaths
    saver: Saver
    log: LogWriter | None
    observer: Observer
    evaluations: list[Evaluation]
    repeats: Repeats
    attempt: int
    began: float = field(default_factory=time.monotonic)

    def started(self) -> RunStarted:
        engine = self.engine
        return RunStarted(
            out=self.paths.out,
            recipe=engine.config.recipe,
            backbone=engine.backbone.name,
            device=str(engine.device),
            first_step=engine.progress.step + 1,
            total_steps=engine.total_steps,
            steps_per_epoch=engine.progress.steps_per_epoch,
            ranks=engine.processes.ranks,
            processes=engine.processes.world.size,
            trainable_parameters=sum(parameter.numel() for _, parameter in engine.parameters),
            rows={task: file.rows for task, file in engine.files.items()},
        )

    def result(self) -> TrainResult:
        progress = self.engine.progress
        return TrainResult(
            out=self.paths.out,
            checkpoint=self.paths.step(progress.step),
            step=progress.step,
            total_steps=self.engine.total_steps,
            optimizer_steps=progress.totals.updates,
            skipped_steps=progress.totals.skipped,
            skips_by_reason=dict(sorted(progress.reasons.items())),
            loss=progress.totals.loss,
            perplexity=progress.totals.perplexity,
            target_tokens=progress.totals.target_tokens,
            seconds=time.monotonic() - self.began,
            evaluations=tuple(self.evaluations),
            milestones=self.saver.milestones,
            generated=dict(progress.generated),
        )

    def close(self) -> None:
        """Ends the writer, the log, the data files and the process group. A failing writer does not hide an error."""
        try:
            self.saver.close()
        finally:
            if self.log is not None:
                self.log.close()
            self.engine.close()
