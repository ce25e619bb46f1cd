"""Adapters shaped like the release's: bf16 embeddings of fewer rows than the padded backbone, beside the LoRA."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from parallel_synthesis.config import BackboneConfig
from parallel_synthesis.errors import BackboneError
from parallel_synthesis.model.backbone import load_backbone
from parallel_synthesis.model.components import embedding_rows

pytestmark = [
    pytest.mark.lane,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT and transformers 5
]
Ps = Any  # tests/conftest.py, Calls
Hashes = Callable[[Path], dict[str, str]]
PADDED = 512
ADAPTER = "judger_lora/adapter_model.safetensors"


def ok(result: Any) -> Any:
    assert result.returncode == 0, result.stderr
    return result


def padded_backbone(source: Path, place: Path, *, tied: bool) -> Path:
    """The tiny backbone in bf16, as the release's is; its embedding has more rows than the tokenizer tokens."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (place / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.bfloat16() for name, tensor in load_file(place / "model.safetensors").items()}
    if tied:
        del weights["lm_head.weight"]
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return place


def release_checkpoint(backbone: Path, place: Path) -> Path:
    """What the reference saves: PEFT's own files after the backbone was resized to the tokenizer's length."""
    tokens = len(AutoTokenizer.from_pretrained(backbone))
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.bfloat16)
        model.resize_token_embeddings(tokens, mean_resizing=False)
        config = PeftLoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
        )
        peft_model = get_peft_model(model, config)
        for name, parameter in peft_model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.05)
        peft_model.save_pretrained(place / "judger_lora", save_embedding_layers=True)
        mapper = {
            "net.0.weight": torch.randn(32, 3),
            "net.0.bias": torch.randn(32),
            "net.2.weight": torch.randn(4, 32) * 0.1,
            "net.2.bias": torch.zeros(4),
        }
    torch.save(mapper, place / "cache_mapper.pt")
    return place


class Shaped:
    """A padded backbone, a release-shaped checkpoint on it, and a recipe."""

    def __init__(self, tiny: Path, place: Path, write: Callable[..., Path], *, tied: bool) -> None:
        self.tied = tied
        self.backbone = padded_backbone(tiny, place / "padded", tied=tied)
        self.tokens = len(AutoTokenizer.from_pretrained(self.backbone))
        assert self.tokens < PADDED
        self.release = release_checkpoint(self.backbone, place / "release")
        self.recipe = write(
            backbone={"model": str(self.backbone)}, checkpoint={"every": 2, "milestones": [2], "keep_last": 9}
        )

    def train(self, ps: Ps, out: Path, *more: Any, init: Path | str | None = None) -> Path:
        ok(ps("train", self.recipe, "--out", out, "--init", init or self.release, *more))
        return out


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def shaped(
    request: pytest.FixtureRequest,
    tiny_backbone: Path,
    module_recipe: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Shaped:
    place = tmp_path_factory.mktemp("shaped")
    return Shaped(tiny_backbone, place, module_recipe, tied=request.param)


@pytest.fixture(scope="module")
def kept(shaped: Shaped, module_ps: Ps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run that carries the embeddings. Nobody writes into it."""
    return shaped.train(module_ps, tmp_path_factory.mktemp("kept") / "run")


@pytest.fixture(scope="module")
def dropped(shaped: Shaped, module_ps: Ps, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without them. Nobody writes into it."""
    out = tmp_path_factory.mktemp("dropped") / "run"
    return shaped.train(module_ps, out, "--set", "checkpoint.embeddings=drop")


def raw_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """name -> dtype, shape, bytes, read by the format's description alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = (
                entry["dtype"],
                tuple(entry["shape"]),
                data[8 + length + begin : 8 + length + end],
            )
    return found


def embeddings(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: tensor for name, tensor in raw_tensors(path).items() if ".lora_" not in name}


def first_loss(out: Path) -> float:
    found = re.search(r" step=1 .* loss=(\S+)", (out / "train.log").read_text())
    assert found is not None
    return float(found[1])


def test_the_embeddings_are_carried_unchanged_into_every_checkpoint(shaped: Shaped, kept: Path) -> None:
    expected = embeddings(shaped.release / ADAPTER)
    assert expected, "PEFT saved none: the test would prove nothing"
    assert all((kind, shape[0]) == ("BF16", shaped.tokens) for kind, shape, _ in expected.values())
    places = [
        kept / "step_checkpoints/step_000000000",
        kept / "step_checkpoints/step_000000004",
        kept / "milestones/tiny_step_2",
        kept,
    ]
    for place in places:
        assert embeddings(place / ADAPTER) == expected
        assert json.loads((place / "checkpoint_meta.json").read_text())["embeddings"] == {
            "saved": True, "rows": shaped.tokens, "tensors": sorted(expected),
        }  # fmt: skip
    source, start, end = (
        {name: tensor for name, tensor in raw_tensors(path / ADAPTER).items() if ".lora_" in name}
        for path in (shaped.release, places[0], kept)
    )
    assert start == source
    assert end.keys() == start.keys()
    assert all(end[name] != start[name] for name in start if ".lora_B." in name)


def test_the_loss_is_over_the_adapters_vocabulary(shaped: Shaped, kept: Path, ps: Ps, tmp_path: Path) -> None:
    """Without the cut the padded rows' logits would be in every loss, and no step equal to the reference's."""
    bare = tmp_path / "bare"
    shutil.copytree(shaped.release, bare)
    lora = {name: tensor for name, tensor in load_file(shaped.release / ADAPTER).items() if ".lora_" in name}
    save_file(lora, bare / ADAPTER)
    padded = shaped.train(ps, tmp_path / "padded", "--max-steps", 1, init=bare)
    difference = first_loss(padded) - first_loss(kept)
    assert difference == pytest.approx(torch.tensor(PADDED / shaped.tokens).log().item(), abs=0.05)
    assert "embeddings" not in json.loads((padded / "checkpoint_meta.json").read_text())


def test_peft_loads_the_final_adapter_onto_the_resized_backbone(shaped: Shaped, kept: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(shaped.backbone, dtype=torch.float32)
    model.resize_token_embeddings(shaped.tokens, mean_resizing=False)
    loaded = dict(PeftModel.from_pretrained(model, kept / "judger_lora").named_parameters())
    for name, tensor in load_file(kept / ADAPTER).items():
        if ".lora_" in name:
            assert loaded[re.sub(r"(lora_[AB])", r"\1.default", name)].equal(tensor)


def test_the_backbone_is_cut_with_its_head(shaped: Shaped) -> None:
    config = BackboneConfig(model=str(shaped.backbone))
    assert embedding_rows(shaped.release) == shaped.tokens
    whole = load_backbone(config, device="cpu")
    cut = load_backbone(config, device="cpu", embedding_rows=shaped.tokens)
    assert whole.embedding_rows == PADDED
    for ours, theirs in (
        (cut.model.get_input_embeddings().weight, whole.model.get_input_embeddings().weight),
        (cut.model.get_output_embeddings().weight, whole.model.get_output_embeddings().weight),
    ):
        assert ours.shape[0] == shaped.tokens
        assert torch.equal(ours, theirs[: shaped.tokens])
        assert not ours.requires_grad
    one, other = cut.model.get_input_embeddings().weight, cut.model.get_output_embeddings().weight
    assert (one is other) == shaped.tied
    assert cut.model(input_ids=torch.tensor([[1, shaped.tokens - 1]])).logits.shape[-1] == shaped.tokens
    assert cut.model.config.vocab_size == shaped.tokens
    assert load_backbone(config, device="cpu", embedding_rows=PADDED).embedding_rows == PADDED
    with pytest.raises(BackboneError, match=f"{shaped.tokens - 1} embedding rows"):
        load_backbone(config, device="cpu", embedding_rows=shaped.tokens - 1)


@pytest.mark.parametrize("embeddings", ["keep", "drop"])
def test_a_resume_cuts_again_and_ends_with_the_same_bytes(
    shaped: Shaped, kept: Path, dropped: Path, ps: Ps, hashes: Hashes, tmp_path: Path, embeddings: str
) -> None:
    out = shaped.train(ps, tmp_path / "run", "--max-steps", 3, "--set", f"checkpoint.embeddings={embeddings}")
    ok(ps("resume", out, "--max-steps", 5))
    whole = kept if embeddings == "keep" else dropped
    assert hashes(out) == hashes(whole)
    ok(ps("verify", out, "--replay", 2))


def test_dropped_embeddings_change_nothing_else(
    shaped: Shaped, kept: Path, dropped: Path, hashes: Hashes
) -> None:
    ours, theirs = hashes(dropped), hashes(kept)
    assert ours.pop(ADAPTER) != theirs.pop(ADAPTER)
    assert ours == theirs
    left, whole = raw_tensors(dropped / ADAPTER), raw_tensors(kept / ADAPTER)
    assert left == {name: tensor for name, tensor in whole.items() if ".lora_" in name}
    record = json.loads((dropped / "checkpoint_meta.json").read_text())["embeddings"]
    assert record == {
        "saved": False, "rows": shaped.tokens, "tensors": sorted(whole.keys() - left.keys()),
    }  # fmt: skip


def test_an_export_puts_them_back_byte_for_byte(
    kept: Path, dropped: Path, ps: Ps, hashes: Hashes, tmp_path: Path
) -> None:
    for name in ("run", "milestone"):
        source = f"{dropped}@tiny_step_2" if name == "milestone" else dropped
        whole = kept / "milestones/tiny_step_2" if name == "milestone" else kept
        ok(ps("snapshot", source, "--export", tmp_path / name))
        assert hashes(tmp_path / name) == hashes(whole)
        ok(ps("verify", tmp_path / name))
        meta = json.loads((tmp_path / name / "checkpoint_meta.json").read_text())
        assert meta["embeddings"]["saved"] is True


def test_through_two_runs_without_them(shaped: Shaped, dropped: Path, ps: Ps, tmp_path: Path) -> None:
    """The second stage of a sequence: its start lacks them too, so they come from where that one began."""
    refused = ps("train", shaped.recipe, "--out", tmp_path / "no", "--init", dropped)
    assert refused.returncode == 2
    assert "--export DEST" in refused.stderr
    assert not (tmp_path / "no").exists()
    drop = ("--set", "checkpoint.embeddings=drop", "--max-steps", 1)
    second = shaped.train(ps, tmp_path / "second", *drop, init=dropped)
    ok(ps("snapshot", second, "--export", tmp_path / "whole"))
    assert embeddings(tmp_path / "whole" / ADAPTER) == embeddings(shaped.release / ADAPTER)


def test_a_merge_passes_on_what_was_left_out(
    kept: Path, dropped: Path, ps: Ps, hashes: Hashes, tmp_path: Path
) -> None:
    """Merged without them and exported, it is the merge of those that have them, byte for byte."""
    for name, run in (("whole", kept), ("merged", dropped)):
        result = ps("merge", run, f"{run}@tiny_step_2", "--out", tmp_path / name)
        ok(result)
    assert "puts them back" in result.stderr
    record = json.loads((tmp_path / "merged" / "checkpoint_meta.json").read_text())["embeddings"]
    assert record == json.loads((dropped / "checkpoint_meta.json").read_text())["embeddings"]
    assert not embeddings(tmp_path / "merged" / ADAPTER)
    ok(ps("snapshot", tmp_path / "merged", "--export", tmp_path / "exported"))
    ok(ps("verify", tmp_path / "exported"))
    for name in ("cache_mapper.pt", ADAPTER, "judger_lora/adapter_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for name in ("exported", "whole"):
        meta = json.loads((tmp_path / name / "checkpoint_meta.json").read_text())
        assert meta["embeddings"] == record | {"saved": True}


def test_a_merge_of_some_with_and_some_without(
    shaped: Shaped, kept: Path, dropped: Path, ps: Ps, tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    pair = (f"{kept}@tiny_step_2", dropped)
    for more in ((), ("--missing", "zero")):
        refused = ps("merge", *pair, "--out", out, *more)
        assert refused.returncode == 2
        assert re.search(
            rf"embeddings: B was saved without its embeddings of {shaped.tokens} rows .*, A has them: put them "
            rf"back by `ps snapshot {dropped} --export DEST`",
            refused.stderr,
        )
        assert not out.exists()
    ok(ps("merge", *pair, "--out", out, "--missing", "copy"))
    assert embeddings(out / ADAPTER) == embeddings(kept / ADAPTER)
    assert json.loads((out / "checkpoint_meta.json").read_text())["embeddings"]["saved"] is True
    other = tmp_path / "other"
    shutil.copytree(dropped / "milestones/tiny_step_2", other)
    meta = json.loads((other / "checkpoint_meta.json").read_text())
    meta["embeddings"]["rows"] += 1
    (other / "checkpoint_meta.json").chmod(0o644)
    (other / "checkpoint_meta.json").write_text(json.dumps(meta))
    refused = ps("merge", dropped, other, "--out", tmp_path / "no", "--missing", "copy")
    assert refused.returncode == 2
    assert f"B embeddings of {shaped.tokens + 1} rows" in refused.stderr


def test_an_export_says_what_is_missing(shaped: Shaped, ps: Ps, tmp_path: Path) -> None:
    release = tmp_path / "release"
    shutil.copytree(shaped.release, release)
    drop = ("--set", "checkpoint.embeddings=drop", "--max-steps", 1)
    out = shaped.train(ps, tmp_path / "run", *drop, init=release)
    resumed = ps("resume", out, "--max-steps", 2, "--set", "checkpoint.embeddings=keep")
    assert resumed.returncode == 2
    assert "checkpoint.embeddings" in resumed.stderr
    release.rename(tmp_path / "away")
    gone = ps("snapshot", out, "--export", tmp_path / "whole")
    assert gone.returncode == 2
    assert str(release) in gone.stderr
    assert "embed_tokens" in gone.stderr
    (tmp_path / "away").rename(release)
    tensors = load_file(release / ADAPTER)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, release / ADAPTER)
    changed = ps("snapshot", out, "--export", tmp_path / "whole")
    assert changed.returncode == 2
    assert "sha256" in changed.stderr
    assert not (tmp_path / "whole").exists()


def test_embeddings_of_another_backbone_are_refused(shaped: Shaped, ps: Ps, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(shaped.release, other)
    tensors = load_file(other / ADAPTER)
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors[name][-1, -1] += 1
    save_file(tensors, other / ADAPTER)
    refused = ps("train", shaped.recipe, "--out", tmp_path / "out", "--init", other)
    assert refused.returncode == 2
    assert "embed_tokens" in refused.stderr
    assert not (tmp_path / "out").exists()
