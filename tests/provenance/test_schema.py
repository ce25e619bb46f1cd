"""JSON in and out: stable bytes, all problems with path and expectation, files of the reference
implementation."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.checkpoint.snapshots import Snapshot
from parallel_synthesis.config import MapperConfig
from parallel_synthesis.errors import CheckpointError, DataError, StorageError
from parallel_synthesis.provenance import schema as schemas
from parallel_synthesis.provenance.manifest import build
from parallel_synthesis.provenance.problems import Problem, ProblemKind
from parallel_synthesis.recipe import recipe_schema
from parallel_synthesis.resources import resource
from parallel_synthesis.training.records import RunRecord

ALL = sorted(path.name.removesuffix(".schema.json") for path in resource("schemas").glob("*.json"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
METRICS = {"task": "flan", "loss": 1.5, "perplexity": math.inf, "target_tokens": 42}
META = {"global_step": 5, "epoch": 1, "source_run_dir": "runs/a", "metrics": METRICS}
TRAIN_METRICS = {
    "global_steps": 302,
    "optimizer_steps": 166,
    "steps_per_epoch": 302,
    "world_size": 4,
    "per_task_steps": {"flan": 302},
    "per_task_seen_samples": {"flan": 1208},
    "skipped_sync_steps": 136,
    "skipped_samples": 544,
    "target_tokens": 1,
    "avg_loss": math.nan,
    "perplexity": 1.0,
    "last_step_loss": 1.0,
    "last_step_perplexity": 1.0,
    "epochs": [{"epoch": 1}],
}
SUMMARY = {
    "mode": "train",
    "method": "fixed_parallel_kv",
    "model_name": "Qwen/Qwen3-14B",
    "tasks": ["flan"],
    "train_sample_caps": {"flan": -1},
    "train_split": "train",
    "save_dir": "x",
    "args": {"seed": 42},
    "world_size": 4,
    "train_metrics": TRAIN_METRICS,
    "train_time_sec": 1.0,
    "total_time_sec": 2.0,
}


@pytest.mark.parametrize("name", ALL)
def test_each_schema_is_valid_draft_2020_12(name: str) -> None:
    document = json.loads(resource("schemas", f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("checkpoint_meta", META),
        ("checkpoint_meta", META | {"metrics": {"avg_loss": 1.0, "perplexity": 2.0, "optimizer_steps": 3}}),
        ("cache_mapper_config", {"hidden_dim": 32, "metadata_features": "both", "more": 1}),
        ("run_args", {"method": "fixed_parallel_kv", "seed": 42, "tasks": ["flan"]}),
        ("train_mixed_summary", SUMMARY),
    ],
)
def test_files_of_the_reference_follow_them(name: str, document: Any, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(document))  # nan and inf as python writes them
    assert schemas.problems(schemas.load_json(tmp_path / "x.json", name), name) == []


def test_ours_follow_them() -> None:
    assert (
        schemas.problems(
            schemas.finite_or_null(META)
            | {"recipe": "general", "recipe_sha256": "a" * 64, "parents": [], "ranks": 4},
            "checkpoint_meta",
        )
        == []
    )
    ours = {
        "schema_version": 1,
        "config": {},
        "recipe": "demo",
        "recipe_sha256": None,
        "argv": ["ps", "train"],
    }
    assert schemas.problems(ours | {"environment": {"python": "3.11", "packages": {}}}, "run_args") == []
    assert schemas.problems(ours, "run_args") == ["$: expected a field 'environment', found none"]
    assert schemas.problems(schemas.finite_or_null(SUMMARY), "train_mixed_summary") == []


def test_every_problem_has_its_path_and_what_was_expected() -> None:
    bad = {"global_step": -1, "epoch": "1", "metrics": {"loss": "low"}, "recipe_sha256": "A", "ranks": 0}
    assert schemas.problems(bad, "checkpoint_meta") == [
        "$: expected a field 'source_run_dir', found none",
        "$.epoch: expected integer, found '1'",
        "$.global_step: expected minimum 0, found -1",
        "$.metrics.loss: expected number or null, found 'low'",
        "$.ranks: expected minimum 1, found 0",
        "$.recipe_sha256: expected pattern ^[0-9a-f]{64}$, found 'A'",
    ]
    assert schemas.problems({"hidden_dim": True, "metadata_features": "x"}, "cache_mapper_config") == [
        "$.hidden_dim: expected integer, found True",
        "$.metadata_features: expected 'both' or 'length' or 'num_agents' or 'none', found 'x'",
    ]
    assert len(schemas.problems({"files": 3}, "manifest")) == 3
    long = schemas.problems({"hidden_dim": "x" * 10_000, "metadata_features": "both"}, "cache_mapper_config")
    assert len(long[0]) < 200


def test_validate_raises_them_all_and_names_the_file() -> None:
    with pytest.raises(DataError) as caught:
        schemas.validate({}, "cache_mapper_config", "run/x.json", error=DataError)
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("run/x.json does not follow schemas/cache_mapper_config.schema.json")
    assert [line.strip() for line in lines[1:3]] == [
        "$: expected a field 'hidden_dim', found none",
        "$: expected a field 'metadata_features', found none",
    ]


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(JSON)
def test_written_bytes_are_stable_and_read_back(document: Any) -> None:
    written = schemas.dump_json(document)
    assert json.loads(written) == document and written.endswith(b"\n")
    shuffled = json.loads(written, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert schemas.dump_json(shuffled) == written


def test_layout_and_numbers_that_are_not() -> None:
    assert (
        schemas.dump_json({"b": [1, 2.5], "a": "é"})
        == '{\n  "a": "é",\n  "b": [\n    1,\n    2.5\n  ]\n}\n'.encode()
    )
    with pytest.raises(ValueError, match="JSON compliant"):
        schemas.dump_json({"a": math.nan})
    value = {"a": [math.inf, 1.0, (math.nan,)], "b": True}
    assert schemas.finite_or_null(value) == {"a": [None, 1.0, [None]], "b": True}


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in (b"", b"{", b"\xff", b'{"a": 1, "b": {"c": 1, "c": 2}}', b"[" * 200_000):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.json"):
            schemas.read_json(path)
    with pytest.raises(StorageError, match=r"absent\.json"):
        schemas.read_json(tmp_path / "absent.json")
    path.write_bytes(b'\xef\xbb\xbf{"a": NaN}')
    assert math.isnan(schemas.read_json(path)["a"])


def properties(name: str, *path: str) -> set[str]:
    document = json.loads(resource("schemas", f"{name}.schema.json").read_text())
    for key in path:
        document = document[key]
    return set(document["properties"])


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_schemas_are_those_of_the_dataclasses() -> None:
    assert json.loads(resource("schemas", "recipe.schema.json").read_text()) == recipe_schema()
    assert properties("cache_mapper_config") == fields(MapperConfig)
    kept = ("properties", "snapshots", "items")
    assert properties("snapshots", *kept) == fields(Snapshot)
    # origins .. attempts are RunRecord's own; the first two are the file's.
    assert properties("run_args") == fields(RunRecord) | {"schema_version", "version", "recipe"}
    problem = ("properties", "problems", "items")
    assert properties("verify_report", *problem) == fields(Problem) - {"kind"} | {"status"}
    document = json.loads(resource("schemas", "verify_report.schema.json").read_text())
    listed = document["properties"]["problems"]["items"]["properties"]["status"]["enum"]
    assert set(listed) == set(get_args(ProblemKind))
    assert properties("manifest") == set(build({}, global_step=1))


def test_shipped_files_follow_their_schemas() -> None:
    for name, path in (
        ("release_manifest", resource("artifacts", "release_checkpoint.json")),
        ("data_manifest", resource("manifests", "training_data.json")),
        ("backbones", resource("manifests", "backbones.json")),
    ):
        schemas.load_json(path, name)
    recipes = sorted(resource("recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        assert schemas.problems(tomllib.loads(path.read_text("utf-8")), "recipe") == [], path.name


def test_a_release_and_a_merge_of_the_reference_follow_them() -> None:
    sha256 = "a" * 64
    release = {
        "schema_version": "1",
        "artifact_name": "x",
        "training_data_manifest": "data.json",
        "huggingface_repo_id": "owner/name",
        "base_model": "Qwen/Qwen3-14B",
        "base_model_revision": "b" * 40,
        "format": "components",
        "components": {"cache_mapper.pt": {"bytes": 3599, "sha256": sha256}},
        "mapper": {"hidden_dim": 32, "metadata_features": "both", "source": "x", "source_sha256": sha256},
        "judger_lora": {
            "rank": 16,
            "alpha": 32,
            "dropout": 0.0,
            "adapter_embedding_vocab_size": 151669,
            "base_model_padded_vocab_size": 151936,
            "target_modules": ["q_proj"],
        },
        "lineage": {"anything": []},
        "training_datasets": {"flan": {"path_hint": "x", "rows": 1, "bytes": 2, "sha256": sha256}},
        "validated_environment": {"python": "3.10.19", "attention_backend": "sdpa"},
    }
    assert schemas.problems(release, "release_manifest") == []
    assert schemas.problems(release | {"schema_version": 2}, "release_manifest") == [
        "$.schema_version: expected maximum 1, found 2"
    ]
    merge = {
        "merge_type": "weighted_average",
        "checkpoint_a": "a",
        "checkpoint_b": "b",
        "source_b_is_base": False,
        "weight_a": 0.5,
        "weight_b": 0.5,
        "missing_policy": "error",
        "cache_mapper_source": "b",
        "lora_merge_mode": "parameter_average",
        "merged_artifacts": ["cache_mapper.pt"],
    }
    assert schemas.problems(merge, "checkpoint_merge_meta") == []
    bad = merge | {"parents": [{"source": "a", "step": -1, "components": {"x": "y"}}]}
    assert schemas.problems(bad, "checkpoint_merge_meta") == [
        "$.parents[0].components.x: expected pattern ^[0-9a-f]{64}$, found 'y'",
        "$.parents[0].step: expected minimum 0, found -1",
    ]
