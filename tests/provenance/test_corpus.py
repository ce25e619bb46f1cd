"""A corpus of damaged directories, one or more a class of problem: what `ps verify` says of each, and how it exits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance import digests, schema
from pscli.main import call

Relist = Callable[..., None]
ADAPTER = "judger_lora/adapter_model.safetensors"
CONFIG = "judger_lora/adapter_config.json"
Verdict = tuple[int, set[tuple[str, str]]]


@pytest.fixture
def verdict(capsys: pytest.CaptureFixture[str]) -> Callable[..., Verdict]:
    """(exit code, {(path, status)}) of a call; its document is checked against its schema."""

    def run(*arguments: str | Path) -> Verdict:
        code = call(["verify", *map(str, arguments), "--json"])
        document = json.loads(capsys.readouterr().out)
        assert schema.problems(document, "verify_report") == []
        assert document["exit_code"] == code and document["ok"] == (code == 0)
        return code, {(problem["path"], problem["status"]) for problem in document["problems"]}

    return run


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def swap(path: Path, target: str | Path) -> None:
    path.unlink()
    path.symlink_to(target)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def out_of_the_way(directory: Path) -> None:
    """The adapter's folder is moved outside, and a link to it, whose content is right, put in its place."""
    (directory / "judger_lora").rename(directory.parent / "elsewhere")
    (directory / "judger_lora").symlink_to(directory.parent / "elsewhere")


def files(directory: Path, **more: Any) -> None:
    edit(directory / "manifest.json", lambda document: document["files"].update(more))


BYTES: Mapping[str, tuple[Callable[[Path], object], str, str, int]] = {
    "missing": (lambda d: (d / "training_state.pt").unlink(), "training_state.pt", "missing", 1),
    "grown": (lambda d: (d / "cache_mapper.pt").write_bytes(b"x" * 9999), "cache_mapper.pt", "size", 1),
    "flipped in a .pt": (lambda d: flip(d / "cache_mapper.pt", -300), "cache_mapper.pt", "digest", 1),
    "flipped in a tensor": (lambda d: flip(d / ADAPTER, -1), ADAPTER, "digest", 1),
    "flipped in a header": (lambda d: flip(d / ADAPTER, 20), ADAPTER, "digest", 1),
    "extra file": (lambda d: (d / "notes.txt").write_text("x"), "notes.txt", "extra", 1),
    "extra, hidden": (lambda d: (d / "judger_lora" / ".x").write_text("x"), "judger_lora/.x", "extra", 1),
    "extra folder": (lambda d: (d / "more").mkdir(), "more", "extra", 1),
    "extra link": (lambda d: (d / "link").symlink_to("/"), "link", "extra", 1),
    "link inside": (
        lambda d: swap(d / CONFIG, "../cache_mapper_config.json"),
        CONFIG,
        "not a regular file",
        1,
    ),
    "pipe": (lambda d: pipe(d / "cache_mapper.pt"), "cache_mapper.pt", "not a regular file", 1),
    "folder": (lambda d: folder(d / "cache_mapper.pt"), "cache_mapper.pt", "not a regular file", 1),
    "link to outside": (
        lambda d: swap(d / "cache_mapper.pt", "/etc/hostname"),
        "cache_mapper.pt",
        "escapes",
        1,
    ),
    "linked folder": (out_of_the_way, ADAPTER, "escapes", 1),
    "link to nowhere": (lambda d: swap(d / "training_state.pt", "/n/o"), "training_state.pt", "escapes", 1),
}
E = {"bytes": 1, "sha256": "a" * 64}
MANIFESTS: Mapping[str, Callable[[Path], object]] = {
    "absent": lambda d: (d / "manifest.json").unlink(),
    "empty file": lambda d: (d / "manifest.json").write_text(""),
    "not JSON": lambda d: (d / "manifest.json").write_text('{"files": '),
    "a link": lambda d: ((d.parent / "m").write_bytes((d / "manifest.json").read_bytes()), swap(d / "manifest.json", "../m")),
    "empty list": lambda d: edit(d / "manifest.json", lambda m: m.update(files={})),
    "unknown version": lambda d: edit(d / "manifest.json", lambda m: m.update(schema_version=2)),
    "bad hex": lambda d: files(d, x=E | {"sha256": "xyz"}),
    "negative size": lambda d: files(d, x=E | {"bytes": -1}),
    "dot dot": lambda d: files(d, **{"../x": E}),
    "dot dot inside": lambda d: files(d, **{"judger_lora/../../x": E}),
    "dot dot, back slashes": lambda d: files(d, **{"judger_lora\\..\\..\\x": E}),
    "absolute": lambda d: files(d, **{"/etc/hostname": E}),
    "drive": lambda d: files(d, **{"C:\\x": E}),
    "duplicate": lambda d: (d / "manifest.json").write_text(
        (d / "manifest.json").read_text().replace('"files": {', '"files": {"cache_mapper.pt": {},', 1)
    ),
    "duplicate, back slash": lambda d: files(d, **{"judger_lora\\adapter_config.json": E}),
    "tensors without header": lambda d: files(d, x=E | {"tensors": {}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes(name: str, sound: Path, verdict: Callable[..., Verdict]) -> None:
    damage, path, status, code = BYTES[name]
    damage(sound)
    found = verdict(sound)
    assert found[0] == code and (path, status) in found[1], found
    others = {other for other in found[1] if other != (path, status)}
    # What is damaged may also not fit any more, and a folder holds two files; nothing else is complained about.
    allowed = {(path, "structure"), (path, "schema"), (CONFIG, status)}
    assert others <= allowed, others


@pytest.mark.parametrize("name", MANIFESTS)
def test_malformed_manifests(name: str, sound: Path, verdict: Callable[..., Verdict]) -> None:
    MANIFESTS[name](sound)
    code, found = verdict(sound)
    assert code == 2 and found == {("manifest.json", "manifest")}


def test_a_sound_one_is_ok(sound: Path, verdict: Callable[..., Verdict]) -> None:
    assert verdict(sound) == (0, set()) == verdict(sound, "--full") == verdict(sound, "--quick")


def test_quick_sees_no_content_and_says_so(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(sound / ADAPTER, -1)
    assert call(["verify", str(sound), "--quick"]) == 0
    assert "contents NOT checked" in capsys.readouterr().out
    assert call(["verify", str(sound), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["content_checked"] is False


def test_all_problems_are_told_at_once(sound: Path, verdict: Callable[..., Verdict]) -> None:
    (sound / "training_state.pt").unlink()
    (sound / "notes.txt").write_text("x")
    flip(sound / ADAPTER, -1)
    flip(sound / "cache_mapper.pt", -300)
    code, found = verdict(sound)
    assert code == 1 and {status for _, status in found} >= {"missing", "extra", "digest"}
    assert verdict(sound, "--allow-extra")[1] == {item for item in found if item[1] != "extra"}


def test_the_damaged_tensor_is_named(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(sound / ADAPTER, -1)
    assert call(["verify", str(sound)]) == 1
    said = capsys.readouterr().err
    assert "(damaged: tensor base_model.model.model.layers." in said and "good copy" in said
    assert call(["verify", str(sound), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["digests"][ADAPTER] == "header and tensors"
    assert document["digests"]["cache_mapper.pt"] == "sha256"
    (problem,) = document["problems"]
    assert problem["expected"] != problem["actual"] and len(problem["actual"]) == 64
    assert call(["verify", str(sound), "--full", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["digests"][ADAPTER] == "header and tensors, sha256"


def test_tensors_that_do_not_cover_the_file_prove_nothing(
    sound: Path, verdict: Callable[..., Verdict]
) -> None:
    def forget(document: dict[str, Any]) -> None:
        tensors = document["files"][ADAPTER]["tensors"]
        del tensors[max(tensors, key=lambda name: tensors[name]["offset"])]

    edit(sound / "manifest.json", forget)
    assert verdict(sound) == (0, set())  # by the whole file's sha256
    flip(sound / ADAPTER, -1)  # in the tensor that is not listed
    assert verdict(sound) == (1, {(ADAPTER, "digest")})


def test_full_compares_the_whole_file_too(sound: Path, verdict: Callable[..., Verdict]) -> None:
    edit(sound / "manifest.json", lambda document: document["files"][ADAPTER].update(sha256="b" * 64))
    assert verdict(sound)[0] == 0 and verdict(sound, "--full") == (1, {(ADAPTER, "digest")})


def test_an_input_error_is_not_a_verdict(
    sound: Path, verdict: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, *rest: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(digests.os, "preadv", broken)
    code, found = verdict(sound)
    assert code == 3 and ("cache_mapper.pt", "unreadable") in found


def test_a_manifest_that_can_not_be_read(sound: Path, verdict: Callable[..., Verdict]) -> None:
    absent = sound / "absent.json"
    assert verdict(sound, "--manifest", absent) == (2, {(str(absent), "manifest")})
    assert verdict(sound, "--manifest", sound) == (2, {(str(sound), "manifest")})


@pytest.mark.parametrize("how", ["truncated", "rewritten", "swapped"])
def test_a_file_that_changes_while_it_is_read(
    how: str, sound: Path, verdict: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, done = sound / "training_state.pt", os.preadv, []

    def meddle(fd: int, buffers: Any, offset: int) -> int:
        if not done and os.fstat(fd).st_ino == path.stat().st_ino:
            done.append(1)
            if how == "truncated":
                os.truncate(path, 10)
            elif how == "rewritten":
                path.write_bytes(path.read_bytes())
                os.utime(path, (1, 1))
            else:
                path.with_suffix(".new").write_bytes(path.read_bytes())
                path.with_suffix(".new").replace(path)
        return real(fd, buffers, offset)

    monkeypatch.setattr(digests.os, "preadv", meddle)
    code, found = verdict(sound)
    assert done
    assert code == 1 and ("training_state.pt", "changed") in found


def test_a_hard_link_made_meanwhile_is_no_change(
    sound: Path, verdict: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, real, done = sound / "training_state.pt", os.preadv, []

    def link(fd: int, buffers: Any, offset: int) -> int:
        if not done and os.fstat(fd).st_ino == path.stat().st_ino:
            done.append(1)
            (tmp_path / "milestone").hardlink_to(path)
        return real(fd, buffers, offset)

    monkeypatch.setattr(digests.os, "preadv", link)
    assert verdict(sound) == (0, set()) and done


def test_nothing_outside_is_opened_and_no_link_followed(
    sound: Path, verdict: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out_of_the_way(sound)
    trap = tmp_path / "trap"
    os.mkfifo(trap)  # opening it would hang
    swap(sound / "cache_mapper.pt", trap)
    opened: list[tuple[str, int, bool]] = []
    real = os.open

    def watch(path: Any, flags: int, *rest: Any, dir_fd: int | None = None) -> int:
        opened.append((os.fspath(path), flags, dir_fd is not None))
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", watch)
    assert verdict(sound)[0] == 1
    below = [(path, flags) for path, flags, relative in opened if relative]
    assert below and all(flags & os.O_NOFOLLOW and "/" not in path for path, flags in below)
    assert all("elsewhere" not in path and "trap" not in path for path, _, _ in opened)


# Parts that do not belong together, under a manifest that lists them as they are.
PARTS: Mapping[str, tuple[Callable[[Path], object], str, str, str]] = {
    "rank": (lambda d: edit(d / CONFIG, lambda c: c.update(r=3)), ADAPTER, "structure", "rank of lora_A: expected 3"),
    "targets": (
        lambda d: edit(d / CONFIG, lambda c: c.update(target_modules=["q_proj"])),
        ADAPTER,
        "structure",
        "v_proj is not among target_modules",
    ),
    "a target without tensors": (
        lambda d: edit(d / CONFIG, lambda c: c["target_modules"].append("o_proj")),
        ADAPTER,
        "structure",
        "no tensor for target module o_proj",
    ),
    "not LoRA": (lambda d: edit(d / CONFIG, lambda c: c.update(peft_type="IA3")), CONFIG, "schema", "expected 'LORA'"),
    "no r": (lambda d: edit(d / CONFIG, lambda c: c.pop("r")), CONFIG, "schema", "expected a field 'r'"),
    "mapper width": (
        lambda d: edit(d / "cache_mapper_config.json", lambda c: c.update(hidden_dim=5)),
        "cache_mapper.pt",
        "structure",
        "shape of net.0.weight: expected [5, 3], found [4, 3]",
    ),
    "mapper inputs": (
        lambda d: edit(d / "cache_mapper_config.json", lambda c: c.update(metadata_features="length")),
        "cache_mapper.pt",
        "structure",
        "expected [4, 2], found [4, 3]",
    ),
    "mapper config": (
        lambda d: edit(d / "cache_mapper_config.json", lambda c: c.update(hidden_dim="4")),
        "cache_mapper_config.json",
        "schema",
        "$.hidden_dim: expected integer, found '4'",
    ),
    "meta schema": (
        lambda d: edit(d / "checkpoint_meta.json", lambda c: c.update(epoch=-1)),
        "checkpoint_meta.json",
        "schema",
        "$.epoch: expected minimum 0, found -1",
    ),
    "step of the meta": (
        lambda d: edit(d / "checkpoint_meta.json", lambda c: c.update(global_step=6)),
        "checkpoint_meta.json",
        "identity",
        "checkpoint_meta.json says 6, the manifest says 5, the directory's name says 5, training_state.pt says 5",
    ),
    "trailing bytes": (
        lambda d: (d / ADAPTER).write_bytes((d / ADAPTER).read_bytes() + b"xx"),
        ADAPTER,
        "structure",
        "2 trailing bytes",
    ),
    "truncated tensors": (
        lambda d: (d / ADAPTER).write_bytes((d / ADAPTER).read_bytes()[:-4]),
        ADAPTER,
        "structure",
        "truncated",
    ),
    "no zip": (lambda d: (d / "training_state.pt").write_bytes(b"x"), "training_state.pt", "structure", "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_do_not_belong_together(
    name: str, sound: Path, relist: Relist, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, path, status, told = PARTS[name]
    damage(sound)
    if name in ("trailing bytes", "truncated tensors"):
        edit(sound / "manifest.json", lambda m: m["files"][ADAPTER].pop("tensors"))
        edit(sound / "manifest.json", lambda m: m["files"][ADAPTER].pop("header_sha256"))
        content = (sound / ADAPTER).read_bytes()
        whole = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        edit(sound / "manifest.json", lambda m: m["files"][ADAPTER].update(whole))
    else:
        relist(sound)
    assert call(["verify", str(sound), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = [(problem["path"], problem["status"], problem["detail"]) for problem in document["problems"]]
    assert any(item[:2] == (path, status) and told in item[2] for item in found), found


def test_tensors_that_do_not_fit(sound: Path, relist: Relist, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    state = load_file(sound / ADAPTER)
    prefix = "base_model.model.model.layers"
    del state[f"{prefix}.0.self_attn.q_proj.lora_B.weight"]
    state[f"{prefix}.1.self_attn.v_proj.lora_A.weight"] = torch.zeros(2, 7)
    state["base_model.model.model.embed_tokens.weight"] = torch.zeros(9, 6)
    state["base_model.model.lm_head.weight"] = torch.zeros(8, 6)
    state["stray"] = torch.zeros(1)
    save_file(state, sound / ADAPTER)
    relist(sound)
    assert call(["verify", str(sound), "--json"]) == 1
    details = " | ".join(problem["detail"] for problem in json.loads(capsys.readouterr().out)["problems"])
    for told in (
        "layers.0.self_attn.q_proj: lora_B is missing",
        "layer 1: self_attn.v_proj has other shapes than in layer 0",
        "vocabulary rows of base_model.model.model.embed_tokens.weight: expected 8, found 9",
        "holds 'stray', which is neither LoRA nor an embedding",
    ):
        assert told in details


def test_usage_errors(verdict: Callable[..., Verdict], sound: Path, tmp_path: Path) -> None:
    for arguments in (
        (),
        (tmp_path / "absent",),
        (sound, "--format", "md5sum"),
        (sound, "--quick", "--full"),
        (sound, "--write-manifest"),
        (sound, "--replay", "1", "--data", "demo"),
        (sound, "--manifest", "release", "--write-manifest"),
        ("--data", "no-such-recipe"),
        ("owner/no-such-name",),
    ):
        assert verdict(*arguments) == (2, set()), arguments
