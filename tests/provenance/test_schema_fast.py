"""The quick way to say "valid" is never wrong: whatever it accepts, jsonschema accepts."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.provenance.schema_fast import surely_follows
from parallel_synthesis.resources import resource

SCHEMAS = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text("utf-8"))
    for path in sorted(resource("schemas").glob("*.json"))
}
SHA = "a" * 64
GOOD: dict[str, Any] = {
    "manifest": {
        "schema_version": 1,
        "kind": "checkpoint",
        "global_step": 5,
        "files": {"x": {"bytes": 1, "sha256": SHA, "header_sha256": SHA, "tensors": {"t": {"offset": 8, "bytes": 1, "sha256": SHA}}}},
    },
    "checkpoint_meta": {
        "global_step": 1,
        "epoch": 1,
        "source_run_dir": None,
        "metrics": {"loss": 1.5},
        "parents": [{"source": "a", "step": None, "components": {"x": SHA}}],
    },
    "adapter_config": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "run_args": {"schema_version": 1, "config": {}, "recipe": None, "recipe_sha256": SHA, "argv": [], "environment": {"python": "3", "packages": {}}},
    "backbones": json.loads(resource("manifests", "backbones.json").read_text()),
}  # fmt: skip
JUNK = st.sampled_from(
    [None, True, 1, 0, -1, 2, 1.0, 0.5, "", "x", SHA, SHA.upper(), [], ["q"], {}, {"a": 1}]
).map(copy.deepcopy)


@pytest.mark.parametrize("name", GOOD)
def test_it_is_sure_of_good_documents(name: str) -> None:
    assert surely_follows(GOOD[name], SCHEMAS[name])


def test_it_is_sure_of_what_is_shipped() -> None:
    for name, path in (
        ("data_manifest", resource("manifests", "training_data.json")),
        ("release_manifest", resource("artifacts", "release_checkpoint.json")),
    ):
        assert surely_follows(json.loads(path.read_text("utf-8")), SCHEMAS[name])


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@settings(derandomize=True, deadline=None, database=None, max_examples=600)
@given(st.sampled_from(sorted(GOOD)), st.data())
def test_what_it_accepts_jsonschema_accepts(name: str, data: st.DataObject) -> None:
    document = copy.deepcopy(GOOD[name])
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(document)))
        how = data.draw(st.sampled_from(["set", "remove", "add"]))
        if not path:
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        if how == "set":
            holder[path[-1]] = data.draw(JUNK)
        elif how == "remove":
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[data.draw(st.sampled_from(["", "more", "schema_version", "kind", "tensors"]))] = data.draw(
                JUNK
            )
    valid = jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(document)
    assert valid or not surely_follows(document, SCHEMAS[name])


def test_an_unknown_keyword_is_doubtful() -> None:
    assert surely_follows(3, {"type": "integer", "minimum": 1})
    assert not surely_follows(3, {"type": "integer", "multipleOf": 1})
    assert not surely_follows(3, {"$ref": "elsewhere.json"})
