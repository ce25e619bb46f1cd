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

from parallel_synthesis.provenance.torch_file import ArrayLook, Look, TensorLook, look


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


def test_numpy_values_are_read_without_numpy(tmp_path: Path) -> None:
    value = {
        "numpy": np.random.RandomState(0).get_state(),
        "step": np.int64(-7),
        "loss": np.float64(2.5),
        "half": np.float32(1.5),
        "flag": np.bool_(True),
        "big": np.array([1], dtype=">u4")[0],
        "matrix": np.zeros((2, 3), dtype=np.float64),
    }
    seen = saved(tmp_path / "x.pt", value)
    assert seen.problems == ()
    assert [seen.value[key] for key in ("step", "loss", "half", "flag", "big")] == [-7, 2.5, 1.5, True, 1]
    assert seen.value["numpy"][0] == "MT19937" and seen.value["numpy"][1] == ArrayLook("u4", (624,))
    assert seen.value["matrix"] == ArrayLook("f8", (2, 3))
    odd = saved(tmp_path / "y.pt", {"a": np.array([{}], dtype=object), "b": np.array(["x"])})
    assert any("something else than numbers" in problem for problem in odd.problems)
    assert any("numpy values of type 'U1'" in problem for problem in odd.problems)


def test_storages_of_tensors_are_told(tmp_path: Path) -> None:
    one, two = torch.zeros(3), torch.ones(3)
    seen = saved(tmp_path / "x.pt", {"a": one, "b": two, "view": two[1:]}).value
    assert seen["b"].storage == seen["view"].storage != seen["a"].storage


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
        (b"\x80\x02\x8b" + (2000).to_bytes(4, "little") + b"\x01" * 2000 + b".", "number of 15,993 bits"),
        (b"\x80\x02N\x85q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"}h\x00Ns.", "neither a text nor a number"),
        # A mebibyte, and a hundred calls that each copy it.
        (
            b"\x80\x02X"
            + (1 << 20).to_bytes(4, "little")
            + b"a" * (1 << 20)
            + b"q\x00X"
            + b"\x06\0\0\0latin1q\x01c_codecs\nencode\nq\x02h\x00h\x01\x86q\x03"
            + b"h\x02h\x03R" * 100
            + b".",
            "calls copy more",
        ),
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


def test_entries_that_are_not_of_torchs_writer(tmp_path: Path) -> None:
    """A few bytes of zip can become any number of them, and what no tensor refers to is nobody's."""
    path = tmp_path / "x.pt"
    for name, told in (
        ("x/bomb", "holds an entry 'x/bomb' of 33,554,432 bytes, which torch does not write"),
        ("elsewhere", "holds an entry 'elsewhere' of"),
        ("x/data/7", "its entry 'x/data/7' is compressed"),
        ("x/.notes", "holds an entry 'x/.notes' of"),
    ):
        torch.save({"w": torch.zeros(4)}, path)
        assert looked(path).problems == ()
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
            file.writestr(name, bytes(1 << 25))
        problems = looked(path).problems
        assert any(told in problem for problem in problems), problems
        assert any("more than the file" in problem for problem in problems)
    torch.save({"w": torch.zeros(4)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x/data/9", b"1234")
    assert looked(path).problems == ("holds data/9, which no tensor refers to",)
    torch.save({"w": torch.zeros(4)}, path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as file:
        file.writestr("x/data/0", bytes(16))
    assert looked(path).problems == ("holds two entries 'x/data/0'",)


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
