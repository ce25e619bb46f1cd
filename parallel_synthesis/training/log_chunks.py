"""train.log at speed: a chunk of lines becomes columns, by one compiled expression; odd lines go to log_reader.py.

Memory is one chunk, whatever the size of the log. A line longer than a chunk is passed over, named and not kept.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from parallel_synthesis.errors import StorageError
from parallel_synthesis.training.log_reader import (
    EpochLine,
    Noise,
    NoteLine,
    Record,
    ResumeLine,
    StepLine,
    parse_line,
    task_names,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

CHUNK = 1 << 18  # bytes; a chunk and what is made of it stay in a core's cache
LONGEST = 1 << 22  # bytes of a line; no record of ours comes near it
LISTED = 20  # line numbers kept for each kind of noise
_MOST_TASKS = 200  # names beyond that are counted as one: noise must not fill the memory
OTHER_TASK = "(other tasks)"
UNKNOWN = -1

# An update as ours and the reference write it; the fields ours append come all or not at all. Every line is matched,
# by the last group when it is anything else. `[^ ]+` is quick and loose: the columns are checked as a whole.
_LINE = re.compile(
    rb"\[train(?:-dist)?\] epoch=([^ ]+) step=([^ ]+) (?:task=([^ ]+)|rank_tasks=\[([^\]]*)\]) "
    rb"loss=([^ ]+) ppl=([^ ]+) target_tokens=(\d+)"
    rb"(?: seconds=([^ ]+) prefill_tokens=([^ ]+) live_tokens=([^ ]+) memory_gib=([^ ]+) grad_norm=([^ ]+) "
    rb"rows=([^ ]+) (rank_loss=.*))?\n|(.*)\n"
)
_MEMORY = re.compile(
    rb"\[cuda-memory\] rank=(\d+) step=(\d{1,15}) allocated_gib=[\d.]+ reserved_gib=[\d.]+ "
    rb"peak_allocated_gib=(\d+\.\d+) peak_reserved_gib=(\d+\.\d+)\n"
)
_COUNTS, _NUMBERS, _ROWS, _PROOF = (0, 1, 6, 8, 9), (4, 5, 7, 10, 11), 12, 13  # groups of _LINE
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
    "ppl": "float64",
    "tokens": "int64",
    "seconds": "float64",
    "prefill": "int64",
    "live": "int64",
    "memory": "float64",
    "rows": "int64",
}
_DIGITS, _REALS = b"0123456789", b"0123456789.+-einfa"


@dataclass(slots=True)
class NoiseCount:
    """How often a kind of noise was met, and the first lines it was met on."""

    count: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int) -> None:
        self.add_many(line, 1)

    def add_many(self, first_line: int, count: int) -> None:
        """`count` lines in a row."""
        self.count += count
        self.lines += range(first_line, first_line + min(count, LISTED - len(self.lines)))


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

    loss and ppl are nan for a skip; seconds, memory nan and prefill, live UNKNOWN where the line lacks them. rows: rows
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
    ppl: Floats
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


class ChunkReader:
    """Reads a log's whole lines chunk by chunk. tasks: shared numbers of task names; noise: met so far."""

    def __init__(self, path: Path, tasks: Tasks | None = None) -> None:
        self.path = path
        self.tasks = Tasks() if tasks is None else tasks
        self.noise: dict[Noise, NoiseCount] = {}

    def read(self, start: int = 0, end: int | None = None, *, first_line: int = 1) -> Iterator[Chunk]:
        """Chunks from byte `start` (the begin of line `first_line`) to `end` or as far as there are whole lines.

        Raises StorageError when the file can not be read.
        """
        try:
            with self.path.open("rb") as file:
                yield from self._read(file, start, end, first_line)
        except OSError as error:
            raise StorageError(
                f"{self.path}: can not be read: {error.strerror}; check its path and permissions"
            ) from error

    def _read(self, file: BinaryIO, start: int, end: int | None, line: int) -> Iterator[Chunk]:
        file.seek(start)
        offset, held, passing = start, b"", False
        while end is None or offset + len(held) < end:
            wanted = CHUNK if end is None else min(CHUNK, end - offset - len(held))
            read = file.read(wanted)
            if not read:
                return
            data = held + read if held else read
            cut = data.rfind(b"\n") + 1
            if cut == 0:
                if len(data) < LONGEST and not passing:
                    held = data
                    continue
                if not passing:
                    self._note("line too long", line)
                offset, held, passing = offset + len(data), b"", True
                continue
            held = data[cut:]
            if passing:  # the end of a line that was too long
                past = data.index(b"\n") + 1
                offset, line, passing = offset + past, line + 1, False
                data, cut = data[past:], cut - past
                if cut == 0:
                    continue
            chunk = self._parse(data if cut == len(data) else data[:cut], offset, line)
            offset, line = offset + cut, line + chunk.lines
            yield chunk

    def _note(self, noise: Noise, line: int) -> None:
        self.noise.setdefault(noise, NoiseCount()).add(line)

    def _parse(self, data: bytes, offset: int, first_line: int) -> Chunk:
        length = len(data)
        if b"\r\n" in data and data.count(b"\r\n") == data.count(
            b"\n"
        ):  # a whole log with such ends stays quick
            self.noise.setdefault("carriage return", NoiseCount()).add_many(first_line, data.count(b"\n"))
            data = data.replace(b"\r\n", b"\n")
        columns = list(zip(*_LINE.findall(data), strict=True))
        odd: Sequence[int] = range(data.count(b"\n"))
        rows = None
        if columns and any(columns[1]):
            numbers: Sequence[int] = odd
            left: Sequence[int] = ()
            if not all(columns[1]):
                plain = columns[1]
                numbers = list(itertools.compress(odd, plain))
                left = list(itertools.compress(odd, map(operator.not_, plain)))
                columns = [tuple(itertools.compress(column, plain)) for column in columns]
            if _plain(columns, self.tasks):
                rows = _columns(numbers, columns, self.tasks)
            odd = odd if rows is None else left
        slow = _Slow(self.tasks)
        if odd:
            self._read_lines(data.split(b"\n"), odd, first_line, slow)
        return _chunk(
            rows, slow, offset=offset, length=length, first_line=first_line, lines=data.count(b"\n")
        )

    def _read_lines(self, lines: list[bytes], numbers: Sequence[int], first_line: int, slow: _Slow) -> None:
        memory = [number for number in numbers if lines[number].startswith(b"[cuda-memory] ")]
        if memory:
            text = b"".join([lines[number] + b"\n" for number in memory])
            found = _MEMORY.findall(text)
            if len(found) == len(memory) == text.count(b"["):
                slow.memory_step += [int(one[1]) for one in found]
                slow.memory_peak += [float(one[2]) for one in found]
                slow.memory_reserved = max(slow.memory_reserved, *(float(one[3]) for one in found))
                skip = set(memory)
                numbers = [number for number in numbers if number not in skip]
        for number in numbers:
            if not lines[number] or slow.add_plain_skip(number, lines[number]):
                continue
            parsed = parse_line(lines[number] + b"\n", first_line + number)
            for noise in parsed.noise:
                self._note(noise, first_line + number)
            if parsed.record is not None:
                slow.add(number, parsed.record, lines[number])


def _plain(columns: Sequence[tuple[bytes, ...]], tasks: Tasks) -> bool:
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
    if any(tasks.of_list(listed)[1] == 0 for listed in set(columns[3]) if listed):
        return False
    # Glued to it, cut, coloured, or fields that are not ours: such lines say more than the columns can hold.
    proofs = b"".join(columns[_PROOF])
    count = sum(map(bool, columns[_PROOF]))
    return not proofs.translate(None, _PROOF_BYTES) and (proofs.count(b" "), proofs.count(b"=")) == (
        3 * count,
        4 * count,
    )


@dataclass(slots=True)
class _Rows:
    """Step records by line number within the chunk; the columns of Chunk."""

    number: Ints
    values: dict[str, Any]
    taken: Sequence[bytes]
    proof: Sequence[bytes]


def _columns(numbers: Sequence[int], columns: Sequence[tuple[bytes, ...]], tasks: Tasks) -> _Rows | None:
    """The columns of plain updates; None when a number is none after all."""
    import numpy as np

    count = len(numbers)
    known = {
        pair: (tasks.number(pair[0].decode("utf-8", "replace")), 1) if pair[0] else tasks.of_list(pair[1])
        for pair in set(zip(columns[2], columns[3], strict=True))
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
            "ppl": reals(5),
            "tokens": ints(6),
            "seconds": reals(7),
            "prefill": ints(8),
            "live": ints(9),
            "memory": reals(10),
        }
    except ValueError:
        return None
    values["rows"] = _rows(columns[_ROWS], ranks)
    return _Rows(np.array(numbers, dtype=np.int64), values, columns[_ROWS], columns[_PROOF])


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


class _Slow:
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
                    _or(record.perplexity, math.nan),
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

    def columns(self) -> _Rows:
        import numpy as np

        values = zip(*self.steps, strict=True) if self.steps else ((),) * len(_KINDS)
        return _Rows(
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


def _chunk(
    rows: _Rows | None, slow: _Slow, *, offset: int, length: int, first_line: int, lines: int
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
