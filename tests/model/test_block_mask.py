"""The check that must hold: branch caches equal one forward with a block mask (design.md)."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.model.branches import common_prefix, plan_prefill
from parallel_synthesis.model.synthesizer import Synthesizer

pytestmark = pytest.mark.lane
BOUND = 1e-5

NAMES = [
    "qwen3",
    "llama",
    "gpt_neox",
    "mistral",
    "qwen2",
    "olmo2",
    "phi3",
    "stablelm",
    "qwen3 yarn",
    "llama yarn",
    "llama llama3",
    "llama linear",
]
# (prefill lengths, kept lengths or None for all, shared prefix tokens)
ROWS = {
    "1 branch": ([37], None, 0),
    "1 branch, extract": ([60], [7], 0),
    "3 branches": ([9, 41, 23], None, 0),
    "3 branches, extracts": ([90, 41, 139], [5, 41, 11], 0),
    "3 branches, shared prefix, extracts": ([120, 131, 138], [3, 12, 10], 110),
    "3 branches, shared prefix, kept reaches into it": ([120, 131, 138], [30, 131, 10], 110),
    "5 branches": ([3, 50, 17, 29, 8], None, 0),
    "5 branches, extracts": ([33, 50, 17, 129, 8], [2, 50, 9, 1, 8], 0),
    "5 branches, shared prefix": ([70, 80, 75, 71, 99], None, 64),
}


def synthesizer(tools: Any, name: str, model: Any = None) -> Synthesizer:
    backbone = tools.wrap(model if model is not None else tools.make_model(name))
    lora = LoraConfig(r=4, alpha=8, target_modules=tools.BACKBONES[name][2])
    return Synthesizer(backbone, mapper=MapperConfig(), lora=lora, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_equals_one_forward_with_a_block_mask(tools: Any, name: str) -> None:
    model = tools.make_model(name)
    reader = synthesizer(tools, name, model)
    for label, (lengths, kept, prefix) in ROWS.items():
        row = tools.make_row(lengths, kept, prefix=prefix, seed=len(label))
        expected = tools.block_mask_logits(model, row)
        assert expected.abs().max() <= 3, "the bound is stated for logits up to 3"
        assert max(branch.start for branch in row.branches) <= 128
        difference = (reader.logits(row) - expected).abs().max().item()
        assert difference < BOUND, f"{name}, {label}: {difference:.2e}"


def test_the_rows_above_take_every_path() -> None:
    """Shared and unshared, grouped and alone: else the check above would prove less than it seems to."""
    plans = [plan_prefill(lengths, prefix) for lengths, _, prefix in ROWS.values()]
    assert {plan.shared > 0 for plan in plans} == {True, False}
    assert {len(group) > 1 for plan in plans for group in plan.groups} == {True, False}


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt_neox", "qwen3 yarn"])
def test_far_beyond_no_worse_than_the_forward_itself(tools: Any, name: str) -> None:
    """Beyond p = 128 the error against fp64 is that of the block-mask forward in fp32.

    Root mean square over all logits of four rows; two equally good roundings differ by some percent. (Rotating
    by the rounded angle -p * frequency instead is two to five times worse, except for gpt_neox.)
    """
    model = tools.make_model(name)
    exact = tools.exact_model(model)
    reader = synthesizer(tools, name, model)
    ours = theirs = 0.0
    for seed in range(4):
        row = tools.make_row([1000, 500, 40], [20, 30, 40], live=20, seed=seed)
        truth = tools.block_mask_logits(exact, row)
        ours += (reader.logits(row) - truth).square().mean().item()
        theirs += (tools.block_mask_logits(model, row) - truth).square().mean().item()
    assert ours**0.5 <= 1.2 * theirs**0.5, (
        f"{name}: {ours**0.5:.2e} against fp64, the forward {theirs**0.5:.2e}"
    )


def test_a_batch_is_rows_one_after_another(tools: Any) -> None:
    """A row's loss is the same alone and among neighbours with other branch lengths (batch of 4)."""
    reader = synthesizer(tools, "qwen3")
    rows = [tools.make_row(lengths, kept, prefix=p, seed=3) for lengths, kept, p in list(ROWS.values())[3:7]]
    together = [reader.loss(row)[0].item() for row in rows]
    alone = [synthesizer(tools, "qwen3").loss(row)[0].item() for row in reversed(rows)][::-1]
    assert together == alone


def test_without_branches_is_a_plain_forward(tools: Any) -> None:
    model = tools.make_model("llama")
    row = tools.make_row([20, 30])
    bare = type(row)(branches=(), live=row.live, target_start=row.target_start)
    ours = synthesizer(tools, "llama", model).logits(row, with_branches=False)
    assert (ours - tools.block_mask_logits(model, bare)).abs().max() < BOUND


def test_common_prefix_is_over_all_branches(tools: Any) -> None:
    assert common_prefix(tools.make_row([12, 15, 30], prefix=10).branches) == 10
    assert common_prefix(tools.make_row([12], prefix=10).branches) == 0
