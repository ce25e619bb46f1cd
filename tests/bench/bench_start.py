"""Start-up time: `ps --help`, a wrong recipe, a wrong flag, the plan of the general mix (median of five)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time

CALLS = (
    (("--help",), 0.3),
    (("train", "genral"), 0.5),
    (("train", "demo", "--bad"), 0.5),
    (("train", "general", "--dry-run", "--rows-at", "95060"), 3.0),
)


def measure(arguments: tuple[str, ...]) -> float:
    times = []
    with tempfile.TemporaryDirectory() as empty:
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "pscli", *arguments], capture_output=True, check=False, cwd=empty
            )
            times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    slow = False
    for arguments, limit in CALLS:
        seconds = measure(arguments)
        slow |= seconds > limit
        print(f"ps {' '.join(arguments):45} {seconds:.3f} s (limit {limit} s)")
    sys.exit(slow)
