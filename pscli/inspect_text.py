"""What `ps inspect` shows of a run on a terminal: the answer in the first lines, one table a question, nothing to scroll for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from parallel_synthesis.training.inspection.report import LogReport
from parallel_synthesis.training.inspection.run import RunReport
from pscli.output import batches, counted, duration, size, table

_TICKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_WIDTH = 60  # columns of a curve
Paint = Callable[[str, str], str]  # text, one of "good", "bad", "warn", "dim", "bold"
_CODES = {"good": "32", "bad": "31;1", "warn": "33", "dim": "2", "bold": "1"}


def painter(colour: bool) -> Paint:
    """Colours for a terminal that wants them, else none."""
    if not colour:
        return lambda text, _kind: text
    return lambda text, kind: f"\x1b[{_CODES[kind]}m{text}\x1b[0m"


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Values as one line of bars; a hole where there is none. At most `width` columns, each the mean of its part."""
    if len(values) > width:
        parts = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
        values = [_mean(part) for part in parts]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)

    def tick(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return _TICKS[min(7, int((value - low) / span * 8))] if span else _TICKS[3]

    return "".join(map(tick, values))


def bar(share: float, width: int = 12) -> str:
    """A share of one as a bar of `width` columns."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "·")


def run(report: RunReport, paint: Paint) -> str:
    """A run directory."""
    log = report.log
    state = (
        paint("complete", "good")
        if report.complete
        else paint("running", "good")
        if report.live
        else paint("not complete", "warn")
    )
    lines = [f"{paint(str(report.path), 'bold')}  {report.recipe or report.method or 'a run'}: {state}", ""]
    lines += aligned(
        [*_progress(log, report.planned_steps, report.seconds_left, paint), *_figures(log, paint)]
    )
    lines += ["", _tasks(log, paint)]
    tail: list[tuple[str, str]] = []
    for milestone in report.milestones:
        there = (
            paint("kept", "good")
            if milestone.present
            else paint("missing", "bad")
            if milestone.due
            else "to come"
        )
        tail.append(("milestone", f"{milestone.name}  {there}"))
    if report.checkpoints:
        tail.append(("checkpoints", ", ".join(f"{step:,}" for step in sorted(report.checkpoints)[-8:])))
    if report.disagreements:
        tail += [
            ("summary", paint(f"{d.name}: the log says {d.log}, train_mixed_summary.json {d.summary}", "bad"))
            for d in report.disagreements
        ]
    elif report.summary_step is not None and report.not_compared is None:
        tail.append(("summary", f"agrees with the log up to step {report.summary_step:,}"))
    elif report.not_compared is not None:
        tail.append(("summary", f"not compared: {report.not_compared}"))
    tail += [("lacks", paint(text, "warn")) for text in report.missing]
    lines += ["", *aligned(tail)] if tail else []
    return "\n".join(lines)


def log_alone(log: LogReport, paint: Paint) -> str:
    """A train.log without its run."""
    lines = [f"{paint(str(log.path), 'bold')}  {log.lines:,} lines, {size(log.bytes)}", ""]
    if not log.steps:
        lines.append(paint("no step record in it" if log.lines or log.unfinished_line else "empty", "warn"))
        return "\n".join([*lines, *aligned(_noise(log, paint))])
    lines += aligned([*_progress(log, None, None, paint), *_figures(log, paint)])
    return "\n".join([*lines, "", _tasks(log, paint)])


def aligned(named: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:<12}{text}" for name, text in named]


def _progress(log: LogReport, planned: int | None, left: float | None, paint: Paint) -> list[tuple[str, str]]:
    done = f"{log.last_step:,}" + (f" of {planned:,}" if planned is not None else "")
    share = f"{bar(log.last_step / planned, 24)} {log.last_step / planned:.0%}  " if planned else ""
    found = [("steps", f"{share}{done}: {counted(log.updates, 'update')}, {log.skipped:,} skipped")]
    found += [("skipped", f"by {batches(count)}: {reason}") for reason, count in log.skips_by_reason.items()]
    if left is not None:
        found.append(("left", paint(f"about {duration(left)}", "good")))
    if log.every > 1:
        found.append(
            ("thinned", paint(f"the log holds every {log.every}th step only; sums are over those", "warn"))
        )
    return found


def _figures(log: LogReport, paint: Paint) -> list[tuple[str, str]]:
    curve = sparkline([point.loss for point in log.curve])
    found = [
        (
            "loss",
            f"{curve}  {number(log.loss_at_start)} -> {number(log.loss_now)}  "
            f"(mean {number(log.loss)}, {log.tokens:,} target tokens)",
        )
    ]
    if log.seconds_per_step is not None:
        found.append(
            (
                "speed",
                f"{log.seconds_per_step:.3g} s a step, {log.tokens_per_second or 0:,.0f} tokens/s, "
                f"{duration(log.seconds or 0)} in all",
            )
        )
    if log.memory_peak_gib is not None:
        reserved = "" if log.memory_reserved_gib is None else f", {log.memory_reserved_gib:.1f} GiB reserved"
        found.append(("memory", f"{log.memory_peak_gib:.1f} GiB at the peak{reserved}"))
    found += _restarts(log, paint)
    if log.missing:
        gaps = ", ".join(
            f"{g.first:,}-{g.last:,}" if g.first < g.last else f"{g.first:,}" for g in log.gaps[:6]
        )
        found.append(("gaps", paint(f"{log.missing:,} steps are not in the log: {gaps}", "bad")))
    if log.nonfinite:
        steps = ", ".join(f"{odd.step:,} ({odd.loss})" for odd in log.nonfinite_first[:6])
        found.append(
            ("non-finite", paint(f"{log.nonfinite:,} updates, left out of the means: step {steps}", "bad"))
        )
    found += [("log says", paint(f"line {line:,}: {text[:150]}", "warn")) for line, text in log.notes[-4:]]
    return [*found, *_noise(log, paint)]


def _restarts(log: LogReport, paint: Paint) -> list[tuple[str, str]]:
    found = []
    if log.earlier:
        runs = "; ".join(
            f"lines {s.first_line:,}-{s.last_line:,}, to step {s.last_step:,}" for s in log.earlier[-3:]
        )
        found.append(
            ("before", f"{len(log.earlier)} earlier run in this log: {runs}; figures are of the last")
        )
    if not log.restarts:
        return found
    repeats = log.repeats
    at = ", ".join(f"{restart.from_step:,}" for restart in log.restarts_last[-6:])
    found.append(
        (
            "restarts",
            f"{log.restarts:,} (at step {at}); {log.superseded:,} superseded records are not counted",
        )
    )
    if repeats.repeated:
        if repeats.differing:
            first = repeats.first[0]
            found.append(
                (
                    "repeated",
                    paint(
                        f"{repeats.differing:,} of {repeats.repeated:,} repeated steps differ; first: ", "bad"
                    )
                    + f"step {first.step:,}, lines {first.line_before:,} and {first.line_now:,}: {first.difference}",
                )
            )
        else:
            how = (
                "bit for bit"
                if repeats.proven == repeats.repeated
                else "as far as the log tells (no digests)"
            )
            found.append(("repeated", paint(f"{repeats.repeated:,} steps, all reproduced {how}", "good")))
    if repeats.not_compared:
        found.append(
            ("repeated", paint(f"{repeats.not_compared:,} more were not compared: too many", "warn"))
        )
    return found


def _noise(log: LogReport, paint: Paint) -> list[tuple[str, str]]:
    found = []
    for noise in log.noise:
        lines = ", ".join(f"{line:,}" for line in noise.lines[:6]) + (", ..." if noise.count > 6 else "")
        found.append(("odd lines", paint(f"{noise.count:,} {noise.kind}: line {lines}", "warn")))
    if log.unfinished_line:
        found.append(
            ("odd lines", paint(f"line {log.lines + 1:,} has no end: cut, or still being written", "warn"))
        )
    return found


def _tasks(log: LogReport, paint: Paint) -> str:
    planned = any(task.rows_planned is not None for task in log.tasks)
    rows = []
    for task in log.tasks:
        seen = f"{task.rows:,}" + (f" / {task.rows_planned:,}" if task.rows_planned is not None else "")
        share = bar(task.rows / task.rows_planned) if task.rows_planned else ""
        rows.append(
            (
                task.task,
                *((share,) if planned else ()),
                seen if log.rows_exact else f"~{seen}",
                f"{task.steps:,}",
                f"{task.skipped / task.steps:.1%}" if task.steps else "-",
                f"{task.tokens:,}",
                number(task.loss_at_start),
                number(task.loss_now),
                number(task.perplexity, 2),
            )
        )
    header = (
        "task",
        *(("trained on",) if planned else ()),
        "rows" + (" of planned" if planned else ""),
        "steps",
        "skipped",
        "tokens",
        "loss at start",
        "now",
        "ppl",
    )
    shown = table(rows, header=header)
    if any(task.updates and None in (task.loss_at_start, task.loss_now) for task in log.tasks):
        said = f"at start: until step {log.start_until:,}; now: from step {log.now_from:,}; -: no update of the task there"
        shown += "\n" + paint(said, "dim")
    return shown


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
