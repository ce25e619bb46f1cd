"""The columns of a piece of train.log: one array a field, taken from plain lines all at once, from odd ones singly."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel_synthesis.training.events import StepDigest
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
    rb"\[train(?:-dist)?\] epoch=([^ ]+) step=([^ ]+) (?:task=([^ ]+)|rank_tasks=\[([^\]]*)\]) "
    rb"loss=([^ ]+) ppl=([^ ]+) target_tokens=(\d+)"
    rb"(?: seconds=([^ ]+) prefill_tokens=([^ ]+) live_tokens=([^ ]+) memory_gib=([^ ]+) grad_norm=([^ ]+) "
    rb"rows=([^ ]+) (rank_loss=.*))?\n|(.*)\n"
)
_COUNTS, _NUMBERS, _ROWS, _PROOF = (0, 1, 6, 8, 9), (4, 5, 7, 10, 11), 12, 13  # groups of LINE
_PROOF_IN_LINE = re.compile(rb" rows=(\S+) ((?:(?:rank_loss|rank_grad|rank_rng|grad)=\S+ ?)+)")
_PROOF_BYTES = b"0123456789abcdef;= _" + b"rank_loss" + b"rank_grad" + b"rank_rng"
_ODD_NAME = re.compile(rb"[\n\r\x1b=]")
_PLAIN_SKIP = re.compile(
    rb"\[train(?:-dist)?\] skipped epoch=(\d{1,9}) step=(\d{1,15}) task=([^ =\x1b]+) ((?:details=rank|reason)=.*)"
)
_PLAIN_TAIL = re.compile(
    rb"(\d+\.\d+) prefill_tokens=(\d{1,15}) live_tokens=(\d{1,15}) memory_gib=(\d+\.\d+) "
    rb"rows=([\d,;]+) (rank_rng=[\da-f;]+)"
)
_REASON = re.compile(rb"(?:=|; )rank=\d{1,9} task=\S+ reason=(\S+)")
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
_DIGITS, _REALS = b"0123456789", b"0123456789.+-einfa"


class Tasks:
    """Names of tasks as small numbers, in the order in which they were met."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.ranks = 1  # most that a step named
        self._numbers: dict[str, int] = {}
        self._lists: dict[bytes, tuple[int, int]] = {}

    def number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            name = name if len(self.names) < _MOST_TASKS else OTHER_TASK
            found = self._numbers.setdefault(name, len(self.names))
            if found == len(self.names):
                self.names.append(name)
        return found

    def of_list(self, listed: bytes) -> tuple[int, int]:
        """(task, ranks) of the text in rank_tasks=[...]; a step's task is its first rank's. (-1, 0): no names in it."""
        found = self._lists.get(listed)
        if found is None:
            names = task_names(listed)
            found = (self.number(names[0]), len(names)) if names else (UNKNOWN, 0)
            self.ranks = max(self.ranks, len(names))
            if len(self._lists) < _MOST_TASKS:
                self._lists[listed] = found
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


def are_plain(columns: Sequence[tuple[bytes, ...]], tasks: Tasks) -> bool:
    """Whether what the loose expression took for updates are updates. One odd value sends the chunk the slow way."""
    for column in _COUNTS:
        if b"".join(columns[column]).translate(None, _DIGITS) or max(map(len, columns[column])) > 15:
            return False
    if any(b"".join(columns[column]).translate(None, _REALS) for column in _NUMBERS):
        return False
    if b"".join(columns[_ROWS]).translate(None, _DIGITS + b",;"):
        return False
    if any(_ODD_NAME.search(task) for task in {*columns[2], *columns[3]}):
        return False
    if any(tasks.of_list(listed)[1] == 0 for listed in dict.fromkeys(columns[3]) if listed):
        return False
    # Glued to it, cut, coloured, or fields that are not ours: such lines say more than the columns can hold.
    proofs = b"".join(columns[_PROOF])
    count = sum(map(bool, columns[_PROOF]))
    return not proofs.translate(None, _PROOF_BYTES) and (proofs.count(b" "), proofs.count(b"=")) == (
        3 * count,
        4 * count,
    )


@dataclass(slots=True)
class Rows:
    """Step records by line number within the chunk; the columns of Chunk."""

    number: Ints
    values: dict[str, Any]
    taken: Sequence[bytes]
    proof: Sequence[bytes]


def plain_columns(numbers: Sequence[int], columns: Sequence[tuple[bytes, ...]], tasks: Tasks) -> Rows | None:
    """The columns of plain updates; None when a number is none after all."""
    import numpy as np

    count = len(numbers)
    known = {
        pair: (tasks.number(pair[0].decode("utf-8", "replace")), 1) if pair[0] else tasks.of_list(pair[1])
        for pair in dict.fromkeys(zip(columns[2], columns[3], strict=True))  # in order: it numbers the tasks
    }
    found = list(map(known.__getitem__, zip(columns[2], columns[3], strict=True)))
    number, ranks = np.array(found, dtype=np.int64).T

    def ints(column: int) -> Ints:
        values = columns[column]
        if len(set(values)) == 1:
            return np.full(count, int(values[0] or UNKNOWN), dtype=np.int64)
        if not all(values):
            values = tuple([value or b"-1" for value in values])
        return np.array(list(map(int, values)), dtype=np.int64)

    def reals(column: int) -> Floats:
        values = columns[column]
        if len(set(values)) == 1:
            return np.full(count, float(values[0] or math.nan))
        if not all(values):
            values = tuple([value or b"nan" for value in values])
        return np.array(list(map(float, values)), dtype=np.float64)

    try:
        values = {
            "epoch": ints(0),
            "step": ints(1),
            "task": number,
            "skipped": np.zeros(count, dtype=np.bool_),
            "loss": reals(4),
            "tokens": ints(6),
            "seconds": reals(7),
            "prefill": ints(8),
            "live": ints(9),
            "memory": reals(10),
        }
    except ValueError:
        return None
    values["rows"] = _rows(columns[_ROWS], ranks)
    return Rows(np.array(numbers, dtype=np.int64), values, columns[_ROWS], columns[_PROOF])


def _rows(taken: Sequence[bytes], ranks: Ints) -> Ints:
    """Rows of each step; -ranks where the line does not say."""
    import numpy as np

    if not all(taken):
        return np.array([_count_rows(text) if text else -n for text, n in zip(taken, ranks, strict=True)])
    joined = b"".join(taken)
    if b"," not in joined and joined.count(b";") == int(ranks.sum()) - len(ranks):
        return ranks  # one row a rank
    return np.array(list(map(_count_rows, taken)), dtype=np.int64)


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

    def add(self, number: int, record: Record, raw: bytes) -> None:
        if isinstance(record, StepLine):
            found = _PROOF_IN_LINE.search(raw)
            taken, proof = (b"", b"") if found is None else (found[1], found[2])
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
        if (mark and measured is None) or (not mark and b" rank_rng=" in tail):
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
        taken, proof = (
            list(itertools.chain.from_iterable(listed))
            for listed in ([part.taken for part in parts], [part.proof for part in parts])
        )
        taken, proof = [taken[place] for place in order], [proof[place] for place in order]
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


def digest_of(taken: bytes, proof: bytes) -> StepDigest | None:
    """The digest of a record's `taken` and `proof`; None when its line has none."""
    if not proof:
        return None
    parts = (part.partition(b"=") for part in proof.split())
    return read_digest({"rows": taken, **{name.decode(): value for name, _, value in parts}})
