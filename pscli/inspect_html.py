"""`ps inspect --html`: one self-contained page without scripts and without requests, for a screen, a telephone, a mail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from parallel_synthesis import __version__
from parallel_synthesis.training.inspection.report import LogReport
from parallel_synthesis.training.inspection.run import RunReport
from parallel_synthesis.training.progress import perplexity
from pscli.inspect_plots import Plot, lines
from pscli.output import batches, duration, size

_STYLE = """
:root { color-scheme: light dark; --paper:#fff; --card:#f6f7f9; --ink:#1b2430; --soft:#5a6675; --faint:#d5dae1;
  --good:#18794e; --warn:#8a5a00; --bad:#b3261e; --s0:#2563c9; --s1:#d9730d; --s2:#2b8a3e; --s3:#b02a5b; --s4:#7048c6;
  --s5:#0b8a9a; --s6:#8a6d1d; --s7:#5f6b7a; --s8:#c23ea9; --s9:#4a7a17 }
@media (prefers-color-scheme: dark) { :root { --paper:#12161c; --card:#1b2129; --ink:#e4e9f0; --soft:#9aa7b6;
  --faint:#36404c; --good:#56c48c; --warn:#e0ac4f; --bad:#ff8a80; --s0:#7aaaf7; --s1:#f3a45c; --s2:#72c785; --s3:#f284ab;
  --s4:#b39af2; --s5:#5bcbd8; --s6:#d4b75e; --s7:#a8b3c1; --s8:#ec8fd8; --s9:#a3cc66 } }
* { box-sizing: border-box }
body { margin:0 auto; max-width:1080px; padding:20px 16px 48px; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, sans-serif; overflow-wrap:anywhere }
h1 { font-size:22px; margin:0 0 2px } h2 { font-size:17px; margin:32px 0 10px }
p { margin:4px 0 } .soft { color:var(--soft) } .good { color:var(--good) } .warn { color:var(--warn) } .bad { color:var(--bad) }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px; margin:16px 0 }
.card { background:var(--card); border-radius:8px; padding:10px 12px } .card b { display:block; font-size:20px; line-height:1.3 }
.card span { color:var(--soft); font-size:13px }
.plots { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr)); gap:14px }
figure { margin:0; background:var(--card); border-radius:8px; padding:10px 12px; min-width:0 }
figcaption { font-weight:600; font-size:14px } figcaption small { font-weight:400; color:var(--soft) } svg { width:100%; height:auto; display:block }
svg text { fill:var(--ink) }
.wide { overflow-x:auto } table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th, td { text-align:left; padding:5px 10px 5px 0; border-bottom:1px solid var(--faint); vertical-align:top }
th { font-weight:600; color:var(--soft); font-size:13px; white-space:nowrap }
#facts td:first-child { white-space:nowrap; width:1% } .n { text-align:right; white-space:nowrap } .tasks td:first-child { white-space:nowrap }
.bar { background:var(--faint); border-radius:4px; height:10px; min-width:70px; overflow:hidden; margin-top:6px } .bar i { display:block; height:100%; background:var(--s0) }
details { margin:10px 0 } summary { cursor:pointer; font-weight:600 } pre { overflow-x:auto; background:var(--card); padding:12px; border-radius:8px; font-size:13px }
"""


def run_page(report: RunReport, *, lineage: str | None) -> str:
    """The page of a run directory. lineage: as `ps inspect --lineage` shows it."""
    log = report.log
    state, kind = (
        ("complete", "good")
        if report.complete
        else ("running", "good")
        if report.live
        else ("not complete", "warn")
    )
    name = report.recipe or report.method or "run"
    head = [
        f"<h1>{escape(name)} <span class={kind}>{state}</span></h1>",
        f"<p class=soft>{escape(str(report.path))}",
    ]
    head.append(f" · {escape(str(report.model))}</p>" if report.model else "</p>")
    left = [("left", f"about {duration(report.seconds_left)}", "")] if report.seconds_left is not None else []
    facts: list[tuple[str, str, str]] = []
    facts += [("lacks", text, "warn") for text in report.missing]
    for milestone in report.milestones:
        there, mood = (
            ("kept", "good")
            if milestone.present
            else ("missing", "bad")
            if milestone.due
            else ("to come", "soft")
        )
        facts.append(("milestone", f"{milestone.name}: {there}", mood))
    for item in report.disagreements:
        facts.append(
            ("summary", f"{item.name}: log {item.log}, train_mixed_summary.json {item.summary}", "bad")
        )
    if report.summary_step is not None and not report.disagreements and report.not_compared is None:
        facts.append(("summary", f"agrees with the log up to step {report.summary_step:,}", "good"))
    elif report.not_compared is not None:
        facts.append(("summary", f"not compared: {report.not_compared}", "soft"))
    body = [
        *head,
        _cards(log, report.planned_steps, left),
        _facts([*facts, *_log_facts(log)]),
        *_log_sections(log),
    ]
    body.append(_settings("Config", report.config))
    if lineage is not None:
        body.append(f"<h2>Lineage</h2><pre>{escape(lineage)}</pre>")
    if report.environment:
        body.append(_settings("Environment", report.environment))
    return _page(f"{name} - {state}", body)


def log_page(log: LogReport) -> str:
    """The page of a log without its run."""
    head = f"<h1>{escape(log.path.name)}</h1><p class=soft>{escape(str(log.path))}, {log.lines:,} lines, {size(log.bytes)}</p>"
    return _page(log.path.name, [head, _cards(log, None, []), _facts(_log_facts(log)), *_log_sections(log)])


def _page(title: str, body: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n'
        + "\n".join(body)
        + f"\n<p class=soft>made by ps inspect, parallel-synthesis {escape(__version__)}</p></body></html>\n"
    )


def _cards(log: LogReport, planned: int | None, more: Sequence[tuple[str, str, str]]) -> str:
    of = f" of {planned:,}" if planned is not None else ""
    share = f"{log.skipped / log.steps:.1%} of the steps" if log.steps else ""
    cards = [
        ("steps", f"{log.last_step:,}", f"steps{of}"),
        ("updates", f"{log.updates:,}", "updates"),
        ("skipped", f"{log.skipped:,}", f"skipped, {share}" if share else "skipped"),
        (
            "loss",
            _number(log.loss_now),
            f"loss now; {_number(log.loss_at_start)} at start, mean {_number(log.loss)}",
        ),
        ("tokens", f"{log.tokens:,}", "target tokens"),
    ]
    if log.seconds_per_step is not None:
        cards.append(
            (
                "seconds",
                f"{log.seconds_per_step:.3g} s",
                f"a step, {log.tokens_per_second or 0:,.0f} tokens/s",
            )
        )
    if log.memory_peak_gib is not None:
        cards.append(("memory", f"{log.memory_peak_gib:.1f} GiB", "memory at the peak"))
    cards += [(name, value, "to the planned end") for name, value, _ in more]
    return (
        "<div class=cards>"
        + "".join(
            f'<div class=card id="card-{name}"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
            for name, value, text in cards
        )
        + "</div>"
    )


def _facts(facts: Sequence[tuple[str, str, str]]) -> str:
    rows = "".join(
        f'<tr><td class=soft>{escape(name)}<td class="{kind}">{escape(text)}</tr>'
        for name, text, kind in facts
    )
    return f"<table id=facts>{rows}</table>" if rows else ""


def _log_facts(log: LogReport) -> list[tuple[str, str, str]]:
    facts = [
        ("skipped", f"by {batches(count)}: {reason}", "") for reason, count in log.skips_by_reason.items()
    ]
    if log.restarts:
        at = ", ".join(f"{restart.from_step:,}" for restart in log.restarts_last[-12:])
        facts.append(
            ("restarts", f"{log.restarts:,}, at step {at}; {log.superseded:,} superseded records", "")
        )
    repeats = log.repeats
    if repeats.repeated:
        facts.append(
            (
                "repeated steps",
                f"{repeats.repeated:,}: {repeats.same:,} reproduced ({repeats.proven:,} by digest), {repeats.differing:,} differ",
                "bad" if repeats.differing else "good",
            )
        )
    facts += [
        (
            "differs",
            f"step {one.step:,}, lines {one.line_before:,} and {one.line_now:,}: {one.difference}",
            "bad",
        )
        for one in repeats.first
    ]
    if log.every > 1:
        facts.append(("thinned", f"the log holds every {log.every}th step only", "warn"))
    if log.missing:
        gaps = ", ".join(f"{gap.first:,}-{gap.last:,}" for gap in log.gaps)
        facts.append(("gaps", f"{log.missing:,} steps are not in the log: {gaps}", "bad"))
    if log.nonfinite:
        steps = ", ".join(f"{odd.step:,} ({odd.loss})" for odd in log.nonfinite_first)
        facts.append(("non-finite", f"{log.nonfinite:,} updates, left out of the means: step {steps}", "bad"))
    facts += [(f"line {line:,}", text, "warn") for line, text in log.notes[-10:]]
    for noise in log.noise:
        lines_met = ", ".join(f"{line:,}" for line in noise.lines)
        facts.append(("odd lines", f"{noise.count:,} {noise.kind}: line {lines_met}", "warn"))
    if log.unfinished_line:
        facts.append(("odd lines", f"line {log.lines + 1:,} has no end: cut, or still being written", "warn"))
    return facts


def _log_sections(log: LogReport) -> list[str]:
    return ["<h2>Coverage</h2>", _tasks(log), "<h2>Over the run</h2>", _plots(log), _points(log)]


def _tasks(log: LogReport) -> str:
    rows = []
    bars = any(task.rows_planned for task in log.tasks)
    for task in log.tasks:
        planned = f" / {task.rows_planned:,}" if task.rows_planned is not None else ""
        share = task.rows / task.rows_planned if task.rows_planned else None
        bar = "" if share is None else f'<div class=bar><i style="width:{min(1.0, share):.1%}"></i></div>'
        cells = (
            f"{task.rows:,}{planned}",
            f"{task.steps:,}",
            f"{task.skipped / task.steps:.1%}" if task.steps else "-",
            f"{task.tokens:,}",
            _number(task.loss_at_start),
            _number(task.loss_now),
            _number(task.perplexity, 2),
        )
        numbers = "".join(f"<td class=n>{cell}" for cell in cells)
        rows.append(f"<tr><td>{escape(task.task)}{f'<td>{bar}' if bars else ''}{numbers}</tr>")
    header = "".join(
        f"<th{'' if name in ('task', 'trained on') else ' class=n'}>{name}"
        for name in (
            "task",
            "trained on",
            "rows",
            "steps",
            "skipped",
            "tokens",
            "loss at start",
            "now",
            "ppl",
        )
        if bars or name != "trained on"
    )
    return f"<div class=wide><table class=tasks id=tasks><tr>{header}</tr>{''.join(rows)}</table></div>"


def _plots(log: LogReport) -> str:
    steps = [point.last for point in log.curve]
    names = [task.task for task in log.tasks]
    reasons = list(log.skips_by_reason)
    marks = [restart.from_step for restart in log.restarts_last]
    note = "restarts dashed" if marks else ""
    losses = {name: [point.tasks.get(name) for point in log.curve] for name in names}
    plots = [
        lines(
            "Loss per task",
            steps,
            losses,
            marks=marks,
            note=", ".join(filter(None, ("nats per target token", note))),
        ),
        lines(
            "Perplexity per task",
            steps,
            {name: [None if y is None else perplexity(y) for y in ys] for name, ys in losses.items()},
            marks=marks,
            note=note,
            log_scale=True,
        ),
        lines(
            "Skips by reason",
            steps,
            {reason: [float(point.skips.get(reason, 0)) for point in log.curve] for reason in reasons},
            marks=marks,
            note="batches",
            stacked=True,
        ),
        lines("Seconds per step", steps, {"seconds": [p.seconds_per_step for p in log.curve]}, marks=marks),
        lines(
            "Target tokens per update",
            steps,
            {"tokens": [p.tokens / p.updates if p.updates else None for p in log.curve]},
            marks=marks,
        ),
        lines(
            "Tokens per second",
            steps,
            {"tokens": [p.tokens_per_second for p in log.curve]},
            marks=marks,
            note="prefill and live, updates only",
        ),
        lines("Memory peak", steps, {"memory": [p.memory_gib for p in log.curve]}, marks=marks, note="GiB"),
    ]
    return "<div class=plots>" + "".join(_figure(plot) for plot in plots if plot is not None) + "</div>"


def _figure(plot: Plot) -> str:
    note = f" <small>{escape(plot.note)}</small>" if plot.note else ""
    return f'<figure aria-label="{escape(plot.title)}"><figcaption>{escape(plot.title)}{note}</figcaption>{plot.svg}</figure>'


def _points(log: LogReport) -> str:
    rows = "".join(
        f"<tr><td>{point.first:,}-{point.last:,}<td class=n>{point.updates:,}<td class=n>{point.skipped:,}"
        f"<td class=n>{point.tokens:,}<td class=n>{_number(point.loss)}<td class=n>{_number(point.seconds_per_step, 3)}</tr>"
        for point in log.curve
    )
    header = "<tr><th>steps<th class=n>updates<th class=n>skipped<th class=n>tokens<th class=n>loss<th class=n>s a step</tr>"
    return f"<details><summary>The curves as a table</summary><div class=wide><table>{header}{rows}</table></div></details>"


def _settings(title: str, settings: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(str(value))}</tr>" for name, value in _flat(settings))
    return (
        f"<h2>{title}</h2><details><summary>{len(settings)} entries</summary><table>{rows}</table></details>"
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
