"""The prefill plan, the cache layers and re-rotation, each on its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from parallel_synthesis.model.branches import join, plan_prefill, prefill, rotate
from parallel_synthesis.model.lanes import make_cache, rotary_module, rotary_tables

pytestmark = pytest.mark.lane


@pytest.mark.parametrize(
    ("lengths", "prefix", "shared", "groups"),
    [
        ([10, 10, 10], 0, 0, ((0, 1, 2),)),
        ([10, 200, 190], 0, 0, ((1, 2), (0,))),  # too unequal to pad
        ([10, 100, 90], 0, 0, ((1, 2, 0),)),  # padding that costs less than a forward
        ([3000, 3000], 0, 0, ((0,), (1,))),  # each fills a forward
        ([300, 310, 305], 290, 290, ((1, 2, 0),)),
        ([300, 310, 305], 60, 0, ((1, 2, 0),)),  # too short a prefix to pay for a forward
        ([300, 300], 300, 299, ((0, 1),)),  # identical branches keep one token of their own
        ([20000, 20010], 19990, 19990, ((1,), (0,))),  # too much context to hold twice
        ([7], 0, 0, ((0,),)),
    ],
)
def test_plan(lengths: list[int], prefix: int, shared: int, groups: tuple[tuple[int, ...], ...]) -> None:
    plan = plan_prefill(lengths, prefix)
    assert (plan.shared, plan.groups) == (shared, groups)
    assert plan.forwards == len(groups) + (shared > 0)


def test_a_shared_prefix_is_prefilled_once(tools: Any) -> None:
    """Counted in tokens that enter the backbone: prefix + suffixes (padded), not three times everything."""
    model = tools.make_model("llama")
    seen: list[int] = []
    hook = model.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel())
    )
    row = tools.make_row([120, 131, 138], [120, 5, 30], prefix=110)
    plan = plan_prefill([120, 131, 138], 110)
    together = prefill(model.base_model, row.branches, plan)
    assert seen == [110, 3 * 28]
    apart = [prefill(model.base_model, [b], plan_prefill([len(b.ids)], 0))[0] for b in row.branches]
    hook.remove()
    for left, right in zip(together, apart, strict=True):
        assert left.kept == right.kept
        for (keys, values), (other_keys, other_values) in zip(left.layers, right.layers, strict=True):
            assert keys.shape == other_keys.shape == (1, 2, left.kept, 8)
            assert (keys - other_keys).abs().max() < 1e-5
            assert (values - other_values).abs().max() < 1e-5
            # Views would keep the whole padded forward alive.
            assert keys.untyped_storage().nbytes() == keys.numel() * 4
            assert values.untyped_storage().nbytes() == values.numel() * 4


def test_a_hand_made_cache_reports_its_length_before_use(tools: Any) -> None:
    backbone = tools.make_backbone("llama")
    row = tools.make_row([20, 30, 9], [4, 30, 2])
    caches = prefill(backbone.base, row.branches, plan_prefill([20, 30, 9], 0))
    cache = join(caches, torch.ones(3, backbone.layers, 4))
    assert cache.get_seq_length() == 36
    assert [layer.get_seq_length() for layer in cache.layers] == [36] * backbone.layers
    assert make_cache([]).get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3 yarn"])
def test_rotation_by_hand(tools: Any, name: str) -> None:
    """A key at position 30, turned back by 21, is the key at position 9: in complex numbers, in fp64."""
    rotary = rotary_module(tools.make_model(name).base_model)
    assert rotary is not None
    cos, sin = rotary_tables(rotary, torch.tensor([-21]), torch.float32)
    assert torch.allclose(cos**2 + sin**2, torch.ones_like(cos), atol=1e-6), (
        "YaRN's scaling must be divided out"
    )
    width = cos.shape[-1]
    keys = torch.randn(1, 2, 1, width + 4, generator=torch.Generator().manual_seed(0))
    turned = rotate(keys, cos, sin)
    half = width // 2
    for i, frequency in enumerate(rotary.inv_freq.tolist()):
        for head in range(2):
            key = complex(keys[0, head, 0, i], keys[0, head, 0, i + half])
            expected = key * complex(math.cos(-21 * frequency), math.sin(-21 * frequency))
            assert turned[0, head, 0, i].item() == pytest.approx(expected.real, abs=1e-5)
            assert turned[0, head, 0, i + half].item() == pytest.approx(expected.imag, abs=1e-5)
    assert torch.equal(turned[..., width:], keys[..., width:]), "channels without rope stay"


def test_rotation_is_computed_in_fp32_and_stored_in_the_cache_dtype() -> None:
    angle = torch.tensor([[0.3, 0.3]])
    keys = torch.tensor([[[[1.0, 3.0]]]], dtype=torch.bfloat16)
    turned = rotate(keys, angle.cos(), angle.sin())
    exact = torch.tensor([math.cos(0.3) - 3 * math.sin(0.3), 3 * math.cos(0.3) + math.sin(0.3)])
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned.flatten(), exact.to(torch.bfloat16))
