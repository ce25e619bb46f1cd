"""--write-manifest: a directory that has none gets one that says exactly what is there, if it fits together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint.adopt import write_manifest
from parallel_synthesis.errors import CheckpointError, VerificationError
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance import schema
from pscli.main import call


def test_the_manifest_is_the_one_a_save_would_have_made(sound: Path) -> None:
    by_hand = json.loads((sound / "manifest.json").read_text())
    (sound / "manifest.json").unlink()
    assert write_manifest(sound) == by_hand == json.loads((sound / "manifest.json").read_text())
    assert call(["verify", str(sound)]) == 0
    raw = (sound / "manifest.json").read_bytes()
    assert b"\r" not in raw and b"\\" not in raw and raw.endswith(b"}\n")


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "sub" / "a.txt").write_text("a")
    document = write_manifest(tmp_path / "d")
    assert document["kind"] == "directory" and "global_step" not in document
    assert list(document["files"]) == ["sub/a.txt"]
    assert manifests.verify(tmp_path / "d") == []
    assert call(["verify", str(tmp_path / "d")]) == 0
    (tmp_path / "d" / "sub" / "a.txt").write_text("b")
    assert call(["verify", str(tmp_path / "d")]) == 1


def test_what_is_not_adopted(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already"):
        write_manifest(sound)
    (sound / "manifest.json").unlink()
    (sound / "link").symlink_to("cache_mapper.pt")
    os.mkfifo(sound / "pipe")
    config = sound / "judger_lora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 7}))
    with pytest.raises(VerificationError) as caught:
        write_manifest(sound)
    told = str(caught.value)
    assert "link: is not a regular file" in told and "pipe:" in told and "rank of lora_A: expected 7" in told
    assert not (sound / "manifest.json").exists()
    for place, why in ((tmp_path / "absent", "expected a directory"), (tmp_path / "empty", "is empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match=why):
            write_manifest(place)


def test_a_run_is_not_adopted(sound: Path) -> None:
    (sound / "manifest.json").unlink()
    (sound / "run_args.json").write_text("{}")
    (sound / "step_checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="is a run"):
        write_manifest(sound)


def test_the_command_and_its_export(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sound / "manifest.json").unlink()
    assert call(["verify", str(sound), "--write-manifest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 6
    assert call(["verify", str(sound), "--format", "sha256sum"]) == 0
    said = capsys.readouterr()
    assert "NOT checked" in said.err
    lines = said.out.splitlines()
    assert len(lines) == 6 and all(line[64:66] == "  " for line in lines)


def test_a_checkpoint_of_another_backbone_is_said_to_be_one(
    sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the release's manifest: first that, not the widths of every tensor."""
    assert call(["verify", str(sound), "--manifest", "release"]) == 1
    said = capsys.readouterr().err.splitlines()
    own = json.loads((sound / "judger_lora/adapter_config.json").read_text())["base_model_name_or_path"]
    assert said[0] == (
        f"error: {sound}: this is no checkpoint of the backbone of release_checkpoint.json, Qwen/Qwen3-14B, but of {own}"
    )
    assert said[2].startswith(f"  - [backbone] judger_lora/adapter_config.json: is of {own}, not of Qwen")
    assert sum("width of lora" in line for line in said) == 1
    assert said[-1] == f"judge it by its own manifest: ps verify {sound}"
    assert call(["verify", str(sound), "--manifest", "release", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert schema.problems(document, "verify_report") == []
    assert document["problems"][0] | {"detail": ""} == {
        "path": "judger_lora/adapter_config.json",
        "status": "backbone",
        "detail": "",
        "expected": "Qwen/Qwen3-14B",
        "actual": own,
    }


def test_the_release_manifest_judges_the_parts_too(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], relist: Callable[..., None]
) -> None:
    listed = json.loads((sound / "manifest.json").read_text())["files"]
    names = ("cache_mapper.pt", "judger_lora/adapter_config.json", "judger_lora/adapter_model.safetensors")
    release: dict[str, Any] = {
        "schema_version": "1.0",
        "components": {name: {key: listed[name][key] for key in ("bytes", "sha256")} for name in names},
        "mapper": {"hidden_dim": 4, "metadata_features": "both"},
        "judger_lora": {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["v_proj", "q_proj"]},
    }
    path = tmp_path / "release.json"

    def verdict(**changes: Any) -> tuple[int, str]:
        path.write_text(json.dumps(release | changes))
        code = call(["verify", str(sound), "--manifest", str(path), "--json"])
        document = json.loads(capsys.readouterr().out)
        told = " | ".join(problem["detail"] for problem in document["problems"])
        return code, told + " | ".join(document.get("not_checked", []))

    code, told = verdict()
    assert (
        code == 0 and "checkpoint_meta.json" in told and "training_state.pt" in told
    )  # named as not checked
    assert verdict(judger_lora={"alpha": 32}) == (1, f"lora_alpha: expected 32, found 4{told}")
    assert "r: expected 16, found 2" in verdict(judger_lora={"rank": 16})[1]
    assert "hidden_dim: expected 32, found 4" in verdict(mapper={"hidden_dim": 32})[1]
    assert "151669 vocabulary rows" in verdict(judger_lora={"adapter_embedding_vocab_size": 151669})[1]
    assert "width of lora_A: expected 5120, found 6" in verdict(base_model="Qwen/Qwen3-14B")[1]
    assert verdict(schema_version=2)[0] == 2
    assert verdict(components={})[0] == 2
