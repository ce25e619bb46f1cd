"""A backbone named as hf://OWNER/NAME: the plain id is what a config keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_synthesis.errors import BackboneError, ConfigError
from parallel_synthesis.model.source import find_source
from parallel_synthesis.recipe import load_recipe


def model(given: str, *more: str) -> str:
    return load_recipe("demo", sets=[f"backbone.model={given}", *more]).config.backbone.model


def test_the_scheme_is_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model("hf://some-lab/a") == "some-lab/a" == model("some-lab/a")
    found = load_recipe(
        "demo", environ={"MODEL_NAME": "hf://some-lab/a"}, sets=["backbone.revision=v1"]
    ).config
    assert (found.backbone.model, found.backbone.revision) == ("some-lab/a", "v1")
    for given, says in (
        ("hf://some-lab/a@v1", "give hf://some-lab/a, and 'v1' as backbone.revision"),
        ("hf:///etc", "expected hf://OWNER/NAME"),
        ("hf://a/b/c", "expected hf://OWNER/NAME"),
    ):
        with pytest.raises(ConfigError) as caught:
            model(given)
        assert caught.value.problems == (f"--set backbone.model={given}: {says}",)
    (tmp_path / "some-lab" / "a").mkdir(parents=True)
    with pytest.raises(ConfigError, match="there is a local path some-lab/a, which would be taken for it"):
        model("hf://some-lab/a")


@pytest.mark.parametrize("given", ["hf://a/b", "https://huggingface.co/a/b", "HF://a/b", "hf:/a/b"])
def test_other_forms_are_told_the_right_one(given: str) -> None:
    with pytest.raises(BackboneError, match="expected OWNER/NAME as on the Hub"):
        find_source(given, None)
