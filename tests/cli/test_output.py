"""The sink, the progress line and small formats."""

from __future__ import annotations

import io
import math
from pathlib import Path

from parallel_synthesis.training.events import Evaluation, RankBatch, RunStarted, StepDigest, StepRecord
from parallel_synthesis.training.guards import Skip
from pscli.output import Output, duration, plain, size, table
from pscli.progress import Watcher


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def info(total: int) -> RunStarted:
    return RunStarted(
        out=Path("runs/x"), recipe="own", backbone="b", device="cpu", first_step=1, total_steps=total,
        steps_per_epoch=total, ranks=1, processes=1, trainable_parameters=1234, rows={"flan": 1000},
    )  # fmt: skip


def record(step: int, *, skipped: bool = False) -> StepRecord:
    return StepRecord(
        epoch=1, step=step, perplexity=4.5, target_tokens=10,
        batches=(RankBatch(rank=0, task="flan", rows=(1,), places=("x:2",), counts=(), skip=None),),
        skips={0: Skip(reason="r", numbers="n", message="m")} if skipped else {},
        loss=math.nan if skipped else 1.5, prefill_tokens=100, live_tokens=50, seconds=0.5,
        memory_gib=1.25, gradient_norm=1.0,
        digest=StepDigest(rows=((1,),), loss=(), gradient=(), rng=(), reduced=""),
    )  # fmt: skip


def watch(output: Output, total: int, skipped: tuple[int, ...] = ()) -> None:
    watcher = Watcher(output, log_every=1)
    watcher.started(info(total))
    for step in range(1, total + 1):
        watcher.step(record(step, skipped=step in skipped))
    watcher.saved(total, Path("runs/x/milestones/m"), "m", 0.1)
    watcher.evaluated(
        Evaluation(when="after", step=total, loss=0.5, tasks={}, rows=3, target_tokens=9, seconds=1.0)
    )
    watcher.close()


def test_without_a_terminal_there_are_a_few_plain_lines():
    out, err = io.StringIO(), io.StringIO()
    watch(Output(stdout=out, stderr=err), 100, skipped=(2, 100))
    lines = err.getvalue().splitlines()
    assert out.getvalue() == ""
    assert len([line for line in lines if line.startswith("step ")]) == 10
    assert lines[3].startswith("step 10/100  loss 1.5000  300 tokens/s  1 skipped  1.2 GiB  45 s left")
    assert any("milestone m" in line for line in lines)
    assert any("held-out loss after: 0.5000" in line for line in lines)
    assert "\x1b" not in err.getvalue()


def test_a_terminal_gets_a_moving_line():
    err = Terminal()
    watch(Output(stderr=err), 20)
    text = err.getvalue()
    assert "20/20" in text
    assert "loss 1.5000" in text
    assert "step 10/20" not in text


def test_quiet_and_other_ranks_show_no_progress():
    for output in (Output(mode="quiet", stderr=Terminal()), Output(rank=1, stderr=Terminal())):
        watch(output, 20)
        assert output.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_warnings_are_shown_even_when_quiet():
    err = io.StringIO()
    Watcher(Output(mode="quiet", stderr=err), log_every=1).warning("look out")
    assert err.getvalue() == "warning: look out\n"


def test_documents_have_no_nan():
    assert plain({"a": math.nan, "b": (math.inf, 1.5), "p": Path("x")}) == {
        "a": None,
        "b": [None, 1.5],
        "p": "x",
    }


def test_small_formats():
    assert [size(n) for n in (12, 1500, 251_900_000, 1.5e9, 3e12)] == [
        "12 bytes",
        "1.5 kB",
        "251.9 MB",
        "1.5 GB",
        "3.0 TB",
    ]
    assert [duration(s) for s in (0.4, 59, 60, 3725, 90000)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "1 h 2 min",
        "1 d 1 h",
    ]
    assert table([("a", "1"), ("bb", "20")], header=("x", "n")) == "x    n\na    1\nbb  20"
