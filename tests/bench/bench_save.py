"""Time a training loop loses per save, background writer against saving in the loop, with components of release size.

84 MB of LoRA and 168 MB of AdamW state (formats.md). The training is a matrix product on one thread, so that the writer
has the other core; the time lost is what a save adds to the loop, its share of the interpreter lock included.

    python tests/bench/bench_save.py [--megabytes 84] [--saves 4] [--between 4]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

import torch

from parallel_synthesis.checkpoint.background import BackgroundWriter
from parallel_synthesis.checkpoint.components import HostState, capture, write_checkpoint


def parameters(megabytes: int) -> dict[str, torch.Tensor]:
    """LoRA tensors of Qwen3-14B's shapes until there are enough of them."""
    tensors: dict[str, torch.Tensor] = {}
    while sum(tensor.numel() * 4 for tensor in tensors.values()) < megabytes * 1e6:
        layer = len(tensors)
        tensors[f"layers.{layer}.lora_A.weight"] = torch.randn(16, 5120)
        tensors[f"layers.{layer}.lora_B.weight"] = torch.randn(5120, 16)
    return tensors


def state_of(
    step: int, adapter: dict[str, torch.Tensor], moments: dict[int, object], spare: HostState | None
) -> HostState:
    return capture(
        step=step,
        mapper={"net.0.weight": torch.zeros(32, 3)},
        mapper_config={"hidden_dim": 32, "metadata_features": "both"},
        adapter=adapter,
        adapter_config={"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]},
        training_state={"optimizer_state": {"state": moments}},
        meta={"global_step": step, "epoch": 1, "source_run_dir": ".", "metrics": {}},
        into=spare,
    )


def loop(background: bool | None, options: argparse.Namespace) -> float:
    """Seconds of a loop with (None: without) saves."""
    adapter = parameters(options.megabytes)
    moments: dict[int, object] = {
        number: {"exp_avg": tensor.clone(), "exp_avg_sq": tensor.clone()}
        for number, tensor in enumerate(adapter.values())
    }
    left = torch.randn(1024, 1024)
    copies: deque[HostState | None] = deque([None, None], maxlen=2)
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        writer = BackgroundWriter(enabled=bool(background))
        for warm in (0, 1):  # the first copies touch fresh memory, which a run does once
            copies.append(state_of(warm, adapter, moments, None))
        started = time.perf_counter()
        for save in range(2, options.saves + 2):
            for _ in range(options.products):
                left @ left
            if background is not None:
                state = state_of(save, adapter, moments, copies[0])
                copies.append(state)
                destination = Path(place) / f"step_{save:09d}"
                writer.submit(
                    lambda destination=destination, state=state: write_checkpoint(destination, state)
                )
        seconds = time.perf_counter() - started
        writer.close()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=84)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--between", type=float, default=4.0, help="seconds of training between two saves")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    left = torch.randn(1024, 1024)
    left @ left
    started = time.perf_counter()
    for _ in range(10):
        left @ left
    options.products = max(1, round(options.between / ((time.perf_counter() - started) / 10)))
    lost: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(options.rounds):
        nothing = loop(None, options)
        for background in (False, True):
            lost[background].append((loop(background, options) - nothing) / options.saves)
    in_loop, behind = statistics.median(lost[False]), statistics.median(lost[True])
    print(
        f"time lost per save of {3 * options.megabytes} MB: {behind:.2f} s in the background, {in_loop:.2f} s in the loop: "
        f"{behind / in_loop:.2f}x (asked: at most 0.25x)"
    )
    return 0 if behind <= 0.25 * in_loop else 1


if __name__ == "__main__":
    raise SystemExit(main())
