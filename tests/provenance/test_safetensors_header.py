"""The header reader: every unsound layout is told, nothing crashes it, and what it calls sound the library opens."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.provenance.safetensors_header import Header, read_header

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    "empty": {"dtype": "U8", "shape": [0], "data_offsets": [22, 22]},
}


def raw_of(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def read(path: Path, content: bytes) -> Header:
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(fd)
    finally:
        os.close(fd)


def opens(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return bool(file.keys()) or True
    except (SafetensorError, OSError):
        return False


def changed(**entries: Any) -> dict[str, Any]:
    return {name: entry for name, entry in (GOOD | entries).items() if entry is not None}


def test_a_sound_file(tmp_path: Path) -> None:
    header = read(tmp_path / "x", raw_of(GOOD | {"__metadata__": {"format": "pt"}}, bytes(22)))
    assert header.problems == () and list(header.tensors) == ["a", "b", "empty"]
    assert header.tensors["b"].start == header.bytes + 16 and header.tensors["b"].shape == (3,)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "truncated: 0 bytes"),
        (b"\x08\0\0", "truncated: 3 bytes"),
        (raw_of(GOOD, bytes(22), length=10**15), "truncated: a header of 1000000000000000 bytes"),
        (raw_of(GOOD, bytes(22), length=2**64 - 1), "truncated: a header of"),
        (raw_of(GOOD, bytes(21)), "truncated: the tensors end at byte"),
        (raw_of(GOOD, bytes(25)), "3 trailing bytes"),
        (raw_of(changed(a=None), bytes(22)), "leaves a hole"),
        (raw_of(changed(c=GOOD["a"]), bytes(22)), "overlaps"),
        (raw_of(changed(a=GOOD["a"] | {"shape": [2, 3]}), bytes(22)), "takes 24 bytes; data_offsets hold 16"),
        (raw_of(changed(a=GOOD["a"] | {"shape": [10**18, 10**18]}), bytes(22)), "takes"),
        (raw_of(changed(a=GOOD["a"] | {"shape": [-2, -2]}), bytes(22)), "expected a shape"),
        (raw_of(changed(a=GOOD["a"] | {"shape": [True, 4]}), bytes(22)), "expected a shape"),
        (raw_of(changed(a=GOOD["a"] | {"dtype": "F33"}), bytes(22)), "unknown dtype"),
        (raw_of(changed(a=GOOD["a"] | {"data_offsets": [16, 0]}), bytes(22)), "expected data_offsets"),
        (raw_of(changed(a=[1]), bytes(22)), "expected dtype, shape and data_offsets"),
        (raw_of(GOOD | {"__metadata__": {"a": 1}}, bytes(22)), "__metadata__"),
        (raw_of(b'{"a": 1, "a": 2}', b""), "appears twice"),
        (raw_of(b"[]", b""), "does not begin with {"),
        (raw_of(b"{" * 50, b""), "not JSON"),
        (raw_of(b'{"a":' * 20_000, b""), "not JSON"),
        (raw_of(b'{"\xff": 1}', b""), "not JSON"),
    ],
)
def test_what_is_not_sound(content: bytes, told: str, tmp_path: Path) -> None:
    header = read(tmp_path / "x", content)
    assert any(told in problem for problem in header.problems), header.problems
    assert len(header.problems[0]) < 500


def test_a_forged_length_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((2 << 30).to_bytes(8, "little") + b"{")
        file.truncate(3 << 30)  # sparse: as many bytes as the length claims
    fd = os.open(path, os.O_RDONLY)
    tracemalloc.start()
    try:
        header = read_header(fd)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert "expected at most" in header.problems[0]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "X"]) | VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | VALUES,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | VALUES,
    }
)
HEADERS = st.dictionaries(st.text(max_size=3), ENTRY | VALUES, max_size=4)


@settings(derandomize=True, deadline=None, database=None, max_examples=400)
@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(raw_of, HEADERS, st.binary(max_size=40)),
        st.builds(raw_of, HEADERS, st.binary(max_size=40), length=st.integers(0, 2**64 - 1)),
        st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=3)).map(
            lambda change: (good := raw_of(GOOD, bytes(22)))[: change[0]] + change[1] + good[change[0] + 1 :]
        ),
    )
)
def test_nothing_crashes_it_and_sound_files_open(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    header = read(path, content)
    if not header.problems:
        assert opens(path)
        assert header.bytes + sum(tensor.bytes for tensor in header.tensors.values()) == len(content)
