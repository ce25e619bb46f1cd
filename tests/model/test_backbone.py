"""Loading a backbone: no network for a local one, resized where it must be, refused by name."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parallel_synthesis.config import BackboneConfig, LoraConfig, MapperConfig
from parallel_synthesis.errors import BackboneError
from parallel_synthesis.model.backbone import check_config, check_model, load_backbone, resolve_device
from parallel_synthesis.model.synthesizer import Synthesizer

pytestmark = pytest.mark.lane


def save_backbone(tools: Any, folder: Path, *, words: int = 90, name: str = "qwen3", **changes: Any) -> Path:
    tools.make_model(name, **changes).save_pretrained(folder)
    tools.make_tokenizer(words).save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a local backbone must not lead to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def load(folder: Path | str, **changes: Any) -> Any:
    return load_backbone(BackboneConfig(model=str(folder), **changes), device="cpu")


@pytest.mark.usefixtures("no_network")
def test_a_directory_loads_frozen_whole_and_silent(
    tools: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_backbone(tools, tmp_path)
    before = torch.get_rng_state()
    capfd.readouterr()
    backbone = load(folder)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before)
    assert backbone.name == str(folder)
    assert backbone.dtype == next(backbone.model.parameters()).dtype == torch.float32
    assert not backbone.model.training
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert backbone.layers == 3
    own = tools.make_model("qwen3").state_dict()
    assert all(torch.equal(own[name], value) for name, value in backbone.model.state_dict().items())
    # 90 words, 97 rows: a padded embedding is kept.
    assert backbone.resized_from is None
    assert backbone.embedding_rows == 97


@pytest.mark.usefixtures("no_network")
def test_a_gguf_file(tools: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Written here with the gguf package; weights and tokenizer come out as they went in."""
    gguf = pytest.importorskip("gguf", reason="an optional extra")
    model = tools.make_model("qwen3", head_dim=128)  # the head_dim transformers takes for every Qwen3 .gguf
    writer = gguf.GGUFWriter(str(tmp_path / "tiny.gguf"), "qwen3")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(3)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list([*(chr(33 + i) for i in range(92)), "ab", "cd", *special])
    writer.add_token_merges(["a b", "c d"])
    writer.add_token_types([1] * 94 + [3] * 3)
    writer.add_eos_token_id(96)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"}
    names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names |= {"post_attention_layernorm": "ffn_norm"}
    for name, weight in model.state_dict().items():
        key = name.removeprefix("model.").removesuffix(".weight")
        block = ""
        if key.startswith("layers."):
            _, layer, key = key.split(".", 2)
            block = f"blk.{layer}."
        writer.add_tensor(f"{block}{names[key]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    capfd.readouterr()
    backbone = load(tmp_path / "tiny.gguf")
    assert capfd.readouterr() == ("", "")
    own = model.state_dict()
    assert [
        name for name, value in backbone.model.state_dict().items() if not torch.equal(own[name], value)
    ] == []
    assert backbone.tokenizer("cab", add_special_tokens=False)["input_ids"] == [66, 92]
    assert backbone.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.usefixtures("no_network")
def test_dtype_and_attention(tools: Any, tmp_path: Path) -> None:
    folder = save_backbone(tools, tmp_path)
    backbone = load(folder, dtype="bfloat16", attention="eager")
    assert {p.dtype for p in backbone.model.parameters()} == {torch.bfloat16}
    assert backbone.model.config._attn_implementation == "eager"
    assert backbone.model.base_model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("tied", [False, True])
def test_a_longer_tokenizer_resizes_the_embedding(tools: Any, tmp_path: Path, tied: bool) -> None:
    folder = save_backbone(tools, tmp_path / "b", words=120, tie_word_embeddings=tied)
    torch.manual_seed(1)
    backbone = load(folder)
    torch.manual_seed(2)
    again = load(folder)
    assert (backbone.resized_from, backbone.embedding_rows) == (97, 120)
    for part, other in (
        (backbone.model.get_input_embeddings(), again.model.get_input_embeddings()),
        (backbone.model.get_output_embeddings(), again.model.get_output_embeddings()),
    ):
        weight = part.weight
        assert torch.equal(weight, other.weight), "every process must get the same rows"
        assert torch.allclose(weight[97:], weight[:97].mean(0).expand(23, -1))
        assert not weight.requires_grad
    reader = Synthesizer(backbone, mapper=MapperConfig(), lora=LoraConfig(r=2), seed=0)
    extra = {name: value.shape for name, value in reader.adapter_state().items() if ".lora_" not in name}
    expected = {"base_model.model.model.embed_tokens.weight": (120, 32)}
    if not tied:
        expected["base_model.model.lm_head.weight"] = (120, 32)
    assert extra == expected


@pytest.mark.usefixtures("no_network")
def test_paths_that_are_not_there(tmp_path: Path) -> None:
    for model in (str(tmp_path / "none"), "package:artifacts/none", "./none", "none.gguf", "a/b/c"):
        with pytest.raises(BackboneError, match="no such file or directory"):
            load(model)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(BackboneError, match="a file; expected a directory"):
        load(tmp_path / "x.bin")
    with pytest.raises(BackboneError, match="config cannot be loaded"):
        load(tmp_path)


@pytest.mark.usefixtures("no_network")
def test_missing_weights_are_refused(tools: Any, tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    folder = save_backbone(tools, tmp_path)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackboneError, match=r"1 weights are missing, e\.g\. model\.layers\.1"):
        load(folder)


@pytest.mark.usefixtures("no_network")
def test_the_tokenizer_is_checked_before_the_weights(tools: Any, tmp_path: Path) -> None:
    folder = save_backbone(tools, tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BackboneError, match="no eos token"):
        load(folder)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
REFUSED = {
    "sliding window": ("mistral", {"sliding_window": 64}, "sliding_attention.*sliding window = 64"),
    "some sliding layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        "sliding_attention.*sliding window = 64",
    ),
    "dynamic rope": ("llama", {"rope": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "longrope": ("llama", {"rope": LONGROPE}, "rope type 'longrope'"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(tools: Any, case: str) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(BackboneError, match=message) as error:
        check_config(tools.config_of(name, **changes), "owner/name")
        check_model(tools.make_model(name, **changes), "owner/name")
    assert "backbone owner/name" in str(error.value)


def test_an_unused_window_is_no_reason_to_refuse(tools: Any) -> None:
    check_config(tools.config_of("qwen3", use_sliding_window=False, sliding_window=64), "owner/name")
    check_config(tools.config_of("qwen2", use_sliding_window=False, sliding_window=64), "owner/name")


def test_architectures_without_the_check_are_refused(tools: Any) -> None:
    with pytest.raises(
        BackboneError, match="architecture 'gpt2' is not tested; expected one of gpt_neox, llama"
    ):
        check_config(transformers.GPT2Config(), "owner/name")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9))
    with pytest.raises(BackboneError, match="no rotary position embedding"):
        check_model(gpt2, "owner/name")


def test_quantised_weights_are_refused(tools: Any) -> None:
    config = tools.config_of("llama")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(BackboneError, match="quantised weights are not supported"):
        check_config(config, "owner/name")


def test_devices() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for device in ("tpu", "meta", "cuda:-1x"):
        with pytest.raises(BackboneError, match="expected auto, cpu, cuda or cuda:N"):
            resolve_device(device)
    with pytest.raises(BackboneError, match="CUDA devices; use --device cpu"):
        resolve_device("cuda:99")


def test_a_file_that_changes_under_a_run_does_not_change_the_run(tmp_path: Path) -> None:
    import shutil

    import torch

    from parallel_synthesis.resources import resource

    copy = tmp_path / "backbone"
    shutil.copytree(resource("artifacts", "demo", "backbone"), copy)
    backbone = load_backbone(BackboneConfig(model=str(copy)), device="cpu")
    before = {name: tensor.clone() for name, tensor in backbone.model.state_dict().items()}
    with (copy / "model.safetensors").open("r+b") as file:  # in place, as a careless copy over it would
        file.seek(-4096, 2)
        file.write(bytes(range(256)) * 16)
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
