"""A save hashes what it writes and reads none of it again: bytes read (the kernel's count) and time, against
writing first and hashing the files afterwards."""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from parallel_synthesis.checkpoint.commit import Staging, commit  # noqa: E402
from parallel_synthesis.checkpoint.safetensors_file import TensorBytes, write_safetensors  # noqa: E402

MOST_READ = 0.01  # of the bytes written
TENSORS = 16


def bytes_read() -> int:
    """What this process has asked read() for since it began, page cache included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def measured(work: Callable[[Path], None], place: Path) -> tuple[float, int]:
    before, began = bytes_read(), time.perf_counter()
    work(place)
    return time.perf_counter() - began, bytes_read() - before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="megabytes of a checkpoint [256]")
    size = parser.parse_args().size * 1_000_000 // TENSORS
    data = os.urandom(size)
    tensors = {f"t{n:02}": TensorBytes(dtype="U8", shape=(size,), data=data) for n in range(TENSORS)}

    def fill(staging: Staging) -> None:
        with staging.open("adapter_model.safetensors") as file:
            details = write_safetensors(file, tensors)
        staging.describe("adapter_model.safetensors", details)

    def save(place: Path) -> None:
        commit(place, step=0, fill=fill)

    def write_then_hash(place: Path) -> None:
        place.mkdir()
        with (place / "file").open("wb") as file:
            for _ in range(TENSORS):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with (place / "file").open("rb") as file:  # the whole, and every tensor
            hashlib.file_digest(file, "sha256")
            file.seek(0)
            for _ in range(TENSORS):
                hashlib.sha256(file.read(size))

    with tempfile.TemporaryDirectory() as place:
        ours, theirs = [], []
        for turn in range(3):
            ours.append(measured(save, Path(place) / f"save{turn}"))
            theirs.append(measured(write_then_hash, Path(place) / f"plain{turn}"))
    written = size * TENSORS
    own, plain = (statistics.median(seconds for seconds, _ in found) for found in (ours, theirs))
    share = max(count for _, count in ours) / written
    print(
        f"{written / 1e6:.0f} MB: a save with all its digests {own:.2f} s, written and then hashed {plain:.2f} s "
        f"(ratio {plain / own:.2f}); read during the save: {share:.2%} of what was written (limit {MOST_READ:.0%}), "
        f"against {max(count for _, count in theirs) / written:.0%}"
    )
    return 0 if share <= MOST_READ else 1


if __name__ == "__main__":
    sys.exit(main())
