"""The quick way through a log against the careful one, on lines that were made to part them."""

from __future__ import annotations

import itertools
import math
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from parallel_synthesis.training import log_columns
from parallel_synthesis.training.log_chunks import ChunkReader
from parallel_synthesis.training.log_columns import UNKNOWN, digest_of
from parallel_synthesis.training.log_numbers import counts, lengths, reals
from parallel_synthesis.training.log_reader import MemoryLine, StepLine, parse_line

# -- numbers -----------------------------------------------------------------------------------------------------------


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def test_many_decimals_are_exactly_those_of_float() -> None:
    rng = random.Random(0)
    texts = [
        f"{rng.random() * 10 ** rng.randint(-6, 6):.{rng.randint(0, 7)}f}".encode() for _ in range(100_000)
    ]
    texts += [b"%d.%0*d" % (rng.randrange(10**9), 5, rng.randrange(10**5)) for _ in range(100_000)]
    texts += [b"0", b"007", b"5.", b"0.10", b"0.30000000000000004", b"99999999999999.9", b"9007199254740993"]
    found = reals([texts])
    assert found is not None
    assert [bits(value) for value in found[0].tolist()] == [bits(float(text)) for text in texts]


ODD_NUMBERS = [
    b"nan",
    b"inf",
    b"-inf",
    b"6.05e-06",
    b"-0.5",
    b"+3",
    b"1e5",
    b"0.1234567890123456789",
    b"1.5E+300",
]
NO_NUMBERS = [
    b".5",
    b".",
    b"1.2.3",
    b"..",
    b"1_0",
    b"e5",
    b"infinity",
    b"NaN",
    b"-",
    b"0x1",
    b"1,5",
    b"\xd9\xa1",
    b"",
]


@given(
    st.lists(
        st.one_of(st.sampled_from(ODD_NUMBERS), st.from_regex(rb"\A\d{1,18}(\.\d{0,18})?\Z")), min_size=1
    )
)
def test_odd_numbers_are_exactly_those_of_float(texts: list[bytes]) -> None:
    found = reals([texts, texts])
    assert found is not None
    assert [bits(value) for value in found[1].tolist()] == [bits(float(text)) for text in texts]


@given(st.lists(st.integers(0, 10**15 - 1), min_size=1), st.integers(0, 3))
def test_counts_are_exactly_those_of_int(numbers: list[int], zeros: int) -> None:
    texts = [(b"0" * zeros + b"%d" % number)[-15:] for number in numbers]
    found = counts([texts, texts])
    assert found is not None
    assert found[1].tolist() == [int(text) for text in texts]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_refused(text: bytes) -> None:
    assert reals([[b"1.0", text], [b"2", b"3"]]) is None
    assert counts([[b"1", text], [b"2", b"3"]]) is None


@pytest.mark.parametrize("text", [b"1.0", b"-1", b"1e3", b"nan", b"1234567890123456", b"0000000000000001"])
def test_what_is_no_count_is_refused(text: bytes) -> None:
    assert counts([[b"1", text]]) is None


@given(st.lists(st.lists(st.integers(0, 10**20), min_size=1, max_size=5), min_size=1), st.randoms())
def test_lists_are_counted_text_by_text(lists: list[list[int]], rng: random.Random) -> None:
    texts = ["".join(f"{number}{rng.choice(',;')}" for number in one)[:-1].encode() for one in lists]
    found = lengths(texts)
    assert found is not None
    assert found.tolist() == list(map(len, lists))


@pytest.mark.parametrize("text", [b"", b";1", b"1;", b"1;;2", b"1,;2", b"1;-2", b"1;2x", b"1.0"])
def test_what_is_no_list_of_numbers_is_refused(text: bytes) -> None:
    assert lengths([b"1;2", text, b"3"]) is None


# -- lines -------------------------------------------------------------------------------------------------------------

REALS = st.sampled_from([b"1.5000", b"0.1234", b"12.0", *ODD_NUMBERS, *NO_NUMBERS])
COUNTS = st.sampled_from(
    [b"1", b"42", b"007", b"-1", b"1.0", b"1234567890123456", b"123456789012345", b"", b"x"]
)
TASKS = st.sampled_from([b"flan", b"2wiki", b"a=b", b"[x", b"[train]", b"\xff", b"a\tb", b"", b"x\x1b[0m"])
LISTS = st.sampled_from(
    [
        b"'flan', 'flan'",
        b"\"it's\", 'x'",
        b"'', 'a'",
        b"",
        b"flan",
        b"'x' [train",
        b"'a=b'",
        b"'a\rb'",
        b"'a' 'b', 'c'",
    ]
)
ROWS = st.sampled_from([b"1;2", b"1,2;3,4", b"7", b"1;;2", b";1", b"1;", b"1;2x", b"1_0", b"", b"-1;2"])
PROOFS = st.sampled_from([b"aa;bb", b"0", b"", b"aa;BB", b"x", b"a=b", b"rank_loss=", b"aa [cut]", b"aa\tb"])
GENERATED = st.sampled_from([b" generated_tokens=%s workers_dropped=0" % n for n in (b"7", b"", b"x", b"-1")])
SPOILT = b" \t\r\x0b\x1b=[];,.'\n_e5-:x"


def usual(values: st.SearchStrategy[bytes], plain: bytes) -> st.SearchStrategy[bytes]:
    """Mostly the plain value, so that most lines have one odd thing or none."""
    return st.one_of(*[st.just(plain)] * 12, values)


@st.composite
def updates(draw: st.DrawFn) -> bytes:
    def of(values: st.SearchStrategy[bytes], plain: bytes) -> bytes:
        return draw(usual(values, plain))

    who = (
        b"task=" + of(TASKS, b"flan")
        if draw(st.booleans())
        else b"rank_tasks=[" + of(LISTS, b"'flan', 'flan'") + b"]"
    )
    head = draw(st.sampled_from([b"[train]", b"[train-dist]"]))
    line = b"%s epoch=%s step=%s %s loss=%s ppl=%s target_tokens=%s" % (
        head,
        of(COUNTS, b"1"),
        of(COUNTS, b"5"),
        who,
        of(REALS, b"1.5000"),
        of(REALS, b"4.4817"),
        of(COUNTS, b"99"),
    )
    if draw(st.integers(0, 5)) == 0:  # of the reference
        return line
    return line + (
        b" seconds=%s prefill_tokens=%s live_tokens=%s memory_gib=%s%s grad_norm=%s rows=%s"
        b" rank_loss=%s rank_grad=%s rank_rng=%s grad=%s"
        % (
            of(REALS, b"0.5000"),
            of(COUNTS, b"100"),
            of(COUNTS, b"50"),
            of(REALS, b"1.250"),
            of(GENERATED, b""),
            of(REALS, b"0.431107"),
            of(ROWS, b"1;2"),
            *(of(PROOFS, b"3f9d70a4;3f9d70a4") for _ in range(4)),
        )
    )


@st.composite
def skips(draw: st.DrawFn) -> bytes:
    def of(values: st.SearchStrategy[bytes], plain: bytes) -> bytes:
        return draw(usual(values, plain))

    task, reason = of(TASKS, b"flan"), of(TASKS, b"a_exceeded")
    line = b"[train-dist] skipped epoch=%s step=%s task=%s " % (of(COUNTS, b"1"), of(COUNTS, b"5"), task)
    if draw(st.booleans()):
        one = b"rank=%s task=%s reason=%s live_tokens=9/8 msg=m, loss=nan" % (of(COUNTS, b"1"), task, reason)
        line += b"details=" + b"; ".join([one] * draw(st.integers(1, 2)))
    else:
        line += b"reason=%s msg=m seconds" % reason
    tail = b" seconds=%s prefill_tokens=%s live_tokens=%s memory_gib=%s%s rows=%s rank_rng=%s" % (
        of(REALS, b"0.0100"),
        of(COUNTS, b"100"),
        of(COUNTS, b"50"),
        of(REALS, b"1.250"),
        of(GENERATED, b""),
        of(ROWS, b"1;2"),
        of(PROOFS, b"aa;bb"),
    )
    return line + tail * draw(st.integers(0, 2) if draw(st.integers(0, 5)) == 0 else st.integers(0, 1))


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """A few records; sometimes one of them is spoilt: bytes put in, taken out or exchanged, cut, glued to another."""
    lines = draw(st.lists(st.one_of(updates(), skips()), min_size=1, max_size=4))
    ends = [draw(st.sampled_from([b"\n"] * 9 + [b"\r\n", b"", b" \n", b" [cut]\n"])) for _ in lines]
    if draw(st.integers(0, 2)) == 0:
        spoilt = draw(st.integers(0, len(lines) - 1))
        line = lines[spoilt]
        at = draw(st.integers(0, len(line)))
        put = bytes(draw(st.lists(st.sampled_from(SPOILT), max_size=2)))
        lines[spoilt] = line[:at] + put + line[at + draw(st.integers(0, 2)) :]
    return b"".join(itertools.chain.from_iterable(zip(lines, ends, strict=True))) + b"\n"


def quick(path: Path) -> tuple[list[dict[str, Any]], dict[str, list[int]], list[tuple[int, float]]]:
    reader = ChunkReader(path)
    records, memory = [], []
    for chunk in reader.read():
        memory += list(zip(chunk.memory_step.tolist(), chunk.memory_peak.tolist(), strict=True))
        for at in range(len(chunk)):
            records.append(
                {
                    "line": int(chunk.line[at]),
                    "step": int(chunk.step[at]),
                    "epoch": int(chunk.epoch[at]),
                    "task": reader.tasks.names[chunk.task[at]],
                    "skipped": bool(chunk.skipped[at]),
                    "loss": bits(chunk.loss[at]),
                    "tokens": int(chunk.tokens[at]),
                    "seconds": bits(chunk.seconds[at]),
                    "prefill": int(chunk.prefill[at]),
                    "live": int(chunk.live[at]),
                    "memory": bits(chunk.memory[at]),
                    "rows": int(chunk.rows[at]),
                    "skips": chunk.skips.get(at, ()),
                    "digest": digest_of(chunk.taken[at], chunk.proof[at]),
                }
            )
    return records, {kind: found.lines for kind, found in reader.noise.items()}, memory


def careful(text: bytes) -> tuple[list[dict[str, Any]], dict[str, list[int]], list[tuple[int, float]]]:
    records: list[dict[str, Any]] = []
    noise: dict[str, list[int]] = {}
    memory = []
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        parsed = parse_line(line + b"\n", number)
        for kind in parsed.noise:
            noise.setdefault(kind, []).append(number)
        record = parsed.record
        if isinstance(record, MemoryLine):
            memory.append((record.step, record.peak_allocated))
        if not isinstance(record, StepLine):
            continue

        def real(value: float | None) -> bytes:
            return bits(math.nan if value is None else value)

        unsaid = 0 if record.skipped else -len(record.tasks)
        records.append(
            {
                "line": number,
                "step": record.step,
                "epoch": record.epoch,
                "task": record.tasks[0],
                "skipped": record.skipped,
                "loss": real(record.loss),
                "tokens": record.target_tokens or 0,
                "seconds": real(record.seconds),
                "prefill": UNKNOWN if record.prefill_tokens is None else record.prefill_tokens,
                "live": UNKNOWN if record.live_tokens is None else record.live_tokens,
                "memory": real(record.memory_gib),
                "rows": unsaid if record.rows is None else record.rows,
                "skips": tuple(skip.reason for skip in record.skips),
                "digest": record.digest,
            }
        )
    return records, noise, memory


WHOLE = (
    b"[train-dist] epoch=1 step=5 rank_tasks=['flan', 'flan'] loss=1.5 ppl=4.4 target_tokens=9 seconds=0.5 "
    b"prefill_tokens=1 live_tokens=2 memory_gib=1.2 grad_norm=0.4 rows=1;2 rank_loss=aa;bb rank_grad=aa;bb rank_rng=aa;bb grad=aa"
)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(text=logs())
@example(text=WHOLE + b"\n" + WHOLE.replace(b"=9 ", b"=9\n") + b"\n")  # cut behind its tokens: two lines
@example(text=WHOLE + b" [cut]\n" + WHOLE + b"\n")
@example(text=WHOLE[:-40] + WHOLE + b"\n")
@example(text=WHOLE.replace(b"flan", b"1;2 rows=3") + b"\n")
@example(text=b"\n\n" + WHOLE + b"\r\n\r\n")
@example(text=WHOLE + b"\n" + WHOLE.partition(b" seconds")[0] + b"\n")
def test_the_quick_way_says_what_the_careful_way_says(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(text)
    records, noise, memory = quick(path)
    expected, expected_noise, expected_memory = careful(text)
    assert records == expected
    assert noise == expected_noise
    assert memory == expected_memory


def test_plain_logs_go_the_quick_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would compare the careful way with itself."""
    taken = []
    whole = log_columns.plain_columns

    def watched(number: Any, *rest: Any) -> Any:
        found = whole(number, *rest)
        taken.append(None if found is None else len(found.number))
        return found

    monkeypatch.setattr("parallel_synthesis.training.log_chunks.plain_columns", watched)
    path = tmp_path / "a.log"
    other = WHOLE.replace(b"loss=1.5", b"loss=nan").replace(b"grad_norm=0.4", b"grad_norm=1e-05")
    workers = WHOLE.replace(b" grad_norm", b" generated_tokens=7 workers_dropped=0 grad_norm")
    path.write_bytes(WHOLE + b"\nWarning: x\n" + other + b"\n" + workers + b"\n")
    records, noise, _ = quick(path)
    assert taken == [3]
    assert [record["line"] for record in records] == [1, 3, 4]
    assert noise == {"foreign line": [2]}
