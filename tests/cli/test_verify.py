"""`ps verify` on real runs, as a process: what is covered, how an incomplete run ends, memory, imports."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance import schema
from pscli.main import call

ROOT = Path(__file__).resolve().parents[2]
LARGE = 400 << 20  # bytes, sparse


@pytest.fixture(scope="module")
def trained(
    module_ps: Any, module_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A complete run of five steps with checkpoints at 0, 2, 4 and 5 and a milestone at 4."""
    recipe = module_recipe(checkpoint={"every": 2, "milestones": [4]})
    out = tmp_path_factory.mktemp("runs") / "a"
    result = module_ps("train", recipe, "--out", out)
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to spoil; `latest` stays a link."""
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def verify(*arguments: str | Path) -> Any:
        code = call(["verify", *map(str, arguments), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert schema.problems(document, "verify_report") == [] and document["exit_code"] == code
        document["found"] = {(problem["path"], problem["status"]) for problem in document["problems"]}
        return document

    return verify


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_whole_run_in_words(trained: Path, ps: Any) -> None:
    done = ps("verify", str(trained))
    assert done.returncode == 0 and done.stderr == ""
    assert "6 checkpoints, 36 files: every byte is as its manifest says" in done.stdout
    assert "not checked, because no manifest vouches for it: train.log" in done.stdout


def test_all_of_a_run_is_covered(run: Path, verdict: Callable[..., Any]) -> None:
    document = verdict(run)
    assert document["ok"] and document["complete"] is True and document["not_checked"] == ["train.log"]
    steps = [f"step_checkpoints/step_{step:09d}" for step in (0, 2, 4, 5)]
    assert document["checkpoints"] == [*steps, "milestones/tiny_step_4", "."]
    damaged = [f"{place}/training_state.pt" for place in (*steps, "milestones/tiny_step_4")]
    for name in [*damaged, "cache_mapper.pt"]:
        flip(run / name)
    (run / "run_args.json").chmod(0o644)
    (run / "run_args.json").write_text("{}")
    (run / "train.log").unlink()
    found = verdict(run)["found"]
    assert {(name, "digest") for name in damaged} | {("cache_mapper.pt", "digest")} <= found
    assert ("run_args.json", "schema") in found and ("train.log", "missing") in found


def test_what_is_extra_in_a_run(run: Path, verdict: Callable[..., Any]) -> None:
    (run / "superseded" / "attempt-2").mkdir(parents=True)
    (run / "notes.txt").write_text("x")
    (run / "milestones" / "stray").write_text("x")
    (run / "step_checkpoints" / "step_7").mkdir()
    (run / "step_checkpoints" / "step_000000009").mkdir()
    document = verdict(run)
    assert document["found"] == {
        ("notes.txt", "extra"),
        ("milestones/stray", "extra"),
        ("step_checkpoints/step_7", "extra"),
        ("step_checkpoints/step_000000009/manifest.json", "missing"),
    }
    assert set(document["not_checked"]) == {"train.log", "superseded"}
    (run / "step_checkpoints" / "step_000000009").rmdir()
    assert verdict(run, "--allow-extra")["found"] == set()


def test_an_incomplete_run_says_so(run: Path, ps: Any, verdict: Callable[..., Any]) -> None:
    (run / "manifest.json").unlink()
    done = ps("verify", str(run))
    assert done.returncode == 0 and "the run is not complete" in done.stdout
    document = verdict(run, "--complete")
    assert document["exit_code"] == 1 and document["found"] == {(".", "incomplete")}
    assert f"ps resume {run}" in ps("verify", str(run), "--complete").stderr
    assert "cache_mapper.pt" in document["not_checked"]  # without a manifest they count for nothing
    (run / "notes.txt").write_text("x")
    assert verdict(run)["found"] == {("notes.txt", "extra")}


def test_a_run_with_folders_or_manifests_that_are_not_its_own(
    run: Path, tmp_path: Path, verdict: Callable[..., Any]
) -> None:
    (run / "milestones").rename(tmp_path / "elsewhere")
    (run / "milestones").symlink_to(tmp_path / "elsewhere")
    (run / "step_checkpoints" / "step_000000002" / "manifest.json").unlink()
    (run / "step_checkpoints" / "latest").unlink()
    (run / "step_checkpoints" / "latest").symlink_to("/tmp")
    assert verdict(run)["found"] == {
        ("milestones", "not a regular file"),
        ("step_checkpoints/step_000000002/manifest.json", "missing"),
        ("step_checkpoints/latest", "structure"),
    }


def test_a_damaged_manifest_alone_is_no_verdict(run: Path, verdict: Callable[..., Any]) -> None:
    path = run / "milestones" / "tiny_step_4" / "manifest.json"
    path.chmod(0o644)
    path.write_text("{}")
    document = verdict(run)
    assert document["exit_code"] == 2
    assert document["found"] == {("milestones/tiny_step_4/manifest.json", "manifest")}


def test_parts_of_two_checkpoints_do_not_pass(run: Path, verdict: Callable[..., Any]) -> None:
    one, other = (run / "step_checkpoints" / f"step_{step:09d}" for step in (2, 4))
    shutil.rmtree(one)
    shutil.copytree(other, one)  # whole, and another step's
    document = verdict(run)
    assert document["found"] == {(f"step_checkpoints/{one.name}/checkpoint_meta.json", "identity")}


def test_a_run_without_anything_to_judge_by(run: Path, verdict: Callable[..., Any]) -> None:
    for name in ("step_checkpoints", "milestones"):
        shutil.rmtree(run / name)
        (run / name).mkdir()
    (run / "manifest.json").unlink()
    assert verdict(run)["exit_code"] == 2
    (run / "run_args.json").chmod(0o644)
    (run / "run_args.json").write_text('{"method": "fixed_parallel_kv"}')  # the reference's
    (run / "step_checkpoints" / "step_000000005").mkdir()
    document = verdict(run)
    assert document["exit_code"] == 1 and document["counts"]["missing"] == 5
    assert document["content_checked"] is False and document["structure_only"]


def test_the_data_of_a_run(trained: Path, verdict: Callable[..., Any]) -> None:
    document = verdict("--data", trained)
    assert document["ok"] and document["content_checked"] and document["counts"]["files"] == 2
    recorded = json.loads((trained / "run_args.json").read_text())["data"]
    path = Path(recorded["first"]["path"])
    before = path.read_bytes()
    path.write_bytes(before.replace(b"word1", b"word2", 1))
    try:
        assert verdict("--data", trained)["found"] == {(str(path), "digest")}
    finally:
        path.write_bytes(before)


def test_a_start_warns_of_a_usual_file_with_other_bytes(
    module_ps: Any, module_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = module_recipe(data={"tasks": ["flan"], "files": {}})
    usual = recipe.parent / "data" / "flan" / "processed" / "train_in_context_examples.jsonl"
    usual.parent.mkdir(parents=True)
    shutil.copy(recipe.parent / "first.jsonl", usual)
    result = module_ps("train", recipe, "--out", tmp_path / "out", "--max-steps", 1)
    assert result.returncode == 0, result.stderr
    assert "bytes; training_data.json says 359,902,340; `ps verify --data` tells more" in result.stderr
    recorded = json.loads((tmp_path / "out" / "run_args.json").read_text())["data"]["flan"]
    assert recorded["sha256"] == hashlib.sha256(usual.read_bytes()).hexdigest()


def test_the_snapshot_list_follows_its_schema(trained: Path, ps: Any) -> None:
    document = json.loads(ps("snapshot", str(trained), "--list", "--json").stdout)
    assert schema.problems(document, "snapshots") == [] and len(document["snapshots"]) == 1


def test_reports_of_a_real_run_follow_their_schemas(trained: Path) -> None:
    for name, file in (
        ("run_args", "run_args.json"),
        ("train_mixed_summary", "train_mixed_summary.json"),
        ("checkpoint_meta", "checkpoint_meta.json"),
        ("manifest", "manifest.json"),
        ("adapter_config", "judger_lora/adapter_config.json"),
    ):
        schema.load_json(trained / file, name)


def large_checkpoint(directory: Path) -> None:
    """One sparse safetensors file of two tensors, with digests of header and tensors."""
    half = LARGE // 2
    fields = {
        name: {"dtype": "U8", "shape": [half], "data_offsets": [at, at + half]}
        for name, at in (("a", 0), ("b", half))
    }
    text = json.dumps(fields).encode()
    header = len(text).to_bytes(8, "little") + text
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + LARGE)
    zeros, whole = hashlib.sha256(bytes(half)).hexdigest(), hashlib.sha256(header)
    for _ in range(2):
        whole.update(bytes(half))
    tensors = {
        name: {"offset": len(header) + at, "bytes": half, "sha256": zeros}
        for name, at in (("a", 0), ("b", half))
    }
    entry = {
        "bytes": len(header) + LARGE,
        "sha256": whole.hexdigest(),
        "header_sha256": hashlib.sha256(header).hexdigest(),
        "tensors": tensors,
    }
    document = {"schema_version": 1, "kind": "directory", "files": {"model.safetensors": entry}}
    (directory / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("option", ["--full", "--allow-extra"])
def test_memory_stays_small_and_torch_is_not_loaded(option: str, tmp_path: Path) -> None:
    large_checkpoint(tmp_path / "large")
    script = (
        "import re, sys\n"
        "from pscli.main import call\n"
        "code = call(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'rich'} & set(sys.modules)\n"
        # Not getrusage: its peak is inherited from the process that started this one.
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(code, sorted(heavy), peak, file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(tmp_path / "large"), option, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    code, heavy, peak = done.stderr.split(maxsplit=2)
    assert (code, heavy) == ("0", "[]")
    assert int(peak) < 80_000  # KiB
    document = json.loads(done.stdout)
    assert document["bytes_hashed"] >= LARGE * (2 if option == "--full" else 1)
