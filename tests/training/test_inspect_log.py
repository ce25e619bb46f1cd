"""The log's parser and its figures: whole records only, the last attempt wins, nothing odd becomes a number."""

from __future__ import annotations

import math
import random
import resource
from pathlib import Path

import pytest

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training import log_chunks
from parallel_synthesis.training.inspection.blocks import FIELD
from parallel_synthesis.training.inspection.report import LogReport, report
from parallel_synthesis.training.inspection.runlog import RunLog
from parallel_synthesis.training.log_reader import EpochLine, MemoryLine, StepLine, parse_line


def update(
    step: int, loss: str = "1.5000", tokens: int = 10, *, task: str = "flan", seed: int = 0, full: bool = True
) -> str:
    line = f"[train-dist] epoch=1 step={step} rank_tasks=['{task}', '{task}'] loss={loss} ppl=4.4817 target_tokens={tokens}"
    if not full:
        return line + "\n"
    proof = f"{step * 7919 + seed:016x}"
    return line + (
        f" seconds=0.5000 prefill_tokens=100 live_tokens=50 memory_gib=1.250 grad_norm=0.5 rows={step};{step + 1000} "
        f"rank_loss=3f9d70a4;3f9d70a4 rank_grad={proof};{proof} rank_rng={proof};{proof} grad={proof}\n"
    )


def skip(
    step: int, *, task: str = "flan", reason: str = "actual_live_tokens_exceeded", full: bool = True
) -> str:
    line = (
        f"[train-dist] skipped epoch=1 step={step} task={task} details="
        f"rank=1 task={task} reason={reason} live_tokens=1900/1800 msg=guards.live_tokens exceeded, loss=nan"
    )
    if not full:
        return line + "\n"
    tail = f" seconds=0.0100 prefill_tokens=100 live_tokens=50 memory_gib=1.250 rows={step};{step + 1000}"
    return f"{line}{tail} rank_rng={step:016x};{step:016x}\n"


def read(path: Path, text: str | bytes) -> RunLog:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    log = RunLog(path)
    log.update()
    return log


def figures(path: Path, text: str | bytes) -> LogReport:
    return report(read(path, text))


def noise(found: LogReport) -> dict[str, tuple[int, ...]]:
    return {item.kind: item.lines for item in found.noise}


@pytest.fixture(params=[1 << 18, 700], ids=["one chunk", "small chunks"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(log_chunks, "CHUNK", request.param)
    return int(request.param)


# -- one line -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("6.05e-06", 6.05e-06),
        ("nan", math.nan),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("-0.5", -0.5),
        ("7", 7.0),
    ],
)
def test_numbers_are_exact(written: str, value: float) -> None:
    record = parse_line(
        f"[train] epoch=1 step=5 task=flan loss={written} ppl={written} target_tokens=42\n".encode(), 3
    ).record
    assert isinstance(record, StepLine)
    assert record.loss == pytest.approx(value, rel=0, abs=0, nan_ok=True)
    assert record.perplexity == pytest.approx(value, rel=0, abs=0, nan_ok=True)


def test_fields_are_read_by_name_in_any_order_and_unknown_ones_are_kept() -> None:
    line = b"[train] target_tokens=42 loss=2.5 lr=1e-4 step=5 ppl=12.2 task=flan epoch=3 note=\n"
    record = parse_line(line, 1).record
    assert isinstance(record, StepLine)
    assert (record.step, record.epoch, record.loss, record.target_tokens) == (5, 3, 2.5, 42)
    assert record.extra == {"lr": "1e-4", "note": ""}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"[train] epoch=1 step=5 task=flan loss=5.1 ppl=164.0 target_tokens=4", "cut line"),
        (b"[train] epoch=1 step=5 task=flan loss=5.1 ppl=164.0 target_tokens=4 [cut]\n", "cut line"),
        (b"[train] epoch=1 step=5 task=flan loss=5.1 ppl=164.0\n", "incomplete record"),
        (b"[train] epoch=1 step=5 task=flan loss=5.1 ppl=164.0 target_tokens=\n", "incomplete record"),
        (b"[train] epoch=1 step=5 task=flan loss=5.1x ppl=164.0 target_tokens=4\n", "not a number"),
        (b"[train] epoch=1 step=5 task=flan loss=1_0 ppl=164.0 target_tokens=4\n", "not a number"),
        (b"[train] epoch=1 step=5 task=flan loss=1 loss=2 ppl=164.0 target_tokens=4\n", "repeated field"),
        (
            b"[train] epoch=1 step=5 task=flan loss=1 ppl=2 target_tokens=42 UserWarning: x\n",
            "foreign text in a record",
        ),
        (b"[train] skipped epoch=1 step=5 task=flan\n", "incomplete record"),
        (b"/x.py:3: UserWarning: loss=3 step=9\n", "foreign line"),
    ],
)
def test_what_is_no_whole_record_is_named_and_gives_no_number(line: bytes, kind: str) -> None:
    parsed = parse_line(line, 1)
    assert parsed.record is None
    assert parsed.noise == (kind,)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (b"[default0]:", "launcher prefix"),
        (b"[rank0]: ", "launcher prefix"),
        (b"0: ", "launcher prefix"),
        (b"\x1b[32m", "colour codes"),
        (b"step 9/10\r", "carriage return"),
        (b"[train] epoch=1 step=9 task=flan loss=9.", "glued lines"),
        (b"[train] epoch=1 step=9 task=flan loss=9.0 ppl=9.0 target_tokens=99", "glued lines"),
    ],
)
def test_a_whole_record_behind_something_else_is_taken_and_the_rest_is_named(
    before: bytes, kind: str
) -> None:
    whole = b"[train] epoch=1 step=5 task=flan loss=5.1234 ppl=167.9 target_tokens=42\n"
    parsed = parse_line(before + whole, 1)
    assert isinstance(parsed.record, StepLine)
    assert (parsed.record.step, parsed.record.loss, parsed.record.target_tokens) == (5, 5.1234, 42)
    assert kind in parsed.noise


def test_the_reference_lines_of_the_formats() -> None:
    skipped = parse_line(
        b"[train-dist] skipped epoch=1 step=13 task=flan details=rank=0 task=flan reason=actual_live_tokens_exceeded "
        b"live_tokens=1900/1800 msg=too long; rank=2 task=flan reason=actual_total_tokens_exceeded msg=y\n",
        1,
    ).record
    assert isinstance(skipped, StepLine)
    assert [(one.rank, one.reason) for one in skipped.skips] == [
        (0, "actual_live_tokens_exceeded"),
        (2, "actual_total_tokens_exceeded"),
    ]
    alone = parse_line(
        b"[train] skipped epoch=1 step=6 task=flan reason=nonfinite_loss msg=loss=nan\n", 1
    ).record
    assert isinstance(alone, StepLine)
    assert (alone.skips[0].reason, alone.skips[0].detail, alone.loss) == ("nonfinite_loss", "loss=nan", None)
    done = parse_line(
        b"[train-dist] epoch=1 done: avg_loss=1.234567 ppl=3.437000 target_tokens=123456\n", 1
    ).record
    assert isinstance(done, EpochLine)
    assert (done.loss, done.target_tokens) == (1.234567, 123456)
    memory = parse_line(
        b"[cuda-memory] rank=0 step=12 allocated_gib=31.204 reserved_gib=33.100 peak_allocated_gib=61.400 "
        b"peak_reserved_gib=64.020\n",
        1,
    ).record
    assert isinstance(memory, MemoryLine)
    assert (memory.peak_allocated, memory.peak_reserved) == (61.4, 64.02)


# -- a whole log ---------------------------------------------------------------------------------------------------------


def oracle(text: str) -> tuple[dict[int, StepLine], int]:
    """The steps that count by the plainest reading, and the number of superseded records."""
    steps: dict[int, StepLine] = {}
    superseded = 0
    last = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        record = parse_line(line.encode(), number).record
        if record is None:
            continue
        if isinstance(record, StepLine):
            if record.step <= last:
                gone = [step for step in steps if step >= record.step]
                superseded += len(gone)
                for step in gone:
                    del steps[step]
            steps[record.step] = record
            last = record.step
        elif getattr(record, "from_step", None) is not None:
            gone = [step for step in steps if step > record.from_step]  # type: ignore[union-attr,operator]
            superseded += len(gone)
            for step in gone:
                del steps[step]
            last = record.from_step  # type: ignore[union-attr,assignment]
    return steps, superseded


@pytest.mark.parametrize("seed", range(12))
def test_figures_are_those_of_the_plainest_reading(tmp_path: Path, chunk: int, seed: int) -> None:
    """Random logs with restarts, noise, thinning in quality, several tasks, against a reading line by line."""
    rng = random.Random(seed)
    lines = []
    step, attempt = 0, 1
    for _ in range(rng.randint(2, 400)):
        if step > 3 and rng.random() < 0.03:
            attempt += 1
            back = rng.randint(max(1, step - 60), step)
            if rng.random() < 0.5:
                lines.append(f"[resume] attempt={attempt} from_step={back} checkpoint=x\n")
            else:
                lines.append("[resume] loaded the state of an earlier step\n")
                back = min(back, step - 1)
            step = back
        step += 1
        task = rng.choice(["flan", "wildchat", "2wiki_multihopqa"])
        full = rng.random() < 0.9
        if rng.random() < 0.2:
            lines.append(skip(step, task=task, reason=rng.choice(["a_exceeded", "b_exceeded"]), full=full))
        else:
            loss = rng.choice(["nan", f"{rng.random() * 5:.4f}", f"{rng.random():.2e}"])
            lines.append(update(step, loss, rng.randint(1, 900), task=task, full=full))
        if rng.random() < 0.05:
            lines.append(rng.choice(["Warning: step=1\n", "\n", "[default0]:" + update(step, task=task)]))
    text = "".join(lines)
    steps, superseded = oracle(text)
    found = figures(tmp_path / "train.log", text)
    updates = [record for record in steps.values() if not record.skipped]
    finite = [record for record in updates if record.loss is not None and math.isfinite(record.loss)]
    assert (found.steps, found.updates, found.superseded) == (len(steps), len(updates), superseded)
    assert found.tokens == sum(record.target_tokens or 0 for record in updates)
    assert found.nonfinite == len(updates) - len(finite)
    tokens = sum(record.target_tokens or 0 for record in finite)
    expected = sum((r.loss or 0) * (r.target_tokens or 0) for r in finite) / tokens if tokens else None
    assert found.loss == (None if expected is None else pytest.approx(expected))
    for task in found.tasks:
        mine = [record for record in steps.values() if record.tasks[0] == task.task]
        assert task.steps == len(mine)
        assert task.skipped == sum(record.skipped for record in mine)
    reasons: dict[str, int] = {}
    for record in steps.values():
        for one in record.skips:
            reasons[one.reason] = reasons.get(one.reason, 0) + 1
    assert dict(found.skips_by_reason) == reasons
    assert found.last_step == max(steps)
    assert found.missing == max(steps) - min(steps) + 1 - len(steps)


def test_noise_is_reported_by_line_and_never_becomes_a_number(tmp_path: Path, chunk: int) -> None:
    clean = [update(step, f"{step}.0", 10) for step in range(1, 31)]
    dirty = list(clean)
    dirty[2] = "\x1b[32m" + dirty[2]
    dirty[4] = "[default0]:" + dirty[4]
    dirty[6] = "it 3/9\r" + dirty[6]
    dirty[8] = dirty[8].replace("\n", "\r\n")
    dirty[10] = dirty[10][:60] + dirty[10]  # cut, and its repetition glued to it
    dirty.insert(13, "/lib/x.py:1: UserWarning: loss=999 target_tokens=999\n")
    text = "".join(dirty) + update(31)[:90]
    found = figures(tmp_path / "train.log", text)
    assert noise(found) == {
        "colour codes": (3,),
        "launcher prefix": (5,),
        "carriage return": (7, 9),
        "glued lines": (11,),
        "foreign line": (14,),
    }
    assert found.unfinished_line
    assert (found.updates, found.tokens, found.loss) == (30, 300, pytest.approx(15.5))
    assert found.missing == 0


def test_a_log_with_dos_line_ends_has_the_same_figures(tmp_path: Path, chunk: int) -> None:
    text = "".join(update(step, f"{step}.0", 10) for step in range(1, 21)) + skip(21)
    found = figures(tmp_path / "a.log", text.replace("\n", "\r\n"))
    assert (found.updates, found.skipped, found.loss) == (20, 1, pytest.approx(10.5))
    assert found.noise[0].kind == "carriage return"
    assert found.noise[0].count == 21


def test_a_line_cut_inside_its_digests_is_no_record(tmp_path: Path, chunk: int) -> None:
    whole = update(2, "2.0")
    text = update(1, "1.0") + whole[: whole.index("rank_grad") + 15] + update(2, "7.0") + update(3, "3.0")
    found = figures(tmp_path / "a.log", text)
    assert noise(found) == {"glued lines": (2,)}
    assert (found.updates, found.loss) == (3, pytest.approx(11 / 3))


def test_a_repeat_that_differs_is_flagged(tmp_path: Path, chunk: int) -> None:
    text = "".join(update(step) for step in range(1, 9)) + "[resume] attempt=2 from_step=4 checkpoint=x\n"
    text += update(5) + update(6, seed=1) + update(7, "1.6000", seed=1) + update(8, seed=1) + update(9)
    found = figures(tmp_path / "a.log", text)
    assert (found.restarts, found.superseded, found.steps) == (1, 4, 9)
    repeats = found.repeats
    assert (repeats.repeated, repeats.same, repeats.proven, repeats.differing) == (4, 1, 1, 3)
    assert (repeats.first[0].step, repeats.first[0].line_before, repeats.first[0].line_now) == (6, 6, 11)
    assert "RNG of rank 0" in repeats.first[0].difference


def test_a_reference_repeat_is_compared_by_its_loss(tmp_path: Path) -> None:
    text = "".join(update(step, full=False) for step in range(1, 7)) + "[resume] from an earlier step\n"
    text += update(5, full=False) + update(6, "9.9999", full=False)
    repeats = figures(tmp_path / "a.log", text).repeats
    assert (repeats.repeated, repeats.same, repeats.proven, repeats.differing) == (2, 1, 0, 1)
    assert repeats.first[0].difference == "loss: 1.5, 9.9999"


def test_a_resume_takes_back_what_followed_its_checkpoint_before_any_step_is_done(
    tmp_path: Path, chunk: int
) -> None:
    text = "".join(update(step) for step in range(1, 9)) + "[resume] attempt=2 from_step=4 checkpoint=x\n"
    found = figures(tmp_path / "a.log", text)
    assert (found.last_step, found.steps, found.superseded, found.restarts) == (4, 4, 4, 1)
    remark = figures(
        tmp_path / "b.log", text + update(5) + "[resume] attempt=2 steps 5-5 reproduced\n" + update(6)
    )
    assert (remark.last_step, remark.steps, remark.restarts) == (6, 6, 1)


def test_an_appended_run_is_its_own_segment(tmp_path: Path, chunk: int) -> None:
    text = "".join(update(step, "5.0") for step in range(1, 21)) + "".join(
        update(step, "2.0") for step in range(1, 6)
    )
    found = figures(tmp_path / "a.log", text)
    assert (found.first_step, found.last_step, found.updates, found.loss) == (1, 5, 5, pytest.approx(2.0))
    (before,) = found.earlier
    assert (before.first_line, before.last_line, before.last_step, before.records) == (1, 20, 20, 20)
    assert (found.superseded, found.restarts) == (0, 0)


def test_gaps_and_non_finite_steps_are_named(tmp_path: Path, chunk: int) -> None:
    text = "".join(update(step) for step in (1, 2, 3, 7, 8, 10)) + update(11, "nan") + update(12, "inf")
    found = figures(tmp_path / "a.log", text)
    assert found.missing == 4
    assert [(gap.first, gap.last) for gap in found.gaps] == [(4, 6), (9, 9)]
    assert [(odd.step, odd.line) for odd in found.nonfinite_first] == [(11, 7), (12, 8)]
    assert found.loss == pytest.approx(1.5)


def test_a_thinned_reference_log_says_so_and_has_no_gaps(tmp_path: Path) -> None:
    found = figures(tmp_path / "a.log", "".join(update(step, full=False) for step in range(10, 510, 10)))
    assert (found.every, found.updates, found.missing, found.last_step) == (10, 50, 0, 500)


def test_a_log_whose_guards_skip_every_second_step_is_not_thinned(tmp_path: Path) -> None:
    text = "".join(skip(step) if step % 2 else update(step) for step in range(1, 41))
    found = figures(tmp_path / "a.log", text)
    assert (found.every, found.updates, found.skipped, found.missing) == (1, 20, 20, 0)
    # One gap more, and updates at even steps only by the guards: still no reason to speak of a gap as thinning.
    uneven = "".join(skip(step) if step % 3 else update(step) for step in range(1, 41) if step != 20)
    gap = figures(tmp_path / "b.log", uneven)
    assert (gap.every, gap.skipped, gap.missing) == (1, 26, 1)


def test_a_long_log_keeps_its_sums_when_blocks_grow(tmp_path: Path) -> None:
    text = "".join(update(step, f"{step % 7}.0", step % 5 + 1, full=False) for step in range(1, 5001))
    log = read(tmp_path / "a.log", text)
    assert log.blocks is not None
    assert log.blocks.width > 1
    found = report(log)
    weights = [(step % 5 + 1, step % 7) for step in range(1, 5001)]
    assert found.loss == pytest.approx(sum(a * b for a, b in weights) / sum(a for a, _ in weights))
    assert sum(point.updates for point in found.curve) == 5000
    part = log.sums(100, 250).total().sum(axis=0)
    assert part[FIELD["updates"]] == 151


def test_a_skipped_step_is_no_throughput(tmp_path: Path) -> None:
    found = figures(tmp_path / "a.log", update(1) + skip(2) + update(3))
    assert found.tokens_per_second == pytest.approx(150 / 0.5)
    assert found.seconds_per_step == pytest.approx(1.01 / 3)


def test_memory_comes_from_cuda_records_of_a_reference_log(tmp_path: Path) -> None:
    lines = [
        update(step, full=False)
        + f"[cuda-memory] rank=0 step={step} allocated_gib=1.0 reserved_gib=2.0 peak_allocated_gib={step}.500 peak_reserved_gib=70.000\n"
        for step in range(1, 9)
    ]
    found = figures(tmp_path / "a.log", "".join(lines))
    assert (found.memory_peak_gib, found.memory_reserved_gib) == (8.5, 70.0)
    assert not found.noise


def test_a_log_that_grows_is_read_on(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "a.log"
    whole = (
        "".join(update(step, f"{step}.0") for step in range(1, 41)) + "[resume] attempt=2 from_step=30 x\n"
    )
    whole += "".join(update(step, f"{step}.0") for step in range(31, 61))
    log = None
    for end in [*range(0, len(whole), 997), len(whole)]:
        path.write_text(whole[:end])
        log = RunLog(path) if log is None else log
        log.update()
    assert log is not None
    found = report(log)
    assert found == report(read(path, whole))
    assert (found.updates, found.superseded, found.loss) == (60, 10, pytest.approx(30.5))


def test_a_log_that_shrinks_under_the_reader_is_an_error(tmp_path: Path) -> None:
    log = read(tmp_path / "a.log", update(1) + update(2))
    (tmp_path / "a.log").write_text(update(1))
    with pytest.raises(StorageError, match="shorter"):
        log.update()


def test_nothing_noise_and_a_huge_line_give_a_clear_word_in_bounded_memory(tmp_path: Path) -> None:
    empty = figures(tmp_path / "empty.log", b"")
    assert (empty.steps, empty.lines, empty.loss) == (0, 0, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = random.Random(0)
    found = figures(tmp_path / "noise.log", rng.randbytes(50_000_000))
    assert found.steps == 0
    assert {item.kind for item in found.noise} >= {"foreign line"}
    huge = figures(tmp_path / "huge.log", update(1) + "x" * 10_000_000 + "\n" + update(2, "2.5"))
    assert (huge.updates, huge.loss) == (2, 2.0)
    assert noise(huge)["line too long"] == (2,)
    assert (huge.lines, huge.unfinished_line) == (3, False)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 150  # MiB; the noise alone is 50


def test_a_line_that_is_too_long_counts_once_and_only_when_it_has_an_end(tmp_path: Path) -> None:
    whole = b"x" * 10_000_000 + b"\n"
    alone = figures(tmp_path / "alone.log", whole)
    assert (alone.lines, alone.bytes, alone.unfinished_line) == (1, len(whole), False)
    assert noise(alone) == {"line too long": (1,)}
    path = tmp_path / "grows.log"
    path.write_bytes(whole[:6_000_000])
    log = RunLog(path)
    for more, lines, unfinished in (
        (b"", 0, True),
        (whole[6_000_000:-1], 0, True),
        (b"\n" + update(1).encode(), 2, False),
        (whole + update(2).encode(), 4, False),
    ):
        with path.open("ab") as file:
            file.write(more)
        log.update()
        found = report(log)
        assert (found.lines, found.unfinished_line) == (lines, unfinished)
        assert found.bytes == (path.stat().st_size if not unfinished else 0)
    assert noise(found) == {"line too long": (1, 3)}
    assert (found.updates, found.last_step) == (2, 2)
