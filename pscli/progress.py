"""Shows a run while it goes on: a moving line on a terminal, else a plain line now and then; rank 0 only."""

from __future__ import annotations

import math
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from parallel_synthesis.training.events import Evaluation, RunStarted, StepRecord, TrainResult
from pscli.output import Output, counted, duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 60.0  # between two plain lines, besides those at tenths of the run
_WINDOW = 50  # steps that speed and time left are estimated from


class Watcher:
    """An observer of training/events.py that writes to the sink's stderr."""

    def __init__(self, output: Output, *, log_every: int) -> None:
        self._output = output
        self._every = log_every
        self._total = 0
        self._skipped = 0
        self._loss = math.nan
        self._recent: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # (seconds, tokens) of a step
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None

    def started(self, info: RunStarted) -> None:
        self._output.stops.check()  # until now there was nothing to save, and loading may have lost one
        self._total = info.total_steps
        rows = ", ".join(f"{task} {count:,}" for task, count in info.rows.items())
        self._output.note(
            f"{info.recipe}: {counted(info.total_steps, 'step')}, {info.ranks} rank{'s' * (info.ranks > 1)} on "
            f"{info.processes} process{'es' * (info.processes > 1)}, {info.device}, "
            f"{info.trainable_parameters:,} trainable parameters\nrows: {rows}\nrun: {info.out}"
        )
        self._last_line = time.monotonic()
        if self._output.progress and info.total_steps >= info.first_step:
            self._start_bar(info)

    def step(self, record: StepRecord) -> None:
        self._skipped += record.skipped
        if not record.skipped:
            self._loss = record.loss
        self._recent.append((record.seconds, record.prefill_tokens + record.live_tokens))
        text = self._text(record)
        if self._bar is not None and self._bar_task is not None:
            shown = record.step % self._every == 0 or record.step == self._total
            if shown:
                self._bar.update(self._bar_task, text=text)
            self._bar.update(self._bar_task, completed=record.step)
            if record.step == self._total:
                self.close()
        elif self._is_due(record.step):
            self._last_line = time.monotonic()
            self._output.note(f"step {record.step:,}/{self._total:,}  {text}")

    def saved(self, step: int, path: Path, milestone: str | None, seconds: float) -> None:
        if milestone is not None:
            self._line(f"milestone {milestone}: step {step:,} is kept at {path} ({duration(seconds)})")

    def evaluated(self, evaluation: Evaluation) -> None:
        self._line(
            f"held-out loss {evaluation.when}: {evaluation.loss:.4f} "
            f"({evaluation.rows} rows, {duration(evaluation.seconds)})"
        )

    def finished(self, result: TrainResult) -> None:
        self._output.stops.settle()  # the run is complete: a signal comes too late
        self.close()
        self._total = result.total_steps

    def note(self, text: str) -> None:
        self._line(text)

    def warning(self, text: str) -> None:
        self._pause()
        self._output.warning(text)
        self._go_on()

    def close(self) -> None:
        """Ends the moving line; whatever ended the run."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _text(self, record: StepRecord) -> str:
        seconds = sum(spent for spent, _ in self._recent)
        tokens = sum(count for _, count in self._recent)
        left = (self._total - record.step) * seconds / len(self._recent)
        parts = [
            f"loss {self._loss:.4f}",
            f"{tokens / seconds:,.0f} tokens/s" if seconds > 0 else "",
            f"{self._skipped:,} skipped" if self._skipped else "",
            f"{record.memory_gib:.1f} GiB",
            f"{duration(left)} left",
        ]
        return "  ".join(part for part in parts if part)

    def _is_due(self, step: int) -> bool:
        tenth = max(1, self._total // 10)
        return step == self._total or step % tenth == 0 or time.monotonic() - self._last_line >= LINE_SECONDS

    def _line(self, text: str) -> None:
        self._pause()
        self._output.note(text)
        self._go_on()

    def _pause(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _go_on(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def _start_bar(self, info: RunStarted) -> None:
        # Here, not at the top: rich costs start-up time that only a run on a terminal should pay.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            console=Console(file=self._output.stderr),
            transient=True,
        )
        self._bar_task = self._bar.add_task(
            "", total=info.total_steps, completed=info.first_step - 1, text=""
        )
        self._bar.start()
