"""train.log: one record a line, append only; the writer (no torch). log_reader.py reads it back.

The first fields of a record are those of the reference implementation (formats.md); ours follow them:
    rows       per rank, its row numbers                             3,17;21,4        (`;` between ranks)
    rank_loss  per rank, the fp32 bits of its loss                   3f9d70a4;...
    rank_grad  per rank, the digest of its gradient                  16 hex digits;...
    rank_rng   per rank, the digest of its random streams before it  16 hex digits;...
    grad       the digest of the reduced gradient                    16 hex digits
Of a run whose workers generate (parallel_kv), before these:
    generated_tokens, workers_dropped   over all ranks; 0 when a guard skipped before generation
Readers take the last attempt of a step; a `[resume] attempt=k from_step=s` line begins an attempt.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
from pathlib import Path

from parallel_synthesis.errors import RefusedError, StorageError
from parallel_synthesis.training.events import StepDigest, StepRecord
from parallel_synthesis.training.log_reader import CUT, ResumeLine, parse_line, read_steps

__all__ = ["CUT", "LogWriter", "count_attempts", "read_steps"]


class LogWriter:
    """Appends whole lines; each is one write, so that a reader never meets a mixed one.

    The open log is the run's lock: who holds it is the run's one writer, and a kill of any kind frees it.
    RefusedError while another process writes the run.
    """

    def __init__(self, path: Path, *, ranks: int) -> None:
        self._path = path
        self._ranks = ranks
        self._tag = "[train]" if ranks == 1 else "[train-dist]"
        try:
            self._file = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            self._lock()
            self._end_cut_line()
        except OSError as error:
            raise StorageError(f"{path}: can not be opened for appending: {error.strerror}") from error

    def step(self, record: StepRecord) -> None:
        """A step with an update, or a skipped one."""
        head = f"{self._tag} skipped" if record.skipped else self._tag
        fields = [f"epoch={record.epoch}", f"step={record.step}"]
        if record.skipped:
            fields.append(f"task={record.task}")
            if self._ranks == 1:
                skip = record.skips[0]
                fields += [f"reason={skip.reason}", f"msg={skip.numbers} {skip.message}"]
            else:
                details = "; ".join(
                    f"rank={rank} task={record.batches[rank].task} reason={skip.reason} {skip.numbers} msg={skip.message}"
                    for rank, skip in sorted(record.skips.items())
                )
                fields.append(f"details={details}")
        else:
            fields.append(
                f"task={record.task}"
                if self._ranks == 1
                else f"rank_tasks={[batch.task for batch in record.batches]}"
            )
            fields += [
                f"loss={_number(record.loss, 4)}",
                f"ppl={_number(record.perplexity, 4)}",
                f"target_tokens={record.target_tokens}",
            ]
        fields += [
            f"seconds={record.seconds:.4f}",
            f"prefill_tokens={record.prefill_tokens}",
            f"live_tokens={record.live_tokens}",
            f"memory_gib={record.memory_gib:.3f}",
        ]
        if record.generated_tokens is not None:
            fields += [
                f"generated_tokens={record.generated_tokens}",
                f"workers_dropped={record.dropped_workers}",
            ]
        if not record.skipped:
            fields.append(f"grad_norm={record.gradient_norm:.6g}")
        fields += _digest_fields(record.digest)
        self.line(f"{head} {' '.join(fields)}")

    def epoch_done(self, epoch: int, *, loss: float, perplexity: float, target_tokens: int) -> None:
        self.line(
            f"{self._tag} epoch={epoch} done: avg_loss={_number(loss, 6)} ppl={_number(perplexity, 6)} "
            f"target_tokens={target_tokens}"
        )

    def cuda_memory(self, rank: int, step: int, gib: tuple[float, float, float, float]) -> None:
        allocated, reserved, peak_allocated, peak_reserved = gib
        self.line(
            f"[cuda-memory] rank={rank} step={step} allocated_gib={allocated:.3f} reserved_gib={reserved:.3f} "
            f"peak_allocated_gib={peak_allocated:.3f} peak_reserved_gib={peak_reserved:.3f}"
        )

    def line(self, text: str) -> None:
        """Any other record: one line."""
        data = (text.replace("\n", " ") + "\n").encode()
        try:
            written = os.write(self._file, data)
            if written != len(
                data
            ):  # a full disk takes a part; the line is ended by whoever opens the log next
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise StorageError(
                f"{self._path}: a log record could not be written: {error.strerror}; free some space, then resume"
            ) from error

    def close(self) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                os.close(self._file)
                raise RefusedError(
                    f"{self._path.parent}: another process is writing this run; wait for it, or stop it by SIGTERM"
                ) from None
            # a file system without locks: nothing can be known, and a run must not fail for it

    def _end_cut_line(self) -> None:
        """A line that a killed writer left without its end is marked as cut and ended, never removed."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        with self._path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(CUT.encode() + b"\n")


def is_being_written(path: Path) -> bool | None:
    """Whether a living process writes the log's run; None where that can not be known."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno == errno.EWOULDBLOCK else None
    finally:
        os.close(file)
    return False


def count_attempts(path: Path) -> int:
    """Attempts in a log so far: 1 and one more for every `[resume] attempt=` line; 0 without a log."""
    if not path.exists():
        return 0
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        found = (parse_line(line.encode(), 0).record for line in lines if "[resume]" in line)
        return 1 + sum(
            isinstance(record, ResumeLine) and record.attempt is not None and record.begins
            for record in found
        )


def _digest_fields(digest: StepDigest) -> list[str]:
    fields = [f"rows={';'.join(','.join(map(str, rows)) for rows in digest.rows)}"]
    if digest.loss:
        fields += [f"rank_loss={';'.join(digest.loss)}", f"rank_grad={';'.join(digest.gradient)}"]
    fields.append(f"rank_rng={';'.join(digest.rng)}")
    if digest.reduced:
        fields.append(f"grad={digest.reduced}")
    return fields


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)
