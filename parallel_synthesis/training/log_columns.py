"""The columns of a piece of train.log: one array a field, taken from plain lines all at once, from odd ones singly."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel_synthesis.training.events import StepDigest
from parallel_synthesis.training.log_numbers import counts, lengths, reals
from parallel_synthesis.training.log_reader import (
    EpochLine,
    NoteLine,
    Record,
    ResumeLine,
    StepLine,
    read_digest,
    task_names,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_MOST_TASKS = 200  # names beyond that are counted as one: noise must not fill the memory
OTHER_TASK = "(other tasks)"
UNKNOWN = -1

# An update as ours and the reference write it; the fields ours append come all or not at all. Every line is matched,
# by the last group when it is anything else. `[^ ]+` is quick and loose: the columns are checked as a whole.
LINE = re.compile(
    rb"\[train(?:-dist)?\] epoch=([^ ]+) step=([^ ]+) (task=[^ ]+|rank_tasks=\[[^\]]*\]) "
    rb"loss=([^ ]+) ppl=([^ ]+) target_tokens=(\d+)"
    rb"(?: seconds=([^ ]+) prefill_tokens=([^ ]+) live_tokens=([^ ]+) memory_gib=([^ ]+)"
    rb"(?: generated_tokens=\d+ workers_dropped=\d+)? grad_norm=([^ ]+) rows=([^ ]+) (rank_loss=[^ ]+ rank_grad=[^ ]+ rank_rng=[^ ]+ grad=.+))?\n|(.*)\n"
)
# Groups of LINE, from 0.
_EPOCH, _STEP, _TASK, _LOSS, _PPL, _TOKENS = range(6)
_SECONDS, _PREFILL, _LIVE, _MEMORY, _NORM, _ROWS, _PROOF, OTHER = range(6, 14)
_HEX = b"0123456789abcdef;"
_PROOF_NAMES = b"rank_loss= rank_grad= rank_rng= grad=".translate(None, _HEX)
_ODD_NAME = re.compile(rb"[\n\r\t\v\f\x1b=\[]")
_PLAIN_SKIP = re.compile(
    rb"\[train(?:-dist)?\] skipped epoch=(\d{1,9}) step=(\d{1,15}) task=([^\s=\x1b\[]+) ((?:details=rank|reason)=.*)"
)
_PLAIN_TAIL = re.compile(
    rb"(\d+\.\d+) prefill_tokens=(\d{1,15}) live_tokens=(\d{1,15}) memory_gib=(\d+\.\d+)"
    rb"(?: generated_tokens=\d+ workers_dropped=\d+)? rows=(\d+(?:[,;]\d+)*) (rank_rng=[\da-f;]+)"
)
_REASON = re.compile(rb"(?:^details=|; )rank=\d{1,9} task=\S+ reason=(\S+)")
_KINDS = {
    "epoch": "int64",
    "step": "int64",
    "task": "int64",
    "skipped": "bool",
    "loss": "float64",
    "tokens": "int64",
    "seconds": "float64",
    "prefill": "int64",
    "live": "int64",
    "memory": "float64",
    "rows": "int64",
}


class Tasks:
    """Names of tasks as small numbers, in the order in which they were met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ranks = 1  # most that a step named
        self._numbers: dict[str, int] = {}
        self._texts: dict[bytes, tuple[int, int]] = {}

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            name = name if len(self.names) < _MOST_TASKS else OTHER_TASK
            found = self._numbers.setdefault(name, len(self.names))
            if found == len(self.names):
                self.names.append(name)
        return found

    def of_text(self, text: bytes) -> tuple[int, int]:
        """(task, ranks) of `task=...` or `rank_tasks=[...]`, a step's task is its first rank's. (UNKNOWN, 0): an odd name."""
        found = self._texts.get(text)
        if found is None:
            field, _, value = text.partition(b"=")
            alone = field == b"task"
            names = (value.decode("utf-8", "replace"),) if alone else task_names(value)
            odd = value if alone else value[1:]  # behind the list's own bracket
            if _ODD_NAME.search(odd) or not names or not all(names):
                return UNKNOWN, 0
            found = (self.number(names[0]), len(names))
            self.ranks = max(self.ranks, len(names))
            if len(self._texts) < _MOST_TASKS:
                self._texts[text] = found
        return found


@dataclass(slots=True, kw_only=True)
class Chunk:
    """The step records of a piece of a log as columns [records] in file order, and its other records.

    loss is nan for a skip; seconds, memory nan and prefill, live UNKNOWN where the line lacks them. rows: rows
    of the step, or -ranks where the line does not say. taken, proof: row numbers and digests, as the line has them.
    skips: record number -> its reasons, one a rank. memory_*: columns of [cuda-memory] records. resumes: in file order.
    """

    offset: int
    length: int
    first_line: int
    lines: int
    line: Ints
    step: Ints
    epoch: Ints
    task: Ints
    skipped: NDArray[np.bool_]
    loss: Floats
    tokens: Ints
    rows: Ints
    seconds: Floats
    prefill: Ints
    live: Ints
    memory: Floats
    taken: list[bytes]
    proof: list[bytes]
    skips: dict[int, tuple[str, ...]]
    resumes: list[ResumeLine]
    epochs: list[EpochLine]
    notes: list[NoteLine]
    memory_step: Ints
    memory_peak: Floats
    memory_reserved: float

    def __len__(self) -> int:
        return len(self.step)


@dataclass(slots=True)
class Rows:
    """Step records by line number within the chunk; the columns of Chunk."""

    number: Ints
    values: dict[str, Any]
    taken: Sequence[bytes]
    proof: Sequence[bytes]


def plain_columns(number: Ints, columns: Sequence[tuple[bytes, ...]], tasks: Tasks) -> Rows | None:
    """The columns of what the loose expression took for updates; None when one of them is none, or says more.

    number: of their lines. columns: the groups of LINE.
    """
    import numpy as np

    proof = columns[_PROOF]
    full = all(proof)
    if not full and any(proof):
        return None  # a run of the reference that ours went on with: only the piece of the log where that happened
    whole = counts([columns[at] for at in (_EPOCH, _STEP, _TOKENS, *((_PREFILL, _LIVE) if full else ()))])
    real = reals([columns[at] for at in (_LOSS, _PPL, *((_SECONDS, _MEMORY, _NORM) if full else ()))])
    if whole is None or real is None:
        return None
    # Glued to it, cut, coloured, or fields that are not ours: such lines say more than the columns can hold.
    if full and b"".join(proof).translate(None, _HEX) != _PROOF_NAMES * len(proof):
        return None
    rows = lengths(columns[_ROWS]) if full else None
    known = {text: tasks.of_text(text) for text in dict.fromkeys(columns[_TASK])}
    if (full and rows is None) or any(ranks == 0 for _, ranks in known.values()):
        return None
    count = len(number)
    places = {text: place for place, text in enumerate(known)}
    place = np.fromiter(map(places.__getitem__, columns[_TASK]), dtype=np.int64, count=count)
    task, ranks = np.array(list(known.values()), dtype=np.int64)[place].T
    unknown, nothing = np.full(count, UNKNOWN), np.full(count, math.nan)
    values = {
        "epoch": whole[0],
        "step": whole[1],
        "task": task,
        "skipped": np.zeros(count, dtype=np.bool_),
        "loss": real[0],
        "tokens": whole[2],
        "seconds": real[2] if full else nothing,
        "prefill": whole[3] if full else unknown,
        "live": whole[4] if full else unknown,
        "memory": real[3] if full else nothing,
        "rows": -ranks if rows is None else rows,
    }
    return Rows(number, values, columns[_ROWS], proof)


def _count_rows(text: bytes) -> int:
    return text.count(b",") + text.count(b";") + 1


class Slow:
    """Records that were read as lines."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.numbers: list[int] = []
        self.steps: list[tuple[float, ...]] = []  # in the order of _KINDS
        self.reasons: dict[int, tuple[str, ...]] = {}
        self.taken: list[bytes] = []
        self.proof: list[bytes] = []
        self.resumes: list[ResumeLine] = []
        self.epochs: list[EpochLine] = []
        self.notes: list[NoteLine] = []
        self.memory_step: list[int] = []
        self.memory_peak: list[float] = []
        self.memory_reserved = 0.0

    def add(self, number: int, record: Record) -> None:
        if isinstance(record, StepLine):
            taken, proof = _texts(record.digest)
            self._add_step(
                number,
                (
                    record.epoch,
                    record.step,
                    self.tasks.number(record.tasks[0]),
                    record.skipped,
                    _or(record.loss, math.nan),
                    _or(record.target_tokens, 0),
                    _or(record.seconds, math.nan),
                    _or(record.prefill_tokens, UNKNOWN),
                    _or(record.live_tokens, UNKNOWN),
                    _or(record.memory_gib, math.nan),
                    (0 if record.skipped else -len(record.tasks)) if record.rows is None else record.rows,
                ),
                taken,
                proof,
            )
            if record.skipped:
                self.reasons[number] = tuple(skip.reason for skip in record.skips)
        elif isinstance(record, ResumeLine):
            self.resumes.append(record)
        elif isinstance(record, EpochLine):
            self.epochs.append(record)
        elif isinstance(record, NoteLine):
            self.notes.append(record)
        else:
            self.memory_step.append(record.step)
            self.memory_peak.append(record.peak_allocated)
            self.memory_reserved = max(self.memory_reserved, record.peak_reserved)

    def add_plain_skip(self, number: int, raw: bytes) -> bool:
        """Takes a skip as ours and the reference write it; False for any other line, which is then read with care."""
        found = _PLAIN_SKIP.fullmatch(raw)
        if found is None or b"[" in found[4] or b"\x1b" in raw or b"\r" in raw:
            return False
        words, mark, tail = found[4].rpartition(b" seconds=")
        measured = _PLAIN_TAIL.fullmatch(tail) if mark else None
        if b" seconds=" in words or (mark and measured is None) or (not mark and b" rank_rng=" in tail):
            return False
        if not mark:
            words = tail
        if words.startswith(b"details="):
            reasons = _REASON.findall(words)
        else:
            reasons = [words[len(b"reason=") :].partition(b" ")[0]]
        if not reasons or not reasons[0]:
            return False
        seconds, prefill, live, memory, rows, proof = (b"",) * 6 if measured is None else measured.groups()
        self._add_step(
            number,
            (
                int(found[1]),
                int(found[2]),
                self.tasks.number(found[3].decode("utf-8", "replace")),
                True,
                math.nan,
                0,
                float(seconds or b"nan"),
                int(prefill or UNKNOWN),
                int(live or UNKNOWN),
                float(memory or b"nan"),
                _count_rows(rows) if rows else 0,
            ),
            rows,
            proof,
        )
        self.reasons[number] = tuple([reason.decode("utf-8", "replace") for reason in reasons])
        return True

    def _add_step(self, number: int, values: tuple[float, ...], taken: bytes, proof: bytes) -> None:
        self.numbers.append(number)
        self.steps.append(values)
        self.taken.append(taken)
        self.proof.append(proof)

    def columns(self) -> Rows:
        import numpy as np

        values = zip(*self.steps, strict=True) if self.steps else ((),) * len(_KINDS)
        return Rows(
            np.array(self.numbers, dtype=np.int64),
            {
                name: np.array(column, dtype=kind)
                for (name, kind), column in zip(_KINDS.items(), values, strict=True)
            },
            self.taken,
            self.proof,
        )


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def make_chunk(
    rows: Rows | None, slow: Slow, *, offset: int, length: int, first_line: int, lines: int
) -> Chunk:
    import numpy as np

    if rows is None or slow.steps:
        other = slow.columns()
        parts = [other] if rows is None else [rows, other]
        number = np.concatenate([part.number for part in parts])
        order = np.argsort(number, kind="stable")
        number = number[order]
        values = {name: np.concatenate([part.values[name] for part in parts])[order] for name in other.values}
        places_in_order = order.tolist()
        taken, proof = (
            list(map(list(itertools.chain.from_iterable(listed)).__getitem__, places_in_order))
            for listed in ([part.taken for part in parts], [part.proof for part in parts])
        )
    else:
        number, values, taken, proof = rows.number, rows.values, list(rows.taken), list(rows.proof)
    places = np.searchsorted(number, slow.numbers).tolist()
    return Chunk(
        offset=offset,
        length=length,
        first_line=first_line,
        lines=lines,
        line=number + first_line,
        **values,
        taken=taken,
        proof=proof,
        skips={
            place: slow.reasons[at]
            for place, at in zip(places, slow.numbers, strict=True)
            if at in slow.reasons
        },
        resumes=slow.resumes,
        epochs=slow.epochs,
        notes=slow.notes,
        memory_step=np.array(slow.memory_step, dtype=np.int64),
        memory_peak=np.array(slow.memory_peak, dtype=np.float64),
        memory_reserved=slow.memory_reserved,
    )


def _texts(digest: StepDigest | None) -> tuple[bytes, bytes]:
    """The `taken` and `proof` of a digest, as a plain line has them; empty without one."""
    if digest is None:
        return b"", b""
    taken = ";".join(",".join(map(str, rows)) for rows in digest.rows)
    ranks = {"rank_loss": digest.loss, "rank_grad": digest.gradient, "rank_rng": digest.rng}
    proof = [f"{name}={';'.join(values)}" for name, values in ranks.items() if values]
    proof += [f"grad={digest.reduced}"] if digest.reduced else []
    return taken.encode(), " ".join(proof).encode()


def digest_of(taken: bytes, proof: bytes) -> StepDigest | None:
    """The digest of a record's `taken` and `proof`; None when its line has none."""
    if not proof:
        return None
    parts = (part.partition(b"=") for part in proof.split())
    return read_digest({"rows": taken, **{name.decode(): value for name, _, value in parts}})
