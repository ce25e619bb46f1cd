"""Speed and memory of `ps merge` on a release-shaped pair, against F = reading both files and copying one.

    python tests/bench/bench_merge.py [--rows 30000] [--rounds 2] [--no-manifest] [--scratch DIR] [--check]

Generated: 320 fp32 LoRA tensors (84 MB) and bf16 embed_tokens and lm_head of [rows, 5120]. The release has 151669
rows (3.19 GB a file): --rows 151669 needs 13 GB of disk. Two cases: embeddings equal in both, as in real pairs, whose
average changes no bit of bf16; and different ones. F is `cat A B > /dev/null` and `cp A`, in the same run, files warm.
Everything a merge does counts: start of the process, hashes of output, tensors and both inputs, fsync. --check: exit
1 beyond the targets (equal 2.5 x F and 100 MB, different 4 x F and 350 MB), which mean the full size: the start of
the process and the comparison of the deltas, about a second, weigh more on a small pair. On a busy machine look at
the CPU seconds.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.safetensors_file import TensorChunks, write_safetensors

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, RANK = 5120, 40, 16
OUTPUTS = {"q": 5120, "k": 1024, "v": 1024, "o": 5120}
CHUNK = 1 << 20
ADAPTER = "judger_lora/adapter_model.safetensors"
TARGETS = {"equal": (2.5, 100), "different": (4.0, 350)}  # times F, MB


def chunks(kind: str, nbytes: int, seed: int) -> Iterator[bytes]:
    """Finite values: a few random chunks, over and over."""
    rng = np.random.default_rng(seed)
    some = []
    for _ in range(4):
        values = (rng.standard_normal(CHUNK // 4) * 0.02).astype(np.float32)
        some.append(
            values.tobytes() if kind == "F32" else np.repeat(values.view(np.uint16)[1::2], 2).tobytes()
        )
    for number, at in enumerate(range(0, nbytes, CHUNK)):
        yield some[number % 4][: nbytes - at]


def write_checkpoint(directory: Path, *, rows: int, seed: int, embedding_seed: int, manifest: bool) -> Path:
    """As a run commits it; without its manifest, as the reference implementation leaves it."""
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for layer in range(LAYERS):
        for part, outputs in OUTPUTS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj"
            shapes[f"{module}.lora_A.weight"] = ("F32", (RANK, HIDDEN), seed)
            shapes[f"{module}.lora_B.weight"] = ("F32", (outputs, RANK), seed)
    for name in ("lm_head", "model.embed_tokens"):
        shapes[f"base_model.model.{name}.weight"] = ("BF16", (rows, HIDDEN), embedding_seed)
    tensors = {
        name: TensorChunks(dtype=kind, shape=shape, chunks=chunks(kind, int(np.prod(shape)) * size, where))
        for name, (kind, shape, where) in shapes.items()
        for size in [4 if kind == "F32" else 2]
    }
    mapper = io.BytesIO()
    with zipfile.ZipFile(mapper, "w") as archive:  # a state dict without tensors
        archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")

    def fill(staging: Staging) -> None:
        with staging.open(ADAPTER) as file:
            details = write_safetensors(file, tensors)
        staging.describe(ADAPTER, details)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": ["q_proj"]}
        staging.write_json("judger_lora/adapter_config.json", config, None)
        staging.write_bytes("cache_mapper.pt", mapper.getvalue())

    commit(directory, step=1, fill=fill)
    if not manifest:
        (directory / "manifest.json").unlink()
    return directory


def timed(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak RSS in MB) of a process and its children."""
    started = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {child.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def baseline(a: Path, b: Path, scratch: Path) -> tuple[float, float]:
    """(seconds, CPU seconds) of F."""
    copy = scratch / "copy"
    found = timed(["sh", "-c", f"cat '{a}' '{b}' > /dev/null && cp '{a}' '{copy}'"])
    copy.unlink()
    return found[:2]


def merged(a: Path, b: Path, scratch: Path) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak RSS in MB) of one `ps merge`."""
    out = scratch / "out"
    command = [sys.executable, "-m", "pscli", "merge", str(a), str(b), "--out", str(out), "--json"]
    found = timed(command)
    shutil.rmtree(out)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=30000, help="vocabulary rows; the release has 151669")
    parser.add_argument("--rounds", type=int, default=2, help="measured this often; the best counts")
    parser.add_argument("--scratch", type=Path, default=None, help="where the files are made")
    parser.add_argument("--no-manifest", action="store_true", help="inputs as the reference leaves them")
    parser.add_argument("--check", action="store_true", help="exit 1 beyond the targets")
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        scratch = Path(name)
        for case, (times, megabytes) in TARGETS.items():
            a = write_checkpoint(
                scratch / "a", rows=options.rows, seed=1, embedding_seed=7, manifest=not options.no_manifest
            )
            b = write_checkpoint(
                scratch / "b",
                rows=options.rows,
                seed=2,
                embedding_seed=7 if case == "equal" else 8,
                manifest=not options.no_manifest,
            )
            files = [one / ADAPTER for one in (a, b)]
            rounds = [(*baseline(*files, scratch), *merged(a, b, scratch)) for _ in range(options.rounds)]
            plain, plain_cpu, seconds, cpu, peak = (min(column) for column in zip(*rounds, strict=True))
            each = files[0].stat().st_size / 1e9
            print(
                f"{case} embeddings, {each:.2f} GB each: merge {seconds:.2f} s = {seconds / plain:.2f} x F "
                f"(F {plain:.2f} s, target {times} x), CPU {cpu:.1f} s = {cpu / plain_cpu:.1f} x F's, "
                f"peak RSS {peak:.0f} MB (target {megabytes} MB)"
            )
            missed = missed or seconds > times * plain or peak > megabytes
            for one in (a, b):
                shutil.rmtree(one)
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
