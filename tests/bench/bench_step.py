"""Steps per second and peak memory of a training step against the plain way, at the real vocabulary size.

The plain way: each branch prefilled whole on its own, guards checked after the prefill, logits and loss over all live
positions at once. Both do the same mathematics on the same rows; each runs in a process of its own.

    python tests/bench/bench_step.py [--rows 12] [--hidden 64] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

VOCABULARY = 151_936
MIXES = {
    # branches of a row share one long history and differ in a short suffix (toucan_single_parallel, dta_tool)
    "shared prefix": {"prefix": 600, "suffix": 40, "guarded": 0.0, "least": 2.0},
    # no sharing; 30 % of the rows have a live sequence above the guard
    "30 % guarded": {"prefix": 0, "suffix": 160, "guarded": 0.3, "least": 1.5},
}
LIVE, TARGET, LIVE_LIMIT = 240, 60, 300


def make_rows(mix: dict[str, float], count: int, seed: int) -> list[object]:
    from parallel_synthesis.model.tokens import BranchTokens, RowTokens

    rng = random.Random(seed)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(number))

    rows = []
    for number in range(count):
        prefix = ids(int(mix["prefix"]))
        branches = []
        for _ in range(4):
            suffix = ids(int(mix["suffix"] * rng.uniform(0.7, 1.3)))
            branches.append(BranchTokens(ids=prefix + suffix, kept=len(suffix)))
        guarded = number % 10 < round(10 * mix["guarded"])
        live = ids(2 * LIVE if guarded else LIVE)
        rows.append(RowTokens(branches=tuple(branches), live=live, target_start=len(live) - TARGET))
    return rows


def backbone(hidden: int) -> object:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from parallel_synthesis.model.backbone import Backbone

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    return Backbone(
        model=model,
        tokenizer=SimpleNamespace(),
        name="bench",
        revision=None,
        device=torch.device("cpu"),
        dtype=torch.float32,
        resized_from=None,
    )


def variant(name: str, mix: dict[str, float], options: argparse.Namespace) -> dict[str, float]:
    """Runs one way in this process: seconds a step, peak RSS, and the sum of the losses (the same mathematics)."""
    import torch

    from parallel_synthesis.config import GuardsConfig, LoraConfig, MapperConfig
    from parallel_synthesis.model.synthesizer import Synthesizer
    from parallel_synthesis.training.guards import check
    from parallel_synthesis.training.prepare import count

    torch.set_num_threads(options.threads)
    synthesizer = Synthesizer(backbone(options.hidden), mapper=MapperConfig(), lora=LoraConfig(), seed=0)  # type: ignore[arg-type]
    parameters = [parameter for _, parameter in synthesizer.parameters("both")]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
    rows = make_rows(mix, options.rows + 1, 1)
    guards = GuardsConfig(live_tokens=LIVE_LIMIT)
    plain = name == "plain"

    def guarded(row: object) -> bool:
        return check([count(row)], guards) is not None  # type: ignore[arg-type]

    loss_of: Callable[[object], torch.Tensor | None]
    if plain:

        def loss_of(row: object) -> torch.Tensor | None:
            return plain_loss(synthesizer, row, lambda: guarded(row))
    else:

        def loss_of(row: object) -> torch.Tensor | None:
            return None if guarded(row) else synthesizer.loss(row)[0]  # type: ignore[arg-type]

    def step(row: object) -> float:
        loss = loss_of(row)
        if loss is None:
            return 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step(rows[-1])
    started = time.perf_counter()
    losses = sum(step(row) for row in rows[:-1])
    seconds = (time.perf_counter() - started) / options.rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak, "loss": losses}


def plain_loss(synthesizer: object, row: object, guarded: Callable[[], bool]) -> object:
    """The plain way of design.md's step."""
    import torch
    from torch.nn import functional

    from parallel_synthesis.model.branches import join, plan_prefill, prefill
    from parallel_synthesis.model.lanes import run_base

    s, r = synthesizer, row
    caches = []
    for branch in r.branches:  # type: ignore[attr-defined]
        caches += prefill(s.backbone.base, [branch], plan_prefill([len(branch.ids)], 0))  # type: ignore[attr-defined]
    if guarded():
        return None
    cache = join(caches, s.mapper([c.kept for c in caches], s.backbone.layers))  # type: ignore[attr-defined]
    offset = max(c.kept for c in caches)
    ids = torch.tensor([r.live])  # type: ignore[attr-defined]
    positions = torch.arange(offset, offset + ids.shape[1])[None]
    model = s.peft_model.get_base_model()  # type: ignore[attr-defined]
    logits = model.get_output_embeddings()(run_base(model.base_model, ids, positions, cache))[0].float()
    labels = ids[0].clone()
    labels[: r.target_start] = -100  # type: ignore[attr-defined]
    return functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")


def measure(way: str, mix: str, arguments: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--mix", mix, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--way", choices=("ours", "plain"))
    parser.add_argument("--mix", choices=tuple(MIXES))
    options = parser.parse_args()
    if options.way:
        print(json.dumps(variant(options.way, MIXES[options.mix], options)))
        return 0
    arguments = [
        "--rows",
        str(options.rows),
        "--hidden",
        str(options.hidden),
        "--threads",
        str(options.threads),
    ]
    reached = True
    for mix, settings in MIXES.items():
        plain, ours = measure("plain", mix, arguments), measure("ours", mix, arguments)
        assert abs(plain["loss"] - ours["loss"]) <= 1e-4 * abs(plain["loss"]), "the two ways disagree"
        ratio = plain["seconds"] / ours["seconds"]
        reached &= ratio >= settings["least"] and ours["peak"] < plain["peak"]
        print(
            f"{mix}: {1 / ours['seconds']:.2f} steps/s against {1 / plain['seconds']:.2f} the plain way: "
            f"{ratio:.2f}x (asked: {settings['least']}x); peak RSS {ours['peak'] / 1e6:,.0f} MB "
            f"against {plain['peak'] / 1e6:,.0f} MB"
        )
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
