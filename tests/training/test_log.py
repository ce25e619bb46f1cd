"""train.log: the reference's fields first, one whole line a record, and a reader that takes back what was written."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import pytest

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training.events import RankBatch, StepDigest, StepRecord
from parallel_synthesis.training.guards import RowCounts, Skip
from parallel_synthesis.training.log import LogWriter, read_steps

COUNTS = RowCounts(prefill=10, past=8, live=5, target=2)


def record(ranks: int, *, skips: dict[int, Skip] | None = None, loss: float = 1.23456) -> StepRecord:
    batches = tuple(
        RankBatch(
            rank=rank,
            task="flan",
            rows=(rank, rank + 10),
            places=("a:1", "a:2"),
            counts=(COUNTS, COUNTS),
            skip=None,
        )
        for rank in range(ranks)
    )
    return StepRecord(
        epoch=1,
        step=12,
        batches=batches,
        skips=skips or {},
        loss=loss,
        perplexity=math.exp(loss) if math.isfinite(loss) else math.nan,
        target_tokens=210,
        prefill_tokens=20,
        live_tokens=10,
        seconds=0.25,
        memory_gib=0.5,
        gradient_norm=2.5,
        digest=StepDigest(
            rows=tuple(batch.rows for batch in batches),
            loss=() if skips else ("3f9d70a4",) * ranks,
            gradient=() if skips else ("00112233aabbccdd",) * ranks,
            rng=("0123456789abcdef",) * ranks,
            reduced="" if skips else "ffeeddcc00112233",
        ),
    )


def written(path: Path, ranks: int, *records: StepRecord) -> list[str]:
    log = LogWriter(path, ranks=ranks)
    for item in records:
        log.step(item)
    log.close()
    return path.read_text().splitlines()


def test_lines_begin_as_the_reference_writes_them(tmp_path: Path) -> None:
    (many,) = written(tmp_path / "many.log", 4, record(4))
    assert many.startswith(
        "[train-dist] epoch=1 step=12 rank_tasks=['flan', 'flan', 'flan', 'flan'] loss=1.2346 ppl=3.4369 target_tokens=210 "
    )
    (one,) = written(tmp_path / "one.log", 1, record(1))
    assert one.startswith("[train] epoch=1 step=12 task=flan loss=1.2346 ppl=3.4369 target_tokens=210 ")


def test_a_skip_says_reason_and_numbers_of_each_rank(tmp_path: Path) -> None:
    skip = Skip(
        reason="actual_live_tokens_exceeded",
        numbers="live_tokens=1900/1800",
        message="guards.live_tokens exceeded",
    )
    (many,) = written(tmp_path / "many.log", 4, record(4, skips={0: skip, 2: skip}))
    assert many.startswith(
        "[train-dist] skipped epoch=1 step=12 task=flan details="
        "rank=0 task=flan reason=actual_live_tokens_exceeded live_tokens=1900/1800 msg=guards.live_tokens exceeded; "
        "rank=2 task=flan reason=actual_live_tokens_exceeded live_tokens=1900/1800 msg=guards.live_tokens exceeded"
    )
    (one,) = written(tmp_path / "one.log", 1, record(1, skips={0: skip}))
    assert one.startswith("[train] skipped epoch=1 step=12 task=flan reason=actual_live_tokens_exceeded msg=")


def test_the_reader_takes_back_steps_and_digests(tmp_path: Path) -> None:
    skip = Skip(reason="nonfinite_loss", numbers="loss=nan", message="loss not finite, rows a:1")
    update, skipped = record(4), record(4, skips={1: skip})
    lines = written(tmp_path / "a.log", 4, update, skipped)
    first, second = read_steps(
        ["[resume] attempt=2 from_step=0\n", *(line + "\n" for line in lines), "a stray line\n"]
    )
    assert (first.step, first.epoch, first.skipped, first.target_tokens, first.line) == (12, 1, False, 210, 2)
    assert first.loss == 1.2346
    assert first.digest == update.digest
    assert (second.skipped, second.loss, second.digest) == (True, None, skipped.digest)


def test_a_reference_line_has_no_digest_and_nan_stays_nan() -> None:
    (step,) = read_steps(["[train] epoch=1 step=5 task=flan loss=nan ppl=nan target_tokens=42\n"])
    assert step.loss is not None
    assert math.isnan(step.loss)
    assert step.digest is None


def test_epoch_and_memory_lines(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "a.log", ranks=4)
    log.epoch_done(1, loss=1.234567, perplexity=3.437, target_tokens=123456)
    log.cuda_memory(0, 12, (31.204, 33.1, 61.4, 64.02))
    log.close()
    assert (tmp_path / "a.log").read_text().splitlines() == [
        "[train-dist] epoch=1 done: avg_loss=1.234567 ppl=3.437000 target_tokens=123456",
        "[cuda-memory] rank=0 step=12 allocated_gib=31.204 reserved_gib=33.100 peak_allocated_gib=61.400 "
        "peak_reserved_gib=64.020",
    ]


def test_a_cut_last_line_is_ended_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("[train-dist] epoch=1 step=11 rank_ta")
    lines = written(path, 4, record(4))
    assert lines[0] == "[train-dist] epoch=1 step=11 rank_ta [cut]"
    assert [step.step for step in read_steps(path.read_text().splitlines(keepends=True))] == [12]


def test_a_line_that_is_being_written_is_no_record_yet(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    written(path, 4, record(4))
    whole = path.read_text()
    path.write_text(whole + whole[:-40])
    with path.open() as lines:
        assert len(list(read_steps(lines))) == 1


def test_a_full_disk_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    if os.fork() == 0:  # the limit must not outlive this test
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        log = LogWriter(path, ranks=4)
        with pytest.raises(StorageError, match=r"a\.log.*free some space"):
            log.step(record(4))
        os._exit(7)
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 7
