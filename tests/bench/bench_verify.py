"""`ps verify` against `openssl dgst -sha256` in the same run: one file, several files, our own checkpoints, start-up.

Warm cache; each figure is the median of five turns, taken in alternation. The ratios are of wall time, openssl's over
ours; hashing alone, without the start of the process, is what both sides are about with large files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from parallel_synthesis.provenance.check import Expected, Place, check, default_jobs  # noqa: E402
from parallel_synthesis.provenance.inside import Inside  # noqa: E402
from parallel_synthesis.provenance.manifest import listing  # noqa: E402

FLOORS = {"one file": 1.2, "several files": 1.9, "header and tensors": 1.9}
TENSORS = 40


def write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, 1 << 22):
            file.write(os.urandom(min(1 << 22, size - start)))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_safetensors(directory: Path, size: int) -> None:
    """A file like an adapter's: two large tensors and many small ones, with a manifest of ours."""
    small = 1 << 18
    large = (size - TENSORS * small) // 2
    sizes = {"embed": large, "head": large, **{f"lora{n}": small for n in range(TENSORS)}}
    fields, at = {}, 0
    for name, length in sizes.items():
        fields[name] = {"dtype": "U8", "shape": [length], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(fields).encode()
    header = len(text).to_bytes(8, "little") + text
    whole, tensors, offset = hashlib.sha256(header), {}, len(header)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        for name, length in sizes.items():
            digest = hashlib.sha256()
            for start in range(0, length, 1 << 22):
                piece = os.urandom(min(1 << 22, length - start))
                digest.update(piece)
                whole.update(piece)
                file.write(piece)
            tensors[name] = {"offset": offset, "bytes": length, "sha256": digest.hexdigest()}
            offset += length
    entry = {"bytes": offset, "sha256": whole.hexdigest(), "tensors": tensors}
    entry["header_sha256"] = hashlib.sha256(header).hexdigest()
    document = {"schema_version": 1, "kind": "directory", "files": {"model.safetensors": entry}}
    (directory / "manifest.json").write_text(json.dumps(document))


def ours(directory: Path, files: dict[str, Expected]) -> None:
    found = check([Place(inside=Inside(directory), files=files, extra=False)]).places[0].problems
    assert not found, found


def openssl(paths: list[Path]) -> None:
    subprocess.run(["openssl", "dgst", "-sha256", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)


def openssl_at_once(paths: list[Path]) -> None:
    """A process a core: what this machine can give at this moment, whoever else is using it."""
    jobs = min(default_jobs(), len(paths))
    each = [["openssl", "dgst", "-sha256", *map(str, paths[at::jobs])] for at in range(jobs)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in each]
    for process in running:
        process.wait()


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, directory: Path, files: dict[str, Expected]) -> bool:
    paths = [directory / file for file in files]
    theirs, mine, at_once = [], [], []
    for _ in range(5):
        theirs.append(seconds(lambda: openssl(paths)))
        at_once.append(seconds(lambda: openssl_at_once(paths)))
        mine.append(seconds(lambda: ours(directory, files)))
    baseline, own = statistics.median(theirs), statistics.median(mine)
    size = sum(path.stat().st_size for path in paths)
    ratio, floor = baseline / own, FLOORS[name]
    print(
        f"{name:20} openssl {size / baseline / 1e9:5.2f} GB/s   ours {size / own / 1e9:5.2f} GB/s   "
        f"ratio {ratio:4.2f} (floor {floor})"
        + (f"; openssl on all cores {baseline / statistics.median(at_once):4.2f}" if len(paths) > 1 else "")
    )
    return ratio >= floor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=800, help="megabytes of each directory [800]")
    size = parser.parse_args().size * 1_000_000
    print(f"{default_jobs()} cores; {size / 1e6:.0f} MB each")
    right = True
    with tempfile.TemporaryDirectory() as place:
        one, several, own = (Path(place) / name for name in ("one", "several", "own"))
        for directory in (one, several, own):
            directory.mkdir()
        write(one / "file", size)
        right &= compare("one file", one, {"file": Expected(sha256=sha256(one / "file"), bytes=size)})
        (one / "file").unlink()
        names = [f"file{number}" for number in range(6)]
        for name in names:
            write(several / name, size // 6)
        files = {name: Expected(sha256=sha256(several / name), bytes=size // 6) for name in names}
        right &= compare("several files", several, files)
        write_safetensors(own, size)
        right &= compare("header and tensors", own, dict(listing(own).files))
        (own / "model.safetensors").unlink()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "pscli", "verify", str(own), "--json"]

        def start_up() -> None:
            subprocess.run(command, env=environment, capture_output=True, check=False)

        starts = [seconds(start_up) for _ in range(5)]
        start = statistics.median(starts)
        print(f"start to verdict     {start:.3f} s (limit 0.3 s)")
        right &= start <= 0.3
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
