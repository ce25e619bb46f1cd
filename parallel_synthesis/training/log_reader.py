"""The parser of train.log, ours and the reference implementation's: one line to one record, or to a named problem.

Whole records only (formats.md, "train.log lines"). Fields are found by name, in any order, and unknown ones are kept.
What stands before a record's tag (a launcher's prefix, colours, a progress bar ended by a carriage return, a line that
was cut and glued to this one) is named and never read as numbers. log_chunks.py reads many lines at once with these
pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from parallel_synthesis.training.events import StepDigest

CUT = " [cut]"  # ends a line whose writer was killed: what stands before it is no record

Noise = Literal[
    "cut line",
    "glued lines",
    "launcher prefix",
    "colour codes",
    "carriage return",
    "incomplete record",
    "not a number",
    "repeated field",
    "foreign text in a record",
    "foreign line",
    "line too long",
]
NUMBER = re.compile(rb"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|inf|nan)")
_COUNT = re.compile(rb"\d{1,15}")
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_TAG = re.compile(rb"\[(train|train-dist|resume|cuda-memory|stop|error)\] ")
_PREFIX = re.compile(rb"\s*(?:\[[\w.:-]+\]:|\d+:)\s*")  # torchrun's [default0]: and [rank0]:, srun's 0:
_FIELD = re.compile(rb"([A-Za-z_][\w.-]*)=(\[[^\]]*\]|\S*)(?:\s+|$)")
_DONE = re.compile(rb"epoch=(\d{1,9}) done: (.*)", re.DOTALL)
_SKIP_HEAD = re.compile(rb"skipped ((?:\w+=\S+ )*?)(details|reason)=(.*)", re.DOTALL)
_SKIP_TAIL = re.compile(rb" seconds=\S+ prefill_tokens=\d+ live_tokens=\d+ memory_gib=\S+(?: \w+=\S*)*$")
_SKIP_RANK = re.compile(rb"(?:^|; )rank=(\d{1,9}) task=(\S+) reason=(\S+)(?: ([^;]*))?")
_ATTEMPT = re.compile(rb"attempt=(\d{1,9}) from_step=(\d{1,15})(?: |$)")
_NAMES = re.compile(rb"'([^']*)'|\"([^\"]*)\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkip:
    """Why one rank's batch was not trained on, as the log says it."""

    rank: int
    task: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A step with an update, or a skipped one. What the line lacks (a reference log) is None.

    tasks: one a rank. loss in nats per target token; seconds of wall time; memory_gib: the peak. extra: unknown fields.
    """

    line: int
    epoch: int
    step: int
    tasks: tuple[str, ...]
    skipped: bool
    skips: tuple[RankSkip, ...] = ()
    loss: float | None = None
    perplexity: float | None = None
    target_tokens: int | None = None
    seconds: float | None = None
    prefill_tokens: int | None = None
    live_tokens: int | None = None
    memory_gib: float | None = None
    grad_norm: float | None = None
    digest: StepDigest | None = None
    extra: Mapping[str, str]

    @property
    def rows(self) -> int | None:
        """Rows the step took over all ranks; None when the line does not say."""
        return None if self.digest is None else sum(len(rows) for rows in self.digest.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLine:
    """The end of an epoch."""

    line: int
    epoch: int
    loss: float
    perplexity: float
    target_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """A [cuda-memory] record, in GiB."""

    line: int
    rank: int
    step: int
    peak_allocated: float
    peak_reserved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeLine:
    """A [resume] record. attempt and from_step: ours begin an attempt with them; None in free text."""

    line: int
    attempt: int | None
    from_step: int | None
    text: str

    @property
    def begins(self) -> bool:
        """False for a remark on an attempt that has begun, such as `attempt=2 steps 11-17 reproduced`."""
        return self.from_step is not None or not self.text.startswith("attempt=")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteLine:
    """A [stop] or [error] record."""

    line: int
    kind: str
    text: str


Record = StepLine | EpochLine | MemoryLine | ResumeLine | NoteLine


@dataclass(frozen=True, slots=True)
class Parsed:
    """A line's record, if it holds a whole one, and what else is wrong or odd with the line."""

    record: Record | None
    noise: tuple[Noise, ...] = ()


class _Bad(Exception):
    def __init__(self, noise: Noise) -> None:
        self.noise = noise


def parse_line(raw: bytes, number: int) -> Parsed:
    """One line of a log, with its end (a line without one is cut, or still being written). number: from 1."""
    noise: list[Noise] = []
    if not raw.endswith(b"\n"):
        return Parsed(None, ("cut line",))
    text = raw[:-1]
    if text.endswith(b"\r"):
        noise.append("carriage return")
        text = text.rstrip(b"\r")
    if b"\x1b" in text:
        noise.append("colour codes")
        text = _ANSI.sub(b"", text)
    if b"\r" in text:
        noise.append("carriage return")
        text = text[text.rindex(b"\r") + 1 :]
    if text.endswith(CUT.encode()):
        return Parsed(None, (*noise, "cut line"))
    tags = list(_TAG.finditer(text))
    if not tags:
        if text.strip():
            noise.append("foreign line")
        return Parsed(None, tuple(noise))
    tag = tags[-1]
    if len(tags) > 1:
        noise.append("glued lines")
    elif tag.start() > 0:
        noise.append("launcher prefix" if _PREFIX.fullmatch(text, 0, tag.start()) else "glued lines")
    try:
        record = _record(tag[1], text[tag.end() :], number)
    except _Bad as problem:
        return Parsed(None, (*noise, problem.noise))
    return Parsed(record, tuple(noise))


def _record(tag: bytes, rest: bytes, line: int) -> Record:
    if tag == b"resume":
        found = _ATTEMPT.match(rest)
        return ResumeLine(
            line=line,
            attempt=int(found[1]) if found else None,
            from_step=int(found[2]) if found else None,
            text=_text(rest),
        )
    if tag in (b"stop", b"error"):
        return NoteLine(line=line, kind=tag.decode(), text=_text(rest))
    if tag == b"cuda-memory":
        fields = _fields(rest)
        return MemoryLine(
            line=line,
            rank=_count(fields, "rank"),
            step=_count(fields, "step"),
            peak_allocated=_number(fields, "peak_allocated_gib"),
            peak_reserved=_number(fields, "peak_reserved_gib"),
        )
    if rest.startswith(b"skipped "):
        return _skip(rest, line)
    done = _DONE.fullmatch(rest)
    if done is not None:
        fields = _fields(done[2])
        return EpochLine(
            line=line,
            epoch=int(done[1]),
            loss=_number(fields, "avg_loss"),
            perplexity=_number(fields, "ppl"),
            target_tokens=_count(fields, "target_tokens"),
        )
    return _update(rest, line)


def _update(rest: bytes, line: int) -> StepLine:
    fields = _fields(rest)
    if "rank_tasks" in fields:
        tasks = task_names(fields.pop("rank_tasks"))
        fields.pop("task", None)
    else:
        tasks = (_text(_take(fields, "task")),)
    if not tasks or not all(tasks):
        raise _Bad("incomplete record")
    return StepLine(
        line=line,
        epoch=_count(fields, "epoch"),
        step=_count(fields, "step"),
        tasks=tasks,
        skipped=False,
        loss=_number(fields, "loss"),
        perplexity=_number(fields, "ppl"),
        target_tokens=_count(fields, "target_tokens"),
        grad_norm=_number(fields, "grad_norm") if "grad_norm" in fields else None,
        **_common(fields),  # type: ignore[arg-type]
    )


def _skip(rest: bytes, line: int) -> StepLine:
    found = _SKIP_HEAD.fullmatch(rest)
    if found is None:
        raise _Bad("incomplete record")
    fields = _fields(found[1])
    words = found[3]
    tail = _SKIP_TAIL.search(words)
    after = {} if tail is None else _fields(words[tail.start() + 1 :])
    words = words if tail is None else words[: tail.start()]
    task = _text(_take(fields, "task"))
    if found[2] == b"reason":
        reason, _, detail = words.partition(b" ")
        skips = (
            [RankSkip(rank=0, task=task, reason=_text(reason), detail=_text(detail).removeprefix("msg="))]
            if reason
            else []
        )
        tasks: tuple[str, ...] = (task,)
    else:
        skips = [
            RankSkip(rank=int(one[1]), task=_text(one[2]), reason=_text(one[3]), detail=_text(one[4] or b""))
            for one in _SKIP_RANK.finditer(words)
        ]
        tasks = (task,)
    if not skips:
        raise _Bad("incomplete record")
    epoch, step = _count(fields, "epoch"), _count(fields, "step")
    common = _common({**after, **{name: value for name, value in fields.items() if name not in after}})
    return StepLine(
        line=line,
        epoch=epoch,
        step=step,
        tasks=tasks,
        skipped=True,
        skips=tuple(skips),
        **common,  # type: ignore[arg-type]
    )


def _common(fields: dict[str, bytes]) -> dict[str, object]:
    """The fields that ours add, taken out of `fields`; what is left is kept as text."""
    digest = read_digest(fields)
    out: dict[str, object] = {"digest": digest}
    if digest is not None:
        for name in ("rows", "rank_loss", "rank_grad", "rank_rng", "grad"):
            fields.pop(name, None)
    for name in ("seconds", "memory_gib"):
        out[name] = _number(fields, name) if name in fields else None
    for name in ("prefill_tokens", "live_tokens"):
        out[name] = _count(fields, name) if name in fields else None
    out["extra"] = {name: _text(value) for name, value in fields.items()}
    return out


def read_digest(fields: Mapping[str, bytes]) -> StepDigest | None:
    """The digest in a line's fields (log.py says what each holds); None when the line has none."""
    if "rows" not in fields or "rank_rng" not in fields:
        return None

    def parts(name: str) -> tuple[str, ...]:
        return tuple(_text(fields[name]).split(";")) if name in fields else ()

    try:
        rows = tuple(tuple(int(row) for row in rank.split(",")) for rank in parts("rows"))
    except ValueError:
        raise _Bad("not a number") from None
    return StepDigest(
        rows=rows,
        loss=parts("rank_loss"),
        gradient=parts("rank_grad"),
        rng=parts("rank_rng"),
        reduced=_text(fields.get("grad", b"")),
    )


def task_names(listed: bytes) -> tuple[str, ...]:
    """`['flan', 'flan']`, with or without its brackets, as names."""
    return tuple(_text(one or other) for one, other in _NAMES.findall(listed))


def _fields(rest: bytes) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    at, end = 0, len(rest.rstrip())
    while at < end:
        found = _FIELD.match(rest, at, end)
        if found is None:
            raise _Bad("foreign text in a record")
        name = found[1].decode()
        if name in fields:
            raise _Bad("repeated field")
        fields[name] = found[2]
        at = found.end()
    return fields


def _take(fields: dict[str, bytes], name: str) -> bytes:
    value = fields.pop(name, None)
    if value is None:
        raise _Bad("incomplete record")
    return value


def _number(fields: dict[str, bytes], name: str) -> float:
    value = _take(fields, name)
    if not NUMBER.fullmatch(value):
        raise _Bad("not a number" if value else "incomplete record")
    return float(value)


def _count(fields: dict[str, bytes], name: str) -> int:
    value = _take(fields, name)
    if not _COUNT.fullmatch(value):
        raise _Bad("not a number" if value else "incomplete record")
    return int(value)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def read_steps(lines: Iterable[str]) -> Iterator[StepLine]:
    """The step records of a log, in file order, superseded ones included; other lines are passed over.

    lines: with their ends, as a file gives them; a last line without its end is still being written, or cut.
    """
    for number, line in enumerate(lines, start=1):
        record = parse_line(line.encode("utf-8", "surrogateescape"), number).record
        if isinstance(record, StepLine):
            yield record
