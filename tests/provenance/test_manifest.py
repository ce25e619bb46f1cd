"""A directory against its manifest: every kind of damage, all problems at once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.errors import CheckpointError, ManifestError
from parallel_synthesis.provenance import manifest as manifests
from parallel_synthesis.provenance.check import Expected
from parallel_synthesis.provenance.manifest import verify, verify_quick
from parallel_synthesis.resources import resource

HEADER = b"\x08\0\0\0\0\0\0\0{header}"
FILES = {
    "cache_mapper.pt": b"mapper",
    "judger_lora/adapter_model.safetensors": HEADER + b"aaaabbbbbb",
    "empty": b"",
}


def entry(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory made by hand, its manifest with independently computed digests."""
    directory = tmp_path / "step_000000005"
    files = {}
    for name, data in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        files[name] = entry(data)
    files["judger_lora/adapter_model.safetensors"] |= {
        "header_sha256": hashlib.sha256(HEADER).hexdigest(),
        "tensors": {
            "a": {"offset": 16, **entry(b"aaaa")},
            "b": {"offset": 20, **entry(b"bbbbbb")},
        },
    }
    document = {"schema_version": 1, "kind": "checkpoint", "global_step": 5, "files": files}
    (directory / "manifest.json").write_text(json.dumps(document))
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((directory / "manifest.json").read_text())
    change(document)
    (directory / "manifest.json").write_text(json.dumps(document))


def found(directory: Path, **options: bool) -> list[tuple[str, str]]:
    return [(problem.path, problem.kind) for problem in verify(directory, **options)]


def test_a_whole_directory_has_no_problem(checkpoint: Path, tmp_path: Path) -> None:
    assert verify(checkpoint) == [] and verify_quick(checkpoint) == []
    (tmp_path / "latest").symlink_to(checkpoint.name)
    assert verify(tmp_path / "latest") == []
    assert manifests.read(checkpoint)["global_step"] == 5


def test_every_kind_of_damage_is_found_at_once(checkpoint: Path, tmp_path: Path) -> None:
    def more(document: dict[str, Any]) -> None:
        for name in ("gone", "pipe", "link", "outward", "directory", "cache_mapper.pt/below"):
            document["files"][name] = entry(b"")

    rewrite(checkpoint, more)
    (tmp_path / "outside").write_bytes(b"")
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "link").symlink_to("empty")
    (checkpoint / "outward").symlink_to("../outside")
    (checkpoint / "directory").mkdir()
    (checkpoint / "stray").write_text("x")
    (checkpoint / "judger_lora" / "stray.tmp").write_text("x")
    (checkpoint / "extra").mkdir()
    (checkpoint / "extra" / "file").write_text("x")
    (checkpoint / "empty").write_bytes(b"x")
    (checkpoint / "cache_mapper.pt").write_bytes(b"mappes")
    expected = [
        ("cache_mapper.pt", "digest"),
        ("cache_mapper.pt/below", "not a regular file"),
        ("directory", "not a regular file"),
        ("empty", "size"),
        ("gone", "missing"),
        ("link", "not a regular file"),
        ("outward", "escapes"),
        ("pipe", "not a regular file"),
        ("extra", "extra"),
        ("judger_lora/stray.tmp", "extra"),
        ("stray", "extra"),
    ]
    assert found(checkpoint) == expected
    assert found(checkpoint, quick=True) == [item for item in expected if item[1] != "digest"]
    assert found(checkpoint, extra=False) == [item for item in expected if item[1] != "extra"]


def test_a_linked_directory_on_the_way_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "judger_lora").rename(tmp_path / "elsewhere")
    (checkpoint / "judger_lora").symlink_to(tmp_path / "elsewhere")
    assert found(checkpoint) == [("judger_lora/adapter_model.safetensors", "escapes")]
    (checkpoint / "judger_lora").unlink()
    (checkpoint / "judger_lora").symlink_to("judger_lora")  # a loop
    assert [kind for _, kind in found(checkpoint)] in (["escapes"], ["not a regular file"])


@pytest.mark.parametrize(
    ("at", "part"), [(10, "header"), (17, "tensor a"), (25, "tensor b"), (0, "header"), (19, "tensor a")]
)
def test_the_damaged_tensor_is_named(at: int, part: str, checkpoint: Path) -> None:
    path = checkpoint / "judger_lora" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    (problem,) = verify(checkpoint)
    assert (problem.path, problem.kind) == ("judger_lora/adapter_model.safetensors", "digest")
    assert problem.detail == f"content differs from its sha256 (damaged: {part})"
    assert problem.expected != problem.actual
    assert str(problem).startswith("judger_lora/adapter_model.safetensors: content differs")


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(st.sampled_from(sorted(set(FILES) - {"empty"})), st.data())
def test_any_change_of_a_file_is_found(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("c")
    files = {}
    for each, content in FILES.items():
        (directory / each).parent.mkdir(parents=True, exist_ok=True)
        (directory / each).write_bytes(content)
        files[each] = entry(content)
    document = {"schema_version": 1, "kind": "checkpoint", "global_step": 5, "files": files}
    (directory / "manifest.json").write_text(json.dumps(document))
    changed = data.draw(st.binary(max_size=30).filter(lambda content: content != FILES[name]))
    (directory / name).write_bytes(changed)
    assert [problem.path for problem in verify(directory)] == [name]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "",
        "a//b",
        "./a",
        "a\\..\\..\\b",
        "C:\\x",
        "\\x",
        "a/",
        "manifest.json",
        "a\0b",
    ],
)
def test_a_manifest_that_leaves_its_directory_is_refused(name: str, checkpoint: Path) -> None:
    rewrite(checkpoint, lambda document: document["files"].update({name: entry(b"")}))
    assert not manifests.is_inside(name)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        manifests.read(checkpoint)
    assert [problem.kind for problem in verify(checkpoint)] == ["manifest"]


def test_a_missing_or_damaged_manifest_is_a_problem(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    good = path.read_bytes()
    for content in (b"", good[:-5], b"\xff\xfe{}", b"[]", b"{}", b'{"a": 1, "a": 2}', b"[" * 100_000):
        path.write_bytes(content)
        (problem,) = verify(checkpoint)
        assert (problem.path, problem.kind) == (
            "manifest.json",
            "manifest",
        ) and "manifest.json" in problem.detail
    path.unlink()
    assert "not a committed checkpoint" in verify(checkpoint)[0].detail
    path.symlink_to("elsewhere.json")
    (checkpoint / "elsewhere.json").write_bytes(good)
    assert "not a committed checkpoint" in verify(checkpoint)[0].detail
    assert found(checkpoint / "absent") == [("manifest.json", "manifest")]


def test_all_problems_of_a_manifest_are_told(checkpoint: Path) -> None:
    def spoil(document: dict[str, Any]) -> None:
        document["files"]["empty"] = {"bytes": -1, "sha256": "ABC"}
        del document["global_step"]
        document["schema_version"] = 2

    rewrite(checkpoint, spoil)
    with pytest.raises(CheckpointError) as caught:
        manifests.read(checkpoint)
    for part in (
        "global_step",
        "$.schema_version: expected 1",
        "$.files.empty.bytes: expected minimum 0",
        "sha256",
    ):
        assert part in str(caught.value)


def test_building_one() -> None:
    document = manifests.build(
        {"b": {"bytes": 1, "sha256": "x"}, "a": {"bytes": 2, "sha256": "y"}}, global_step=3
    )
    assert (
        document["kind"] == "checkpoint"
        and document["global_step"] == 3
        and list(document["files"]) == ["a", "b"]
    )
    assert "global_step" not in manifests.build({}, global_step=None, kind="backbone")


# Forms that say the same.

NAMES = st.lists(
    st.text(
        st.characters(codec="utf-8", exclude_characters='/\\:\0"', exclude_categories=["Cc"]),
        min_size=1,
        max_size=6,
    ).filter(lambda part: part not in (".", "..")),
    min_size=1,
    max_size=3,
).map("/".join)
DIGEST = st.binary(min_size=32, max_size=32).map(bytes.hex)
LISTS = st.dictionaries(
    NAMES.filter(lambda name: name != "manifest.json"),
    st.tuples(st.integers(0, 2**60), DIGEST),
    min_size=1,
    max_size=4,
)
FUZZ = settings(derandomize=True, deadline=None, database=None, max_examples=150)


def listed(files: dict[str, tuple[int, str]]) -> dict[str, Any]:
    return {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in files.items()}


@FUZZ
@given(LISTS, st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["files", "components"]))
def test_every_form_of_a_list_is_read_the_same(
    files: dict[str, tuple[int, str]], upper: bool, windows: bool, mark: bool, key: str
) -> None:
    wanted = {name: (size, sha256) for name, (size, sha256) in files.items()}
    document = manifests.build(listed(files), global_step=5)
    assert document["schema_version"] == 1
    entries = document.pop("files")
    if upper:
        entries = {name: entry | {"sha256": entry["sha256"].upper()} for name, entry in entries.items()}
    if windows:
        entries = {name.replace("/", "\\"): entry for name, entry in entries.items()}
    text = json.dumps(document | {key: entries}, indent=1)
    raw = (b"\xef\xbb\xbf" if mark else b"") + text.replace("\n", "\r\n" if windows else "\n").encode()
    found = manifests.parse(raw, "m.json")
    assert {name: (one.bytes, one.sha256) for name, one in found.files.items()} == wanted
    assert found.form == {"files": "manifest", "components": "release_manifest"}[key]
    assert found.sha256 == hashlib.sha256(raw).hexdigest()
    lines = manifests.sha256sum_lines(found.files)
    assert lines == lines.lower() or any(name != name.lower() for name in files)
    if windows:
        lines = "\ufeff" + lines.replace("\n", "\r\n")
    again = manifests.parse(lines.encode(), "sums")
    assert again.form == "sha256sum"
    assert {name: one.sha256 for name, one in again.files.items()} == {n: d for n, (_, d) in files.items()}


@FUZZ
@given(st.text(max_size=12) | NAMES)
def test_a_name_that_is_accepted_stays_inside(name: str) -> None:
    if manifests.is_inside(name):
        assert os.path.normpath(f"/base/dir/{name}").startswith("/base/dir/")
        assert os.path.normpath(name) == name


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | DIGEST,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "files",
                    "components",
                    "schema_version",
                    "kind",
                    "bytes",
                    "sha256",
                    "tensors",
                    "a/b",
                    "..",
                    "x",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@FUZZ
@given(
    st.binary(max_size=60)
    | JUNK.map(lambda value: json.dumps(value).encode())
    | st.text(max_size=80).map(str.encode)
)
def test_anything_else_is_one_kind_of_error(raw: bytes) -> None:
    try:
        found = manifests.parse(raw, "m.json")
    except ManifestError as error:
        assert error.problems and all("m.json" in problem for problem in error.problems)
    else:
        assert found.files and all(manifests.is_inside(name) for name in found.files)


def test_sha256sum_itself_reads_our_lines(tmp_path: Path) -> None:
    names = ("plain", "with space", "sub/é", "new\nline")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    files = {name: Expected(sha256=entry(name.encode())["sha256"]) for name in names}
    lines = manifests.sha256sum_lines(files)
    done = subprocess.run(
        ["sha256sum", "-c"], input=lines, text=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0 and done.stdout.count(": OK") == 4
    made = subprocess.run(
        ["sha256sum", *names], text=True, cwd=tmp_path, capture_output=True, check=True
    ).stdout
    assert manifests.parse(made.encode(), "sums").files == files


def test_the_demo_and_release_manifests_are_read() -> None:
    release = manifests.parse(resource("artifacts", "release_checkpoint.json").read_bytes(), "release")
    assert release.form == "release_manifest"
    assert {name: one.bytes for name, one in release.files.items()} == {
        "cache_mapper.pt": 3599,
        "judger_lora/adapter_config.json": 995,
        "judger_lora/adapter_model.safetensors": 3190110480,
    }
    assert release.files["judger_lora/adapter_model.safetensors"].sha256.startswith("25f09176222bd328")
