"""Hub ids on the command line, against a Hub on loopback: every command that takes a checkpoint takes one."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.resources import resource

ADAPTER = "judger_lora/adapter_model.safetensors"
Result = subprocess.CompletedProcess[str]
Hub = Callable[..., Result]


@pytest.fixture
def hub_ps(hub_environment: dict[str, str], tmp_path: Path) -> Hub:
    """`ps` as a process of its own: huggingface_hub reads its environment when it is imported."""

    def run(*args: str | Path, module: str = "pscli", **env: str) -> Result:
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, args)],
            cwd=tmp_path,
            env={**hub_environment, **env},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return run


def document(result: Result, code: int = 0) -> dict[str, Any]:
    assert result.returncode == code, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(directory: Path) -> Mapping[str, bytes]:
    names = ("cache_mapper.pt", "cache_mapper_config.json", "judger_lora/adapter_config.json", ADAPTER)
    return {name: (directory / name).read_bytes() for name in names}


@pytest.mark.lane
def test_merge_of_a_hub_checkpoint_and_a_local_one(
    hub_server: Any,
    hub_ps: Hub,
    lora_checkpoint: Callable[..., Path],
    tmp_path: Path,
    hub_environment: dict[str, str],
) -> None:
    a, b = (lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    commit = hub_server.publish("owner/name", a)
    source = f"hf://owner/name@{commit}"
    found = hub_ps("merge", "owner/name", b, "--out", "merged", "--json")
    assert [parent["source"] for parent in document(found)["parents"]] == [source, str(b)]
    assert all(
        line.startswith(("warning: ", "next, ")) for line in found.stderr.splitlines()
    )  # no bars, no remarks
    hub_ps("merge", a, b, "--out", "local")
    assert files(tmp_path / "merged") == files(tmp_path / "local")
    meta = json.loads((tmp_path / "merged" / "checkpoint_merge_meta.json").read_text())
    assert meta["checkpoint_a"] == source and meta["parents"][0]["source"] == source

    hub_server.publish("owner/name", b)  # main moves on; the record still means what was merged
    hub_server.asked()
    tree = document(hub_ps("inspect", "merged", "--lineage", "--json"))["lineage"]["parents"]
    assert [(parent["source"], parent["edge"]) for parent in tree] == [
        (source, "verified"),
        (str(b), "verified"),
    ]
    assert document(hub_ps("verify", "merged", "--json"))["not_checked"] == []
    again = hub_ps("merge", source, b, "--out", "again", HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and files(tmp_path / "again") == files(tmp_path / "local")
    assert hub_server.asked() == []
    shutil.rmtree(Path(hub_environment["HF_HOME"]))
    told = document(hub_ps("verify", "merged", "--json"))["not_checked"]
    assert told == [f"source {source}: the parent is not in the local Hub cache"]
    assert hub_server.asked() == []  # what a record names is not downloaded to be checked


@pytest.mark.lane
def test_inspect_and_its_lineage_fetch_no_more_than_they_read(
    hub_server: Any, hub_ps: Hub, lora_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    commit = hub_server.publish("owner/name", lora_checkpoint(tmp_path / "a", seed=1))
    tree = document(hub_ps("inspect", "owner/name", "--lineage", "--json"))["lineage"]
    assert tree["source"] == f"hf://owner/name@{commit}" and tree["step"] == 7
    assert sorted(hub_server.downloads()) == ["cache_mapper.pt", "checkpoint_meta.json"]
    found = document(hub_ps("inspect", "owner/name", "--json"))["checkpoint"]
    assert commit in found["path"] and found["problems"] == [] and len(found["tensors"]) == 16
    assert found["source"] == f"hf://owner/name@{commit}"
    head = hub_ps("inspect", "owner/name").stdout.splitlines()[0]
    assert f" hf://owner/name@{commit}, " in head and "models--" not in head


@pytest.mark.lane
def test_verify_by_its_own_manifest_and_by_another(
    hub_server: Any,
    hub_ps: Hub,
    lora_checkpoint: Callable[..., Path],
    tmp_path: Path,
    hub_environment: dict[str, str],
) -> None:
    plain = lora_checkpoint(tmp_path / "a", seed=1)
    hub_server.publish("owner/plain", plain)
    copied = hub_ps("snapshot", "owner/plain", "--export", "own")  # gets a manifest
    assert copied.returncode == 0 and "exported hf://owner/plain@" in copied.stdout
    assert files(tmp_path / "own") == files(plain)
    commit = hub_server.publish("owner/own", tmp_path / "own")
    hub_server.asked()
    found = hub_ps("verify", "owner/own")
    assert found.returncode == 0 and found.stdout.startswith(f"hf://owner/own@{commit}: 5 files: every byte")
    assert "README.md" not in hub_server.downloads()
    again = hub_ps("snapshot", "owner/own", "--export", "again")
    assert again.returncode == 0 and "every byte was checked" in again.stdout
    assert files(tmp_path / "again") == files(plain)

    sums = tmp_path / "sums"
    listed = ("judger_lora/adapter_config.json", ADAPTER)
    sums.write_text("".join(f"{hashlib.sha256(files(plain)[n]).hexdigest()}  {n}\n" for n in listed))
    shutil.rmtree(Path(hub_environment["HF_HOME"]))
    hub_server.asked()
    report = document(hub_ps("verify", "hf://owner/plain", "--manifest", sums, "--json"))
    assert report["content_checked"] and set(report["digests"]) == set(listed)
    assert set(hub_server.downloads()) == {*listed, "checkpoint_meta.json", "cache_mapper_config.json"}
    sums.write_text(f"{'0' * 64}  {ADAPTER}\n{'0' * 64}  missing.bin\n")
    report = document(hub_ps("verify", "hf://owner/plain", "--manifest", sums, "--json"), code=1)
    assert {"digest", "missing"} <= {problem["status"] for problem in report["problems"]}
    refused = hub_ps("verify", "owner/own", "--write-manifest")
    assert refused.returncode == 2 and "nothing is written into the Hub's cache" in refused.stderr


def test_errors_and_their_codes(
    hub_server: Any, hub_ps: Hub, lora_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    hub_server.publish("owner/name", lora_checkpoint(tmp_path / "a", seed=1))
    hub_server.repositories["owner/name"].gated = True
    cases: list[tuple[list[str], dict[str, str], int, str]] = [
        (["inspect", "owner/nam"], {}, 2, "no such directory, and as a Hub id: no such repository"),
        (["inspect", "hf://owner/name"], {}, 2, "gated"),
        (["inspect", "hf://owner/name"], {"HF_HUB_OFFLINE": "1"}, 3, "HF_HUB_OFFLINE"),
        (["inspect", "hf://owner/name"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 3, "can not be reached"),
        (
            ["inspect", "owner/nam"],
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            2,
            "no such directory, and as a Hub id",
        ),
        (["inspect", "hf://owner/nam"], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 3, "can not be reached"),
        (["inspect", "https://huggingface.co/a/b"], {}, 2, "but so: hf://a/b"),
        (["resume", "owner/name"], {}, 2, "ps resume owner/name --out DIR"),
        (["snapshot", "owner/name"], {}, 2, "--export"),
        (["train", "demo", "--init", "hf://owner/name@v2"], {}, 2, "no revision v2"),
    ]
    for words, env, code, said in cases:
        result = hub_ps(*words, "--json", **env)
        error = document(result, code)["error"]
        assert said in error["message"] and "Traceback" not in result.stderr
        assert result.stderr == f"error: {error['message']}\n"
    assert not (tmp_path / "runs").exists()
    result = hub_ps("verify", "hf://owner/name", "--replay", "3")
    assert result.returncode == 2 and "--replay needs a run directory" in result.stderr
    # A directory of the name comes first, as ever; hf:// never means one.
    shutil.copytree(tmp_path / "a", tmp_path / "owner" / "name")
    assert document(hub_ps("inspect", "owner/name", "--json"))["checkpoint"]["path"] == "owner/name"
    assert hub_ps("inspect", "hf://owner/name").returncode == 2


@pytest.mark.lane
@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("inspect", signal.SIGINT),
        ("inspect", signal.SIGTERM),
        ("train", signal.SIGINT),
        ("train", signal.SIGTERM),
        ("train", signal.SIGUSR1),
        ("torchrun", signal.SIGTERM),
    ],
)
def test_a_stop_signal_ends_a_download_at_once(
    hub_server: Any,
    hub_environment: dict[str, str],
    hub_ps: Hub,
    lora_checkpoint: Callable[..., Path],
    tiny_recipe: Callable[..., Path],
    tmp_path: Path,
    command: str,
    number: signal.Signals,
) -> None:
    hub_server.publish("owner/name", lora_checkpoint(tmp_path / "a", seed=1))
    hub_server.stalled.add(ADAPTER)
    words = ["inspect", "owner/name"]
    if command != "inspect":
        words = ["train", str(tiny_recipe(run={"max_steps": 1})), "--init", "owner/name", "--out", "run"]
        words += ["--nproc", "2"] if command == "torchrun" else []
    process = subprocess.Popen(
        [sys.executable, "-m", "pscli", *words, "--json"],
        env=hub_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while ADAPTER not in hub_server.downloads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ADAPTER in hub_server.downloads()
    time.sleep(0.3)  # the first half arrives, the other one never does
    process.send_signal(number)
    began = time.monotonic()
    out, err = process.communicate(timeout=30)
    assert time.monotonic() - began < 5  # it waits for nothing; a busy machine may
    assert process.returncode == 130, err
    error = json.loads(out)["error"]
    assert error["type"] == "KeyboardInterrupt" and error["message"].startswith("interrupted")
    assert err == f"{error['message']}\n"
    assert not (tmp_path / "run").exists()
    hub_server.stalled.clear()
    hub_server.release.set()
    hub_server.asked()
    document(hub_ps("inspect", "owner/name", "--json"))
    assert hub_server.downloads().count(ADAPTER) == 1  # the next call completes it


@pytest.mark.lane
def test_whoever_uses_or_records_a_big_adapter_notices_other_bytes(
    hub_server: Any,
    hub_ps: Hub,
    lora_checkpoint: Callable[..., Path],
    tiny_recipe: Callable[..., Path],
    tmp_path: Path,
) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    big = lora_checkpoint(tmp_path / "big", seed=1, modules={module: (1 << 18, 24)})
    other = lora_checkpoint(tmp_path / "other", seed=2, modules={module: (1 << 18, 24)})
    hub_server.publish("owner/name", big)
    found = document(hub_ps("inspect", "owner/name", "--json"))["checkpoint"]
    blob = (tmp_path / found["path"] / ADAPTER).resolve()
    assert blob.stat().st_size > 4 << 20
    damage(blob)
    for words in (
        ["merge", "owner/name", other, "--out", "out"],
        ["snapshot", "owner/name", "--export", "out"],
        ["train", tiny_recipe(run={"max_steps": 1}), "--init", "owner/name", "--out", "out"],
    ):
        error = document(hub_ps(*words, "--json"), 3)["error"]
        assert error["type"] == "StorageError" and str(blob) in error["message"], words
        assert "not those that its name stands for" in error["message"]
        assert not (tmp_path / "out" / ADAPTER).exists()
    assert hub_ps("inspect", "owner/name").returncode == 0  # it shows what there is

    # Of a model too, whose files' names are not known beforehand.
    (tmp_path / "base").mkdir()
    shutil.copy(big / ADAPTER, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    hub_server.publish("owner/base", tmp_path / "base")
    fold = ["merge", other, "--onto-base", "owner/base", "--out", "out"]
    assert "which the adapter changes" in hub_ps(*fold).stderr
    blob = blob.parents[2] / "models--owner--base" / "blobs" / blob.name
    damage(blob)
    assert str(blob) in document(hub_ps(*fold, "--json"), 3)["error"]["message"]


def damage(blob: Path) -> None:
    """Other bytes in the middle, where no header is."""
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        file.seek(2 << 20)
        file.write(b"other bytes")


def test_a_slip_in_a_local_path_does_not_ask_the_hub(hub_server: Any, hub_ps: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for words in (
        ["inspect", "runs/deno"],
        ["inspect", "runs/deno", "--lineage"],
        ["verify", "runs/deno"],
        ["verify", "runs/deno", "--replay", "3"],
        ["resume", "runs/deno"],
        ["resume", "runs/deno", "--out", "other"],
        ["snapshot", "runs/deno@x", "--export", "other"],
        ["merge", "runs/deno", "runs/demo", "--out", "other"],
        ["train", "demo", "--init", "runs/deno"],
    ):
        result = hub_ps(*words)
        assert result.returncode == 2, (words, result.stderr)
        assert ": no such directory; in runs there are: demo" in result.stderr, result.stderr
    result = hub_ps("inspect", "runs/deno", HF_HUB_OFFLINE="1")
    assert result.returncode == 2 and "hf download" not in result.stderr
    result = hub_ps("merge", "runs/demo", "--onto-base", "runs/base", "--out", "other")
    assert result.returncode == 2 and "runs/base: no such directory" in result.stderr
    assert hub_server.asked() == []
    assert hub_ps("inspect", "hf://runs/deno").returncode == 2  # this means the Hub
    assert "GET /api/models/runs/deno/revision/main" in hub_server.asked()


def test_a_backbone_named_with_the_scheme_is_recorded_without(
    hub_server: Any, hub_ps: Hub, tiny_recipe: Callable[..., Path], tiny_backbone: Path, tmp_path: Path
) -> None:
    hub_server.publish("owner/base", tiny_backbone)
    recipe = tiny_recipe(backbone={"model": "hf://owner/base"}, run={"max_steps": 1, "ranks": 1})
    result = hub_ps("train", recipe, "--out", "run")
    assert result.returncode == 0, result.stderr
    adapter = json.loads((tmp_path / "run" / "judger_lora" / "adapter_config.json").read_text())
    record = json.loads((tmp_path / "run" / "run_args.json").read_text())
    assert adapter["base_model_name_or_path"] == "owner/base" == record["config"]["backbone"]["model"]
    for model in ("owner/base", "hf://owner/base"):
        result = hub_ps("resume", "run", "--set", f"backbone.model={model}", "--max-steps", "2")
        assert result.returncode == 0, result.stderr


def test_the_launcher_of_the_merge(
    hub_server: Any, lora_checkpoint: Callable[..., Path], tmp_path: Path, hub_environment: dict[str, str]
) -> None:
    a, b = (lora_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    commits = [hub_server.publish(f"owner/{path.name}", path) for path in (a, b)]
    script = resource("recipes", "training", "03_merge_release_checkpoint.sh")
    variables = {
        "PYTHON": sys.executable,
        "BROWSECOMP_CHECKPOINT": "hf://owner/a",
        "GENERAL_EARLY_CHECKPOINT": "owner/b",
        "OUTPUT_DIR": "merged",
    }
    subprocess.run(
        ["bash", script], env=hub_environment | variables, cwd=tmp_path, check=True, capture_output=True
    )
    meta = json.loads((tmp_path / "merged" / "checkpoint_meta.json").read_text())
    assert [parent["source"] for parent in meta["parents"]] == [
        f"hf://owner/{name}@{commit}" for name, commit in zip("ab", commits)
    ]


def test_folding_into_a_hub_model_fetches_the_model_alone(
    hub_server: Any,
    hub_ps: Hub,
    module_ps: Any,
    tiny_recipe: Callable[..., Path],
    tiny_backbone: Path,
    tmp_path: Path,
) -> None:
    done = module_ps("train", tiny_recipe(run={"max_steps": 1}), "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    other = {"pytorch_model.bin": b"the same again", "onnx/model.onnx": b"and again"}
    commit = hub_server.publish("owner/base", tiny_backbone, **other)
    checkpoint = hub_server.publish("owner/name", tmp_path / "run")
    result = hub_ps("merge", "owner/name", "--onto-base", "owner/base", "--out", "full")
    assert result.returncode == 0, result.stderr
    fetched = hub_server.downloads()
    assert "model.safetensors" in fetched and not other.keys() & set(fetched)
    assert "training_state.pt" not in fetched and not [name for name in fetched if name.startswith("step_")]
    meta = json.loads((tmp_path / "full" / "checkpoint_merge_meta.json").read_text())
    assert meta["checkpoint_a"] == f"hf://owner/name@{checkpoint}" == meta["parents"][0]["source"]
    assert meta["checkpoint_b"] == f"hf://owner/base@{commit}"


def test_training_from_a_hub_checkpoint_on_two_processes(
    hub_server: Any,
    hub_ps: Hub,
    module_ps: Any,
    tiny_recipe: Callable[..., Path],
    tmp_path: Path,
    hashes: Callable[..., Any],
) -> None:
    recipe = tiny_recipe(run={"max_steps": 2, "ranks": 2})
    first = module_ps("train", recipe, "--out", tmp_path / "first")
    assert first.returncode == 0, first.stderr
    commit = hub_server.publish("owner/name", tmp_path / "first")
    result = hub_ps("train", recipe, "--init", "owner/name", "--out", "second", "--nproc", "2", "--json")
    assert result.returncode == 0, result.stderr
    json.loads(result.stdout)  # one document and nothing else
    wanted = ["cache_mapper.pt", "cache_mapper_config.json", "checkpoint_meta.json", "manifest.json"]
    assert sorted(hub_server.downloads()) == sorted([*wanted, "judger_lora/adapter_config.json", ADAPTER])
    meta = json.loads((tmp_path / "second" / "checkpoint_meta.json").read_text())
    assert meta["parents"][0]["source"] == f"hf://owner/name@{commit}"
    local = module_ps("train", recipe, "--init", tmp_path / "first", "--out", tmp_path / "third")
    assert local.returncode == 0, local.stderr
    assert hashes(tmp_path / "second") == hashes(tmp_path / "third")


def test_a_hub_checkpoint_with_its_training_state_goes_on_exactly(
    hub_server: Any,
    hub_ps: Hub,
    module_ps: Any,
    tiny_recipe: Callable[..., Path],
    tmp_path: Path,
    hashes: Callable[..., Any],
) -> None:
    recipe = tiny_recipe(run={"max_steps": 4})
    straight = module_ps("train", recipe, "--out", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    assert module_ps("train", recipe, "--max-steps", 2, "--out", tmp_path / "half").returncode == 0
    commit = hub_server.publish("owner/half", tmp_path / "half")
    flags = ["--parallel_kv_load_dir", "hf://owner/half", "--resume_from_global_step", "2"]
    result = hub_ps(*flags, "--parallel_kv_save_dir", "on", "--max-steps", "4", module="pscli.compat_train")
    assert result.returncode == 0, result.stderr
    assert "training_state.pt" in hub_server.downloads() and "train.log" not in hub_server.downloads()
    assert hashes(tmp_path / "on") == hashes(tmp_path / "straight")
    assert commit in (tmp_path / "on" / "train.log").read_text()

    shutil.copytree(tmp_path / "half", tmp_path / "bare", symlinks=True)
    (tmp_path / "bare" / "training_state.pt").unlink()
    hub_server.publish("owner/bare", tmp_path / "bare")
    result = hub_ps("resume", "owner/bare", "--out", "other")
    assert result.returncode == 2 and "components without a training state" in result.stderr
    assert "--order-from-step" in result.stderr and not (tmp_path / "other").exists()
