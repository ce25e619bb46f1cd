"""The shipped data manifest: its schema, and the figures that plans are made from."""

from __future__ import annotations

import json

import jsonschema
import pytest

from parallel_synthesis.data.manifests import ManifestEntry, manifest_entry, manifest_rows
from parallel_synthesis.data.tasks import TASKS
from parallel_synthesis.resources import resource

MANIFEST = json.loads(resource("manifests", "training_data.json").read_text())
SCHEMA = json.loads(resource("schemas", "data_manifest.schema.json").read_text())


def test_fits_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(MANIFEST)


def test_the_schema_refuses_a_short_hash_and_a_missing_count() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    broken = json.loads(json.dumps(MANIFEST))
    broken["general_phase"][0]["sha256"] = "abc"
    del broken["browsecomp_trajectory_sft"]["filtered_variant"]["uncompressed_bytes"]
    problems = {error.json_path for error in validator.iter_errors(broken)}
    assert problems == {"$.general_phase[0].sha256", "$.browsecomp_trajectory_sft.filtered_variant"}


def test_every_task_has_an_entry_for_its_usual_file() -> None:
    for name, task in TASKS.items():
        entry = manifest_entry(name)
        assert entry is not None
        assert (entry.task, entry.path) == (name, task.usual_file)
        assert len(entry.sha256) == 64
    general = [entry["task"] for entry in MANIFEST["general_phase"]]
    assert general == [name for name in TASKS if name != "browsecomp_textmas_toolcall"]


def test_figures() -> None:
    # Sums over the release's table, added up apart from the file.
    assert sum(entry["rows"] for entry in MANIFEST["general_phase"]) == 880_895
    assert sum(entry["bytes"] for entry in MANIFEST["general_phase"]) == 39_124_535_108
    assert manifest_entry("browsecomp-textmas") == ManifestEntry(
        task="browsecomp_textmas_toolcall",
        path="data/browsecomp-textmas/processed/filtered_train.jsonl.gz",
        rows=1211,
        bytes=33_827_874,
        sha256="1b170a6e4354c7b5999e66671af4dc5e671a2ec984f0e7fda4ed4243fb7723f8",
        unpacked_bytes=194_414_797,
        unpacked_sha256="4abd4dd4eb314784c83eec46b0475cda77dcd4a88e4af9a133977ad3e1d6f222",
    )
    assert MANIFEST["browsecomp_trajectory_sft"]["release_checkpoint"]["rows"] == 1266
    assert manifest_rows("2wiki") == 167_254


@pytest.mark.parametrize("name", ["my_task", ""])
def test_unknown_tasks_have_none(name: str) -> None:
    assert manifest_entry(name) is None
    assert manifest_rows(name) is None
