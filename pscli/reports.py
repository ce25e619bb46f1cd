"""What `ps train` prints: a resolved recipe, a plan, the end of a run; as text and as documents (no I/O)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parallel_synthesis.recipe import Resolved
from parallel_synthesis.training.events import Evaluation, TrainResult
from parallel_synthesis.training.plan import Plan, RankRows
from pscli.output import batches, counted, duration, plain, size, table


def recipe(resolved: Resolved) -> str:
    """The resolved recipe as TOML that can be saved and trained, each field with its origin as a comment."""
    lines = [f"# {resolved.name}, from {resolved.path}", f"# sha256 {resolved.sha256}"]
    for section, fields in resolved.config.to_dict().items():
        if section == "recipe":
            continue
        rows = []
        for key, value in fields.items():
            text = f"# {key} is not set" if value is None else f"{key} = {_toml(value)}"
            rows.append((text, f"# {resolved.origins[f'{section}.{key}']}"))
        width = min(50, max(len(text) for text, _ in rows))
        lines += ["", f"[{section}]", *(f"{text.ljust(width)}  {origin}" for text, origin in rows)]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def recipe_document(resolved: Resolved) -> dict[str, Any]:
    return {
        "recipe": _source(resolved),
        "config": resolved.config.to_dict(),
        "origins": dict(resolved.origins),
    }


def plan(resolved: Resolved, planned: Plan, *, step: int | None, rows: Sequence[RankRows] | None) -> str:
    """A dry run for a human."""
    tasks = [
        (t.task, _count(t.rows), t.rows_from, _count(t.steps), _count(t.dropped_rows), str(t.file))
        for t in planned.tasks
    ]
    lines = [
        f"{resolved.name} (nothing is written)",
        "",
        table(tasks, header=("task", "rows", "rows from", "steps", "rows dropped", "file")),
        "",
        f"steps       {_count(planned.total_steps)} global steps: {planned.epochs} epoch"
        f"{'s' * (planned.epochs > 1)} of {_count(planned.steps_per_epoch)}; "
        f"{planned.ranks} rank{'s' * (planned.ranks > 1)} x batch {planned.batch_size}",
    ]
    if planned.init is not None:
        about = [f"recipe {planned.init.recipe}"] if planned.init.recipe is not None else []
        about += [f"step {planned.init.step:,}"] if planned.init.step is not None else []
        told = f" ({', '.join(about)})" if about else ""
        lines.append(f"starts      from the components of {planned.init.source}{told}")
    if planned.trainable_parameters is not None:
        lines.append(f"trains      {planned.trainable_parameters:,} parameters")
    if planned.saves is not None:
        saves = planned.saves
        lines.append(
            f"saves       {saves.count:,}, at step {saves.first} to {saves.last}; at most {saves.kept} kept"
        )
    for milestone in planned.milestones:
        beyond = "" if milestone.reached or planned.total_steps is None else ", beyond the end of the run"
        lines.append(f"milestone   {milestone.name}{beyond}")
    if planned.disk is not None:
        free = "" if planned.disk.free is None else f"; {size(planned.disk.free)} free"
        lines.append(
            f"disk        {size(planned.disk.needed)} ({size(planned.disk.checkpoint)} a checkpoint){free}"
        )
    else:
        what = "number of steps" if planned.total_steps is None else "number of trained parameters"
        lines.append(f"disk        unknown: the {what} is not known")
    lines.append(
        f"device      {resolved.config.backbone.device}{_device_note(resolved.config.backbone.device)}"
    )
    lines += [f"warning     {text}" for text in planned.warnings]
    lines += [f"missing     {text}" for text in planned.missing]
    lines += [f"refused     {error}" for error in planned.refused]
    if step is not None and rows is not None:
        lines += ["", f"step {step:,} takes (row numbers count the task's valid rows from 0)"]
        lines.append(
            table(
                [(str(r.rank), r.task, ", ".join(map(str, r.rows))) for r in rows],
                header=("rank", "task", "rows"),
                indent=2,
            )
        )
    return "\n".join(lines)


def plan_document(
    resolved: Resolved, planned: Plan, *, step: int | None, rows: Sequence[RankRows] | None
) -> dict[str, Any]:
    document = {"recipe": _source(resolved), "plan": plain(planned)}
    if step is not None and rows is not None:
        document["rows_at"] = {"step": step, "ranks": plain(rows)}
    return document


def ending(resolved: Resolved, result: TrainResult) -> str:
    """The end of a run for a human: what happened, what was made, what to try next."""
    lines = [
        f"trained {resolved.name}: {counted(result.step, 'step')}, {counted(result.optimizer_steps, 'update')}, "
        f"{result.skipped_steps:,} skipped, mean loss {result.loss:.4f}, {duration(result.seconds)}"
    ]
    lines += [f"  skipped by {batches(count)}: {reason}" for reason, count in result.skips_by_reason.items()]
    if result.generated:
        tokens, dropped = result.generated["tokens"], result.generated["workers_dropped"]
        lines.append(
            f"  workers generated {tokens:,} tokens; {dropped:,} workers wrote nothing and were dropped"
        )
    if result.evaluations:
        lines += ["", _evaluations(resolved, result)]
    lines += ["", "made"]
    made = [
        ("the final checkpoint", str(result.out)),
        ("the mapper", str(result.out / "cache_mapper.pt")),
        ("the LoRA, for PEFT", str(result.out / "judger_lora")),
        *(("a milestone", f"{result.out}@{name}") for name in result.milestones),
    ]
    lines.append(table(made, indent=2))
    lines += ["", "next", table(_next(resolved, result), indent=2)]
    return "\n".join(lines)


def _evaluations(resolved: Resolved, result: TrainResult) -> str:
    tasks = list(result.evaluations[0].tasks)
    rows = [
        (_when(item, result.evaluations), f"{item.loss:.4f}", *(f"{item.tasks[task]:.4f}" for task in tasks))
        for item in result.evaluations
    ]
    floor = resolved.config.evaluate.blind_floor
    if floor is not None:
        rows.append(("floor for a reader without branches", f"{floor:.4f}", *("-" for _ in tasks)))
    first = result.evaluations[0]
    header = ("held-out loss", "all", *tasks)
    return table(rows, header=header) + f"\n(nats per target token, {first.rows} rows)"


def _when(item: Evaluation, all_of_them: Sequence[Evaluation]) -> str:
    """A run that went on beyond its end was evaluated more than once: the step tells which is which."""
    again = sum(other.when == item.when for other in all_of_them) > 1
    return f"{item.when} (step {item.step})" if again else item.when


def _next(resolved: Resolved, result: TrainResult) -> list[tuple[str, str]]:
    if resolved.name == "demo":
        count = min(20, result.step)  # step 0 is always kept, so as many as there are can be done again
        prove = ("prove that its steps repeat", f"ps verify {result.out} --replay {count}")
        return [
            *([prove] if count else []),
            *(("go back and on again", f"ps resume {result.out}@{name}") for name in result.milestones[:1]),
            ("the same bytes on two processes", "ps train demo --nproc 2"),
            ("the recipe, to edit and train", "ps train demo --show > own.toml"),
            ("what the release's recipe takes", "ps train general --dry-run"),
        ]
    return [
        ("train on from it", f"ps train RECIPE --init {result.out}"),
        ("use the LoRA", f'PeftModel.from_pretrained(backbone, "{result.out / "judger_lora"}")'),
    ]


def result_document(resolved: Resolved, result: TrainResult) -> dict[str, Any]:
    document = {"recipe": _source(resolved), "result": plain(result)}
    document["result"]["blind_floor"] = resolved.config.evaluate.blind_floor
    return document


def _source(resolved: Resolved) -> dict[str, str]:
    return {"name": resolved.name, "path": str(resolved.path), "sha256": resolved.sha256}


def _count(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"


def _device_note(device: str) -> str:
    return " (decided at the start: CUDA when there is one, else the CPU)" if device == "auto" else ""
