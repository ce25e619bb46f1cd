"""The look into a .pt file: shapes without torch, nothing executed, no crash on damage."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.provenance.torch_file import Look, Named, TensorLook, look


def looked(path: Path) -> Look:
    fd = os.open(path, os.O_RDONLY)
    try:
        return look(fd)
    finally:
        os.close(fd)


def saved(path: Path, value: Any) -> Look:
    torch.save(value, path)
    return looked(path)


def test_plain_values_and_tensors(tmp_path: Path) -> None:
    value = {
        "state": OrderedDict(w=torch.zeros(3, 2), b=torch.zeros(5, dtype=torch.bfloat16)),
        "parameter": torch.nn.Parameter(torch.zeros(1)),
        "view": torch.zeros(4, 4).t()[1:],
        "nested": [1, -(2**70), 2.5, "é", b"x", None, True, (1, 2), {3: [4]}],
        "python": random.Random(0).getstate(),
        "bytes": torch.zeros(7, dtype=torch.uint8),
    }
    seen = saved(tmp_path / "x.pt", value)
    assert seen.problems == ()
    assert seen.value["state"] == {"w": TensorLook("F32", (3, 2)), "b": TensorLook("BF16", (5,))}
    assert seen.value["parameter"] == TensorLook("F32", (1,)) and seen.value["view"] == TensorLook(
        "F32", (3, 4)
    )
    assert seen.value["nested"] == value["nested"] and seen.value["python"] == value["python"]
    assert seen.value["bytes"] == TensorLook("U8", (7,))


def test_numpy_states_of_the_reference_are_passed_over(tmp_path: Path) -> None:
    seen = saved(tmp_path / "x.pt", {"numpy": np.random.RandomState(0).get_state(), "global_step": 7})
    assert seen.problems == () and seen.value["global_step"] == 7
    assert isinstance(seen.value["numpy"][1], Named)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


def test_code_is_named_and_never_run(tmp_path: Path) -> None:
    seen = saved(tmp_path / "x.pt", {"a": Bomb(tmp_path / "run"), "b": 1})
    assert seen.problems == ("needs posix.system, which is not plain data; do not load it",)
    assert not (tmp_path / "run").exists() and seen.value["b"] == 1


def archive(path: Path, pickled: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickled)
        for name, data in storages.items():
            file.writestr(f"x/data/{name.removeprefix('s')}", data)
    return path


@pytest.mark.parametrize(
    ("pickled", "told"),
    [
        (b"", "damaged"),
        (b"\x80\x02", "no end|damaged"),
        (b"\x80\x02\x8e" + (2**62).to_bytes(8, "little") + b".", "damaged"),  # a text of a forged length
        (b"\x80\x02Nr\xff\xff\xff\xff0.", "uses POP"),  # a memo of four thousand million places
        (b"\x80\x02a.", "damaged"),
        (b"\x80\x02ios\nsystem\n(U\x02ls.", "uses INST"),
        (pickle.dumps(memoryview, protocol=4)[:-1] + b")\x81.", "uses NEWOBJ"),
        (b"\x80\x02NNNs.", "fills"),
        (b"\x80\x02]]Ns.", "fills"),
        (b"\x80\x02NNQ.", "refers to something"),
    ],
)
def test_forged_pickles(pickled: bytes, told: str, tmp_path: Path) -> None:
    seen = looked(archive(tmp_path / "x.pt", pickled))
    assert seen.value is None
    assert any(part in seen.problems[0] for part in told.split("|")), seen.problems


def test_storages_are_held_against_the_zip(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4, 4)}, buffer)
    with zipfile.ZipFile(buffer) as file:
        pickled = file.read("archive/data.pkl")
    assert looked(archive(tmp_path / "a.pt", pickled, s0=bytes(64))).problems == ()
    assert (
        "holds 60 bytes; expected 64" in looked(archive(tmp_path / "b.pt", pickled, s0=bytes(60))).problems[0]
    )
    assert "is missing" in looked(archive(tmp_path / "c.pt", pickled)).problems[0]
    grown = pickled.replace(b"K\x04K\x04\x86", b"K\x04K\x05\x86", 1)
    assert "reaches beyond" in looked(archive(tmp_path / "d.pt", grown, s0=bytes(64))).problems[0]


def test_what_is_no_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for content in (b"", b"PK\x03\x04", pickle.dumps({"a": 1}), b"\0" * 1000):
        path.write_bytes(content)
        assert looked(path).problems and looked(path).value is None
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"N" * 10_000)
    assert "compressed" in looked(path).problems[0]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pt") / "x.pt"
    torch.save({"net.0.weight": torch.zeros(3, 2), "list": [1, 2, {"a": "b"}]}, path)
    return path.read_bytes()


@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.data())
def test_damage_never_crashes_it(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    spoiled = bytearray(content)
    for _ in range(data.draw(st.integers(1, 6))):
        spoiled[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    path.write_bytes(
        bytes(spoiled[: data.draw(st.integers(0, len(spoiled)))]) if data.draw(st.booleans()) else spoiled
    )
    looked(path)  # raises nothing
