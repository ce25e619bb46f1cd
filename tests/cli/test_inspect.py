"""`ps inspect` on real runs: figures against the summary, steps, comparisons, coverage, files, and the page in a browser."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance.schema import problems

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
GUARD = 84  # prefill tokens: skips some steps of the tiny recipe, not all


@pytest.fixture(scope="module")
def recipe(module_recipe: Callable[..., Path]) -> Path:
    return module_recipe(
        run={"epochs": 4}, guards={"prefill_tokens": GUARD}, checkpoint={"every": 4, "milestones": [8]}
    )


@pytest.fixture(scope="module")
def run(recipe: Path, module_ps: Any) -> Path:
    """20 steps, 14 of them first and then again from step 8."""
    out = recipe.parent / "run"
    assert module_ps("train", recipe, "--out", out, "--max-steps", 14).returncode == 0
    assert module_ps("resume", out, "--step", 8, "--max-steps", 20).returncode == 0
    return out


@pytest.fixture(scope="module")
def other(recipe: Path, module_ps: Any) -> Path:
    """The same recipe from another seed of the data order; shorter."""
    out = recipe.parent / "other"
    assert module_ps("train", recipe, "--out", out, "--max-steps", 6, "--set", "run.seed=4").returncode == 0
    return out


def document(ps: Any, *args: str | Path | int, code: int = 0) -> dict[str, Any]:
    """The one document of a call, checked against the schema."""
    done = ps("inspect", *args, "--json")
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert problems(found, "inspect") == []
    assert found["exit_code"] == code
    return found


def test_a_run_agrees_with_its_summary(ps: Any, run: Path) -> None:
    found = document(ps, run)["run"]
    metrics = json.loads((run / "train_mixed_summary.json").read_text())["train_metrics"]
    log = found["log"]
    assert found["complete"]
    assert (found["disagreements"], found["not_compared"], found["missing"]) == ([], None, [])
    assert 0 < log["skipped"] < 20
    assert (log["updates"], log["skipped"]) == (metrics["optimizer_steps"], metrics["skipped_sync_steps"])
    assert log["skips_by_reason"] == metrics["skips_by_reason"]
    assert log["tokens"] == metrics["target_tokens"]
    assert log["loss"] == pytest.approx(metrics["avg_loss"], abs=1e-4)
    seen = {task["task"]: task["rows"] for task in log["tasks"] if task["rows"]}
    assert seen == metrics["per_task_seen_samples"]
    assert sum(task["rows_planned"] for task in log["tasks"]) == 80  # 20 steps of 4 ranks
    assert (log["restarts"], log["superseded"]) == (1, 6)
    assert log["repeats"] | {"first": None} == {
        "repeated": 6,
        "same": 6,
        "proven": 6,
        "differing": 0,
        "not_compared": 0,
        "first": None,
    }
    assert [(m["step"], m["present"]) for m in found["milestones"]] == [(8, True)]


def test_the_terminal_view_says_it_at_a_glance(ps: Any, run: Path) -> None:
    done = ps("inspect", run)
    assert done.returncode == 0, done.stderr
    assert "tiny: complete" in done.stdout.splitlines()[0]
    assert re.search(r"steps +█+ 100%  20 of 20: \d+ updates, \d+ skipped", done.stdout)
    assert "fixed_cache_total_prefill_tokens_exceeded" in done.stdout
    assert "6 steps, all reproduced bit for bit" in done.stdout
    assert "agrees with the log up to step 20" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140 + len(str(run))


def test_a_disagreement_with_the_summary_is_shown(ps: Any, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    summary = json.loads((copy / "train_mixed_summary.json").read_text())
    summary["train_metrics"]["target_tokens"] += 1
    (copy / "train_mixed_summary.json").write_text(json.dumps(summary))
    (found,) = document(ps, copy)["run"]["disagreements"]
    assert (found["name"], found["summary"]) == ("target_tokens", found["log"] + 1)
    assert "target_tokens: the log says" in ps("inspect", copy).stdout


def test_a_live_run_says_what_it_lacks_and_how_long_it_takes(ps: Any, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, symlinks=True)
    (copy / "manifest.json").unlink()
    shutil.rmtree(copy / "milestones")
    lines = (run / "train.log").read_text().splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("[resume]"))
    (copy / "train.log").write_text("".join(lines[: start + 3]))  # resumed at 8, two steps since
    (copy / "train_mixed_summary.json").unlink()
    assert document(ps, copy)["run"]["live"] is False  # nobody holds its log
    with (copy / "train.log").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # as the process that writes a run does
        found = document(ps, copy)["run"]
    assert (found["live"], found["complete"], found["log"]["last_step"]) == (True, False, 10)
    assert found["seconds_left"] == pytest.approx(10 * found["log"]["seconds_per_step_now"])
    assert found["missing"][0] == "steps 11 to 20"
    assert "milestone tiny_step_8, which was due" in found["missing"]
    assert found["not_compared"] == "there is no train_mixed_summary.json"


def test_a_step_leads_to_its_rows(ps: Any, recipe: Path, run: Path) -> None:
    found = document(ps, run, "--step", "11")["step"]
    planned = json.loads(ps("train", recipe, "--rows-at", "11", "--json").stdout)["rows_at"]["ranks"]
    assert [(row["rank"], row["task"], [row["number"]]) for row in found["rows"]] == [
        (rank["rank"], rank["task"], rank["rows"]) for rank in planned
    ]
    for row in found["rows"]:
        line = Path(row["file"]).read_text().splitlines()[row["line"] - 1]
        assert json.loads(line)["id"] == row["id"]
    assert [logged["counts"] for logged in found["logged"]] == [False, True]
    raw = (run / "train.log").read_text().splitlines()
    assert [raw[logged["record"]["line"] - 1] for logged in found["logged"]] == [
        one["raw"] for one in found["logged"]
    ]
    assert ps("inspect", run, "--step", "999").returncode == 2


def test_where_two_runs_part(ps: Any, run: Path, other: Path, tmp_path: Path) -> None:
    found = document(ps, run, "--against", other, code=1)["against"]
    assert found["parting"]["step"] == 1
    assert found["parting"]["difference"].startswith(("rows", "task"))
    assert [item["kind"] for item in found["settings"] if item["name"] == "run.seed"] == [
        "changes the data or the loss"
    ]
    same = document(ps, run, "--against", run / "train.log")["against"]
    assert (same["differs"], same["compared"], same["proven"]) == (False, 20, 20)
    changed = tmp_path / "changed.log"
    lines = (run / "train.log").read_text().splitlines(keepends=True)
    place = max(number for number, line in enumerate(lines) if " step=15 " in line)
    lines[place] = re.sub(r" grad=[0-9a-f]{4}", " grad=0000", lines[place])
    lines[place] = (
        lines[place].replace("rank_rng=", "rank_rng=0", 1) if " grad=" not in lines[place] else lines[place]
    )
    changed.write_text("".join(lines))
    parted = document(ps, run, "--against", changed, code=1)["against"]
    assert (parted["parting"]["step"], parted["differing"]) == (15, 1)
    assert "they part at step 15" in ps("inspect", run, "--against", changed).stdout


def test_logs_of_the_reference_are_compared_by_their_fields(ps: Any, run: Path, tmp_path: Path) -> None:
    text = re.sub(r" seconds=.*", "", (run / "train.log").read_text())
    plain = tmp_path / "reference.log"
    plain.write_text(text)
    same = document(ps, plain, "--against", run)["against"]
    assert (same["differs"], same["compared"], same["proven"]) == (False, 20, 0)
    found = document(ps, plain)["log"]
    ours = document(ps, run)["run"]["log"]
    for name in ("updates", "skipped", "tokens", "loss", "skips_by_reason", "superseded", "last_step"):
        assert found[name] == ours[name], name
    assert found["repeats"]["proven"] == 0


def test_a_task_without_an_update_at_the_start_or_the_end_is_explained(ps: Any, tmp_path: Path) -> None:
    def line(step: int, task: str) -> str:
        return f"[train-dist] epoch=1 step={step} task={task} loss=1.5 ppl=4.48 target_tokens=9\n"

    path = tmp_path / "reference.log"
    path.write_text("".join(line(step, "flan" if step < 30 else "dta_tool") for step in range(1, 41)))
    said = ps("inspect", path)
    assert said.stdout.splitlines()[-1] == (
        "at start: until step 10; now: from step 31; -: no update of the task there"
    ), said.stderr
    path.write_text("".join(line(step, "flan") for step in range(1, 4)))
    assert "no update of the task there" not in ps("inspect", path).stdout


def test_the_coverage_foretells_what_the_log_of_a_finished_run_says(ps: Any, recipe: Path, run: Path) -> None:
    found = document(ps, run, "--coverage")["coverage"]
    log = document(ps, run)["run"]["log"]
    assert (found["agreement"]["compared"], found["agreement"]["differing"]) == (20, 0)
    assert (found["skipped"], found["updates"], found["tokens"]) == (
        log["skipped"],
        log["updates"],
        log["tokens"],
    )
    assert found["skips"] == log["skips_by_reason"]
    assert found["tokenised"] > 0
    skipped = [
        int(re.search(r"step=(\d+)", line)[1])  # type: ignore[index]
        for line in (run / "train.log").read_text().splitlines()
        if line.startswith("[train-dist] skipped")
    ]
    assert found["skipped_first"] == sorted(set(skipped))
    # Before the run: from the recipe, with another limit, from the counts that are known by now.
    (prefill,) = [spread for spread in found["spreads"] if spread["quantity"] == "prefill_tokens"]
    assert prefill["over"] == found["skipped"]
    limit = prefill["keeps"]["90"]
    done = ps(
        "train",
        recipe,
        "--dry-run",
        "--coverage",
        "--json",
        "--max-steps",
        "20",
        "--set",
        f"guards.prefill_tokens={limit}",
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)["coverage"]
    assert again["updates"] >= 18
    other = document(ps, run, "--coverage", "--set", f"guards.prefill_tokens={limit}")["coverage"]
    assert other["updates"] == again["updates"]
    assert other["agreement"] is None  # the log is of another limit
    assert (again["tokenised"], again["cached"]) == (0, found["tokenised"])


def test_coverage_by_several_processes_is_the_same(
    recipe: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    script = (
        "import sys, json\nfrom pathlib import Path\n"
        "from parallel_synthesis.recipe import load_recipe\n"
        "from parallel_synthesis.training.inspection import coverage\n"
        "if __name__ == '__main__':\n"
        "    coverage._FEW, coverage._BATCH = 0, 3\n"
        "    config = load_recipe(sys.argv[1]).config\n"
        "    found = [coverage.cover(config, cache=Path(sys.argv[2]) / str(jobs), jobs=jobs) for jobs in (1, 2)]\n"
        "    assert found[0] == found[1] and found[0].tokenised == 22, found\n"
    )
    place = tmp_path / "both.py"
    place.write_text(script)
    done = subprocess.run(
        [sys.executable, place, recipe, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_tells_its_tensors_and_frozen_copies(ps: Any, run: Path, tmp_path: Path) -> None:
    found = document(ps, f"{run}@tiny_step_8")["checkpoint"]
    assert (found["step"], found["epoch"], found["committed"], found["frozen_tensors"]) == (8, 2, True, 0)
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    assert shapes["net.0.weight"] == [32, 3]
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in found["tensors"])
    big = tmp_path / "big"
    (big / "judger_lora").mkdir(parents=True)
    shutil.copy(run / "cache_mapper.pt", big)
    shutil.copy(run / "judger_lora" / "adapter_config.json", big / "judger_lora")
    header = {
        "base_model.model.model.embed_tokens.weight": {
            "dtype": "BF16",
            "shape": [10, 4],
            "data_offsets": [0, 80],
        },
        "base_model.model.x.lora_A.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [80, 112]},
    }
    text = json.dumps(header).encode()
    (big / "judger_lora" / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + bytes(112)
    )
    resized = document(ps, big)["checkpoint"]
    assert (resized["frozen_tensors"], resized["frozen_bytes"], resized["dtypes"]) == (
        1,
        80,
        {"BF16": 1, "F32": 5},
    )
    assert "the backbone's own" in ps("inspect", big).stdout


def test_a_merge_is_no_step_of_a_run(ps: Any, lora_checkpoint: Any, tmp_path: Path) -> None:
    pair = [lora_checkpoint(tmp_path / name, seed=seed, step=seed) for seed, name in enumerate("ab")]
    assert ps("merge", *pair, "--out", tmp_path / "merged").returncode == 0
    found = document(ps, tmp_path / "merged")["checkpoint"]
    assert (found["step"], found["epoch"], found["merge"]["method"]) == (None, None, "average")
    lines = ps("inspect", tmp_path / "merged").stdout.splitlines()
    assert "merge       average 0.5 A + 0.5 B, mapper of B (release-merge); no step of any run" in lines
    assert not any(line.startswith("step ") for line in lines)
    assert f"parent      {pair[1]}, step 1" in lines
    assert document(ps, pair[0])["checkpoint"]["merge"] is None


def test_a_data_file(ps: Any, recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((recipe.parent / "first.jsonl").read_text() + "{broken\n")
    found = document(ps, path)["data"]
    assert (found["rows"], found["bad"], found["bad_first"][0][0]) == (13, 1, 14)
    assert found["bytes"] == path.stat().st_size
    assert found["loose"] == {"branches": 0, "rows": 0, "first_line": 0}
    assert "extracts" not in ps("inspect", path).stdout


def test_a_data_file_whose_extracts_are_not_the_ends_of_their_contexts(ps: Any, tmp_path: Path) -> None:
    row = {"question": "q", "gold": "g", "agent_reference_contexts": ["a b"], "agent_extract_contexts": ["a"]}
    (tmp_path / "own.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    assert document(ps, tmp_path / "own.jsonl")["data"]["loose"] == {
        "branches": 2,
        "rows": 2,
        "first_line": 1,
    }
    said = ps("inspect", tmp_path / "own.jsonl").stdout
    assert "extracts    2 branches in 2 rows have an extract that is not the end of its context" in said


def test_what_a_call_may_not_ask(ps: Any, run: Path, tmp_path: Path) -> None:
    both = ps("inspect", run, "--step", "3", "--coverage")
    assert both.returncode == 2
    assert "--step and --coverage exclude each other" in both.stderr
    assert ps("inspect", tmp_path / "nowhere").returncode == 2
    alone = ps("inspect", run, "--set", "run.seed=4")
    assert (alone.returncode, "--set goes with --coverage" in alone.stderr) == (2, True)
    for name in ("nosuch.jsonl", "own/er.jsonl", "nosuch", f"{run}x"):  # a file's name is no Hub id
        missing = ps("inspect", name)
        assert missing.returncode == 2
        assert (
            "a run, a train.log, a data file (.jsonl, .jsonl.gz), a checkpoint or RUN@NAME" in missing.stderr
        )
    (tmp_path / "empty.log").write_bytes(b"")
    assert "empty" in ps("inspect", tmp_path / "empty.log").stdout
    watched = ps("inspect", run, "--follow")
    assert watched.returncode == 0  # a run that is over needs no watching
    assert "complete" in watched.stdout


def test_neither_torch_nor_transformers_nor_the_plots_are_loaded(
    run: Path, environment: dict[str, str]
) -> None:
    script = (
        "import sys\nfrom pscli.main import call\n"
        "assert call(['inspect', sys.argv[1]]) == 0\n"
        "assert call(['inspect', sys.argv[1], '--step', '3', '--quiet']) == 0\n"
        "loaded = {'torch', 'transformers', 'matplotlib', 'peft'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, run], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def page(run: Path, module_ps: Any) -> Path:
    out = run.parent / "report.html"
    done = module_ps("inspect", run, "--html", out)
    assert done.returncode == 0, done.stderr
    return out


def test_the_page_is_one_file_without_scripts_and_requests(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert len(text) < 1_000_000


def browse(page: Path, place: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """One headless call of the browser on a local page."""
    if CHROMIUM is None:
        pytest.skip("not run: there is no chromium, so the page was not looked at by a browser")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --disable-extensions"
    )
    return subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={place}", *more, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(place)},
    )


def test_a_browser_shows_the_figures_of_the_json(ps: Any, run: Path, page: Path, tmp_path: Path) -> None:
    log = document(ps, run)["run"]["log"]
    shown = browse(page, tmp_path / "profile", "--dump-dom")
    assert shown.returncode == 0, shown.stderr
    # What the page's policy blocks would be said here too: no message, no request.
    assert "CONSOLE" not in shown.stderr, shown.stderr
    dom = shown.stdout

    def card(name: str) -> str:
        found = re.search(rf'id="card-{name}"><b>([^<]*)</b>', dom)
        assert found is not None, name
        return found[1]

    assert card("steps") == "20"
    assert card("updates") == str(log["updates"])
    assert card("skipped") == str(log["skipped"])
    assert card("tokens") == f"{log['tokens']:,}"
    assert card("loss") == f"{log['loss_now']:.4f}"
    cells = re.search(r'<table class="tasks" id="tasks">(.*?)</table>', dom, re.DOTALL)
    assert cells is not None
    for task in log["tasks"]:
        assert f"<td>{task['task']}</td>" in cells[1]
        assert f"{task['rows']:,} / {task['rows_planned']:,}" in cells[1]
        assert f"{task['loss_now']:.4f}" in cells[1] if task["loss_now"] is not None else True
    titles = set(re.findall(r'<figure aria-label="([^"]*)"', dom))
    assert titles >= {
        "Loss per task",
        "Perplexity per task",
        "Skips by reason",
        "Seconds per step",
        "Memory peak",
    }
    for heading in ("Config", "Lineage", "Environment"):
        assert f"<h2>{heading}</h2>" in dom
    assert "learning_rate" in dom


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_readable_on_a_telephone_in_light_and_dark(
    page: Path, tmp_path: Path, dark: bool
) -> None:
    """390 px wide: the picture is painted in the theme's colours, and nothing is wider than the screen."""
    picture = tmp_path / "page.png"
    theme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    done = browse(page, tmp_path / "profile", *theme, "--window-size=390,1600", f"--screenshot={picture}")
    assert done.returncode == 0, done.stderr
    width, height, pixels = read_png(picture)
    assert (width, height) == (390, 1600)
    paper = pixels[3][4]
    assert (sum(paper) < 150) == dark
    ink = sum(abs(sum(pixel) - sum(paper)) > 300 for row in pixels for pixel in row)
    assert 4_000 < ink < 390 * 1600 // 3


def read_png(path: Path) -> tuple[int, int, list[list[tuple[int, ...]]]]:
    """(width, height, rows of pixels) of an 8-bit RGB or RGBA PNG without interlacing."""
    data = path.read_bytes()
    at, body, width, height, kind = 8, b"", 0, 0, 0
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        chunk = data[at + 8 : at + 8 + length]
        if name == b"IHDR":
            width, height, depth, kind = struct.unpack(">IIBB", chunk[:10])
            assert depth == 8
        elif name == b"IDAT":
            body += chunk
        at += length + 12
    step = {2: 3, 6: 4}[kind]
    raw = zlib.decompress(body)
    rows: list[list[tuple[int, ...]]] = []
    above = bytearray(width * step)
    for number in range(height):
        start = number * (width * step + 1)
        method, line = raw[start], bytearray(raw[start + 1 : start + 1 + width * step])
        for place in range(len(line)):
            left = line[place - step] if place >= step else 0
            up, corner = above[place], above[place - step] if place >= step else 0
            guess = left + up - corner
            near = min((left, up, corner), key=lambda value: abs(guess - value))
            line[place] = (line[place] + (0, left, up, (left + up) // 2, near)[method]) % 256
        rows.append([tuple(line[x : x + 3]) for x in range(0, len(line), step)])
        above = line
    return width, height, rows
