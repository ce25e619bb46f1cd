"""Training state: host copies, safe .pt files, the canonical digest, the container and its checks."""

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

from parallel_synthesis.checkpoint import state as states
from parallel_synthesis.checkpoint.state import canonical_digest, host_copy, load_pt, save_pt
from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import HashingFile

pytestmark = pytest.mark.lane


def rng_state(seed: int) -> dict[str, Any]:
    python = random.Random(seed)
    python.gauss(0, 1)
    name, keys, position, has_gauss, cached = np.random.RandomState(seed).get_state(legacy=True)
    return {
        "python": python.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)),
        "torch_cpu": torch.Generator().manual_seed(seed).get_state(),
        "torch_cuda": None,
    }


def example(ranks: int = 4, step: int = 7) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return states.training_state(
        global_step=step,
        ranks=ranks,
        optimizer_state=optimizer.state_dict(),
        loop_state={
            "epoch_idx": 0,
            "next_batch_idx_in_epoch": step,
            "global_step": step,
            "totals": {"loss": 1.5},
        },
        rank_states={rank: {"rank": rank, "process_rng_state": rng_state(rank)} for rank in range(ranks)},
        versions={"torch": torch.__version__[:4]},
    )


def pt_bytes(value: Any) -> bytes:
    content = io.BytesIO()
    file = HashingFile(content.write)
    save_pt(file, value)
    file.flush()
    return content.getvalue()


def written(path: Path, value: Any) -> Path:
    path.write_bytes(pt_bytes(value))
    return path


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_state_survives_the_file_and_loads_safely(ranks: int, tmp_path: Path) -> None:
    state = host_copy(example(ranks))
    loaded = states.read_training_state(written(tmp_path / "training_state.pt", state), ranks=ranks, step=7)
    assert canonical_digest(loaded) == canonical_digest(state)
    rng = loaded["process_rng_state"] if ranks == 1 else loaded["rank_state_by_rank"][3]["process_rng_state"]
    assert ("single_loop_state" in loaded) == (ranks == 1)
    assert {key for key in loaded if loaded[key] is None} == {
        "lr_scheduler_state",
        "amp_scaler_state",
        "ema_state",
    }
    seed = 0 if ranks == 1 else 3
    python = random.Random()
    python.setstate(rng["python"])
    expected = random.Random(seed)
    expected.gauss(0, 1)
    assert python.gauss(0, 1) == expected.gauss(0, 1)
    generator = np.random.RandomState()
    generator.set_state(rng["numpy"])
    assert generator.random_sample() == np.random.RandomState(seed).random_sample()


def test_the_host_copy_is_independent_and_canonical() -> None:
    weight = torch.arange(12.0).reshape(3, 4).requires_grad_()
    view = weight.detach().T[1:]
    copy = host_copy(OrderedDict(weight=weight, view=view, values=[1, (2.5, "x", None, True)]))
    with torch.no_grad():
        weight.zero_()
    assert copy["weight"].sum() == 66 and copy["view"].is_contiguous() and not copy["weight"].requires_grad
    assert type(copy) is dict and copy["values"] == [1, (2.5, "x", None, True)]
    assert copy["view"].untyped_storage().nbytes() == 3 * 3 * 4  # no larger tensor hides behind a view


def test_equal_content_is_equal_bytes() -> None:
    """Pickle writes which objects are the same one; that must not depend on where a state came from."""
    state = host_copy(example())
    again = host_copy(pickle.loads(pickle.dumps(example_copy := state)))
    assert example_copy is state and pt_bytes(again) == pt_bytes(state)
    shared = torch.ones(3)
    text = "".join(["some", "where"])
    assert pt_bytes(host_copy({"a": shared, "b": shared, text: text})) == pt_bytes(
        host_copy({"a": torch.ones(3), "b": torch.ones(3), "somewhere": "some" + "where"[:5]})
    )
    padded = torch.ones(4, 3)[:, :1].T  # strides of a view, sizes of one
    assert pt_bytes(host_copy([padded])) == pt_bytes(host_copy([torch.ones(1, 4)]))


def test_memory_of_an_earlier_copy_is_used_again() -> None:
    source = {"a": torch.ones(3), "b": [torch.ones(2, dtype=torch.int64)], "c": torch.ones(1)}
    first = host_copy(source)
    places = [first["a"].data_ptr(), first["b"][0].data_ptr()]
    changed = {"a": torch.full((3,), 2.0), "b": [torch.full((2,), 3)], "c": torch.ones(2)}
    second = host_copy(changed, into=first)
    assert [second["a"].data_ptr(), second["b"][0].data_ptr()] == places
    assert canonical_digest(second) == canonical_digest(changed)
    assert pt_bytes(second) == pt_bytes(host_copy(changed))


@pytest.mark.parametrize("bad", [np.float64(1.0), np.zeros(2), {1, 2}, object(), bytearray(b"x"), Path("x")])
def test_what_would_not_load_safely_is_named(bad: object) -> None:
    with pytest.raises(TypeError, match=r"training\.a\[1\]: \w+ cannot be saved safely"):
        host_copy({"a": [1, bad]}, where="training")


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (os.mkdir, (self.target,))


@pytest.mark.parametrize("form", ["zip", "bare pickle", "legacy"])
def test_a_crafted_pickle_is_never_executed(form: str, tmp_path: Path) -> None:
    path = tmp_path / "training_state.pt"
    bomb = {"checkpoint_version": 2, "x": Bomb(tmp_path / "executed")}
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(CheckpointError, match=r"training_state\.pt"):
        load_pt(path)
    assert not (tmp_path / "executed").exists()
    pickle.loads(path.read_bytes()) if form == "bare pickle" else torch.load(
        path, weights_only=False
    )  # a real one
    assert (tmp_path / "executed").exists()


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    good = pt_bytes(host_copy(example(1)))
    path = tmp_path / "training_state.pt"
    for content in (b"", b"PK\x03\x04", good[:-1], good[: len(good) // 2], b"\0" * len(good), b"text"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"training_state\.pt"):
            load_pt(path)
    with pytest.raises(StorageError, match=r"absent\.pt"):
        load_pt(tmp_path / "absent.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_pickle_is_a_value_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    try:
        load_pt(path)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@settings(derandomize=True, deadline=None, database=None, max_examples=300)
@given(st.data())
def test_a_flipped_byte_is_a_value_or_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(
        pt_bytes(host_copy({"a": torch.ones(3), "b": [("x", 1.5)], "rng": rng_state(0)["numpy"][:1]}))
    )
    content[data.draw(st.integers(4, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "flip.pt"
    path.write_bytes(content)
    try:
        load_pt(path)
    except CheckpointError as error:
        assert str(path) in str(error)


def test_the_digest_is_golden_and_sees_what_matters() -> None:
    base = {"a": torch.tensor([1.0, 2.0]), "b": [1, (2.5, "x")], 3: None}
    golden = canonical_digest(base)
    assert golden == canonical_digest({3: None, "b": [1, (2.5, "x")], "a": torch.tensor([1.0, 2.0])})
    others: list[Any] = [
        base | {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        base | {"a": torch.tensor([[1.0, 2.0]])},
        base | {"a": torch.tensor([1.0, -2.0])},
        base | {"b": (1, (2.5, "x"))},
        base | {"b": [True, (2.5, "x")]},
        base | {"b": [1.0, (2.5, "x")]},
        base | {"b": [1, (2.5, b"x")]},
        base | {"b": [1, (2.5, "x"), []]},
        base | {3: 0},
        {"a": base["a"], "b": base["b"], "3": None},
        {"a": base["a"], "b": base["b"]},
        base | {"c": {}},
        [base],
    ]
    assert len({golden, *map(canonical_digest, others)}) == len(others) + 1
    assert canonical_digest(0.0) != canonical_digest(-0.0)
    assert canonical_digest({"a": {"b": 1}}) != canonical_digest({"a.b": 1})
    assert canonical_digest(torch.zeros(0)) != canonical_digest(torch.zeros(0, 2))
    assert canonical_digest(torch.tensor(1.0).bfloat16()) == canonical_digest(
        torch.ones((), dtype=torch.bfloat16)
    )
    with pytest.raises(TypeError, match="no canonical form"):
        canonical_digest({"a": {1}})


def test_the_digest_of_a_small_state_is_what_its_docstring_says() -> None:
    """Computed here independently: sorted (path, content) pairs, length-prefixed."""
    import hashlib
    import struct

    data = hashlib.sha256(struct.pack("<2f", 1.0, 2.0)).digest()
    leaves = [
        (b"", b"mapping 2"),
        (b"\0\0\0\5str a", b"tensor torch.float32 [2] " + data),
        (b"\0\0\0\5str b", b"list 1"),
        (b"\0\0\0\5str b\0\0\0\2@0", b"int 7"),
    ]
    digest = hashlib.sha256()
    for path, content in leaves:
        digest.update(struct.pack("<QQ", len(path), len(content)) + path + content)
    assert canonical_digest({"b": [7], "a": torch.tensor([1.0, 2.0])}) == digest.hexdigest()


def test_missing_and_foreign_pieces_are_all_named(tmp_path: Path) -> None:
    state = example(2)
    del state["rank_state_by_rank"][1]["process_rng_state"]["numpy"]
    state["rank_state_by_rank"][0]["rank"] = 3
    state["distributed_loop_state"]["global_step"] = 6
    path = written(tmp_path / "training_state.pt", host_copy(state))
    with pytest.raises(CheckpointError) as caught:
        states.read_training_state(path, ranks=3, step=8)
    message = str(caught.value)
    for part in (
        str(path),
        "global_step: expected 8, found 7",
        "distributed_loop_state.global_step: expected 7 as outside, found 6",
        "rank_state_by_rank[2]: missing",
        "rank_state_by_rank[0]: is the state of rank 3",
        "rank_state_by_rank[1].process_rng_state.numpy",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"checkpoint_version": 1}, "checkpoint_version: expected 2, found 1"),
        ({"optimizer_state": {"state": {}}}, "optimizer_state: expected"),
        ({"process_rng_state": None}, "process_rng_state: missing"),
        ({"single_loop_state": None}, "single_loop_state: missing"),
        (
            {"process_rng_state": rng_state(0) | {"python": (3, (1, 2), None)}},
            "python: expected random.getstate",
        ),
        ({"process_rng_state": rng_state(0) | {"torch_cpu": torch.ones(3)}}, "torch_cpu: expected a uint8"),
        ({"process_rng_state": rng_state(0) | {"torch_cuda": [None]}}, "torch_cuda: expected None"),
    ],
)
def test_each_check(change: dict[str, Any], problem: str) -> None:
    assert states.state_problems(example(1)) == []
    found = states.state_problems(example(1) | change)
    assert len(found) == 1 and problem in found[0]
    assert states.state_problems([]) == ["expected a dict, found list"]


def test_the_world_size_must_fit() -> None:
    assert (
        "expected the states of 4, found that of a single one"
        in states.state_problems(example(1), ranks=4)[0]
    )
    assert "foreign; expected the ranks 0 to 1" in " ".join(states.state_problems(example(3), ranks=2))
    assert states.state_problems(example(3), ranks=3, step=7) == []
