"""The affine map and the gradients, checked by a second forward that is written differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from parallel_synthesis.config import LoraConfig, MapperConfig
from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.loss import target_loss
from parallel_synthesis.model.mapper import CacheMapper
from parallel_synthesis.model.synthesizer import Synthesizer

pytestmark = pytest.mark.lane


def randomise(reader: Synthesizer) -> None:
    """Mapper and LoRA far from identity and zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in reader.mapper.parameters():
            parameter.normal_(0, 0.7, generator=generator)
        for _, parameter in reader.lora_parameters():
            parameter.normal_(0, 0.15, generator=generator)


def make(tools: Any, name: str = "qwen3", dtype: torch.dtype = torch.float32) -> tuple[Synthesizer, Backbone]:
    backbone = tools.wrap(tools.make_model(name).to(dtype))
    lora = LoraConfig(r=4, alpha=8, target_modules=tools.BACKBONES[name][2])
    reader = Synthesizer(backbone, mapper=MapperConfig(), lora=lora, seed=1)
    randomise(reader)
    return reader, backbone


def coefficients_by_hand(mapper: CacheMapper, kept: list[int], layers: int) -> Tensor:
    """The formula of design.md, written out."""
    weights = mapper.state_dict()
    result = torch.empty(len(kept), layers, 4)
    for n, length in enumerate(kept):
        for layer in range(layers):
            inputs = torch.tensor([length + 1.0, len(kept) + 1.0]).log()
            inputs = torch.cat([inputs, torch.tensor([layer / (layers - 1)])])
            hidden = weights["net.0.weight"] @ inputs + weights["net.0.bias"]
            hidden = hidden / (1 + torch.exp(-hidden))
            out = 0.1 * torch.tanh(weights["net.2.weight"] @ hidden + weights["net.2.bias"])
            result[n, layer] = out + torch.tensor([1.0, 0.0, 1.0, 0.0])
    return result


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_affine_map_equals_block_mask_forward_with_transformed_states(
    tools: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random mapper and LoRA: the same logits from ONE forward of which attention is written by hand.

    In it the keys and values of branch tokens are mapped where live tokens read them, and only live tokens go
    through the LoRA. Independent of the cache code: no cache, no re-rotation, no joint prefill.
    """
    reader, backbone = make(tools)
    model = reader.peft_model.get_base_model()
    row = tools.make_row([30, 8, 17], [10, 8, 3], live=9, seed=2)
    table = coefficients_by_hand(reader.mapper, [10, 8, 3], backbone.layers)
    past = row.prefill_tokens
    owner = torch.tensor([n for n, branch in enumerate(row.branches) for _ in branch.ids])

    for module in model.modules():
        if hasattr(module, "lora_A"):

            def forward(x: Tensor, module: Any = module) -> Tensor:
                delta = module.lora_B["default"](module.lora_A["default"](x)) * module.scaling["default"]
                delta[:, :past] = 0  # prefill runs with the LoRA off
                return module.base_layer(x) + delta

            monkeypatch.setattr(module, "forward", forward)

    def by_hand(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        alpha_k, beta_k, alpha_v, beta_v = table[owner, module.layer_idx].T[:, None, None, :, None].unbind()
        mapped_key, mapped_value = key.clone(), value.clone()
        mapped_key[:, :, :past] = alpha_k * key[:, :, :past] + beta_k
        mapped_value[:, :, :past] = alpha_v * value[:, :, :past] + beta_v
        outputs = []
        for q, k, v, m in (
            (query[:, :, :past], key, value, attention_mask[:, :, :past]),
            (query[:, :, past:], mapped_key, mapped_value, attention_mask[:, :, past:]),
        ):
            scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * kwargs["scaling"]
            scores = scores.masked_fill(~m, float("-inf"))
            outputs.append(scores.softmax(-1) @ v.repeat_interleave(groups, 1))
        return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None

    untouched, its_backbone = make(tools)
    for part in (its_backbone.model, untouched.peft_model.get_base_model()):
        part.set_attn_implementation(attention)
    ours = untouched.logits(row)
    AttentionInterface.register("by_hand", by_hand)
    model.config._attn_implementation = "by_hand"
    expected = tools.block_mask_logits(model, row)
    assert (ours - expected).abs().max() < 1e-5
    with torch.no_grad():
        untouched.mapper.net[2].weight.zero_()
        untouched.mapper.net[2].bias.zero_()
    assert (untouched.logits(row) - expected).abs().max() > 1e-2, "without the map it must not hold"


def test_gradients_equal_finite_differences(tools: Any) -> None:
    """fp64 throughout: central differences on coordinates of each mapper tensor and of some LoRA tensors."""
    # The one tested architecture whose norms stay in fp64; the others compute them in fp32.
    reader, _ = make(tools, "gpt_neox", dtype=torch.float64)
    reader.mapper.double()
    for _, parameter in reader.lora_parameters():
        parameter.data = parameter.data.double()
    row = tools.make_row([30, 8, 17], [10, 8, 3], live=9, seed=2)
    named = reader.parameters("both")
    loss, count = reader.loss(row)
    assert loss.dtype == torch.float64
    assert count == row.target_tokens == 5
    gradients = torch.autograd.grad(loss, [parameter for _, parameter in named])
    chosen = named[:4] + named[4 :: max(1, len(named) // 5)]
    assert any("lora_A" in name for name, _ in chosen)
    assert any("lora_B" in name for name, _ in chosen)
    step = 1e-5
    for name, parameter in chosen:
        gradient = dict(zip((n for n, _ in named), gradients, strict=True))[name].flatten()
        for place in {0, parameter.numel() // 2, int(gradient.abs().argmax())}:
            flat = parameter.data.view(-1)
            kept = flat[place].item()
            values = []
            for sign in (1, -1):
                flat[place] = kept + sign * step
                values.append(reader.loss(row)[0].item())
            flat[place] = kept
            numeric = (values[0] - values[1]) / (2 * step)
            assert numeric == pytest.approx(gradient[place].item(), rel=1e-4, abs=1e-8), f"{name}[{place}]"


def test_gradients_reach_both_components_and_never_the_backbone(tools: Any) -> None:
    reader, backbone = make(tools)
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    named = reader.parameters("both")
    optimizer = torch.optim.AdamW([parameter for _, parameter in named], lr=1e-2)
    for seed in range(3):
        optimizer.zero_grad()
        reader.loss(tools.make_row([30, 8, 17], [10, 8, 3], seed=seed))[0].backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in named)
        optimizer.step()
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    others = [p for n, p in reader.peft_model.named_parameters() if ".lora_" not in n]
    frozen = [*backbone.model.parameters(), *others]
    assert all(p.grad is None and not p.requires_grad for p in frozen)


@pytest.mark.parametrize(
    ("components", "trained"), [("mapper_only", "cache_mapper"), ("lora_only", ".lora_")]
)
def test_one_component_alone(tools: Any, components: Any, trained: str) -> None:
    reader, _ = make(tools)
    named = reader.parameters(components)
    everything = reader.parameters("both")
    assert [n for n, _ in named] == [n for n, _ in everything if trained in n]
    named = reader.parameters(components)
    reader.loss(tools.make_row([9, 5]))[0].backward()
    with_gradient = [name for name, parameter in everything if parameter.grad is not None]
    assert with_gradient == [name for name, _ in named]


def test_loss_is_the_sum_over_target_positions_in_any_chunks(tools: Any) -> None:
    """More target tokens than a chunk holds, against plain cross-entropy; gradients too."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 33, bias=False).requires_grad_(False)
    hidden = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(33, (50,))
    plain = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
    (expected,) = torch.autograd.grad(plain, hidden)
    for chunk in (7, 50, 256):
        rows: list[int] = []

        def watched(states: Tensor, rows: list[int] = rows) -> Tensor:
            rows.append(len(states))
            return head(states)

        loss = target_loss(watched, hidden, targets, chunk=chunk)
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert max(rows) <= chunk, "the logits of a whole sequence must never exist"
        assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
        assert torch.allclose(gradient, expected, atol=1e-6)
    reader, _ = make(tools)
    row = tools.make_row([9, 5], live=12)
    logits = reader.logits(row)[row.target_start - 1 : -1]
    expected_loss = torch.nn.functional.cross_entropy(
        logits, torch.tensor(row.live[row.target_start :]), reduction="sum"
    )
    assert reader.loss(row)[0].item() == pytest.approx(expected_loss.item(), rel=1e-5)
