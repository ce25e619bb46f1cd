"""The reference's flags: every one is mapped, refused or said by name; parallel-synthesis-train runs what they mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis import compat
from parallel_synthesis.errors import ConfigError
from parallel_synthesis.recipe import load_recipe
from parallel_synthesis.resources import resource
from pscli.compat_train import translate

Ps = Any  # tests/conftest.py, Calls
# formats.md, "`parallel-synthesis-train` flags", word for word.
DOCUMENTED = """--method --model_name --tasks --train_split --train_samples_per_task --browsecomp_textmas_data_file
--device --seed --think --dist_backend --generate_bs --max_new_tokens --temperature --top_p --attn_implementation
--num_epochs --steps_per_epoch --learning_rate --weight_decay --log_every_steps --parallel_kv_train_components
--parallel_kv_mapper_hidden_dim --parallel_kv_mapper_metadata_features --parallel_kv_num_parallel_agents
--parallel_kv_lora_r --parallel_kv_lora_alpha --parallel_kv_lora_dropout --parallel_kv_target_position_logits
--parallel_kv_target_position_logit_chunk_size --parallel_kv_skip_train_if_total_tokens_exceed
--parallel_kv_skip_train_if_live_tokens_exceed --parallel_kv_skip_train_if_attention_area_exceed
--parallel_kv_save_dir --parallel_kv_load_dir --resume_from_global_step --parallel_kv_save_every_steps --run_name
--output_root --fixed_parallel_kv_cache_max_tokens_per_text
--fixed_parallel_kv_skip_train_if_cache_total_prefill_tokens_exceed""".split()
# flag, value -> field, value in the config
MAPPED: list[tuple[str, str, str, Any]] = [
    ("method", "parallel_kv", "run.method", "parallel_kv"),
    ("model_name", "Qwen/Qwen3-0.6B", "backbone.model", "Qwen/Qwen3-0.6B"),
    ("train_split", "validation", "data.split", "validation"),
    ("train_samples_per_task", "40", "data.max_rows", 40),
    ("train_samples_per_task", "-1", "data.max_rows", None),
    ("device", "cuda:1", "backbone.device", "cuda:1"),
    ("seed", "7", "run.seed", 7),
    ("generate_bs", "3", "data.batch_size", 3),
    ("max_new_tokens", "17", "workers.max_new_tokens", 17),
    ("temperature", "0", "workers.temperature", 0.0),
    ("top_p", "0.5", "workers.top_p", 0.5),
    ("attn_implementation", "eager", "backbone.attention", "eager"),
    ("num_epochs", "2", "run.epochs", 2),
    ("steps_per_epoch", "2", "run.steps_per_epoch", 2),
    ("steps_per_epoch", "0", "run.steps_per_epoch", None),
    ("learning_rate", "3e-4", "optim.learning_rate", 3e-4),
    ("weight_decay", "0.01", "optim.weight_decay", 0.01),
    ("log_every_steps", "10", "log.every", 10),
    ("parallel_kv_train_components", "lora_only", "run.components", "lora_only"),
    ("parallel_kv_mapper_hidden_dim", "16", "mapper.hidden_dim", 16),
    ("parallel_kv_mapper_metadata_features", "length", "mapper.metadata_features", "length"),
    ("parallel_kv_num_parallel_agents", "5", "workers.count", 5),
    ("parallel_kv_lora_r", "8", "lora.r", 8),
    ("parallel_kv_lora_alpha", "64.0", "lora.alpha", 64),
    ("parallel_kv_lora_dropout", "0.1", "lora.dropout", 0.1),
    ("parallel_kv_skip_train_if_total_tokens_exceed", "20000", "guards.total_tokens", 20000),
    ("parallel_kv_skip_train_if_live_tokens_exceed", "1800", "guards.live_tokens", 1800),
    ("parallel_kv_skip_train_if_attention_area_exceed", "20000000", "guards.attention_area", 20000000),
    ("parallel_kv_save_every_steps", "0", "checkpoint.every", 0),
    ("parallel_kv_save_every_steps", "-1", "checkpoint.every", 0),
    ("fixed_parallel_kv_skip_train_if_cache_total_prefill_tokens_exceed", "13000", "guards.prefill_tokens", 13000),
]  # fmt: skip
SAID = {
    "dist_backend": "nccl",
    "run_name": "a",
    "output_root": "b",
    "parallel_kv_target_position_logits": "true",
    "parallel_kv_target_position_logit_chunk_size": "64",
}
BASE = ["--model_name", "m", "--tasks", "flan"]
BASE_SETS = ["backbone.model=m", "data.tasks=flan"]


def test_every_documented_flag_is_known() -> None:
    assert {f"--{name}" for name in compat.FLAGS} == set(DOCUMENTED)
    covered = {flag for flag, *_ in MAPPED} | SAID.keys()
    others = {
        "tasks", "think", "browsecomp_textmas_data_file", "parallel_kv_save_dir", "parallel_kv_load_dir",
        "resume_from_global_step", "fixed_parallel_kv_cache_max_tokens_per_text",
    }  # fmt: skip
    assert covered | others == compat.FLAGS.keys()  # the others have tests of their own below


def config_of(*words: str) -> Any:
    call, _ = translate([*BASE, *words], torchrun=(), environ={})
    sets = [call[at + 1] for at, word in enumerate(call) if word == "--set"]
    return load_recipe(call[1], sets=sets).config


@pytest.mark.parametrize(("flag", "value", "field", "expected"), MAPPED)
def test_mapped(flag: str, value: str, field: str, expected: Any) -> None:
    section, key = field.split(".")
    plain = getattr(getattr(config_of(), section), key)
    for words in ([f"--{flag}", value], [f"--{flag}={value}"]):
        found = getattr(getattr(config_of(*words), section), key)
        assert (found, type(found)) == (expected, type(expected))
    if value not in ("-1", "0") and flag != "model_name":
        assert plain != expected  # the flag makes the difference, not a default


@pytest.mark.parametrize(
    "written", [["flan", "LMSYS", "2wiki"], ["flan,lmsys,2wiki"], ["flan, lmsys", "2wiki"]]
)
def test_tasks(written: list[str]) -> None:
    assert config_of("--tasks", *written).data.tasks == ("flan", "lmsys_chat", "2wiki_multihopqa")


def test_think_and_the_data_file() -> None:
    assert config_of().workers.think is False
    assert config_of("--think", "--seed", "3").workers.think is True
    assert config_of("--think", "false").workers.think is False
    assert config_of("--no-think").workers.think is False
    files = config_of("--browsecomp_textmas_data_file", "own dir/a.jsonl").data.files
    assert files == {"browsecomp_textmas_toolcall": "own dir/a.jsonl"}


@pytest.mark.parametrize(("flag", "value"), SAID.items())
def test_said_by_name(flag: str, value: str) -> None:
    _, warnings = translate([*BASE, f"--{flag}", value], torchrun=(), environ={})
    assert len(warnings) == 1
    assert warnings[0].startswith(f"--{flag} has no effect: ")


def test_cutting_texts_is_refused_unless_it_is_off() -> None:
    name = "--fixed_parallel_kv_cache_max_tokens_per_text"
    assert translate([*BASE, name, "-1"], torchrun=(), environ={})[1] == []
    with pytest.raises(ConfigError, match=f"{name} 512: texts are never cut here"):
        translate([*BASE, name, "512"], torchrun=(), environ={})


def test_all_problems_together_and_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        translate(
            ["--model_nam", "m", "--seed", "x", "--parallel_kv_lora_r=1.5", "--resume_from_global_step", "4",
             "--think=maybe", "--tasks"], torchrun=(), environ={},
        )  # fmt: skip
    assert caught.value.problems == (
        "--model_nam: no such flag; did you mean --model_name?",
        "--tasks: a value is missing",
        "--seed x: expected a whole number",
        "--parallel_kv_lora_r 1.5: expected a whole number",
        "--think maybe: expected true or false",
        "--resume_from_global_step needs --parallel_kv_load_dir, the checkpoint of that step",
    )


def test_a_value_that_does_not_fit_is_told_by_the_flag_that_was_typed() -> None:
    with pytest.raises(ConfigError) as caught:
        translate([*BASE, "--method", "nope", "--attn_implementation=spda"], torchrun=(), environ={})
    assert caught.value.problems == (
        "--method nope: expected one of fixed_parallel_kv, parallel_kv",
        "--attn_implementation spda: expected one of sdpa, eager, flash_attention_2; did you mean sdpa?",
    )


def test_what_ends_a_run_before_max_steps_is_named(ps: Ps, world: dict[str, Any], tmp_path: Path) -> None:
    warned = "warning: run.max_steps = 99 is beyond "
    short = ps(
        "train", world["recipe"], "--out", tmp_path / "a", "--max-steps", 99, "--set", "run.steps_per_epoch=1"
    )
    assert short.returncode == 0, short.stderr
    assert f"{warned}the run's end by run.steps_per_epoch = 1: " in short.stderr
    assert "raise run.steps_per_epoch or run.epochs to go on" in short.stderr
    whole = ps("train", world["recipe"], "--out", tmp_path / "b", "--max-steps", 99)
    assert f"{warned}the data: " in whole.stderr and "; raise run.epochs to go on" in whole.stderr


def test_ranks_are_the_number_of_processes_unless_a_recipe_or_set_says_them() -> None:
    def ranks(*words: str, environ: dict[str, str] | None = None) -> list[str]:
        out = ["--parallel_kv_save_dir", "o"]
        call, _ = translate([*BASE, *out, *words], torchrun=(), environ=environ or {})
        return [word for word in call if word.startswith("run.ranks")]

    assert ranks() == ["run.ranks=1"]
    assert ranks("--nproc", "4") == ["run.ranks=4"]
    assert ranks(environ={"WORLD_SIZE": "8"}) == ["run.ranks=8"]
    assert ranks("--nproc", "4", "--set", "run.ranks=8") == ["run.ranks=4", "run.ranks=8"]  # the last counts
    assert ranks("--nproc", "4", "--recipe", "general") == []


def test_the_directory_without_a_save_dir() -> None:
    call, _ = translate(["--model_name", "a/b", "--tasks", "flan,dta"], torchrun=(), environ={})
    out = call[call.index("--out") + 1]
    prefix = "checkpoints/mixed_train_fixed_parallel_kv_flan-dta_tool_a-b_"
    assert out.startswith(prefix)
    date, _, clock = out.removeprefix(prefix).partition("_")
    assert (len(date), len(clock), (date + clock).isdigit()) == (8, 6, True)
    with pytest.raises(ConfigError, match="parallel_kv_save_dir is missing"):
        translate(BASE, torchrun=(), environ={"WORLD_SIZE": "2"})


def test_a_record_says_what_it_can_not_carry() -> None:
    said = compat.settings({"seed": 5, "shiny": 3, "unused": None, "dist_backend": "nccl"}, recorded=True)
    assert said.fields == {"run.seed": 5}
    assert said.warnings == ["shiny = 3: not a flag that is known here; it has no effect"]
    assert said.problems == []


SCRIPT = "import sys; from pscli.compat_train import main; sys.exit(main(sys.argv[1:]))"


def flags_of(world: dict[str, Any], **over: Any) -> list[str]:
    words = []
    for name, value in (world["flags"] | over).items():
        if value is not None and value is not False:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def test_it_trains_what_ps_train_trains(ps: Ps, world: dict[str, Any], hashes: Any, tmp_path: Path) -> None:
    out, root = tmp_path / "flags", f"data.root={world['root']}"
    more = ["--num_epochs", "1", "--set", "run.ranks=4", "--set", root]
    result = ps(*flags_of(world, parallel_kv_save_dir=out), *more, script=SCRIPT, env={"NO_COLOR": "1"})
    assert result.returncode == 0, result.stderr
    assert "warning: --dist_backend has no effect" in result.stderr
    ours = tmp_path / "ours"
    assert ps("train", world["recipe"], "--out", ours, "--set", "run.epochs=1").returncode == 0
    assert hashes(out) == hashes(ours)
    argv = json.loads((out / "run_args.json").read_text())["argv"]
    assert argv[:2] == ["parallel-synthesis-train", "--method"]


def test_it_goes_on_exactly_in_place_in_a_new_run_or_with_the_order_alone(
    ps: Ps, world: dict[str, Any], hashes: Any, tmp_path: Path
) -> None:
    root = ["--set", f"data.root={world['root']}"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    flags = flags_of(world, num_epochs=1)
    result = ps(*flags, "--set", "run.ranks=2", "--parallel_kv_save_dir", whole, *root, script=SCRIPT)
    assert result.returncode == 0, result.stderr
    resume = ["--parallel_kv_load_dir", whole, "--resume_from_global_step", "8"]
    into_new = ps(*flags, *resume, "--parallel_kv_save_dir", part, *root, script=SCRIPT)
    assert into_new.returncode == 0, into_new.stderr
    assert hashes(part) == hashes(whole)
    in_place = ps(*flags, *resume, "--parallel_kv_save_dir", whole, *root, script=SCRIPT)
    assert in_place.returncode == 0, in_place.stderr
    assert "reproduced" in in_place.stderr
    assert hashes(part) == hashes(whole)
    wrong = ps(*flags, *resume[:-1], "3", "--parallel_kv_save_dir", tmp_path / "x", *root, script=SCRIPT)
    assert wrong.returncode == 2
    assert "has no training state of step 3; there are those of: 0, 8, 10" in wrong.stderr
    bare = tmp_path / "bare"
    for name in (
        "cache_mapper.pt",
        "judger_lora/adapter_model.safetensors",
        "judger_lora/adapter_config.json",
    ):
        (bare / name).parent.mkdir(parents=True, exist_ok=True)
        (bare / name).write_bytes((whole / "step_checkpoints/step_000000008" / name).read_bytes())
    resume = ["--parallel_kv_load_dir", bare, "--resume_from_global_step", "8", "--nproc", "2"]
    order = ps(*flags, *resume, "--parallel_kv_save_dir", tmp_path / "order", *root, script=SCRIPT)
    assert order.returncode == 0, order.stderr
    assert "this continuation is not exact" in order.stderr
    assert " step=9 " in (tmp_path / "order" / "train.log").read_text().splitlines()[1]


def test_a_reference_checkpoint_goes_on_with_the_same_command_line(
    ps: Ps, whole: Path, world: dict[str, Any], reference_run: Any, hashes: Any, tmp_path: Path
) -> None:
    """As its users resume: all flags again, and without the run's own record they alone say what it is."""
    theirs = reference_run(whole, tmp_path / "theirs", world["flags"], steps=(6,))
    (theirs / "run_args.json").unlink()
    out = tmp_path / "ours"
    result = ps(
        *flags_of(world), "--parallel_kv_load_dir", theirs / "step_checkpoints" / "step_000000006",
        "--resume_from_global_step", 6, "--parallel_kv_save_dir", out,
        "--set", f"data.root={world['root']}", "--max-steps", 15, script=SCRIPT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert hashes(out) == hashes(whole)


def test_help_names_every_flag(environment: dict[str, str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pscli.compat_train", "--help"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert all(f"--{name} " in result.stdout for name in compat.FLAGS)
    line = {text.split()[0]: text for text in result.stdout.splitlines() if text.startswith("  --")}
    for flag, flags in compat.FLAGS.items():  # what has no effect says so
        assert (" ignored: " in line[f"--{flag}"]) == bool(flags.why and not flags.refused)
    assert " refused above 0: " in line["--fixed_parallel_kv_cache_max_tokens_per_text"]
    assert {"--recipe", "--out", "--nproc", "--set"} <= line.keys()
    defaults = load_recipe(str(resource("recipes", "training", "mixed_train.toml")), sets=BASE_SETS).config
    for flag, given in compat.FLAGS.items():
        section, _, key = (given.target or "").partition(".")
        value = getattr(getattr(defaults, section), key) if key and "." not in key else None
        if isinstance(value, str | float | int) and section != "guards" and flag != "model_name":
            assert line[f"--{flag}"].endswith(f" [{str(value).lower() if value is False else value}]")
    loaded = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not {"torch", "transformers", "jsonschema"} & loaded
    assert os.environ.get("RANK") is None
