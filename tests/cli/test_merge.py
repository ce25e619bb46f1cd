"""`ps merge` as a process: exit codes, what it prints, and a kill in the middle."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save

ADAPTER = "judger_lora/adapter_model.safetensors"


@pytest.fixture
def ps(module_ps):
    """Forked from a process that has torch loaded; tests/checkpoint shows that none is needed."""
    return module_ps


@pytest.fixture
def pair(lora_checkpoint, tmp_path):
    return [
        lora_checkpoint(tmp_path / name, seed=seed, step=step)
        for name, seed, step in (("a", 1, 302), ("b", 2, 95060))
    ]


def test_the_release_merge(ps, pair, tmp_path):
    done = ps("merge", str(pair[0]), str(pair[1]), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    a, b = (load_file(one / ADAPTER) for one in pair)
    content = save({name: (a[name].float() * 0.5 + b[name].float() * 0.5).to(a[name].dtype) for name in a})
    assert (tmp_path / "out" / ADAPTER).read_bytes() == content
    assert (tmp_path / "out" / "cache_mapper.pt").read_bytes() == (pair[1] / "cache_mapper.pt").read_bytes()
    assert hashlib.sha256(content).hexdigest() in done.stdout and "95,060" in done.stdout
    assert "differs from averaging the deltas by" in done.stdout
    assert "warning: averaging the factors is not averaging the deltas" in done.stderr
    assert "--manifest release" not in done.stderr  # of another backbone, so it can not be the release
    assert ps("verify", str(tmp_path / "out")).returncode == 0
    resumed = ps("resume", str(tmp_path / "out"))
    assert resumed.returncode == 2 and "--init" in resumed.stderr


def test_what_may_be_the_release_is_to_be_compared_with_it(ps, lora_checkpoint, tmp_path):
    pair = [
        lora_checkpoint(tmp_path / name, seed=seed, base_model_name_or_path="/models/Qwen3-14B")
        for seed, name in enumerate("ab")
    ]
    done = ps("merge", *pair, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"ps verify {tmp_path / 'out'} --manifest release" in done.stderr


def test_json_and_verify(ps, pair, tmp_path):
    arguments = ("merge", str(pair[0]), str(pair[1]), "--weight-a", "0.3", "--weight-b", "0.7", "--json")
    dry = ps(*arguments, "--out", str(tmp_path / "out"), "--dry-run")
    document = json.loads(dry.stdout)
    assert document["dry_run"] and not (tmp_path / "out").exists()
    sums = tmp_path / "sums"
    sums.write_text(f"{document['components'][ADAPTER]['sha256']}  {ADAPTER}\n")
    done = ps(*arguments, "--out", str(tmp_path / "out"), "--verify", str(sums))
    assert done.returncode == 0 and json.loads(done.stdout)["verified"] == str(sums)
    wrong = ps(*arguments, "--out", str(tmp_path / "other"), "--verify", "release")
    assert wrong.returncode == 1 and json.loads(wrong.stdout)["error"]["type"] == "VerificationError"
    assert "3190110480" in wrong.stderr and (tmp_path / "other").is_dir()


def test_more_than_two(ps, pair, lora_checkpoint, tmp_path):
    third = lora_checkpoint(tmp_path / "c", seed=3)
    inputs = [f"--input={one}={weight}" for one, weight in zip([*pair, third], (0.5, 0.3, 0.2))]
    missing = ps("merge", *inputs, "--out", str(tmp_path / "out"))
    assert missing.returncode == 2 and "--mapper-from is missing" in missing.stderr
    done = ps("merge", *inputs, "--out", str(tmp_path / "out"), "--mapper-from", "1")
    assert done.returncode == 0, done.stderr
    a, b, c = (load_file(one / ADAPTER) for one in (*pair, third))
    found = load_file(tmp_path / "out" / ADAPTER)
    assert all(torch.equal(found[n], (a[n] * 0.5 + b[n] * 0.3) + c[n] * 0.2) for n in a)
    assert (tmp_path / "out" / "cache_mapper.pt").read_bytes() == (pair[0] / "cache_mapper.pt").read_bytes()


def test_concat_and_svd_say_what_they_did(ps, pair, tmp_path):
    done = ps("merge", *map(str, pair), "--out", str(tmp_path / "c"), "--method", "concat", "--json")
    assert done.returncode == 0
    assert json.loads((tmp_path / "c" / "judger_lora/adapter_config.json").read_text())["r"] == 8
    done = ps("merge", *map(str, pair), "--out", str(tmp_path / "s"), "--method", "svd", "--rank", "3")
    assert done.returncode == 0 and "rank 3 leaves out" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["A", "B"], "--out is missing"),
        (["A", "--out", "O"], "expected two checkpoints"),
        (["A", "B", "--out", "O", "--method", "mean"], "expected one of average, concat, svd"),
        (["A", "B", "--out", "O", "--mapper-from", "c"], "expected one of a, b"),
        (["A", "B", "--out", "O", "--recipe", "release"], "did you mean release-merge?"),
        (["--input", "A", "--out", "O"], "expected CKPT=WEIGHT"),
        (["A", "B", "--input", "A=1", "--out", "O"], "give one or the other"),
        (["A", "B", "--onto-base", "M", "--out", "O"], "--onto-base takes one checkpoint"),
        (["A", "B", "--out", "O", "--scale", "0.5"], "go with --onto-base"),
        (["A", "B", "--out", "O", "--weight-a", "nan"], "expected a finite number"),
        (["A", "C", "--out", "O"], "C: no such directory"),
        (["A", "A", "--out", "O"], "are the same checkpoint"),
    ],
)
def test_what_is_refused(ps, shared_pair, arguments, text):
    places = {"A": shared_pair[0], "B": shared_pair[1], "O": shared_pair[0].parent / "out"}
    done = ps("merge", *(places.get(word, word) for word in arguments))
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr and not places["O"].exists()


@pytest.fixture(scope="module")
def shared_pair(lora_checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    return [lora_checkpoint(directory / name, seed=seed) for seed, name in enumerate("AB")]


def test_all_findings_in_one_message(ps, lora_checkpoint, tmp_path):
    first = lora_checkpoint(tmp_path / "a", seed=1)
    second = lora_checkpoint(tmp_path / "b", seed=2, r=8, alpha=16, hidden=16)
    done = ps("merge", str(first), str(second), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    for field in ("r: A has 4, B has 8", "lora_alpha: ", "mapper: ", "shape: ", "5 findings"):
        assert field in done.stderr
    assert not (tmp_path / "out").exists()


def test_onto_base(ps, lora_checkpoint, tiny_backbone, tmp_path):
    modules = {f"base_model.model.model.layers.{layer}.self_attn.q_proj": (32, 32) for layer in range(2)}
    adapter = lora_checkpoint(tmp_path / "a", seed=1, modules=modules)
    done = ps("merge", str(adapter), "--onto-base", str(tiny_backbone), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "2 modules with 1 of their delta folded in" in done.stdout and "relative difference" in done.stdout
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tiny_backbone / "tokenizer.json"
    ).read_bytes()
    strict = ps(
        "merge",
        str(adapter),
        "--onto-base",
        str(tiny_backbone),
        "--out",
        str(tmp_path / "o"),
        "--tolerance",
        "0",
    )
    assert strict.returncode == 1 and "do not use it" in strict.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stop_in_the_middle_leaves_nothing_under_the_name(
    lora_checkpoint, clean_environment, ps, tmp_path, number
):
    rows = {
        "base_model.model.lm_head.weight": torch.zeros(1_500_000, 64).bfloat16()
    }  # 192 MB: time to be hit
    pair = [
        str(lora_checkpoint(tmp_path / name, seed=seed, embeddings=rows)) for seed, name in enumerate("ab")
    ]
    command = [sys.executable, "-m", "pscli", "merge", *pair, "--out", str(tmp_path / "runs" / "out")]
    child = subprocess.Popen(
        command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/.out.partial-*/judger_lora/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child.pid, number)
    child.communicate()
    assert child.returncode == (-number if number == signal.SIGKILL else 130)
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert "out" not in left and (left == [] or number == signal.SIGKILL)
    small = [str(lora_checkpoint(tmp_path / name, seed=seed)) for seed, name in enumerate("cd")]
    assert ps("merge", *small, "--out", str(tmp_path / "runs" / "out"), "--quiet").returncode == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["out"]  # the leftover is cleared


def test_runs_and_milestones_are_inputs_and_the_result_starts_a_run(ps, tiny_recipe, tmp_path):
    recipe = tiny_recipe(run={"max_steps": 3}, checkpoint={"milestones": [1]})
    run, out = tmp_path / "run", tmp_path / "merged"
    assert ps("train", recipe, "--out", run).returncode == 0
    done = ps("merge", run, f"{run}@tiny_step_1", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert [parent["step"] for parent in json.loads(done.stdout)["parents"]] == [3, 1]
    a, b, merged = (load_file(one / ADAPTER) for one in (run, run / "milestones" / "tiny_step_1", out))
    assert all(torch.equal(merged[name], a[name] * 0.5 + b[name] * 0.5) for name in a)
    assert ps("verify", out).returncode == 0
    again = ps("merge", run, f"{run}@tiny_step_1", "--out", run / "inside")
    assert again.returncode == 2 and "lies inside input A" in again.stderr
    started = ps("train", recipe, "--out", tmp_path / "next", "--init", out, "--max-steps", 1)
    assert started.returncode == 0, started.stderr
    meta = json.loads((tmp_path / "next" / "checkpoint_meta.json").read_text())
    assert meta["parents"][0]["source"] == str(out) and meta["parents"][0]["step"] == 0
