"""Speed of indexing a data file (validation and sha256 included), in MB/s and against `openssl dgst -sha256`.

    python tests/bench/bench_index.py [--mb 1000] [--rounds 3] [--at-least 300]

Rows are seeded and of realistic size (10 to 66 KB): plain words, other alphabets and emoji, as UTF-8 and as
JSON escapes, quotes, line ends and backslashes. The file is read once before, so that it is warm. 1 MB is
10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parallel_synthesis.data.index import open_rows
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.tasks import TASKS

_OTHERS = [
    "naïve",
    "déjà",
    "日本語",
    "Привет",
    "😀",
    '"quoted"',
    "line\nend",
    "back\\slash",
    "tab\t",
    "{'a': 1}",
]
GENERAL_ROWS = {  # rows of the general mix, for the planning figure
    "wildchat": 206788,
    "ultrachat": 140520,
    "lmsys_chat": 175635,
    "toucan_single_parallel": 141717,
    "toucan_multi_parallel": 1171,
    "dta_tool": 14459,
    "flan": 33351,
    "2wiki_multihopqa": 167254,
}


def write_rows(path: Path, size: int, seed: int = 0) -> None:
    """About `size` bytes of valid rows; every third row is written with \\u escapes."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(3000)] + _OTHERS * 30
    lines = []
    written = 0
    while written < min(size, 40_000_000):  # enough variety; larger files repeat it
        branches = draw.randint(2, 6)
        words_each = draw.randint(10_000, 66_000) // 7 // branches
        contexts = [" ".join(draw.choices(words, k=words_each)) for _ in range(branches)]
        row = {
            "id": f"row-{len(lines)}",
            "question": " ".join(draw.choices(words, k=30)),
            "gold": " ".join(draw.choices(words, k=60)),
            "references": ["source"],
            "agent_reference_contexts": contexts,
            "agent_extract_contexts": [text[-400:] for text in contexts],
        }
        lines.append(json.dumps(row, ensure_ascii=len(lines) % 3 == 0).encode() + b"\n")
        written += len(lines[-1])
    block = b"".join(lines)
    with path.open("wb") as file:
        for _ in range(max(1, round(size / len(block)))):
            file.write(block)


def index_seconds(path: Path, cache: Path) -> float:
    """Seconds to open the rows of `path` with an empty cache."""
    shutil.rmtree(cache, ignore_errors=True)
    started = time.perf_counter()
    open_rows(TASKS["flan"], path, cache=cache).close()
    return time.perf_counter() - started


def openssl_seconds(path: Path) -> float:
    """Seconds that openssl takes for the sha256 alone."""
    started = time.perf_counter()
    subprocess.run(["openssl", "dgst", "-sha256", str(path)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=1000, help="size of the file")
    parser.add_argument("--rounds", type=int, default=3, help="measured this often; the best counts")
    parser.add_argument("--at-least", type=float, default=0, help="exit 1 when slower than this many MB/s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path, cache = Path(name) / "rows.jsonl", Path(name) / "cache"
        write_rows(path, options.mb * 1_000_000)
        megabytes = path.stat().st_size / 1e6
        openssl_seconds(path)
        pairs = [(index_seconds(path, cache), openssl_seconds(path)) for _ in range(options.rounds)]
        indexing, hashing = (min(column) for column in zip(*pairs, strict=True))
        started = time.perf_counter()
        open_rows(TASKS["flan"], path, cache=cache).close()
        again = time.perf_counter() - started
    speed, plain = megabytes / indexing, megabytes / hashing
    started = time.perf_counter()
    steps = len(Order(GENERAL_ROWS, ranks=4, batch_size=1, seed=42).epoch(0))
    planning = time.perf_counter() - started
    print(f"index (sha256 + validation), {megabytes:.0f} MB: {speed:.0f} MB/s, best of {options.rounds}")
    print(f"openssl dgst -sha256 alone: {plain:.0f} MB/s; indexing has {speed / plain:.2f} of its speed")
    print(f"opening again with the cache: {again * 1000:.1f} ms")
    print(f"planning an epoch of the general mix: {steps} steps in {planning:.2f} s")
    return 0 if speed >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
