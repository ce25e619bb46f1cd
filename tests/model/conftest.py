"""Tiny random backbones, seeded rows, and the block-mask forward that the branch caches must equal."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.tokens import BranchTokens, RowTokens

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_PAIRS = {"num_key_value_heads": 2}
_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (config class, fields besides the common ones, LoRA targets)
BACKBONES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen3": ("Qwen3Config", _PAIRS | {"head_dim": 16}, _QKVO),
    "llama": ("LlamaConfig", _PAIRS, _QKVO),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.25}, ("query_key_value", "dense")),
    "mistral": ("MistralConfig", _PAIRS | {"sliding_window": None}, _QKVO),
    "qwen2": ("Qwen2Config", _PAIRS, _QKVO),
    "olmo2": ("Olmo2Config", _PAIRS, _QKVO),
    "phi3": ("Phi3Config", _PAIRS | {"sliding_window": None}, ("qkv_proj", "o_proj")),
    "stablelm": ("StableLmConfig", _PAIRS | {"partial_rotary_factor": 0.5}, _QKVO),
    "qwen3 yarn": ("Qwen3Config", _PAIRS | {"head_dim": 16, "rope": YARN}, _QKVO),
    "llama yarn": ("LlamaConfig", _PAIRS | {"rope": YARN}, _QKVO),
    "llama llama3": ("LlamaConfig", _PAIRS | {"rope": LLAMA3}, _QKVO),
    "llama linear": ("LlamaConfig", _PAIRS | {"rope": {"rope_type": "linear", "factor": 2.0}}, _QKVO),
}


def config_of(name: str, **changes: Any) -> Any:
    """A tiny config; rope parameters go where the installed transformers looks for them."""
    kind, fields, _ = BACKBONES[name]
    fields = _COMMON | fields | changes
    rope = fields.pop("rope", None)
    if rope is not None:
        key = "rope_parameters" if transformers.__version__.startswith("5") else "rope_scaling"
        fields[key] = rope | {"rope_theta": 10000.0} if key == "rope_parameters" else rope
    return getattr(transformers, kind)(**fields)


def make_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A frozen random causal LM in fp32; its logits stay below 3, for which the bound is stated."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name, **changes), attn_implementation="sdpa", dtype=torch.float32
        )
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
        model.get_output_embeddings().weight.data *= 0.7
    return model.eval().requires_grad_(False)


def make_backbone(name: str, **changes: Any) -> Backbone:
    return wrap(make_model(name, **changes))


def wrap(model: Any) -> Backbone:
    return Backbone(
        model=model,
        tokenizer=None,
        name="tests/tiny",
        revision=None,
        device=torch.device("cpu"),
        dtype=next(model.parameters()).dtype,
        resized_from=None,
    )


def make_row(
    lengths: Sequence[int],
    kept: Sequence[int] | None = None,
    *,
    prefix: int = 0,
    live: int = 12,
    seed: int = 0,
) -> RowTokens:
    """A row with branches of these prefill and kept lengths, the first `prefix` tokens shared by all."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCABULARY) for _ in range(prefix)]
    branches = []
    for length, keeps in zip(lengths, kept or lengths, strict=True):
        ids = (*shared, *(draw.randrange(VOCABULARY) for _ in range(length - prefix)))
        branches.append(BranchTokens(ids=ids, kept=keeps))
    tokens = tuple(draw.randrange(VOCABULARY) for _ in range(live))
    return RowTokens(branches=tuple(branches), live=tokens, target_start=live // 2)


class ExactRotary(nn.Module):
    """A rotary module in fp64 with the frequencies and scaling of another: the truth to measure by."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.frequencies = rotary.inv_freq.double()
        self.attention_scaling = rotary.attention_scaling
        self.rope_type = rotary.rope_type

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None].double() * self.frequencies).repeat(1, 1, 2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def exact_model(model: Any) -> Any:
    """The same model in fp64, rotary tables included."""
    double = copy.deepcopy(model).double()
    double.base_model.rotary_emb = ExactRotary(model.base_model.rotary_emb)
    return double


def block_mask_logits(model: Any, row: RowTokens) -> Tensor:
    """Live logits [live, V] of ONE plain forward over [branch 1 | ... | live] with a block mask."""
    ids, positions, blocks, visible = [], [], [], []
    for number, branch in enumerate(row.branches):
        start = len(branch.ids) - branch.kept
        ids += branch.ids
        positions += [i - start for i in range(len(branch.ids))]
        blocks += [number] * len(branch.ids)
        visible += [i >= start for i in range(len(branch.ids))]
    past, live = len(ids), len(row.live)
    ids += row.live
    positions += [max((b.kept for b in row.branches), default=0) + j for j in range(live)]
    size = past + live
    block = torch.tensor([*blocks, *([-1] * live)])
    seen_by_live = torch.tensor([*visible, *([True] * live)])
    same_block = block[:, None] == block[None]
    mask = torch.where((block == -1)[:, None], seen_by_live[None], same_block).tril()
    assert mask.shape == (size, size)
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([ids]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
    return output.logits[0, past:]


def make_tokenizer(words: int = 90) -> Any:
    """A word-level tokenizer of that many tokens."""
    vocabulary = {f"w{i}": i for i in range(words - 2)} | {"<unk>": words - 2, "<eos>": words - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture
def tools() -> Any:
    """The helpers of this file, for tests (there are no importable modules among the tests)."""
    return sys.modules[__name__]
