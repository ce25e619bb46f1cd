"""Drift: every difference is found once, classed, and what is not harmless is refused unless it is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from parallel_synthesis.config import Config
from parallel_synthesis.provenance import drift


def record() -> dict[str, Any]:
    return {
        "recipe_sha256": "r",
        "config": Config().to_dict(),
        "data": {
            "flan": {"sha256": "a", "rows": 4, "unpacked_sha256": None, "bad_rows_sha256": "n", "path": "x"}
        },
        "backbone": {
            "files": {"model.safetensors": "m", "tokenizer.json": "t"},
            "revision": None,
            "device": "cpu",
            "dtype": "float32",
            "resized_from": None,
        },
        "environment": {
            "python": "3.11.7",
            "platform": "Linux 6",
            "machine": "x86_64",
            "cpu_model": "A",
            "packages": {"torch": "2.13.0", "safetensors": "0.8"},
            "variables": {"MKL_CBWR": "AVX2"},
        },
    }


def changed(*path: str, value: Any) -> list[drift.Drift]:
    now = record()
    place = now
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return drift.compare(record(), now)


def test_nothing_changed_is_no_drift() -> None:
    assert drift.compare(record(), copy.deepcopy(record())) == []


@pytest.mark.parametrize(
    ("path", "value", "name", "kind"),
    [
        (("config", "optim", "learning_rate"), 1.0, "optim.learning_rate", drift.DATA),
        (("config", "run", "seed"), 7, "run.seed", drift.DATA),
        (("config", "run", "ranks"), 2, "run.ranks", drift.DATA),
        (("config", "data", "tasks"), ["b"], "data.tasks", drift.DATA),
        (("config", "guards", "live_tokens"), 5, "guards.live_tokens", drift.DATA),
        (("config", "backbone", "threads_per_rank"), 8, "backbone.threads_per_rank", drift.BITS),
        (("config", "backbone", "deterministic"), False, "backbone.deterministic", drift.BITS),
        (("config", "checkpoint", "every"), 9, "checkpoint.every", drift.HARMLESS),
        (("config", "run", "max_steps"), 9, "run.max_steps", drift.HARMLESS),
        (("data", "flan", "sha256"), "b", "data.flan", drift.DATA),
        (("data", "flan", "rows"), 5, "data.flan", drift.DATA),
        (("data", "flan", "bad_rows_sha256"), "b", "data.flan", drift.DATA),
        (("backbone", "files"), {"model.safetensors": "x", "tokenizer.json": "t"}, "backbone", drift.DATA),
        (("backbone", "files"), {"model.safetensors": "m", "tokenizer.json": "x"}, "tokenizer", drift.DATA),
        (("backbone", "device"), "NVIDIA X", "device", drift.BITS),
        (("backbone", "dtype"), "bfloat16", "dtype", drift.DATA),
        (("environment", "packages", "torch"), "2.14", "torch", drift.BITS),
        (("environment", "packages", "safetensors"), "0.9", "safetensors", drift.HARMLESS),
        (("environment", "variables", "MKL_CBWR"), "SSE2", "MKL_CBWR", drift.BITS),
        (("environment", "variables", "OMP_NUM_THREADS"), "2", "OMP_NUM_THREADS", drift.HARMLESS),
        (("environment", "cpu_model"), "B", "cpu_model", drift.BITS),
        (("environment", "platform"), "Linux 7", "platform", drift.HARMLESS),
        (("recipe_sha256",), "other", "recipe", drift.HARMLESS),
    ],
)
def test_each_change_has_its_name_and_class(path: tuple[str, ...], value: Any, name: str, kind: str) -> None:
    (found,) = changed(*path, value=value)
    assert (found.name, found.kind) == (name, kind)


def test_the_path_of_a_data_file_is_not_its_content() -> None:
    assert changed("data", "flan", "path", value="elsewhere") == []


def test_a_gzip_file_and_its_text_are_the_same_data() -> None:
    now = record()
    now["data"]["flan"] |= {"sha256": "packed", "unpacked_sha256": "a"}
    assert drift.compare(record(), now) == []


def test_on_a_gpu_the_processor_does_not_matter() -> None:
    before, now = record(), record()
    before["backbone"]["device"] = now["backbone"]["device"] = "NVIDIA X"
    now["environment"]["cpu_model"] = "B"
    (found,) = drift.compare(before, now)
    assert found.kind == drift.HARMLESS


def test_only_what_is_named_is_accepted() -> None:
    now = record()
    now["config"]["optim"]["learning_rate"] = 1.0
    now["environment"]["packages"]["torch"] = "2.14"
    now["config"]["log"]["every"] = 7
    found = drift.compare(record(), now)
    assert [item.name for item in found] == ["optim.learning_rate", "torch", "log.every"]  # the gravest first
    assert [item.name for item in drift.refused(found, ["torch"])] == ["optim.learning_rate"]
    assert drift.refused(found, ["torch", "optim.learning_rate"]) == []
