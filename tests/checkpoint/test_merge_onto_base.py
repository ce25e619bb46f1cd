"""A LoRA folded into its backbone: the bytes that stay, the logits that must be those of backbone + adapter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

from parallel_synthesis.errors import BackboneError, CheckFailedError, CheckpointError, ConfigError
from parallel_synthesis.training.onto_base import check_logits, fold

pytestmark = pytest.mark.lane
Make = Callable[..., Path]
ADAPTER = "judger_lora/adapter_model.safetensors"
MODULES = {
    f"base_model.model.model.layers.{layer}.self_attn.{part}_proj": (32, 16 if part in "kv" else 32)
    for layer in range(2)
    for part in "qkvo"
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """base(tied=..., dtype=...): a two-layer model in several shards, with something like a tokenizer beside it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
        directory = tmp_path_factory.mktemp("model") / "base"
        with torch.random.fork_rng():
            torch.manual_seed(7)
            config = Qwen3Config(
                vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
            )  # fmt: skip
            model = Qwen3ForCausalLM(config).to(dtype)
        model.save_pretrained(directory, max_shard_size="60KB")
        (directory / "tokenizer.json").write_text("{}")
        return directory

    return make


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()
    }


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.0])
def test_the_folded_model_answers_as_backbone_and_adapter(
    lora_checkpoint: Make, base: Make, tmp_path: Path, scale: float
) -> None:
    model = base()
    adapter = lora_checkpoint(tmp_path / "a", seed=1, modules=MODULES, alpha=2)
    result = fold(str(adapter), str(model), tmp_path / "out", scale=scale)
    check_logits(result)
    assert result.logits is not None and result.logits < 1e-5 and result.modules == 8
    before, after, lora = tensors(model), tensors(tmp_path / "out"), load_file(adapter / ADAPTER)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if module in MODULES:
            b, a = (lora[f"{module}.lora_{side}.weight"].double() for side in "BA")
            assert torch.equal(after[name], (tensor.double() + scale * 0.5 * (b @ a)).float())
        else:
            assert torch.equal(after[name], tensor)
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    shard = next((tmp_path / "out").glob("*.safetensors"))
    with safe_open(shard, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # older loaders refuse a file without it


def test_bf16_and_tied_heads(lora_checkpoint: Make, base: Make, tmp_path: Path) -> None:
    model = base(tied=True, dtype=torch.bfloat16)
    adapter = lora_checkpoint(tmp_path / "a", seed=1, modules=MODULES, alpha=1)
    result = fold(str(adapter), str(model), tmp_path / "out")
    check_logits(result)
    after = tensors(tmp_path / "out")
    assert HEAD not in after and {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    head = {"base_model.model.lm_head": (32, 512)}
    both = lora_checkpoint(tmp_path / "b", seed=1, modules=MODULES | head)
    with pytest.raises(CheckpointError, match="base has no tensor lm_head"):
        fold(str(both), str(model), tmp_path / "other")


def test_vocabularies(lora_checkpoint: Make, base: Make, tmp_path: Path) -> None:
    model = base()
    own = tensors(model)
    rows = {f"base_model.model.{name}": own[name][:500].clone() for name in (EMBED, HEAD)}
    short = lora_checkpoint(tmp_path / "short", seed=1, modules=MODULES, embeddings=rows)
    result = fold(str(short), str(model), tmp_path / "out")  # the base's own rows: they stay, padding and all
    check_logits(result)
    after = tensors(tmp_path / "out")
    assert result.changed == 8 and torch.equal(after[EMBED], own[EMBED])
    longer = {name: torch.cat([tensor, tensor[:40] + 0.5]) for name, tensor in rows.items()}
    grown = lora_checkpoint(tmp_path / "long", seed=1, modules=MODULES, embeddings=longer)
    result = fold(str(grown), str(model), tmp_path / "grown")
    check_logits(result)
    after = tensors(tmp_path / "grown")
    assert torch.equal(after[HEAD], longer[f"base_model.model.{HEAD}"])
    assert json.loads((tmp_path / "grown" / "config.json").read_text())["vocab_size"] == 540
    index = json.loads((tmp_path / "grown" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in after.values())
    one = {f"base_model.model.{EMBED}": longer[f"base_model.model.{EMBED}"]}
    lone = lora_checkpoint(tmp_path / "one", seed=1, modules=MODULES, embeddings=one)
    with pytest.raises(CheckpointError, match="other numbers of rows"):
        fold(str(lone), str(model), tmp_path / "lone")


def test_what_is_refused(lora_checkpoint: Make, base: Make, tmp_path: Path) -> None:
    model = base()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"modules": {"base_model.model.model.layers.7.self_attn.q_proj": (32, 32)}}, "no tensor model.layers.7"),
        ({"modules": {"base_model.model.model.layers.0.self_attn.q_proj": (24, 32)}}, r"floats \[32, 24\]"),
        ({"modules": MODULES, "use_dora": True}, "use_dora"),
        ({"modules": MODULES, "fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules": MODULES, "embeddings": {"base_model.model.model.norm.weight": torch.ones(32)}}, "trained copy"),
    ]  # fmt: skip
    for number, (changes, text) in enumerate(cases):
        adapter = lora_checkpoint(tmp_path / str(number), seed=1, **changes)
        with pytest.raises(CheckpointError, match=text):
            fold(str(adapter), str(model), tmp_path / "out")
    good = lora_checkpoint(tmp_path / "good", seed=1, modules=MODULES)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        fold(str(good), str(model), tmp_path / "out", scale=1.5)
    with pytest.raises(BackboneError, match=r"no such directory.*Expected the directory of a model"):
        fold(str(good), str(tmp_path / "nothing"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="lies inside"):
        fold(str(good), str(model), model / "out")
    result = fold(str(good), str(model), tmp_path / "out", dry_run=True)
    assert result.logits is None and not (tmp_path / "out").exists()


def test_logits_that_are_wrong_are_seen(
    lora_checkpoint: Make, base: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parallel_synthesis.model import folded

    model = base()
    adapter = lora_checkpoint(tmp_path / "a", seed=1, modules=MODULES)
    right = folded.logit_difference

    def spoilt(base: Path, checkpoint: Path, out: Path, **more: Any) -> float:
        shard = next(
            path for path in out.glob("*.safetensors") if any("q_proj" in key for key in load_file(path))
        )
        state = load_file(shard)
        name = next(key for key in state if "q_proj" in key)
        shard.unlink()
        save_file(state | {name: state[name] + 0.3}, shard, metadata={"format": "pt"})
        return right(base, checkpoint, out, **more)

    monkeypatch.setattr(folded, "logit_difference", spoilt)
    with pytest.raises(CheckFailedError, match="do not use it"):
        check_logits(fold(str(adapter), str(model), tmp_path / "out"))
