"""The plan of a run: counts, where they come from, and that planning leaves no trace."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest

from parallel_synthesis.checkpoint.layout import RunPaths
from parallel_synthesis.data.index import open_rows
from parallel_synthesis.data.tasks import Task
from parallel_synthesis.errors import ConfigError, DataError, RunExistsError
from parallel_synthesis.recipe import load_recipe
from parallel_synthesis.training.plan import (
    missing_inputs,
    plan,
    refuse_existing,
    rows_at,
)
from parallel_synthesis.training.task_names import with_canonical_tasks

ROWS = {"a": 13, "b": 6}


def row(number: int) -> str:
    return json.dumps(
        {"question": f"q{number}", "gold": "g", "references": [], "agent_reference_contexts": ["c"]}
    )


@pytest.fixture
def config(tmp_path):
    """A config of two own tasks with 13 and 6 rows; 4 ranks."""
    for task, count in ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text("".join(row(i) + "\n" for i in range(count)), "utf-8")
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    shapes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 4}
    (backbone / "config.json").write_text(json.dumps(shapes))
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'[backbone]\nmodel = "{backbone}"\n[lora]\nr = 2\n'
        f'[data]\ntasks = ["a", "b"]\nroot = "{tmp_path}"\nfiles = {{ a = "a.jsonl", b = "b.jsonl" }}\n'
    )

    def make(*sets: str):
        return load_recipe(str(recipe), sets=sets, complete=with_canonical_tasks).config

    return make


def by_hand(
    rows: dict[str, int], *, ranks: int, batch: int, seed: int, step: int
) -> list[tuple[str, tuple[int, ...]]]:
    """The reference's order with plain lists: batches of global step `step` (from 1) of the first epoch."""
    rng = random.Random(seed)
    groups = []
    for task, count in rows.items():
        numbers = list(range(count))
        rng.shuffle(numbers)
        batches = [(task, tuple(numbers[i : i + batch])) for i in range(0, count, batch)]
        groups += [batches[i : i + ranks] for i in range(0, len(batches) - ranks + 1, ranks)]
    rng.shuffle(groups)
    return groups[step - 1]


def test_counts(config, tmp_path):
    cache = tmp_path / "cache"
    planned = plan(config("checkpoint.every=2", "checkpoint.milestones=3,9"), cache=cache, out=tmp_path)
    assert [(t.task, t.rows, t.rows_from, t.steps, t.dropped_rows) for t in planned.tasks] == [
        ("a", 13, "indexed", 3, 1),
        ("b", 6, "indexed", 1, 2),
    ]
    assert (planned.steps_per_epoch, planned.total_steps) == (4, 4)
    assert planned.saves is not None
    assert (planned.saves.count, planned.saves.first, planned.saves.last) == (4, 0, 4)  # 0, 2, 3, 4
    assert [(m.name, m.reached) for m in planned.milestones] == [("own_step_3", True), ("own_step_9", False)]
    assert any("milestone 9" in text for text in planned.warnings)
    assert planned.missing == ()
    lora = 2 * 4 * 2 * (8 + 8)  # layers x modules x r x (in + out)
    assert planned.trainable_parameters == lora + 260
    assert planned.disk is not None
    assert planned.disk.checkpoint > 12 * (lora + 260)
    assert planned.disk.needed == planned.disk.checkpoint * planned.saves.kept
    assert not cache.exists()


@pytest.mark.parametrize(
    ("sets", "per_epoch", "total"),
    [
        (["run.epochs=3"], 4, 12),
        (["run.epochs=3", "run.max_steps=5"], 4, 5),
        (["run.steps_per_epoch=2", "run.epochs=2"], 2, 4),
        (["run.steps_per_epoch=9"], 4, 4),
        (["run.max_steps=99"], 4, 4),
        (["data.max_rows=4"], 2, 2),
        (["run.ranks=1", "data.batch_size=4"], 6, 6),
    ],
)
def test_steps(config, tmp_path, sets, per_epoch, total):
    planned = plan(config(*sets), cache=tmp_path / "cache")
    assert (planned.steps_per_epoch, planned.total_steps) == (per_epoch, total)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_rows_at_equals_the_order_by_hand(config, tmp_path, step):
    settings = config("run.seed=11")
    found = rows_at(settings, plan(settings, cache=tmp_path / "cache"), step)
    assert [(r.task, r.rows) for r in found] == by_hand(ROWS, ranks=4, batch=1, seed=11, step=step)
    assert [r.rank for r in found] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [0, 5])
def test_rows_at_outside_the_run(config, tmp_path, step):
    settings = config()
    with pytest.raises(DataError, match="expected 1 to 4"):
        rows_at(settings, plan(settings, cache=tmp_path / "cache"), step)


def test_a_cached_index_is_used_and_left_alone(config, tmp_path):
    cache = tmp_path / "cache"
    open_rows(Task(name="a", usual_file=None, own=True), tmp_path / "a.jsonl", cache=cache).close()
    before = sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*"))
    planned = plan(config(), cache=cache)
    assert [t.rows_from for t in planned.tasks] == ["cached index", "indexed"]
    assert sorted((path, path.stat().st_mtime_ns) for path in cache.rglob("*")) == before


def test_a_gzip_file_is_planned_without_a_trace(config, tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    planned = plan(config("data.files.a=a.jsonl.gz"), cache=tmp_path / "cache")
    assert planned.tasks[0].rows == 13
    assert not (tmp_path / "cache").exists()


def test_bad_rows(config, tmp_path):
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write("{}\n")
    refused = plan(config(), cache=tmp_path / "cache")
    assert refused.total_steps is None
    assert ["b.jsonl:7" in str(error) for error in refused.refused] == [True]
    assert refused.missing == ()
    with pytest.raises(DataError, match="unknown"):
        rows_at(config(), refused, 1)
    skipped = plan(config("data.on_bad_row=skip"), cache=tmp_path / "cache")
    assert skipped.refused == ()
    assert [(t.rows, t.bad_rows) for t in skipped.tasks] == [(13, 0), (6, 1)]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_data_that_is_no_file_is_refused_as_a_start_would(config, tmp_path, make):
    (tmp_path / "b.jsonl").unlink()
    make(tmp_path / "b.jsonl")
    (error,) = plan(config(), cache=tmp_path / "cache").refused
    assert "b.jsonl: expected a .jsonl or .jsonl.gz file for task b, found" in str(error)


def test_extracts_that_are_not_the_end_of_their_context_are_told(config, tmp_path):
    contexts = {"agent_reference_contexts": ["one two", "three"], "agent_extract_contexts": ["one", "three"]}
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(json.dumps({"question": "q", "gold": "g", **contexts}) + "\n")
    (warning,) = plan(config(), cache=tmp_path / "cache").warnings
    assert warning.startswith(
        "b: 1 branch in 1 row has an extract that is not the end of its context (first in line 7). The end of"
    )
    assert plan(config("data.max_rows=6"), cache=tmp_path / "cache").warnings == ()
    (error,) = plan(config("data.max_rows=3"), cache=tmp_path / "cache").refused  # a start says the same
    assert str(error).startswith("no task has the 4 rows that one step takes")
    generated = config("run.method=parallel_kv")  # where the branches of the file are not read
    assert plan(generated, cache=tmp_path / "cache").warnings == ()


def test_own_data_that_is_absent_has_no_count(config, tmp_path):
    (tmp_path / "b.jsonl").unlink()
    planned = plan(config(), cache=tmp_path / "cache")
    assert (planned.tasks[1].rows, planned.tasks[1].rows_from) == (None, "unknown")
    assert planned.total_steps is None
    assert len(planned.missing) == 1
    assert str(tmp_path / "b.jsonl") in planned.missing[0]


def test_the_general_mix_from_its_manifest(tmp_path):
    settings = load_recipe("general", sets=[f"data.root={tmp_path}"], complete=with_canonical_tasks).config
    planned = plan(settings, cache=tmp_path)
    assert planned.total_steps == 220220
    assert sum(t.rows or 0 for t in planned.tasks) == 880895
    assert planned.trainable_parameters == 20_971_520 + 260
    assert planned.disk is not None
    assert 251_000_000 < planned.disk.checkpoint < 253_000_000  # 84 MB adapter, 168 MB of moments
    other = load_recipe(
        "general", sets=[f"data.root={tmp_path}", "data.files.flan=mine.jsonl"], complete=with_canonical_tasks
    ).config
    assert plan(other, cache=tmp_path).tasks[6].rows is None  # not the file that the manifest counts


def test_browsecomp_from_its_manifest(tmp_path):
    settings = load_recipe("browsecomp", sets=[f"data.root={tmp_path}"], complete=with_canonical_tasks).config
    assert plan(settings, cache=tmp_path).total_steps == 302


def test_task_names(tmp_path):
    def load(*sets: str):
        return load_recipe("general", sets=sets, complete=with_canonical_tasks).config

    aliases = load("data.tasks=LMSYS,2wiki,toucan-single", "data.files.2wiki=x.jsonl")
    assert aliases.data.tasks == ("lmsys_chat", "2wiki_multihopqa", "toucan_single_parallel")
    assert aliases.data.files == {"2wiki_multihopqa": "x.jsonl"}
    for sets, expected in [
        (["data.tasks=flann"], "did you mean flan"),
        (["data.tasks=lmsys,lmsys_chat"], "more than once, by different names"),
        (["data.files.LMSYS=x", "data.files.lmsys_chat=y"], r"data\.files names lmsys_chat more than once"),
        (
            ["evaluate.files.2wiki=x", "evaluate.files.2WIKI=x"],
            r"evaluate\.files names 2wiki_multihopqa more",
        ),
        (
            ["data.files.wildchatt=x"],
            r"data\.files\.wildchatt: no such task in data\.tasks; did you mean wildchat\?",
        ),
        (
            ["evaluate.files.flann=x"],
            r"evaluate\.files\.flann: no such task in data\.tasks; did you mean flan\?",
        ),
        (
            ["data.files.mine=x"],
            r"data\.files\.mine: no such task in data\.tasks; expected one of them \(wildchat",
        ),
    ]:
        with pytest.raises(ConfigError, match=expected):
            load(*sets)


def test_files_of_tasks_that_a_run_does_not_take(config):
    """A typo would read another file, or none, unseen; but a shared recipe may name files of more tasks."""
    taken = config(
        "data.tasks=a", "data.files.flan=x.jsonl"
    ).data  # b is a task of the recipe, flan a known one
    assert (taken.tasks, set(taken.files)) == (("a",), {"a", "b", "flan"})
    config("data.files.other=o.jsonl", "evaluate.files.other=held.jsonl")  # held out, not trained on
    with pytest.raises(ConfigError) as refused:
        config("data.files.aa=x", "evaluate.files.bb=x")
    assert refused.value.problems == (
        "data.files.aa: no such task in data.tasks; did you mean a?",
        "evaluate.files.bb: no such task in data.tasks; did you mean b?",
    )
    with pytest.raises(ConfigError) as refused:  # one problem, not two
        config("data.tasks=aa,b", "data.files={aaa = 'x', b = 'y'}")
    assert [problem.split(".")[0] for problem in refused.value.problems] == ["data"]
    assert "there is no task 'aa' (did you mean aaa?)" in refused.value.problems[0]


def test_missing_inputs(config, tmp_path):
    assert missing_inputs(config()) == []
    settings = config(
        "evaluate.files.a=held.jsonl", f"backbone.model={tmp_path}/none", "data.files.a=no.jsonl"
    )
    found = missing_inputs(settings)
    assert len(found) == 3
    assert "held.jsonl" in found[1]


def test_what_an_out_directory_may_hold(tmp_path):
    refuse_existing(RunPaths(tmp_path / "new"))
    (tmp_path / "empty").mkdir()
    refuse_existing(RunPaths(tmp_path / "empty"))
    (tmp_path / "empty" / "notes.txt").touch()
    with pytest.raises(RunExistsError, match="not an empty directory"):
        refuse_existing(RunPaths(tmp_path / "empty"))
    for name in ("run_args.json", "train.log", "step_checkpoints"):
        out = tmp_path / name.split(".")[0]
        out.mkdir()
        (out / name).touch()
        with pytest.raises(RunExistsError, match="ps resume"):
            refuse_existing(RunPaths(out))
