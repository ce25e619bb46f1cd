"""What `ps verify` says at its end: the document, the lines, the exit code; and its bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from parallel_synthesis.errors import CheckpointError, StorageError, VerificationError
from pscli.output import Output, size

if TYPE_CHECKING:
    from parallel_synthesis.checkpoint.verification import Report
    from parallel_synthesis.provenance.problems import Problem

_RESTORE = "restore the named files from a good copy, or use another checkpoint"
_SHOWN = 200  # problems a human is shown; --json has all


def exit_code(problems: Sequence[Problem]) -> int:
    """What could not be read outranks what is wrong, which outranks a manifest that says nothing."""
    kinds = {problem.kind for problem in problems}
    if "unreadable" in kinds:
        return 3
    return 1 if kinds - {"manifest"} else 2 if kinds else 0


def tell(output: Output, given: str, report: Report, *, released: bool) -> None:
    code = exit_code(report.problems)
    foreign = next((problem for problem in report.problems if problem.kind == "backbone"), None)
    # It explains all the others.
    problems = sorted(report.problems, key=lambda problem: problem is not foreign)
    output.document(
        {
            "ok": code == 0,
            "exit_code": code,
            "target": report.target,
            "manifest": report.manifest,
            "manifest_sha256": report.manifest_sha256,
            "content_checked": report.content_checked,
            "counts": report.counts,
            "bytes_hashed": report.bytes_hashed,
            "seconds": report.seconds,
            "problems": described(problems),
            "complete": report.complete,
            "checkpoints": report.checkpoints,
            "digests": report.digests,
            "not_checked": report.not_checked,
            "structure_only": report.structure_only,
        }
    )
    going_on = all(problem.kind == "incomplete" for problem in report.problems)
    next_ = f"go on with it: ps resume {given}" if going_on else _RESTORE
    first = None
    if foreign is not None:
        whose = f"the backbone of {Path(report.manifest or '').name}, {foreign.expected}"
        first = f"this is no checkpoint of {whose}, but of {foreign.actual or 'another one'}"
        next_ = f"judge it by its own manifest: ps verify {given}"
    fail(output, given, problems, next_, first=first)
    many = f"{len(report.checkpoints)} checkpoints, " if len(report.checkpoints) > 1 else ""
    files = f"{len(report.digests)} file{'s' * (len(report.digests) != 1)}"
    lines = [f"{given}: {many}{files}: every byte is as its manifest says, and the parts belong together"]
    if report.structure_only:
        lines = _structure_only(given, f"{many}{files}", report)
    elif not report.content_checked:
        lines = [f"{given}: {many}{files}: sizes and headers are as the manifest says; contents NOT checked"]
    elif released:
        lines.append(f"the files that {Path(report.manifest or '').name} lists are those of the release")
    if report.not_checked:
        shown = ", ".join(report.not_checked[:8]) + (" ..." if len(report.not_checked) > 8 else "")
        why = "" if report.structure_only else ", because no manifest vouches for it"
        lines.append(f"not checked{why}: {shown}")
    if report.complete is False:
        lines.append("the run is not complete")
    seconds = max(report.seconds, 1e-3)
    rate = f" ({size(report.bytes_hashed / seconds)}/s)" if report.bytes_hashed > 10_000_000 else ""
    if not report.structure_only:
        lines.append(f"{size(report.bytes_hashed)} hashed in {report.seconds:.1f} s{rate}")
    output.text("\n".join(lines))


def _structure_only(given: str, what: str, report: Report) -> list[str]:
    """Of checkpoints without recorded hashes: what was looked at, that it proves no content, and how to get there."""
    from parallel_synthesis.provenance.check import NOTHING, PARTS, WHOLE

    some = len(report.structure_only) < len(report.checkpoints)
    whose = f" of {', '.join(report.structure_only[:4])}" if some else ""
    looked = sorted({part for how in report.digests.values() for part in how.split(", ")})
    looked = [part for part in looked if part not in (WHOLE, PARTS, NOTHING)]
    return [
        f"{given}: {what}: the parts fit together; there are no recorded hashes{whose}, so contents are NOT verified",
        f"looked at: {', '.join(looked)}",
        "to record hashes: ps verify CHECKPOINT --write-manifest, or a copy by ps snapshot CHECKPOINT --export DEST; "
        "to judge by known ones: --manifest FILE",
    ]


def described(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """The problems as --json lists them."""
    return [
        {
            "path": problem.path,
            "status": problem.kind,
            "detail": problem.detail,
            "expected": problem.expected,
            "actual": problem.actual,
        }
        for problem in problems
    ]


def fail(
    output: Output, given: str, problems: Sequence[Problem], next_: str, *, first: str | None = None
) -> None:
    """Ends the call when there are problems; the document has been printed. first: what explains them all."""
    code = exit_code(problems)
    if code == 0:
        return
    if output.mode == "json":
        raise typer.Exit(code)
    lines = [f"  - [{problem.kind}] {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  ... and {len(problems) - _SHOWN} more (--json has all)")
    count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    head = f"{given}: {count}" if first is None else f"{given}: {first}\n{count}"
    message = "\n".join([head, *lines, next_])
    if code == 3:
        raise StorageError(message)
    raise VerificationError([message]) if code == 1 else CheckpointError(message)


class Bar:
    """A bar with bytes a second on a terminal; nothing anywhere else."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._bar: Any = None

    def start(self, total: int) -> Callable[[int], None]:
        # Here, not at the top: rich costs start-up time that only a terminal should pay.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            BarColumn(bar_width=30),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=self._output.stderr),
            transient=True,
        )
        task = self._bar.add_task("", total=total)
        self._bar.start()
        bar = self._bar

        def advance(count: int) -> None:
            bar.update(task, advance=count)

        return advance

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
