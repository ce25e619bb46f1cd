"""Initial weights, RNG, dropout, forwards, files: what a run relies on besides the numbers of the method."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from parallel_synthesis.config import BackboneConfig, LoraConfig, MapperConfig
from parallel_synthesis.errors import BackboneError, CheckpointError
from parallel_synthesis.model.backbone import load_backbone
from parallel_synthesis.model.synthesizer import Synthesizer

pytestmark = pytest.mark.lane


def make(tools: Any, name: str = "llama", *, seed: int = 7, model: Any = None, **lora: Any) -> Synthesizer:
    backbone = tools.wrap(model if model is not None else tools.make_model(name))
    config = LoraConfig(r=4, alpha=8, target_modules=tools.BACKBONES[name][2], **lora)
    return Synthesizer(backbone, mapper=MapperConfig(), lora=config, seed=seed)


def stir(reader: Synthesizer, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in reader.parameters("both"):
            parameter.normal_(0, scale, generator=generator)


def all_weights(reader: Synthesizer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in reader.parameters("both")}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rng_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_initial_weights_come_from_the_seed_alone(tools: Any) -> None:
    torch.manual_seed(1)
    first = all_weights(make(tools))
    torch.manual_seed(2)
    torch.rand(5)
    assert same(first, all_weights(make(tools)))
    other = all_weights(make(tools, seed=8))
    changed = {name for name in first if not torch.equal(first[name], other[name])}
    assert changed == {name for name in first if "lora_A" in name or "net.0" in name}
    for name, weight in first.items():
        assert weight.dtype == torch.float32
        zero = "lora_B" in name or "net.2" in name
        assert bool((weight == 0).all()) == zero, name
        if "lora_A" in name:  # PEFT's own distribution: uniform within 1/sqrt(inputs)
            bound = weight.shape[1] ** -0.5
            assert 0.9 * bound < weight.abs().max() <= bound


def test_initial_weights_are_the_same_in_another_process(tools: Any) -> None:
    code = (
        "import torch; from parallel_synthesis.model.mapper import CacheMapper;"
        "from parallel_synthesis.config import MapperConfig; torch.rand(3);"
        "m = CacheMapper(MapperConfig(), generator=torch.Generator().manual_seed(3));"
        "print(m.net[0].weight.view(torch.int32).tolist())"
    )
    from parallel_synthesis.model.mapper import CacheMapper

    here = CacheMapper(MapperConfig(), generator=torch.Generator().manual_seed(3)).net[0].weight
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(there) == here.detach().view(torch.int32).tolist()


def test_nothing_touches_the_global_rng_without_dropout(tools: Any) -> None:
    model, row = tools.make_model("llama"), tools.make_row([20, 30], [4, 30])
    before = rng_state()
    reader = make(tools, model=model)
    reader.loss(row)[0].backward()
    reader.logits(row)
    assert rng_state() == before


def test_dropout_is_active_only_in_training_and_draws_from_the_global_rng(tools: Any) -> None:
    reader = make(tools, dropout=0.5)
    stir(reader)
    row = tools.make_row([20, 30], [4, 30])
    quiet = reader.loss(row, train=False)[0].item()
    assert reader.loss(row, train=False)[0].item() == quiet
    torch.manual_seed(0)
    first = reader.loss(row)[0].item()
    second = reader.loss(row)[0].item()
    torch.manual_seed(0)
    assert reader.loss(row)[0].item() == first
    assert len({quiet, first, second}) == 3
    assert reader.loss(row, train=False)[0].item() == quiet


def test_backbone_dropout_stays_off_in_training(tools: Any) -> None:
    """attention_dropout of the backbone's config must not act: the backbone is frozen and in eval mode."""
    row = tools.make_row([20, 30])
    calm, dropping = (make(tools, model=tools.make_model("llama", attention_dropout=p)) for p in (0.0, 0.9))
    assert calm.loss(row)[0].item() == dropping.loss(row)[0].item()


def test_prefill_runs_without_the_lora(tools: Any) -> None:
    """A LoRA that only changes what prefill leaves would show here: the branch caches stay the backbone's."""
    from parallel_synthesis.model.branches import plan_prefill, prefill

    reader = make(tools)
    row = tools.make_row([20, 30])
    plan = plan_prefill([20, 30], 0)
    before = prefill(reader.backbone.base, row.branches, plan)
    stir(reader, scale=1.0)
    reader.loss(row)[0].backward()
    after = prefill(reader.backbone.base, row.branches, plan)
    for left, right in zip(before, after, strict=True):
        for pair in zip(left.layers, right.layers, strict=True):
            assert torch.equal(pair[0][0], pair[1][0])
            assert torch.equal(pair[0][1], pair[1][1])
            assert not pair[1][0].requires_grad
    assert not any("lora" in name for name, _ in reader.backbone.model.named_modules())


def test_the_two_module_trees_share_every_backbone_tensor(tools: Any) -> None:
    reader = make(tools)
    own = {p.data_ptr() for p in reader.backbone.model.parameters()}
    theirs = {p.data_ptr() for n, p in reader.peft_model.named_parameters() if ".lora_" not in n}
    assert own == theirs


def test_forwards_are_counted(tools: Any) -> None:
    reader = make(tools)
    shared = tools.make_row([120, 131, 138], prefix=110)
    reader.loss(shared)
    assert reader.forwards == 3  # the prefix, the three suffixes together, the live sequence
    reader.loss(tools.make_row([20, 21]))
    assert reader.forwards == 5
    reader.loss(shared, with_branches=False)
    assert reader.forwards == 6


def test_parameters_are_in_the_order_of_the_optimizer_state(tools: Any) -> None:
    names = [name for name, _ in make(tools).parameters("both")]
    assert names[:4] == [f"cache_mapper.net.{part}" for part in ("0.weight", "0.bias", "2.weight", "2.bias")]
    layer = "base_model.model.model.layers.0.self_attn"
    first = [f"{layer}.{m}_proj.lora_{ab}.weight" for m in "qkvo" for ab in "AB"]
    assert names[4:12] == first
    assert len(names) == 4 + 3 * 8


def test_bf16_backbone_with_fp32_components(tools: Any) -> None:
    model = tools.make_model("qwen3")
    row = tools.make_row([40, 21], [9, 21])
    exact = make(tools, "qwen3", model=model)
    half = make(tools, "qwen3", model=tools.make_model("qwen3").to(torch.bfloat16))
    for reader in (exact, half):
        stir(reader)
    loss, _ = half.loss(row)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        p.dtype == p.grad.dtype == torch.float32 for _, p in half.parameters("both") if p.grad is not None
    )
    assert loss.item() == pytest.approx(exact.loss(row)[0].item(), rel=0.02)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # between PEFT and transformers 5
@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_peft_loads_the_adapter_and_gives_the_same_logits(tools: Any, name: str, tmp_path: Path) -> None:
    reader = make(tools, name)
    stir(reader)
    folder = tmp_path / "judger_lora"
    folder.mkdir()
    state = reader.adapter_state()
    assert all(".lora_" in key for key in state)
    save_file(state, folder / "adapter_model.safetensors")
    config = reader.adapter_config()
    assert config["base_model_name_or_path"] == "tests/tiny"
    assert config["target_modules"] == sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    loaded = PeftModel.from_pretrained(tools.make_model(name), str(folder))
    assert not loaded.training
    row = tools.make_row([])
    expected = tools.block_mask_logits(loaded, row)
    ours = reader.logits(row)
    assert (ours - expected).abs().max() < 1e-5
    assert (ours - make(tools, name).logits(row)).abs().max() > 1e-3


def write_components(reader: Synthesizer, folder: Path) -> None:
    (folder / "judger_lora").mkdir(parents=True)
    torch.save(reader.mapper.state_dict(), folder / "cache_mapper.pt")
    save_file(reader.adapter_state(), folder / "judger_lora" / "adapter_model.safetensors")
    (folder / "judger_lora" / "adapter_config.json").write_text(json.dumps(reader.adapter_config()))


def test_components_round_trip(tools: Any, tmp_path: Path) -> None:
    reader = make(tools)
    stir(reader)
    write_components(reader, tmp_path)  # without cache_mapper_config.json, as in the release
    fresh = make(tools, seed=99)
    fresh.load_components(tmp_path)
    assert same(all_weights(fresh), all_weights(reader))
    row = tools.make_row([12, 9])
    assert torch.equal(fresh.logits(row), reader.logits(row))


def test_components_that_do_not_fit_are_named(tools: Any, tmp_path: Path) -> None:
    reader = make(tools)
    write_components(reader, tmp_path)
    config = tmp_path / "cache_mapper_config.json"
    config.write_text('{"hidden_dim": 16, "metadata_features": "both"}')
    with pytest.raises(CheckpointError, match="hidden_dim = 16, expected 32"):
        reader.load_components(tmp_path)
    config.unlink()
    with pytest.raises(CheckpointError, match="r = 4, expected 8"):
        wide = dataclasses.replace(reader.lora_config, r=8)
        Synthesizer(reader.backbone, mapper=MapperConfig(), lora=wide, seed=1).load_components(tmp_path)
    adapter = tmp_path / "judger_lora" / "adapter_model.safetensors"
    state = reader.adapter_state()
    for broken, message in (
        ({k: v for k, v in state.items() if "layers.0" not in k}, "8 missing"),
        (state | {"other.weight": torch.zeros(1)}, "1 unknown"),
        ({k: torch.full_like(v, float("nan")) for k, v in state.items()}, "not all finite"),
        ({k: torch.zeros(2, 2) for k in state}, r"shape \[2, 2\]"),
    ):
        save_file(broken, adapter)
        with pytest.raises(CheckpointError, match=message):
            reader.load_components(tmp_path)
    adapter.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        reader.load_components(tmp_path)
    torch.save({"net.0.weight": torch.zeros(1)}, tmp_path / "cache_mapper.pt")
    with pytest.raises(CheckpointError, match="3 missing"):
        reader.load_components(tmp_path)
    (tmp_path / "cache_mapper.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"cache_mapper\.pt"):
        reader.load_components(tmp_path)


def test_a_failed_load_changes_nothing(tools: Any, tmp_path: Path) -> None:
    reader = make(tools)
    stir(reader)
    write_components(reader, tmp_path)
    (tmp_path / "judger_lora" / "adapter_model.safetensors").unlink()
    fresh = make(tools)
    before = all_weights(fresh)
    with pytest.raises(CheckpointError):
        fresh.load_components(tmp_path)
    assert same(before, all_weights(fresh))


def test_embeddings_in_an_adapter_must_be_the_backbones_own(tools: Any, tmp_path: Path) -> None:
    """The release's adapter carries the untrained embeddings, with fewer rows than the padded backbone."""
    reader = make(tools)
    stir(reader)
    write_components(reader, tmp_path)
    weight = reader.backbone.model.get_input_embeddings().weight
    name = "base_model.model.model.embed_tokens.weight"
    adapter = tmp_path / "judger_lora" / "adapter_model.safetensors"
    save_file(reader.adapter_state() | {name: weight[:90].clone()}, adapter)
    make(tools).load_components(tmp_path)
    save_file(reader.adapter_state() | {name: weight[:90] + 1}, adapter)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        make(tools).load_components(tmp_path)


def test_unknown_target_modules_name_those_that_exist(tools: Any) -> None:
    with pytest.raises(BackboneError, match=r"gate_proj.*k_proj"):
        Synthesizer(
            tools.make_backbone("llama"),
            mapper=MapperConfig(),
            lora=LoraConfig(target_modules=("nope",)),
            seed=1,
        )


def test_nothing_is_logged_or_warned(tools: Any, tmp_path: Path) -> None:
    """Deprecations of transformers come through its logger, not as Python warnings."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "peft", "py.warnings")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in ("qwen3", "llama", "gpt_neox"):
                folder = tmp_path / name
                tools.make_model(name).save_pretrained(folder)
                tools.make_tokenizer().save_pretrained(folder)
                backbone = load_backbone(BackboneConfig(model=str(folder)), device="cpu")
                lora = LoraConfig(r=4, dropout=0.1, target_modules=tools.BACKBONES[name][2])
                reader = Synthesizer(backbone, mapper=MapperConfig(), lora=lora, seed=0)
                for row in (tools.make_row([20, 21]), tools.make_row([120, 131, 138], prefix=110)):
                    reader.loss(row)[0].backward()
                reader.adapter_state()
                reader.adapter_config()
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []
    assert [str(warning.message) for warning in caught] == []
