"""Reading a long log: records a second and peak memory of `ps inspect`'s figures, against a plain pass over the lines.

    python tests/bench/bench_inspect.py [--size 1000000] [--kind ours|reference]

The baseline is one `for line in file: line.split()` of the same run. Targets on one free core: 1,000,000 records in 5 s
and under 300 MB, memory that does not grow with the records, and the view of 220,220 steps in 1.5 s, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TASKS = ("wildchat", "ultrachat", "lmsys_chat", "toucan_single_parallel", "flan", "2wiki_multihopqa")
_CHILD = """
import json, resource, sys, time
from pathlib import Path
if sys.argv[2] == "baseline":
    with open(sys.argv[1], "rb") as file:
        count = sum(1 for line in file if line.split())
else:
    from parallel_synthesis.training.inspection.report import report
    from parallel_synthesis.training.inspection.runlog import RunLog
    log = RunLog(Path(sys.argv[1]))
    log.update()
    count = report(log).steps
taken = time.process_time()  # of this process alone, with its start: a busy machine does not count against it
print(json.dumps([count, taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def write_log(path: Path, records: int, *, kind: str) -> None:
    """A seeded log of one run; 8 % of the steps are skipped."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for step in range(1, records + 1):
            task = rng.choice(TASKS)
            measured = update = skip = ""
            if kind == "ours":
                proof = f"{step:016x}"
                rows = f"rows={step};{step + 1};{step + 2};{step + 3}"
                measured = (
                    f" seconds={rng.uniform(0.8, 2):.4f} prefill_tokens={rng.randint(8000, 30000)} "
                    f"live_tokens={rng.randint(900, 7000)} memory_gib={rng.uniform(50, 62):.3f}"
                )
                update = (
                    f"{measured} grad_norm={rng.random():.6g} {rows} rank_loss=40c820a4;40c7c5f8;40c94acb;40ca22e0 "
                    f"rank_grad={proof};{proof};{proof};{proof} rank_rng={proof};{proof};{proof};{proof} grad={proof}"
                )
                skip = f"{measured} {rows} rank_rng={proof};{proof};{proof};{proof}"
            if rng.random() < 0.08:
                file.write(
                    f"[train-dist] skipped epoch=1 step={step} task={task} details=rank=1 task={task} "
                    f"reason=actual_live_tokens_exceeded live_tokens=1900/1800 msg=guards.live_tokens exceeded{skip}\n"
                )
            else:
                loss = rng.random() * 5
                file.write(
                    f"[train-dist] epoch=1 step={step} rank_tasks={[task] * 4} loss={loss:.4f} ppl={2.718**loss:.4f} "
                    f"target_tokens={rng.randint(50, 900)}{update}\n"
                )


def measure(path: Path, what: str) -> tuple[int, float, float]:
    """(records, CPU seconds, MiB at the peak) of a fresh process."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, path, what], env=env, check=True, capture_output=True
    )
    count, seconds, memory = json.loads(done.stdout)
    return count, seconds, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--size", type=int, default=200_000, help="records [200000]; the target is for 1000000"
    )
    parser.add_argument("--kind", choices=("ours", "reference"), default="ours")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        whole, half = Path(place) / "whole.log", Path(place) / "half.log"
        write_log(whole, arguments.size, kind=arguments.kind)
        write_log(half, arguments.size // 2, kind=arguments.kind)
        lines, base, _ = measure(whole, "baseline")
        steps, seconds, memory = measure(whole, "figures")
        _, _, memory_half = measure(half, "figures")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "pscli", "inspect", whole], env=env, check=True, capture_output=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        view = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert steps == lines == arguments.size
        print(
            f"log          {arguments.size:,} records, {whole.stat().st_size / 1e6:.0f} MB, {arguments.kind}"
        )
        print(f"baseline     {base:.2f} s of CPU (a plain pass that splits each line)")
        print(
            f"figures      {seconds:.2f} s of CPU, {seconds / base:.2f} x the baseline; {steps / seconds / 1e6:.2f} M records/s"
        )
        print(f"a million    {seconds / arguments.size * 1e6:.2f} s at this rate (target 5 s)")
        print(
            f"memory       {memory:.0f} MiB at the peak (target 300), {memory_half:.0f} MiB for half the records"
        )
        print(
            f"whole call   {view:.2f} s of CPU (target 1.5 for 220220 records), the start of Python and the printing included"
        )


if __name__ == "__main__":
    main()
