"""Streamed SHA-256, of files and while writing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.safetensors_file import TensorBytes, write_safetensors
from parallel_synthesis.errors import StorageError
from parallel_synthesis.provenance.hashing import BLOCK, HashingFile, read_ahead, sha256_bytes, sha256_file

ROOT = Path(__file__).resolve().parents[2]


def test_golden(tmp_path: Path) -> None:
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-4's example
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_bytes(b"abc") == sha256_file(tmp_path / "abc") == abc


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 12345])
def test_sizes_around_the_block(size: int, tmp_path: Path) -> None:
    content = os.urandom(size)
    (tmp_path / "x").write_bytes(content)
    assert sha256_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()
    for start, length in ((0, 10), (5, BLOCK + 7), (size // 2, None), (size + 5, 3), (1, 0), (0, 10 * BLOCK)):
        part = content[start:] if length is None else content[start : start + length]
        assert sha256_file(tmp_path / "x", start=start, length=length) == hashlib.sha256(part).hexdigest()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(StorageError, match=str(path)):
            sha256_file(path)


@settings(derandomize=True, deadline=None, database=None, max_examples=50)
@given(st.lists(st.binary(max_size=50) | st.integers(0, 3 << 20).map(bytes), max_size=8))
def test_what_is_written_is_what_is_hashed(parts: list[bytes]) -> None:
    out = bytearray()
    file = HashingFile(out.extend)
    for part in parts:
        assert file.write(memoryview(part)) == len(part)
    whole = b"".join(parts)
    assert file.sha256 == hashlib.sha256(whole).hexdigest()
    assert bytes(out) == whole and file.bytes == len(whole)


def test_views_of_other_shapes_are_bytes() -> None:
    out = bytearray()
    file = HashingFile(out.extend)
    view = memoryview(bytes(range(24))).cast("I", (2, 3))
    assert file.write(view) == 24 and file.write(memoryview(b"").cast("I")) == 0
    file.flush()
    assert bytes(out) == bytes(range(24))


def test_the_room_needs_no_torch() -> None:
    code = (
        "import sys, parallel_synthesis.provenance.manifest, parallel_synthesis.provenance.environment, "
        "parallel_synthesis.checkpoint.commit, parallel_synthesis.checkpoint.layout, "
        "parallel_synthesis.checkpoint.retention, parallel_synthesis.checkpoint.safetensors_file, "
        "parallel_synthesis.checkpoint.background\n"
        "print({'torch', 'transformers', 'numpy', 'jsonschema'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel's count of bytes read is Linux's")
def test_a_save_does_not_read_what_it_wrote(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    data = os.urandom(8 << 20)
    tensors = {"t": TensorBytes(dtype="U8", shape=(len(data),), data=data)}

    def fill(staging: Staging) -> None:
        with staging.open("x.safetensors") as file:
            details = write_safetensors(file, tensors)
        staging.describe("x.safetensors", details)

    before = bytes_read()
    manifest = commit(tmp_path / "c", step=0, fill=fill)
    assert bytes_read() - before < len(data) // 50
    content = (tmp_path / "c" / "x.safetensors").read_bytes()
    assert manifest["files"]["x.safetensors"]["sha256"] == hashlib.sha256(content).hexdigest()


def test_reading_ahead_gives_the_file(tmp_path: Path) -> None:
    content = os.urandom(100_001)
    (tmp_path / "x").write_bytes(content)
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    try:
        for start, end in ((0, len(content)), (5, 70_000), (99_999, 10**6), (10**6, 10**7)):
            pieces = b"".join(bytes(piece) for piece in read_ahead(fd, start, end, block=4096))
            assert pieces == content[start:end]
    finally:
        os.close(fd)
