"""What `ps inspect` shows of a step, of two runs, of a coverage, of a checkpoint and of a data file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel_synthesis.training.inspection.against import Comparison
from parallel_synthesis.training.inspection.files import CheckpointReport, DataReport
from parallel_synthesis.training.inspection.forecast import Coverage
from parallel_synthesis.training.inspection.steps import StepReport
from pscli.inspect_text import Paint, aligned, bar
from pscli.output import size, table


def step(report: StepReport, paint: Paint) -> str:
    """One step: what the log says of it, and its rows."""
    lines = [paint(f"step {report.step:,}", "bold")]
    for logged in report.logged:
        record = logged.record
        word = "" if logged.counts else paint("  superseded", "warn")
        what = (
            "skipped: " + "; ".join(f"rank {s.rank} {s.reason} {s.detail}" for s in record.skips)
            if record.skipped
            else f"loss {record.loss}, ppl {record.perplexity}, {record.target_tokens} target tokens"
        )
        lines += [
            "",
            f"line {record.line:,}, attempt {logged.attempt}, epoch {record.epoch}{word}",
            f"  {what}",
        ]
        extra = [
            (name, value)
            for name, value in (
                ("seconds", record.seconds),
                ("prefill tokens", record.prefill_tokens),
                ("live tokens", record.live_tokens),
                ("gradient norm", record.grad_norm),
                *record.extra.items(),
            )
            if value is not None
        ]
        lines += [f"  {', '.join(f'{name} {value}' for name, value in extra)}"] if extra else []
        if record.digest is not None and record.digest.reduced:
            lines.append(f"  gradient digest {record.digest.reduced}")
    if not report.logged:
        lines += ["", "not in the log (yet)"]
    if report.rows:
        shown = any(row.line is not None for row in report.rows)
        rows: list[tuple[str, ...]] = [
            (
                str(row.rank),
                row.task,
                str(row.number),
                *((str(row.line), row.id or "-", row.file or "-") if shown else ()),
            )
            for row in report.rows
        ]
        header = ("rank", "task", "row", *(("line", "id", "file") if shown else ()))
        lines += ["", table(rows, header=header), paint(f"rows as {report.rows_from} has them", "dim")]
    if report.note is not None:
        lines += ["", paint(report.note, "warn")]
    return "\n".join(lines)


def against(found: Comparison, paint: Paint) -> str:
    """Two runs."""
    lines = [f"{found.one}  against  {found.other}", ""]
    if found.parting is not None:
        part = found.parting
        apart = "; they did not start from the same weights" if found.same_start is False else ""
        lines.append(paint(f"they part at step {part.step:,}", "bad") + f": {part.difference}{apart}")
        lines.append(
            f"lines {part.line:,} and {part.other_line:,}; {found.differing:,} of {found.compared:,} differ"
        )
    elif found.compared:
        how = (
            "rows, losses and gradients to the bit"
            if found.proven == found.compared
            else f"as far as both tell (digests of {found.proven:,})"
        )
        lines.append(paint(f"{found.compared:,} steps are the same", "good") + f": {how}")
    else:
        lines.append(paint("they have no step in common", "bad"))
    if found.only_one or found.only_other:
        lines.append(
            f"{found.only_one:,} steps only in the first (to step {found.last_step:,}), "
            f"{found.only_other:,} only in the other (to step {found.other_last_step:,})"
        )
    if found.settings:
        rows = [(item.name, item.one, item.other, item.kind or "") for item in found.settings]
        lines += ["", table(rows, header=("what differs", "first", "other", "what it can do"))]
    return "\n".join(lines)


def coverage(found: Coverage, paint: Paint) -> str:
    """What the guards will skip."""
    share = found.skipped / found.steps
    lines = [
        f"{found.recipe}: of {found.steps:,} steps the guards will skip "
        + paint(f"{found.skipped:,} ({share:.1%})", "warn" if found.skipped else "good"),
        *(f"  {count:,} {reason}" for reason, count in found.skips.items()),
        "",
    ]
    rows: list[tuple[str, ...]] = [
        (
            task.task,
            bar(task.kept_rows / task.rows) if task.rows else "",
            f"{task.kept_rows:,} / {task.rows:,}",
            f"{task.steps:,}",
            f"{task.skipped:,}",
            f"{task.skipped / task.steps:.1%}" if task.steps else "-",
            f"{task.tokens:,}",
        )
        for task in found.tasks
    ]
    lines.append(
        table(rows, header=("task", "kept", "rows of all", "steps", "skipped", "share", "target tokens"))
    )
    header = (
        "",
        "limit now",
        "median",
        "90 %",
        "99 %",
        "largest",
        "over",
        "keeps 90 %",
        "99 %",
        "100 % of steps",
    )
    for name, spreads in (("all tasks", found.spreads), *((task.task, task.spreads) for task in found.tasks)):
        if not spreads or (name != "all tasks" and len(found.tasks) == 1):
            continue
        rows = [
            (
                spread.quantity,
                "off" if spread.limit < 0 else f"{spread.limit:,}",
                *(
                    f"{value:,}"
                    for value in (spread.median, spread.p90, spread.p99, spread.largest, spread.over)
                ),
                *(f"{spread.keeps[share]:,}" for share in ("90", "99", "100")),
            )
            for spread in spreads
        ]
        lines += ["", table(rows, header=(name, *header[1:]))]
    lines += ["", f"{found.tokenised:,} rows tokenised, {found.cached:,} known from before"]
    agreed = found.agreement
    if agreed is not None:
        lines.append(
            paint(f"the log's {agreed.compared:,} steps were skipped or not as foretold", "good")
            if not agreed.differing
            else paint(f"{agreed.differing:,} of {agreed.compared:,} logged steps differ", "bad")
            + f"; first: step {agreed.first:,}, foretold {agreed.predicted}, logged {agreed.logged}"
        )
    return "\n".join(lines)


def checkpoint(found: CheckpointReport, paint: Paint) -> str:
    """A checkpoint."""
    state = paint("committed", "good") if found.committed else "without a manifest"
    pairs = [("checkpoint", f"{paint(found.source, 'bold')}, {state}")]
    if found.merge is not None:
        pairs.append(("merge", _merge(found)))
    elif found.step is not None:
        pairs.append(
            (
                "step",
                f"{found.step:,}, epoch {found.epoch}" + (f", of {found.recipe}" if found.recipe else ""),
            )
        )
    metrics = ", ".join(
        f"{name} {_short(value)}" for name, value in found.metrics.items() if value is not None
    )
    pairs += [("metrics", metrics)] if metrics else []
    lora = ", ".join(f"{name} {_short(value)}" for name, value in found.adapter.items())
    pairs += [("LoRA", lora)] if lora else []
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    pairs.append(("tensors", f"{len(found.tensors):,} ({kinds}), {size(found.tensor_bytes)}"))
    if found.frozen_tensors:
        pairs.append(
            (
                "frozen",
                paint(
                    f"{found.frozen_tensors:,} of them, {size(found.frozen_bytes)}, are the backbone's own: not trained",
                    "warn",
                ),
            )
        )
    for parent in found.parents:
        step = parent.get("step")
        pairs.append(("parent", f"{parent.get('source', '?')}" + (f", step {step:,}" if step else "")))
    pairs += [("problem", paint(problem, "bad")) for problem in found.problems]
    rows = [(name, size(count)) for name, count in found.files.items()]
    shapes = [
        (tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", size(tensor.bytes))
        for tensor in [
            *(t for t in found.tensors if "mapper" in t.file),
            *(t for t in found.tensors if t.frozen),
        ]
    ]
    return "\n".join(
        [
            *aligned(pairs),
            "",
            table(rows, header=("file", "size")),
            "",
            table(shapes, header=("tensor", "dtype", "shape", "size")),
        ]
    )


def data(found: DataReport, paint: Paint) -> str:
    """A data file."""
    pairs = [
        ("data", f"{paint(str(found.path), 'bold')}, {size(found.bytes)}"),
        ("known as", found.known_as or "no file of the training-data manifest"),
        ("rows", f"{found.rows:,} valid, {found.bad:,} not"),
        ("sha256", found.sha256),
    ]
    if found.unpacked_sha256 is not None:
        pairs.append(("unpacked", f"{size(found.unpacked_bytes or 0)}, sha256 {found.unpacked_sha256}"))
    pairs += [
        ("branches", f"{found.branches[0]} to {found.branches[2]}, median {found.branches[1]}"),
        (
            "contexts",
            f"{found.characters[0]:,} to {found.characters[2]:,} characters a row, median {found.characters[1]:,} "
            f"({found.sampled:,} rows looked at)",
        ),
    ]
    if found.loose.said is not None:
        pairs.append(("extracts", paint(found.loose.said, "warn")))
    pairs += [("bad row", paint(f"line {line:,}: {problem}", "bad")) for line, problem in found.bad_first]
    return "\n".join(aligned(pairs))


def _merge(found: CheckpointReport) -> str:
    """How it was merged: `average 0.5 A + 0.5 B, mapper of B (release-merge)`."""
    merge = found.merge or {}
    weights = merge.get("weights") or {name: merge.get(f"weight_{name}") for name in "ab"}
    given = " + ".join(f"{weight:g} {name.upper()}" for name, weight in weights.items() if weight is not None)
    how = merge.get("method") or merge["merge_type"]
    mapper = merge.get("cache_mapper_source")
    of = f", mapper of {str(mapper).upper()}" if mapper is not None else ""
    recipe = f" ({found.recipe})" if found.recipe else ""
    return f"{how} {given}{of}{recipe}; no step of any run"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list | tuple):
        return "/".join(map(str, value))
    if isinstance(value, Mapping):
        return "..."
    return str(value)
