"""A merge that fails or is hindered: nothing half-written, inputs untouched, and little memory whatever the size."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from parallel_synthesis.checkpoint.disk import Disk
from parallel_synthesis.checkpoint.merge import merge
from parallel_synthesis.checkpoint.merge_plan import MergeOptions
from parallel_synthesis.errors import CheckpointError, StorageError

pytestmark = pytest.mark.lane
ADAPTER = "judger_lora/adapter_model.safetensors"
RELEASE = MergeOptions(mapper_from=1)
EMBED, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"

Make = Callable[..., Path]


def embeddings(seed: int, rows: int = 30_011) -> dict[str, torch.Tensor]:
    """bf16, more than one chunk each, with an odd number of elements."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((rows, 23), generator=generator).bfloat16() for name in (EMBED, HEAD)}


def test_where_it_must_not_write_or_merge(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    a, b = map(str, made)
    cases = [
        ([(a, 0.5), (b, 0.5)], made[1] / "new" / "out", "lies inside input B"),
        ([(a, 0.5), (b, 0.5)], made[0], "exists already"),
        ([(a, 0.5), (f"{tmp_path}/b/../a", 0.5)], tmp_path / "out", "A and B are the same checkpoint"),
        ([(a, 0.5), (f"{tmp_path}/c", 0.5)], tmp_path / "out", "no such directory"),
    ]
    for sources, out, text in cases:
        with pytest.raises(CheckpointError, match=text):
            merge(sources, out, RELEASE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert sorted(path.name for path in made[1].iterdir()) == sorted(path.name for path in made[0].iterdir())


def test_damaged_inputs(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    sources = [(str(one), 0.5) for one in made]
    whole = (made[1] / ADAPTER).read_bytes()
    (made[1] / ADAPTER).write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        merge(sources, tmp_path / "out", RELEASE)
    (made[1] / ADAPTER).write_bytes(whole)
    mapper = (made[1] / "cache_mapper.pt").read_bytes()
    (made[1] / "cache_mapper.pt").write_bytes(mapper[:100])
    with pytest.raises(CheckpointError, match=r"cache_mapper\.pt: expected a state dict"):
        merge(sources, tmp_path / "out", RELEASE)
    (made[1] / "cache_mapper.pt").write_bytes(mapper)
    merge(sources, tmp_path / "good", RELEASE)
    damaged = tmp_path / "good" / ADAPTER
    damaged.chmod(0o644)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="differs from the sha256 in its manifest"):
        merge([(str(made[0]), 0.5), (str(tmp_path / "good"), 0.5)], tmp_path / "out", RELEASE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["header", "lora", "equal", "from the start", "later"])
def test_inputs_with_manifests_are_proved_by_their_parts(
    lora_checkpoint: Make, tmp_path: Path, place: str
) -> None:
    """Equal tensors are hashed in the output alone, so damage that both inputs share must show there too."""
    shared = embeddings(1, 60_000)
    later = {name: tensor.clone() for name, tensor in shared.items()}
    later[HEAD][-1] += 1  # equal for two chunks, then not
    other = later | {"base_model.model.other.weight": embeddings(2)[HEAD]}
    pair = []
    for seed, state in enumerate((shared | {"base_model.model.other.weight": embeddings(3)[HEAD]}, other)):
        plain = lora_checkpoint(tmp_path / f"plain-{seed}", seed=seed, embeddings=state)
        merge([(str(plain), 1.0)], tmp_path / f"in-{seed}", MergeOptions())  # now it has a manifest
        pair.append(tmp_path / f"in-{seed}")
    sources = [(str(one), 0.5) for one in pair]
    good = merge(sources, tmp_path / "good", RELEASE)
    assert [parent["components"][ADAPTER] for parent in good.parents] == [
        hashlib.sha256((one / ADAPTER).read_bytes()).hexdigest() for one in pair
    ]
    states = [load_file(one / ADAPTER) for one in pair]
    wanted = {n: (a.float() * 0.5 + states[1][n].float() * 0.5).to(a.dtype) for n, a in states[0].items()}
    assert (tmp_path / "good" / ADAPTER).read_bytes() == save(wanted)
    names = {"equal": EMBED, "from the start": "base_model.model.other.weight", "later": HEAD}
    name = names.get(place, min(n for n in wanted if "lora" in n))
    listed = json.loads((pair[0] / "manifest.json").read_text())["files"][ADAPTER]["tensors"]
    for one in pair:
        if one == pair[1] and place != "equal":
            continue
        (one / ADAPTER).chmod(0o644)
        content = bytearray((one / ADAPTER).read_bytes())
        if place == "header":
            content = bytearray(content.replace(b"other.weight", b"odder.weight", 1))
        else:
            content[listed[name]["offset"] + 2] ^= 1
        (one / ADAPTER).write_bytes(content)
    options = MergeOptions(mapper_from=1, missing="copy")
    with pytest.raises(
        CheckpointError, match=f"damaged: {'header' if place == 'header' else f'tensor {name}'}"
    ):
        merge(sources, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_an_input_that_changes_meanwhile(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [
        lora_checkpoint(tmp_path / name, seed=seed, embeddings=embeddings(seed))
        for seed, name in enumerate("ab")
    ]
    copy = shutil.copyfile(made[0] / ADAPTER, tmp_path / "copy")

    def change(done: int, _total: int) -> None:
        if done > 1 << 20:
            shutil.copyfile(copy, tmp_path / "new").replace(made[0] / ADAPTER)

    with pytest.raises(CheckpointError, match="was changed while it was read"):
        merge([(str(one), 0.5) for one in made], tmp_path / "out", RELEASE, progress=change)
    assert not (tmp_path / "out").exists()


class FullDisk(Disk):
    """Has room for `room` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: Any) -> int:
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return super().write(fd, data)


def test_a_full_disk_leaves_nothing(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [
        lora_checkpoint(tmp_path / name, seed=seed, embeddings=embeddings(seed))
        for seed, name in enumerate("ab")
    ]
    before = {path: path.stat() for one in made for path in one.rglob("*")}
    for room in (0, 1 << 20, 2_765_000):
        with pytest.raises(StorageError, match="No space left"):
            merge([(str(one), 0.5) for one in made], tmp_path / "out", RELEASE, disk=FullDisk(room))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    after = {path: path.stat() for one in made for path in one.rglob("*")}
    assert [s.st_mtime_ns for s in before.values()] == [s.st_mtime_ns for s in after.values()]


def test_a_disk_that_will_be_full(
    lora_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    monkeypatch.setattr("parallel_synthesis.checkpoint.merge.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="1000 are free there"):
        merge([(str(one), 0.5) for one in made], tmp_path / "out", RELEASE)


def test_torch_is_not_needed_and_memory_is_little(lora_checkpoint: Make, tmp_path: Path) -> None:
    """In a process of its own, where importing torch fails: 40 MB a file, under 100 MB at the peak."""
    made = [
        lora_checkpoint(tmp_path / name, seed=seed, embeddings=embeddings(seed, 400_000))
        for seed, name in enumerate("ab")
    ]
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['safetensors'] = None\n"
        "from pscli.main import call\n"
        f"code = call(['merge', {str(made[0])!r}, {str(made[1])!r}, '--out', {str(tmp_path / 'out')!r}, '--quiet'])\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(code, peak.split()[1])\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    code_, peak = done.stdout.split()[-2:]
    assert code_ == "0", done.stderr
    assert int(peak) * 1024 < 100e6


def test_an_interrupt_just_after_the_thread_began_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hung: the thread waited for room that nobody made, and was waited for."""
    import itertools
    from concurrent.futures import ThreadPoolExecutor

    from parallel_synthesis.checkpoint import merge_stream

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args: Any, **more: Any) -> Any:
            super().submit(*args, **more)
            raise KeyboardInterrupt

    monkeypatch.setattr(merge_stream, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(merge_stream._ahead(itertools.repeat(b"x")))
