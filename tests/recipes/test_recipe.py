"""Recipes and overrides: types, precedence, origins, and every problem at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_synthesis.errors import ConfigError
from parallel_synthesis.recipe import ENVIRONMENT, list_recipes, load_recipe, recipe_schema, sections
from parallel_synthesis.resources import resource

MINIMAL = '[backbone]\nmodel = "m"\n[data]\ntasks = ["flan"]\n'


@pytest.fixture
def write(tmp_path):
    def make(text: str, name: str = "own.toml") -> str:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return str(path)

    return make


def problems_of(*arguments, **named) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_recipe(*arguments, **named)
    return list(caught.value.problems)


def test_the_file_is_named_hashed_and_gives_the_run_its_name(write):
    path = write("﻿" + MINIMAL)
    resolved = load_recipe(path)
    assert (resolved.name, resolved.config.recipe, resolved.path) == ("own", "own", Path(path))
    assert resolved.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert resolved.config.run.seed == 42


@pytest.mark.parametrize(
    ("item", "value"),
    [
        ("optim.learning_rate=3e-4", 3e-4),
        ("optim.learning_rate=1", 1.0),
        ("run.seed=7", 7),
        ("run.max_steps=none", None),
        ("run.max_steps=12", 12),
        ("backbone.revision=none", None),
        ("backbone.revision=123", "123"),
        ('backbone.revision="none"', None),
        ("backbone.revision=40c069824f42", "40c069824f42"),
        ("backbone.model=a=b", "a=b"),
        ("backbone.model='quoted'", "quoted"),
        ("backbone.deterministic=false", False),
        ("data.tasks=flan", ("flan",)),
        ("data.tasks=flan, wildchat", ("flan", "wildchat")),
        ('data.tasks=["flan", "wildchat"]', ("flan", "wildchat")),
        ("data.tasks=[flan, wildchat]", ("flan", "wildchat")),
        ("data.tasks=[flan]", ("flan",)),
        ("lora.target_modules=[ q_proj , 'v_proj', ]", ("q_proj", "v_proj")),
        ("checkpoint.milestones=10,20", (10, 20)),
        ("checkpoint.milestones=5", (5,)),
        ("checkpoint.milestones=[]", ()),
        ("data.files={ flan = 'x' }", {"flan": "x"}),
        ("data.files.flan=3.jsonl", {"flan": "3.jsonl"}),
        ("log.on_nonfinite=skip", "skip"),
    ],
)
def test_set_is_typed_by_its_field(write, item, value):
    name = ".".join(item.split("=")[0].split(".")[:2])
    resolved = load_recipe(write(MINIMAL), sets=[item])
    section, field = name.split(".")
    found = getattr(getattr(resolved.config, section), field)
    if item == 'backbone.revision="none"':
        assert found == "none"
        return
    assert found == value
    assert type(found) is type(value)
    assert resolved.origins[name] == "--set"


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("run.seed=true", "expected a whole number"),
        ("run.seed=1.5", "expected a whole number"),
        ("run.seed=1e3", "expected a whole number"),
        ("run.max_steps=x", "expected a whole number (or none)"),
        ("optim.learning_rate=fast", "expected a number"),
        ("optim.learning_rate=true", "expected a number"),
        ("backbone.deterministic=1", "expected true or false"),
        ("log.on_nonfinite=stp", "did you mean stop?"),
        ("data.files=x", "expected a table of strings"),
        ("checkpoint.milestones=a,b", "expected a list of whole numbers"),
        ("data.tasks=[flan", 'expected a list of strings, such as ["a", "b"]'),
        ("data.tasks=[[flan]]", "expected a list of strings"),
        ("optim.learning_rat=1", "did you mean optim.learning_rate?"),
        ("optm.learning_rate=1", "did you mean optim.learning_rate?"),
        ("learning_rate=1", "did you mean optim.learning_rate?"),
        ("run.seed.x=1", "no such field"),
        ("seed", "expected section.field=value"),
        ("run.seed=1\nrun.ranks = 2", "expected a whole number"),
        ("run.ranks=0", "expected 1 or more"),
    ],
)
def test_set_that_does_not_fit(write, item, expected):
    found = problems_of(write(MINIMAL), sets=[item])
    assert len(found) == 1
    assert expected in found[0]


def test_every_problem_is_found_at_once(write):
    path = write(
        'top = 3\n[optim]\nlr = 1\nlearning_rate = "x"\n[gaurds]\n[run]\nranks = true\nseed = -1\n'
        '[data]\ntasks = ["flan", 3]\n[lora]\ntarget_modules = "q_proj"\n'
    )
    found = problems_of(path, sets=["log.evry=2"], environ={"SAVE_EVERY_STEPS": "often"})
    expected = [
        "own.toml: [top]: no such section",
        "optim.lr = 1: no such field",
        'optim.learning_rate = "x": expected a number',
        "did you mean guards?",
        "run.ranks = true: expected a whole number",
        "data.tasks = ['flan', 3]: expected a list of strings",
        "lora.target_modules",
        "SAVE_EVERY_STEPS=often (environment)",
        "did you mean log.every?",
        "run.seed = -1: expected 0 or more",
        "backbone.model is missing",
    ]
    assert len(found) == len(expected), found
    for part in expected:
        assert any(part in problem for problem in found), (part, found)


def test_precedence(write):
    path = write(MINIMAL + "[run]\nsteps_per_epoch = 1\nmax_steps = 1\n")
    environ = {"STEPS_PER_EPOCH": "2", "MODEL_NAME": "", "ATTN_IMPLEMENTATION": "eager"}
    resolved = load_recipe(path, environ=environ, flags={"--max-steps": None})
    assert (resolved.config.run.steps_per_epoch, resolved.config.run.max_steps) == (2, 1)
    assert resolved.from_environment == {
        "run.steps_per_epoch": "STEPS_PER_EPOCH",
        "backbone.attention": "ATTN_IMPLEMENTATION",
    }
    resolved = load_recipe(
        path,
        environ=environ,
        sets=["run.steps_per_epoch=3", "run.max_steps=3", "run.steps_per_epoch=4"],
        flags={"--max-steps": 5},
    )
    assert (resolved.config.run.steps_per_epoch, resolved.config.run.max_steps) == (4, 5)
    assert resolved.origins["run.max_steps"] == "flag --max-steps"
    assert resolved.origins["run.steps_per_epoch"] == "--set"


def test_data_file_is_for_browsecomp_only():
    environ = {"DATA_FILE": "mine.jsonl"}
    assert load_recipe("general", environ=environ).from_environment == {}
    files = load_recipe("browsecomp", environ=environ).config.data.files
    assert files == {"browsecomp_textmas_toolcall": "mine.jsonl"}


def test_a_revision_does_not_outlive_its_model():
    sets = ["backbone.model=other/model"]
    assert load_recipe("general", sets=sets).config.backbone.revision is None
    assert load_recipe("general", sets=[*sets, "backbone.revision=abc"]).config.backbone.revision == "abc"
    assert load_recipe("general").config.backbone.revision is not None


def test_a_name_that_is_not_there():
    assert "did you mean general?" in problems_of("genral")[0]
    assert "browsecomp, demo, demo-generate, general" in problems_of("nothing-like-it")[0]
    assert "no such recipe file" in problems_of("no/such.toml")[0]


@pytest.mark.parametrize("name", ["my run.toml", "a@b.toml", ".toml", "ä.toml"])
def test_a_file_name_that_can_not_name_milestones(write, name):
    assert any("milestones" in problem for problem in problems_of(write(MINIMAL, name)))


@pytest.mark.parametrize("content", [b"[run\n", b"[run]\nseed = 1\nseed = 2\n", b"\xff\xfe"])
def test_a_file_that_is_not_toml(tmp_path, content):
    path = tmp_path / "own.toml"
    path.write_bytes(content)
    assert problems_of(str(path))[0].startswith(f"{path}: not ")


@given(st.text(max_size=40))
def test_any_set_is_a_config_or_a_config_error(text):
    try:
        load_recipe("demo", sets=[text, f"run.seed={text}", f"data.files={text}"])
    except ConfigError as error:
        assert error.problems


def test_the_schema_is_that_of_the_dataclasses():
    shipped = json.loads(resource("schemas", "recipe.schema.json").read_text("utf-8"))
    assert shipped == recipe_schema()


def test_the_shipped_recipes_fit_the_schema():
    import tomllib

    import jsonschema

    validator = jsonschema.Draft202012Validator(recipe_schema())
    for info in list_recipes():
        validator.validate(tomllib.loads(info.path.read_text("utf-8")))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"run": {"seeds": 1}})


def test_the_environment_names_fields_that_exist():
    fields = {f"{section}.{key}" for section, types in sections().items() for key in types}
    assert {".".join(target.split(".")[:2]) for target in ENVIRONMENT.values()} <= fields


@pytest.mark.parametrize(
    "setting",
    ["optim.learning_rate=1e300", "run.seed=99999999999999999999", "backbone.threads_per_rank=100000"],
)
def test_values_that_no_run_could_use_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.split("=", maxsplit=1)[0]):
        load_recipe("demo", sets=[setting])


@pytest.mark.parametrize("text", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "9" * 5000])
def test_a_recipe_that_the_parser_gives_up_on_is_not_toml(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not TOML"):
        load_recipe(str(path))
