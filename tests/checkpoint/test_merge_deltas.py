"""concat, svd and the gap of an average, against deltas built in full in fp64, and against PEFT's own merging."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from parallel_synthesis.checkpoint.merge import MergeResult, merge
from parallel_synthesis.checkpoint.merge_plan import MergeOptions
from parallel_synthesis.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.lane
Make = Callable[..., Path]
ADAPTER = "judger_lora/adapter_model.safetensors"
CONFIG = "judger_lora/adapter_config.json"
HEAD = "base_model.model.lm_head.weight"


def deltas(directory: Path) -> dict[str, npt.NDArray[np.float64]]:
    """module -> scale * B @ A, in fp64."""
    config = json.loads((directory / CONFIG).read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    state = {name: tensor.double().numpy() for name, tensor in load_file(directory / ADAPTER).items()}
    return {
        name.removesuffix(".lora_A.weight"): scale * state[name.replace("lora_A", "lora_B")] @ state[name]
        for name in state
        if name.endswith(".lora_A.weight")
    }


def summed(sources: Sequence[tuple[Path, float]]) -> dict[str, npt.NDArray[np.float64]]:
    parts = [{module: weight * delta for module, delta in deltas(one).items()} for one, weight in sources]
    return {module: sum(part[module] for part in parts) for module in parts[0]}  # type: ignore[misc]


def run(sources: Sequence[tuple[Path, float]], out: Path, **options: Any) -> MergeResult:
    return merge([(str(one), weight) for one, weight in sources], out, MergeOptions(**options))


@pytest.mark.parametrize("second", [{}, {"r": 6, "alpha": 9}, {"use_rslora": True}])
def test_concat_is_the_sum_of_the_deltas(
    lora_checkpoint: Make, tmp_path: Path, second: dict[str, Any]
) -> None:
    sources = [
        (lora_checkpoint(tmp_path / "a", seed=1), 0.3),
        (lora_checkpoint(tmp_path / "b", seed=2, **second), 0.9),
    ]
    result = run(sources, tmp_path / "out", method="concat")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    rank = 4 + second.get("r", 4)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (rank, rank, False)
    found, wanted = deltas(tmp_path / "out"), summed(sources)
    for module, delta in wanted.items():
        assert np.abs(found[module] - delta).max() < 1e-6 * np.abs(delta).max()
    assert "the weights sum to 1.2, not 1" in result.warnings
    again = run(sources, tmp_path / "again", method="concat")
    assert again.components == result.components


@pytest.mark.parametrize("rank", [1, 3, 4, 8])
def test_svd_is_the_best_of_its_rank(lora_checkpoint: Make, tmp_path: Path, rank: int) -> None:
    sources = [
        (lora_checkpoint(tmp_path / "a", seed=1), 0.5),
        (lora_checkpoint(tmp_path / "b", seed=2), 0.5),
    ]
    result = run(sources, tmp_path / "out", method="svd", rank=rank)
    found, wanted = deltas(tmp_path / "out"), summed(sources)
    lost, whole, worst = 0.0, 0.0, 0.0
    for module, delta in wanted.items():
        values = np.linalg.svd(delta, compute_uv=False)  # full size: what ps never does
        best = float(np.sqrt(np.sum(values[rank:] ** 2)))
        error = float(np.linalg.norm(found[module] - delta))
        assert error == pytest.approx(best, rel=1e-4, abs=1e-5 * float(values[0]))
        lost, whole = lost + best**2, whole + float(np.sum(values**2))
        worst = max(worst, best / float(np.linalg.norm(delta)))
    assert result.truncation is not None
    assert result.truncation.overall == pytest.approx((lost / whole) ** 0.5, abs=1e-6)
    assert result.truncation.worst == pytest.approx(worst, abs=1e-6)
    again = run(sources, tmp_path / "again", method="svd", rank=rank)
    assert again.components == result.components


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.3, 0.7), (0.4, 0.8), (0.2, 0.3, 0.5)])
def test_the_gap_of_an_average(lora_checkpoint: Make, tmp_path: Path, weights: tuple[float, ...]) -> None:
    sources = [
        (lora_checkpoint(tmp_path / str(number), seed=number), weight)
        for number, weight in enumerate(weights)
    ]
    result = run(sources, tmp_path / "out")
    found, wanted = deltas(tmp_path / "out"), summed(sources)
    relative = {
        module: np.linalg.norm(found[module] - wanted[module]) / np.linalg.norm(wanted[module])
        for module in wanted
    }
    whole = np.sqrt(sum(np.linalg.norm(delta) ** 2 for delta in wanted.values()))
    gap = np.sqrt(sum(np.linalg.norm(found[module] - wanted[module]) ** 2 for module in wanted)) / whole
    assert result.gap is not None
    assert result.gap.overall == pytest.approx(gap, rel=1e-5)
    assert result.gap.worst == pytest.approx(max(relative.values()), rel=1e-5)
    assert result.gap.worst_module == max(relative, key=lambda module: relative[module])
    assert any("--method concat is the exact sum" in warning for warning in result.warnings)


def test_near_inputs_have_a_small_gap_and_no_warning(lora_checkpoint: Make, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first = lora_checkpoint(tmp_path / "a", seed=1)
    second = lora_checkpoint(tmp_path / "b", seed=1)
    save_file({n: t * 1.001 for n, t in load_file(first / ADAPTER).items()}, second / ADAPTER)
    result = run([(first, 0.5), (second, 0.5)], tmp_path / "out")
    assert result.gap is not None and result.gap.overall == pytest.approx(
        0.25e-6, rel=0.01
    )  # no cancellation
    assert result.warnings == []


def test_embeddings_of_a_delta_merge_are_averaged(lora_checkpoint: Make, tmp_path: Path) -> None:
    matrix = torch.randn((50, 24), generator=torch.Generator().manual_seed(0)).bfloat16()
    sources = [
        (lora_checkpoint(tmp_path / name, seed=seed, embeddings={HEAD: matrix}), 1.0)
        for seed, name in enumerate("ab")
    ]
    result = run(
        sources, tmp_path / "out", method="concat"
    )  # the sum of both tasks: the matrix is not doubled
    assert torch.equal(load_file(tmp_path / "out" / ADAPTER)[HEAD], matrix)
    assert any("scaled to sum to 1" in warning for warning in result.warnings)


def test_modules_that_only_one_has(lora_checkpoint: Make, tmp_path: Path) -> None:
    short = {"base_model.model.model.layers.0.self_attn.q_proj": (24, 24)}
    config = {"target_modules": ["q_proj", "v_proj"]}
    sources = [
        (lora_checkpoint(tmp_path / "a", seed=1), 0.3),
        (lora_checkpoint(tmp_path / "b", seed=2, modules=short, **config), 0.7),
    ]
    with pytest.raises(CheckpointError, match="keys: 10 tensors only in A"):
        run(sources, tmp_path / "out", method="concat")
    only = "base_model.model.model.layers.2.self_attn.v_proj"
    for missing, weight in (("copy", 1.0), ("zero", 0.3)):
        for method in ({"method": "concat"}, {"method": "svd", "rank": 8}):
            out = tmp_path / f"{missing}-{method['method']}"
            run(sources, out, missing=missing, **method)
            wanted = weight * deltas(sources[0][0])[only]
            assert np.abs(deltas(out)[only] - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rank_pattern": {"q_proj": 4}}, "B has a rank_pattern; concat has one rank"),
        ({"alpha_pattern": {"q_proj": 4}}, "B has a alpha_pattern; concat has one rank"),
    ],
)
def test_what_they_cannot_do(
    lora_checkpoint: Make, tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    sources = [
        (lora_checkpoint(tmp_path / "a", seed=1), 0.5),
        (lora_checkpoint(tmp_path / "b", seed=2, **config), 0.5),
    ]
    with pytest.raises(CheckpointError, match=text):
        run(sources, tmp_path / "out", method="concat")


def test_ranks_that_make_no_sense(lora_checkpoint: Make, tmp_path: Path) -> None:
    sources = [(lora_checkpoint(tmp_path / name, seed=seed), 0.5) for seed, name in enumerate("ab")]
    for options, text in (
        ({"method": "svd"}, "svd needs it"),
        ({"rank": 4}, "goes with --method svd"),
        ({"method": "svd", "rank": 9}, "have 8 together"),
        ({"method": "svd", "rank": 0}, "expected 1 or more"),
    ):
        with pytest.raises(ConfigError, match=text):
            run(sources, tmp_path / "out", **options)


def test_an_svd_of_nan_is_refused(lora_checkpoint: Make, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    sources = [(lora_checkpoint(tmp_path / name, seed=seed), 0.5) for seed, name in enumerate("ab")]
    state = load_file(sources[1][0] / ADAPTER)
    name = min(state)
    state[name][0, 0] = float("nan")
    save_file(state, sources[1][0] / ADAPTER)
    for method in ({"method": "svd", "rank": 4, "allow_nonfinite": True}, {"method": "concat"}):
        with pytest.raises(CheckpointError, match=f"{name} has inf or nan in B"):
            run(sources, tmp_path / "out", **method)


@pytest.mark.parametrize("method", ["concat", "svd"])
def test_logits_equal_those_of_pefts_own(
    lora_checkpoint: Make, tmp_path: Path, tiny_backbone: Path, method: str
) -> None:
    """add_weighted_adapter is right for cat and svd of plain LoRA; the two share no code."""
    from peft import PeftModel
    from peft import __version__ as peft_version
    from transformers import AutoModelForCausalLM

    from parallel_synthesis.model.lanes import quiet_attach

    modules = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj": (32, 16 if part == "v" else 32)
        for layer in range(2)
        for part in "qv"
    }
    config = {"base_model_name_or_path": str(tiny_backbone)}
    sources = [
        (lora_checkpoint(tmp_path / "a", seed=1, modules=modules, alpha=4, **config), 0.3),
        (lora_checkpoint(tmp_path / "b", seed=2, modules=modules, alpha=2, **config), 0.7),
    ]
    run(sources, tmp_path / "out", method=method, rank=5 if method == "svd" else None)

    def loaded(directory: Path) -> Any:
        backbone = AutoModelForCausalLM.from_pretrained(tiny_backbone)
        return PeftModel.from_pretrained(backbone, str(directory / "judger_lora"), adapter_name="a").eval()

    ids = torch.arange(24).reshape(2, 12) * 7
    with quiet_attach(), torch.no_grad():
        theirs = loaded(sources[0][0])
        theirs.load_adapter(str(sources[1][0] / "judger_lora"), adapter_name="b")
        kind = (
            {"combination_type": "cat"} if method == "concat" else {"combination_type": "svd", "svd_rank": 5}
        )
        # Its svd of 0.18 multiplies by the scale (1 and 1/2 here) twice; that of 0.21 does not.
        twice = method == "svd" and peft_version.startswith("0.18.")
        theirs.add_weighted_adapter(["a", "b"], [0.3, 1.4 if twice else 0.7], adapter_name="merged", **kind)
        theirs.set_adapter("merged")
        difference = (
            (loaded(tmp_path / "out")(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max()
        )
        theirs.set_adapter("a")
        other = (loaded(tmp_path / "out")(input_ids=ids).logits - theirs(input_ids=ids).logits).abs().max()
    assert difference < 1e-5 < 1e-2 < other
