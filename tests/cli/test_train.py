"""`ps train`: list, show, plan, refuse early, and one whole run with its output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from parallel_synthesis.config import Config
from parallel_synthesis.recipe import load_recipe


def files_below(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


def test_list(ps):
    done = ps("train", "--list")
    names = ["browsecomp", "demo", "demo-generate", "general"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == names
    recipes = json.loads(ps("train", "--list", "--json").stdout)["recipes"]
    assert [recipe["name"] for recipe in recipes] == names
    assert "220,220 global steps" in recipes[-1]["summary"]


def test_show_is_a_recipe_again(ps, tmp_path):
    done = ps("train", "general", "--show", "--set", 'lora.target_modules=["a\\"b"]', "--device", "cpu")
    assert done.returncode == 0
    again = tmp_path / "again.toml"
    again.write_text(done.stdout, "utf-8")
    first = load_recipe("general", sets=['lora.target_modules=["a\\"b"]'], flags={"--device": "cpu"}).config
    second = load_recipe(str(again)).config
    assert {**first.to_dict(), "recipe": ""} == {**second.to_dict(), "recipe": ""}


def test_show_gives_every_field_its_origin(ps):
    done = ps(
        "train", "general", "--show", "--json", "--set", "run.seed=7", "--max-steps", "9",
        env={"MODEL_NAME": "Qwen/Qwen3-0.6B", "SAVE_EVERY_STEPS": "50", "DATA_FILE": "no-such-task-here"},
    )  # fmt: skip
    document = json.loads(done.stdout)
    config = Config().to_dict()
    fields = {
        f"{section}.{key}" for section, values in config.items() if section != "recipe" for key in values
    }
    assert set(document["origins"]) == fields
    expected = {
        "run.seed": ("--set", 7),
        "run.max_steps": ("flag --max-steps", 9),
        "backbone.model": ("environment MODEL_NAME", "Qwen/Qwen3-0.6B"),
        "backbone.revision": ("default, since environment MODEL_NAME replaces the model", None),
        "checkpoint.every": ("environment SAVE_EVERY_STEPS", 50),
        "checkpoint.keep_last": ("default", 2),
        "run.ranks": ("recipe", 4),
        "data.files": ("default", {}),
    }
    for name, (origin, value) in expected.items():
        section, key = name.split(".")
        assert (document["origins"][name], document["config"][section][key]) == (origin, value)
    assert done.stderr.splitlines() == [
        "warning: backbone.model is taken from the environment variable MODEL_NAME",
        "warning: checkpoint.every is taken from the environment variable SAVE_EVERY_STEPS",
    ]


def test_a_dry_run_plans_without_data_and_writes_nothing(ps, tmp_path):
    before = files_below(tmp_path)
    done = ps("train", "general", "--dry-run", "--rows-at", "95060", "--json", "--out", "runs/x")
    assert done.returncode == 0
    assert files_below(tmp_path) == before
    document = json.loads(done.stdout)
    planned = document["plan"]
    assert planned["total_steps"] == 220220
    assert {task["rows_from"] for task in planned["tasks"]} == {"manifest"}
    assert sum(task["steps"] for task in planned["tasks"]) == 220220
    assert [item["name"] for item in planned["milestones"]] == ["general_step_95060", "general_step_176175"]
    assert len([text for text in planned["missing"] if text.startswith("data of task")]) == 8
    assert document["rows_at"]["step"] == 95060
    assert [rank["rank"] for rank in document["rows_at"]["ranks"]] == [0, 1, 2, 3]


def test_a_dry_run_for_a_human(ps):
    shown = ps("train", "browsecomp", "--dry-run", "--rows-at", "302").stdout
    for text in (
        "1,211",
        "302 global steps",
        "rows dropped",
        "missing     data of task browsecomp",
        "step 302",
    ):
        assert text in shown


def test_a_dry_run_ends_as_the_start_would_where_rows_are_refused(ps, small, tmp_path):
    row = {"question": "q", "gold": "g", "agent_reference_contexts": ["c"]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4 + "{}\n")
    done = ps("train", small, "--dry-run", "--rows-at", "1")
    assert done.returncode == 2
    assert "refused     " in done.stdout and f"{tmp_path}/rows.jsonl:5: question: expected" in done.stdout
    assert (
        done.stderr == f"error: a start would be refused: {tmp_path}/rows.jsonl: 1 of 5 rows are not valid\n"
    )
    done = ps("train", small, "--dry-run", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["ok"], document["exit_code"]) == (2, False, 2)
    assert document["error"]["type"] == document["plan"]["refused"][0]["type"] == "DataError"
    assert "rows.jsonl:5" in document["error"]["message"] and "rows.jsonl:5" in done.stderr
    assert document["plan"]["ranks"] == 4
    assert ps("train", small, "--dry-run", "--set", "data.on_bad_row=skip").returncode == 0


@pytest.mark.parametrize("step", ["0", "303"])
def test_a_step_outside_the_run_is_refused(ps, step):
    done = ps("train", "browsecomp", "--rows-at", step)
    assert done.returncode == 2
    assert "expected 1 to 302" in done.stderr


def test_missing_data_is_refused_all_at_once_before_torch(ps):
    done = ps("train", "general")
    assert done.returncode == 2
    assert done.stderr.count("data of task") == 8
    assert "ps train general --dry-run" in done.stderr


@pytest.fixture
def small(tmp_path):
    """A recipe whose inputs are there, as far as a look can tell."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "backbone").mkdir()
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        f'[backbone]\nmodel = "{tmp_path}/backbone"\n'
        f'[data]\ntasks = ["own"]\nroot = "{tmp_path}"\nfiles = {{ own = "rows.jsonl" }}\n'
    )
    return recipe


def test_a_run_that_exists_is_refused_with_the_command_to_use(ps, tmp_path, small):
    out = tmp_path / "out"
    (out / "step_checkpoints").mkdir(parents=True)
    for more in ([], ["--nproc", "2"]):
        done = ps("train", str(small), "--out", str(out), *more, "--json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["error"]["type"] == "RunExistsError"
        assert f"ps resume {out}" in done.stderr
        assert "--overwrite" in done.stderr


def test_an_init_that_is_no_checkpoint_is_refused(ps, small):
    done = ps("train", str(small), "--init", "no/such/run")
    assert done.returncode == 2
    assert "no/such/run" in done.stderr


def test_a_whole_run(ps, tmp_path, tiny_recipe):
    held_out = {"files": {"first": "second.jsonl"}, "max_rows": 4, "blind_floor": 1.25}
    recipe = tiny_recipe(evaluate=held_out, checkpoint={"every": 2, "milestones": [3]})
    done = ps("train", str(recipe), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    shown = done.stdout
    for text in ("trained tiny: 5 steps, 5 updates, 0 skipped", "before", "after, branches removed", "1.2500",
                 "judger_lora", f"{tmp_path}/run@tiny_step_3"):  # fmt: skip
        assert text in shown
    assert "step 5/5" in done.stderr

    again = ps("train", str(recipe), "--out", str(tmp_path / "run"), "--json")
    assert again.returncode == 2
    quiet = ps("train", str(recipe), "--out", str(tmp_path / "run"), "--overwrite", "--json", "--quiet")
    assert quiet.returncode == 0, quiet.stderr
    document = json.loads(quiet.stdout)
    assert document["result"]["step"] == document["result"]["total_steps"] == 5
    assert [item["when"] for item in document["result"]["evaluations"]] == [
        "before",
        "after",
        "after, branches removed",
    ]
    assert len(list(tmp_path.glob("run.old-*"))) == 1


def test_a_run_of_one_step_and_what_may_be_asked_of_it(ps, tmp_path):
    out = tmp_path / "short"
    done = ps("train", "demo", "--out", out, "--max-steps", "1", "--set", "evaluate.files={}")
    assert done.returncode == 0, done.stderr
    assert "demo: 1 step, 4 ranks" in done.stderr
    assert "trained demo: 1 step, 1 update, 0 skipped" in done.stdout
    assert f"ps verify {out} --replay 1\n" in done.stdout  # no more than there are
    assert ": 1 update, 0 skipped" in ps("inspect", out).stdout
    other = ps("train", "demo", "--out", tmp_path / "other", "--init", out, "--set", "lora.r=8")
    assert (other.returncode, "r = 16, expected 8, the run's lora.r; set that to 16" in other.stderr) == (
        2,
        True,
    )
    modules = ps(
        "train", "demo", "--out", tmp_path / "other", "--init", out, "--set", "lora.target_modules=[q_proj]"
    )
    assert "expected ['q_proj'], the run's lora.target_modules; set that to ['k_proj', " in modules.stderr
    assert ps("snapshot", out, "--name", "mine").returncode == 0
    drop = ps("snapshot", f"{out}@mine", "--drop", "mine", "--yes")
    assert drop.returncode == 2
    assert f"here the run is meant, {out}: `ps snapshot {out} --drop mine` removes it" in drop.stderr


def test_a_whole_run_on_two_processes(ps, tmp_path, tiny_recipe):
    recipe = tiny_recipe()
    done = ps("train", str(recipe), "--out", str(tmp_path / "run"), "--nproc", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["step"] == 5
    argv = json.loads((tmp_path / "run" / "run_args.json").read_text())["argv"]
    assert argv[-3:] == ["--nproc", "2", "--json"]


@pytest.mark.parametrize("more", [[], ["--nproc", "2"]])
def test_a_signal_stops_a_run_after_a_save(tmp_path, tiny_recipe, clean_environment, more):
    recipe = tiny_recipe(run={"epochs": 10_000}, checkpoint={"every": 1000})
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "pscli", "train", str(recipe), "--out", str(out), "--json", *more],
        cwd=tmp_path,
        env=clean_environment(PARALLEL_SYNTHESIS_CACHE=str(tmp_path / "cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 100
    while not (out / "train.log").exists() or "step=2 " not in (out / "train.log").read_text():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    document = json.loads(stdout)
    assert (document["exit_code"], document["error"]["type"]) == (75, "StoppedError")
    assert "stopped by SIGTERM" in stderr
    last = (out / "train.log").read_text().splitlines()[-1]
    assert last.startswith("[stop] signal=SIGTERM step=")
    assert (out / last.rsplit("checkpoint=", 1)[1] / "manifest.json").exists()


def test_shipped_recipes_are_toml_with_the_releases_figures():
    general = load_recipe("general").config
    browsecomp = load_recipe("browsecomp").config
    assert (general.guards.prefill_tokens, general.guards.live_tokens) == (13000, 1800)
    assert (browsecomp.guards.prefill_tokens, browsecomp.guards.live_tokens) == (25000, 1500)
    for config in (general, browsecomp):
        assert (config.guards.attention_area, config.guards.total_tokens) == (20_000_000, 20_000)
        assert config.backbone.model == "Qwen/Qwen3-14B"
        assert config.backbone.revision == "40c069824f4251a91eefaf281ebe4c544efd3e18"
        assert (config.run.seed, config.run.ranks, config.run.epochs, config.data.batch_size) == (42, 4, 1, 1)
        assert (config.optim.learning_rate, config.optim.weight_decay, config.checkpoint.every) == (
            1e-4,
            0.0,
            5,
        )
        assert (config.lora.r, config.lora.alpha, config.lora.dropout) == (16, 32, 0.0)
        assert config.lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
        assert (config.mapper.hidden_dim, config.mapper.metadata_features) == (32, "both")
    assert general.checkpoint.milestones == (95060, 176175)
    assert tomllib.loads(load_recipe("demo").path.read_text())["backbone"]["model"].startswith("package:")
