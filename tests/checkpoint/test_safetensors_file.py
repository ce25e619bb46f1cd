"""The streaming writer against the real library, byte for byte."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from parallel_synthesis.checkpoint.components import as_bytes
from parallel_synthesis.checkpoint.safetensors_file import TensorBytes, write_safetensors
from parallel_synthesis.provenance.hashing import HashingFile

pytestmark = pytest.mark.lane
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


def tensor_of(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(torch.Size(shape).numel())
    top = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, top, (count * size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


TENSORS = st.builds(
    tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**31)
)


def written(state: dict[str, torch.Tensor]) -> tuple[bytes, dict[str, object], HashingFile]:
    content = io.BytesIO()
    file = HashingFile(content.write)
    details = write_safetensors(file, {name: as_bytes(tensor) for name, tensor in state.items()})
    file.flush()
    return content.getvalue(), details, file


@settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.dictionaries(NAMES, TENSORS, max_size=8))
def test_bytes_equal_the_library(state: dict[str, torch.Tensor]) -> None:
    content, _, file = written(state)
    assert content == save(state)
    assert file.sha256 == hashlib.sha256(content).hexdigest() and file.bytes == len(content)


@settings(derandomize=True, deadline=None, database=None, max_examples=50)
@given(st.dictionaries(NAMES, TENSORS, max_size=8))
def test_the_digests_are_those_of_the_parts(state: dict[str, torch.Tensor]) -> None:
    content, details, _ = written(state)
    length = 8 + int.from_bytes(content[:8], "little")
    assert details["header_sha256"] == hashlib.sha256(content[:length]).hexdigest()
    header = json.loads(content[8:length])
    expected = {}
    for name, field in header.items():
        start, end = field["data_offsets"]
        data = content[length + start : length + end]
        digest = hashlib.sha256(data).hexdigest()
        expected[name] = {"offset": length + start, "bytes": end - start, "sha256": digest}
    assert details["tensors"] == expected


def test_a_release_like_adapter_through_the_file_system(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight": torch.randn(
            (16, 333) if side == "A" else (333, 16), generator=generator
        )
        for layer in range(12)
        for module in ("q_proj", "o_proj")
        for side in "AB"
    }
    state["base_model.model.lm_head.weight"] = torch.randn((1001, 333), generator=generator).bfloat16()
    save_file(state, tmp_path / "theirs")
    content, _, _ = written(dict(reversed(state.items())))  # the order of insertion does not count
    (tmp_path / "ours").write_bytes(content)
    assert content == (tmp_path / "theirs").read_bytes()
    loaded = load_file(tmp_path / "ours")
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)


def test_what_cannot_be_right_is_refused() -> None:
    file = HashingFile(lambda data: None)
    with pytest.raises(ValueError, match="expected 8 bytes"):
        write_safetensors(file, {"a": TensorBytes(dtype="F32", shape=(2,), data=b"1234567")})
    with pytest.raises(ValueError, match="another name"):
        write_safetensors(file, {"__metadata__": TensorBytes(dtype="U8", shape=(1,), data=b"1")})
    assert file.bytes == 0
