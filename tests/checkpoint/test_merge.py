"""The release merge: its bits against torch, what does not fit, and what it writes down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from parallel_synthesis.checkpoint.merge import MERGE_META, differences, merge
from parallel_synthesis.checkpoint.merge_average import WeightedSum, count_nonfinite
from parallel_synthesis.checkpoint.merge_plan import MergeOptions
from parallel_synthesis.checkpoint.merge_recipe import load_merge_recipe, place_of
from parallel_synthesis.errors import CheckpointError, ConfigError
from parallel_synthesis.provenance import lineage, manifest
from parallel_synthesis.training.records import parent_record

pytestmark = pytest.mark.lane
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ADAPTER = "judger_lora/adapter_model.safetensors"
RELEASE = MergeOptions(mapper_from=1)
EMBED, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"

Make = Callable[..., Path]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def expected(a: torch.Tensor, b: torch.Tensor, w_a: float, w_b: float) -> torch.Tensor:
    """The release's expression."""
    return (a.float() * w_a + b.float() * w_b).to(a.dtype)


def patterns(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """All 65,536 values of a 16-bit dtype in a seeded order; of fp32 random bits, subnormals, inf and nan."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 2:
        return torch.randperm(1 << 16, generator=generator).to(torch.uint16).view(dtype)
    bits = torch.randint(-(2**31), 2**31 - 1, (65537,), generator=generator).to(torch.int32)
    bits[:5000] = torch.randint(0, 2**23, (5000,), generator=generator).to(torch.int32)
    bits[5000:5004] = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7F7FFFFF]).to(torch.int32)
    return bits.view(dtype)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.3, 0.7), (0.1, 0.2), (1.0, 1.0), (2.0, -1.0), (0.0, 1.0)])
@pytest.mark.parametrize("name", DTYPES)
def test_every_bit_is_that_of_torch(name: str, weights: tuple[float, float]) -> None:
    a, b = patterns(DTYPES[name], 1), patterns(DTYPES[name], 2)
    wanted = expected(a, b, *weights)
    found = torch.frombuffer(
        bytearray(WeightedSum(weights)([raw(a), raw(b)], [name] * 2, name)), dtype=a.dtype
    )
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)  # a nan stays one; its payload differs between processors
    assert raw(found[~nan]) == raw(wanted[~nan])
    finite = wanted.isfinite()
    assert count_nonfinite(raw(found), name) == int((~finite).sum())


@pytest.mark.parametrize("mixed", [("BF16", "F32"), ("F16", "BF16"), ("F32", "F16")])
def test_mixed_dtypes_take_the_first(mixed: tuple[str, str]) -> None:
    a, b = (patterns(DTYPES[name], seed)[: 1 << 16] for seed, name in enumerate(mixed))
    wanted = expected(a, b, 0.3, 0.7)
    found = torch.frombuffer(
        bytearray(WeightedSum((0.3, 0.7))([raw(a), raw(b)], mixed, mixed[0])), dtype=a.dtype
    )
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan) and raw(found[~nan]) == raw(wanted[~nan])


def test_equal_bytes_are_copied_only_where_that_is_the_average() -> None:
    for weights in ((0.5, 0.5), (0.3, 0.7), (0.2, 0.3, 0.5)):
        assert WeightedSum(weights).keeps_bits("BF16") and WeightedSum(weights).keeps_bits("F16")
        assert not WeightedSum(weights).keeps_bits("F32")
    for weights in ((0.5, 0.6), (1.0, 0.0), (2.0, -1.0), (0.3, 0.3)):  # 0 * inf and inf - inf are nan
        assert not WeightedSum(weights).keeps_bits("BF16")
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    assert raw(expected(values, values, 0.3, 0.7)) != raw(values)  # why fp32 is always computed


def embeddings(seed: int, rows: int = 30_011) -> dict[str, torch.Tensor]:
    """bf16, more than one chunk each, with an odd number of elements."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((rows, 23), generator=generator).bfloat16() for name in (EMBED, HEAD)}


@pytest.mark.parametrize("equal", [True, False])
def test_the_file_is_what_save_file_writes(lora_checkpoint: Make, tmp_path: Path, equal: bool) -> None:
    odd = {"odd": torch.randn(7, 3, 5), "one": torch.tensor([1.5]), "scalar": torch.tensor(-2.5)}
    extra = {**odd, "none": torch.empty(0, 4), "half": torch.randn(11).half()}
    first = lora_checkpoint(tmp_path / "a", seed=1, embeddings=embeddings(5) | extra)
    second = lora_checkpoint(tmp_path / "b", seed=2, embeddings=embeddings(5 if equal else 6) | extra)
    (first / "judger_lora" / "README.md").write_text("of A")
    state_a, state_b = load_file(first / ADAPTER), load_file(second / ADAPTER)
    for number, weights in enumerate(((0.5, 0.5), (0.3, 0.7))):
        out = tmp_path / f"out-{number}"
        result = merge([(str(first), weights[0]), (str(second), weights[1])], out, RELEASE)
        content = save({name: expected(state_a[name], state_b[name], *weights) for name in state_a})
        assert (out / ADAPTER).read_bytes() == content
        assert result.components[ADAPTER]["sha256"] == hashlib.sha256(content).hexdigest()
        assert manifest.verify(out) == []
        for name in ("cache_mapper.pt", "cache_mapper_config.json"):
            assert (out / name).read_bytes() == (second / name).read_bytes()
        for name in ("judger_lora/adapter_config.json", "judger_lora/README.md"):
            assert (out / name).read_bytes() == (first / name).read_bytes()
    assert load_file(out / ADAPTER).keys() == state_a.keys()


def test_three_inputs_and_one(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("abc")]
    a, b, c = (load_file(one / ADAPTER) for one in made)
    merge(
        [(str(one), w) for one, w in zip(made, (0.5, 0.3, 0.2))],
        tmp_path / "out",
        MergeOptions(mapper_from=2),
    )
    wanted = {name: (a[name] * 0.5 + b[name] * 0.3) + c[name] * 0.2 for name in a}
    assert (tmp_path / "out" / ADAPTER).read_bytes() == save(wanted)
    assert (tmp_path / "out" / "cache_mapper.pt").read_bytes() == (made[2] / "cache_mapper.pt").read_bytes()
    merge([(str(made[0]), 1.0)], tmp_path / "same", MergeOptions())
    assert (tmp_path / "same" / ADAPTER).read_bytes() == (made[0] / ADAPTER).read_bytes()


def test_against_plain_numpy(lora_checkpoint: Make, tmp_path: Path) -> None:
    """Independent of torch's arithmetic: fp32 by numpy, bf16 rounded by hand."""
    first = lora_checkpoint(tmp_path / "a", seed=1, embeddings=embeddings(5, 101))
    second = lora_checkpoint(tmp_path / "b", seed=2, embeddings=embeddings(6, 101))
    merge([(str(first), 0.3), (str(second), 0.7)], tmp_path / "out", RELEASE)
    a, b, out = (load_file(one / ADAPTER) for one in (first, second, tmp_path / "out"))
    for name in a:
        total = a[name].float().numpy() * np.float32(0.3) + b[name].float().numpy() * np.float32(0.7)
        if a[name].dtype == torch.bfloat16:
            bits = total.view(np.uint32).astype(np.uint64)
            total = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)
        assert np.array_equal(out[name].float().numpy(), total)


def test_it_loads_in_peft(lora_checkpoint: Make, tmp_path: Path, tiny_backbone: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from parallel_synthesis.model.lanes import quiet_attach

    modules = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj": (32, 16 if part == "v" else 32)
        for layer in range(2)
        for part in "qv"
    }
    made = [lora_checkpoint(tmp_path / name, seed=seed, modules=modules) for seed, name in enumerate("ab")]
    merge([(str(one), 0.5) for one in made], tmp_path / "out", RELEASE)
    with quiet_attach():
        backbone = AutoModelForCausalLM.from_pretrained(tiny_backbone)
        model = PeftModel.from_pretrained(backbone, str(tmp_path / "out" / "judger_lora"))
    state = load_file(tmp_path / "out" / ADAPTER)
    inside = dict(model.named_parameters())
    for name, tensor in state.items():
        assert torch.equal(inside[name.replace(".weight", ".default.weight")], tensor)


FINDINGS: list[tuple[str, dict[str, Any], str]] = [
    ("peft_type", {"peft_type": "IA3"}, "unsupported: B has peft_type 'IA3'"),
    ("r", {"r": 8}, "r: A has 4, B has 8"),
    ("alpha", {"alpha": 16}, "lora_alpha: A has 8, B has 16"),
    ("targets", {"target_modules": ["q_proj"]}, "target_modules: A has ['q_proj', 'v_proj'], B has ['q_proj']"),
    ("rank pattern", {"rank_pattern": {"q_proj": 8}}, "rank_pattern: A has {}, B has {'q_proj': 8}"),
    ("alpha pattern", {"alpha_pattern": {"q_proj": 8}}, "alpha_pattern: "),
    ("rslora", {"use_rslora": True}, "use_rslora: A has False, B has True"),
    ("dora", {"use_dora": True}, "unsupported: B has use_dora = True"),
    ("bias", {"bias": "all"}, "unsupported: B has bias = 'all'"),
    ("fan", {"fan_in_fan_out": True}, "fan_in_fan_out: A has False, B has True"),
    ("task", {"task_type": "SEQ_CLS"}, "task_type: A has 'CAUSAL_LM', B has 'SEQ_CLS'"),
    ("saved", {"modules_to_save": ["lm_head"]}, "modules_to_save: A has None, B has ['lm_head']"),
    ("base", {"base_model_name_or_path": "x/y"}, "base_model_name_or_path: A has 'tiny/base', B has 'x/y'"),
    ("mapper", {"hidden": 16}, "mapper: A has hidden_dim 32, B has 16"),
    ("dtype", {"dtype": "bfloat16"}, "dtype: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight: A F32, B BF16"),
    ("init", {"init_lora_weights": "pissa"}, "unsupported: B has init_lora_weights = 'pissa'"),
    ("fp64", {"dtype": "float64"}, "in F64"),
    ("keys", {"embeddings": {HEAD: torch.zeros(3, 2)}}, f"keys: 1 tensors only in B (e.g. {HEAD})"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"), [case[1:] for case in FINDINGS], ids=[case[0] for case in FINDINGS]
)
def test_what_does_not_fit_is_named(lora_checkpoint: Make, tmp_path: Path, changes: Any, text: str) -> None:
    first = lora_checkpoint(tmp_path / "a", seed=1)
    second = lora_checkpoint(tmp_path / "b", seed=2, **changes)
    with pytest.raises(CheckpointError, match="nothing was written") as error:
        merge([(str(first), 0.5), (str(second), 0.5)], tmp_path / "out", RELEASE)
    assert text in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_every_finding_is_in_one_message(lora_checkpoint: Make, tmp_path: Path) -> None:
    first = lora_checkpoint(tmp_path / "a", seed=1, embeddings=embeddings(1, 20), revision="x")
    second = lora_checkpoint(
        tmp_path / "b", seed=2, r=8, hidden=16, use_dora=True, embeddings=embeddings(1, 25), revision="y"
    )
    with pytest.raises(CheckpointError) as error:
        merge([(str(first), 0.5), (str(second), 0.5)], tmp_path / "out", RELEASE)
    fields = [line.split(":")[0].removeprefix("  - ") for line in str(error.value).splitlines()[1:-1]]
    assert fields == ["unsupported", "r", "revision", "mapper", "mapper", "shape", "vocabulary"]
    assert "[20, 23], B [25, 23] and 1 more" in str(error.value)


def test_allowed_mismatches_are_recorded(lora_checkpoint: Make, tmp_path: Path) -> None:
    first = lora_checkpoint(tmp_path / "a", seed=1)
    second = lora_checkpoint(tmp_path / "b", seed=2, base_model_name_or_path="x/y")
    sources = [(str(first), 0.5), (str(second), 0.5)]
    options = MergeOptions(mapper_from=1, allow_mismatch=("base_model_name_or_path",))
    result = merge(sources, tmp_path / "out", options)
    assert [finding.field for finding in result.accepted] == ["base_model_name_or_path"]
    meta = json.loads((tmp_path / "out" / MERGE_META).read_text())
    assert meta["accepted"][0]["field"] == "base_model_name_or_path" and meta["allow_mismatch"]
    with pytest.raises(ConfigError, match="--allow-mismatch base: expected one of"):
        merge(sources, tmp_path / "other", MergeOptions(allow_mismatch=("base",)))


def test_missing_tensors(lora_checkpoint: Make, tmp_path: Path) -> None:
    extra = embeddings(3, 40)
    first = lora_checkpoint(tmp_path / "a", seed=1, embeddings=extra)
    second = lora_checkpoint(tmp_path / "b", seed=2)
    sources = [(str(first), 0.3), (str(second), 0.7)]
    merge(sources, tmp_path / "copy", MergeOptions(mapper_from=1, missing="copy"))
    assert torch.equal(load_file(tmp_path / "copy" / ADAPTER)[HEAD], extra[HEAD])
    merge(sources, tmp_path / "zero", MergeOptions(mapper_from=1, missing="zero"))
    wanted = expected(extra[HEAD], torch.zeros_like(extra[HEAD]), 0.3, 0.7)
    assert torch.equal(load_file(tmp_path / "zero" / ADAPTER)[HEAD], wanted)
    assert json.loads((tmp_path / "zero" / MERGE_META).read_text())["missing_policy"] == "zero"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_nonfinite_weights_are_refused_by_name(
    lora_checkpoint: Make, tmp_path: Path, dtype: str, value: float
) -> None:
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    first = lora_checkpoint(tmp_path / "a", seed=1, dtype=dtype)
    second = lora_checkpoint(tmp_path / "b", seed=2, dtype=dtype)
    state = load_file(second / ADAPTER)
    state[name][3, 1] = value
    save_file(state, second / ADAPTER)
    sources = [(str(first), 0.5), (str(second), 0.5)]
    with pytest.raises(CheckpointError, match=f"{name} has inf or nan in B"):
        merge(sources, tmp_path / "out", RELEASE)
    assert not (tmp_path / "out").exists()
    result = merge(sources, tmp_path / "out", MergeOptions(mapper_from=1, allow_nonfinite=True))
    assert any(name in warning for warning in result.warnings)
    assert not load_file(tmp_path / "out" / ADAPTER)[name][3, 1].isfinite()


def test_a_sum_that_overflows_is_refused(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [
        lora_checkpoint(tmp_path / name, seed=1, embeddings={HEAD: torch.full((4, 4), 60000.0).half()})
        for name in "ab"
    ]
    with pytest.raises(CheckpointError, match="in the result, which F16 cannot hold"):
        merge([(str(one), 1.0) for one in made], tmp_path / "out", RELEASE)


def test_what_is_written_down(lora_checkpoint: Make, tmp_path: Path) -> None:
    first = lora_checkpoint(tmp_path / "a", seed=1, step=302)
    second = lora_checkpoint(tmp_path / "b", seed=2, step=95060)
    out = tmp_path / "out"
    result = merge([(str(first), 0.5), (str(second), 0.5)], out, RELEASE, recipe="release-merge")
    parents = [parent_record(str(one), one) for one in (first, second)]
    meta = json.loads((out / MERGE_META).read_text())
    for parent in parents:
        del parent["checked"]  # of a start alone: a merge reads all of its inputs against their manifests
    assert meta["parents"] == parents == list(result.parents)
    assert json.loads((out / "checkpoint_meta.json").read_text())["parents"] == parents
    reference = {
        "merge_type", "checkpoint_a", "checkpoint_b", "source_b_is_base", "weight_a", "weight_b", "missing_policy",
        "cache_mapper_source", "lora_merge_mode", "merged_artifacts",
    }  # fmt: skip
    assert reference <= meta.keys()
    assert (meta["checkpoint_a"], meta["weight_b"], meta["cache_mapper_source"]) == (str(first), 0.5, "b")
    for name, sha256 in meta["components"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == sha256
    assert not (out / "training_state.pt").exists()
    tree = lineage.read(out)
    assert tree.how == "merge" and [(parent.edge, parent.step) for parent in tree.parents] == [
        ("verified", 302),
        ("verified", 95060),
    ]


def test_a_dry_run_knows_the_hashes_and_writes_nothing(lora_checkpoint: Make, tmp_path: Path) -> None:
    made = [lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    sources = [(str(one), 0.5) for one in made]
    seen: list[tuple[int, int]] = []
    dry = merge(sources, tmp_path / "out", RELEASE, dry_run=True, progress=lambda *at: seen.append(at))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert seen[-1][0] == seen[-1][1] > 0
    assert dry.components == merge(sources, tmp_path / "out", RELEASE).components
    again = merge(sources, tmp_path / "again", RELEASE)
    assert differences(again, str(tmp_path / "out" / "manifest.json")) == []  # two runs, the same bytes
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in dry.components.items())
    (tmp_path / "sums").write_text(lines)
    assert differences(again, str(tmp_path / "sums")) == differences(dry, str(tmp_path / "sums")) == []
    assert len(differences(again, "release")) == len(differences(dry, "release")) == 3


def test_recipes(tmp_path: Path) -> None:
    recipe = load_merge_recipe("release-merge")
    assert (recipe.method, recipe.weights, recipe.mapper_from, recipe.missing) == (
        "average",
        (0.5, 0.5),
        "b",
        "error",
    )
    with pytest.raises(ConfigError, match="no merge recipe 'release'; did you mean release-merge"):
        load_merge_recipe("release")
    (tmp_path / "own.toml").write_text(
        '[merge]\nmethod = "mean"\nweights = [1]\nmapper_from = "a"\nfoo = 1\n'
    )
    with pytest.raises(ConfigError) as error:
        load_merge_recipe(str(tmp_path / "own.toml"))
    assert "average" in str(error.value) and "foo" in str(error.value)
    assert [place_of(word, 3, flag="--mapper-from") for word in ("a", "C", "2")] == [0, 2, 1]
    for word in ("d", "0", "4", "ab", ""):
        with pytest.raises(ConfigError, match="--mapper-from"):
            place_of(word, 3, flag="--mapper-from")


def test_a_hub_id_in_the_local_cache(
    lora_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the Hub's cache keeps it: a snapshot of links into blobs."""
    first = lora_checkpoint(tmp_path / "a", seed=1)
    second = lora_checkpoint(tmp_path / "b", seed=2)
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    for path in [path for path in second.rglob("*") if path.is_file()]:
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(second)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = merge([(str(first), 0.5), ("owner/name", 0.5)], tmp_path / "out", RELEASE)
    local = merge([(str(first), 0.5), (str(second), 0.5)], tmp_path / "local", RELEASE)
    assert result.components == local.components
    assert result.parents[1]["source"] == f"hf://owner/name@{'0' * 40}"  # a main that moves changes nothing
