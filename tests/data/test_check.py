"""Input files against manifests: size, sha256, rows, gzip packed and unpacked, and how a file is recognised."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.data import check
from parallel_synthesis.data.check import check_files, difference, wanted_files
from parallel_synthesis.data.index import open_rows
from parallel_synthesis.data.manifests import ManifestEntry
from parallel_synthesis.data.tasks import find_task
from parallel_synthesis.errors import ConfigError, DataError, ManifestError
from pscli.main import call

TEXT = b'{"a": 1}\n\n{"a": 2}\r\n   \n{"a": 3}'  # three rows: blank lines are none, the last need not end


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two files and the data manifest (m.json) that lists them."""
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "data" / "flan.jsonl").write_bytes(TEXT)
    packed = gzip.compress(TEXT[:9]) + gzip.compress(TEXT[9:])
    (root / "data" / "bc.jsonl.gz").write_bytes(packed)
    document: dict[str, Any] = {
        "schema_version": 1,
        "general_phase": [
            {"task": "flan", "path": "data/flan.jsonl", "rows": 3, "bytes": len(TEXT), "sha256": sha(TEXT)}
        ],
        "browsecomp_trajectory_sft": {
            "task": "browsecomp_textmas_toolcall",
            "filtered_variant": {
                "path": "data/bc.jsonl.gz",
                "rows": 3,
                "compressed_bytes": len(packed),
                "compressed_sha256": sha(packed),
                "uncompressed_bytes": len(TEXT),
                "uncompressed_sha256": sha(TEXT),
            },
        },
    }
    (root / "m.json").write_text(json.dumps(document))
    return root


def told(root: Path, **options: Any) -> list[tuple[str, str]]:
    found = check_files(wanted_files(str(root / "m.json"), root=root), **options)
    return [(Path(problem.path).name, problem.kind) for file in found for problem in file.problems]


def test_right_files(root: Path) -> None:
    plain, packed = check_files(wanted_files(str(root / "m.json"), root=root), jobs=2)
    assert plain.problems == packed.problems == ()
    assert plain.rows == packed.rows == 3 and plain.sha256 == packed.unpacked_sha256 == sha(TEXT)
    assert packed.unpacked_bytes == len(TEXT)
    assert told(root, quick=True) == []


def test_each_kind_of_difference(root: Path) -> None:
    plain, packed = root / "data" / "flan.jsonl", root / "data" / "bc.jsonl.gz"
    plain.write_bytes(TEXT.replace(b"1", b"9"))
    assert told(root) == [("flan.jsonl", "digest")] and told(root, quick=True) == []
    plain.write_bytes(TEXT + b"\n")
    assert told(root) == [("flan.jsonl", "size")] == told(root, quick=True)
    plain.unlink()
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 255
    packed.write_bytes(content)
    assert told(root)[0] == ("flan.jsonl", "missing")
    assert told(root)[1][1] in ("structure", "digest")
    packed.write_bytes(bytes(content[:-8]))
    assert told(root, quick=True) == [("flan.jsonl", "missing"), ("bc.jsonl.gz", "size")]
    plain.mkdir()
    assert told(root)[0] == ("flan.jsonl", "not a regular file")


def test_rows_are_counted(root: Path) -> None:
    document = json.loads((root / "m.json").read_text())
    document["general_phase"][0]["rows"] = 4
    (root / "m.json").write_text(json.dumps(document))
    assert told(root) == [("flan.jsonl", "structure")]


def test_the_unpacked_text_may_stand_in(root: Path) -> None:
    (root / "data" / "bc.jsonl.gz").unlink()
    (root / "data" / "bc.jsonl").write_bytes(TEXT)
    assert told(root) == []
    (root / "data" / "bc.jsonl").write_bytes(TEXT.replace(b"2", b"7"))
    assert told(root) == [("bc.jsonl", "digest")]


def test_a_bad_manifest_is_told_with_its_places(root: Path) -> None:
    (root / "m.json").write_text('{"schema_version": 1, "general_phase": [{"task": "flan"}]}')
    with pytest.raises(ManifestError) as caught:
        wanted_files(str(root / "m.json"))
    assert "$.general_phase[0]: expected a field 'sha256'" in str(caught.value)
    assert "browsecomp_trajectory_sft" in str(caught.value)


def test_how_files_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = wanted_files("general")
    assert files[0].task == "wildchat" and len(files) == 8
    assert all(file.entry is not None and file.says == "training_data.json" for file in files)
    place = tmp_path / "copy" / "2wiki-multihopqa" / "processed"
    place.mkdir(parents=True)
    (place / "train.jsonl").write_text("x")  # a name that two entries have
    (tmp_path / "train.jsonl").write_text("x")
    (tmp_path / "filtered_train.jsonl").write_text("x")
    assert wanted_files(str(place / "train.jsonl"))[0].task == "2wiki_multihopqa"
    assert wanted_files("train.jsonl")[0].entry is None
    (unpacked,) = wanted_files("filtered_train.jsonl")
    assert unpacked.entry is not None and unpacked.entry.rows == 1211
    assert check_files([unpacked])[0].problems[0].expected == 194414797
    for bad in ("no-such", "no-such.jsonl", "no-such.toml"):
        with pytest.raises(ConfigError):
            wanted_files(bad)
    with pytest.raises(DataError, match="expected a run"):
        wanted_files(str(tmp_path))


def test_what_no_manifest_speaks_of_is_never_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.jsonl").write_text('{"a": 1}\n')
    assert call(["verify", "--data", str(tmp_path / "own.jsonl"), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["content_checked"] is False and "nothing was checked" in document["problems"][0]["detail"]


def test_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["verify", str(root), "--data", str(root / "m.json")]) == 0
    said = capsys.readouterr().out
    assert "3 rows" in said and "unpacked" in said and "m.json says" in said
    assert call(["verify", str(root), "--data", str(root / "m.json"), "--quick"]) == 0
    assert "contents NOT checked" in capsys.readouterr().out
    (root / "data" / "flan.jsonl").write_bytes(TEXT.replace(b"1", b"9"))
    assert call(["verify", str(root), "--data", str(root / "m.json"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["manifest_sha256"] == sha((root / "m.json").read_bytes())
    (problem,) = document["problems"]
    assert problem["status"] == "digest" and problem["expected"] == sha(TEXT)


def test_loose_extracts_are_told_where_an_index_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PARALLEL_SYNTHESIS_CACHE", str(tmp_path / "cache"))
    row = {"question": "q", "gold": "g", "agent_reference_contexts": ["a b"], "agent_extract_contexts": ["a"]}
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row) + "\n")
    listed = {"own.jsonl": {"bytes": path.stat().st_size, "sha256": sha(path.read_bytes())}}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": listed}))
    assert call(["verify", "--data", str(path)]) == 0
    assert "note" not in capsys.readouterr().out
    open_rows(find_task("own", own=("own",)), path).close()
    assert call(["verify", "--data", str(path)]) == 0
    assert (
        "note: own: 1 branch in 1 row has an extract that is not the end of its context (first in line 1). "
        in capsys.readouterr().out
    )
    assert call(["verify", "--data", str(path), "--json"]) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert file["loose"] == {"branches": 1, "rows": 1, "first_line": 1}


def test_the_cheap_check_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data" / "flan" / "processed" / "train_in_context_examples.jsonl"
    path.parent.mkdir(parents=True)
    row = {"question": "q", "gold": "g", "references": [], "agent_reference_contexts": ["c"]}
    content = json.dumps(row).encode() + b"\n"
    path.write_bytes(content)
    with open_rows(find_task("flan"), path, cache=tmp_path / "cache") as file:
        assert f"{len(content):,} bytes; training_data.json says 359,902,340" in str(difference(file))
        entry = ManifestEntry(
            task="flan",
            path="data/flan/processed/train_in_context_examples.jsonl",
            rows=1,
            bytes=len(content),
            sha256="0" * 64,
        )
        patch: Callable[[str], ManifestEntry] = lambda task: entry  # noqa: E731
        monkeypatch.setattr(check, "manifest_entry", patch)
        assert "sha256" in str(difference(file))
    own = tmp_path / "flan.jsonl"  # the user's own file of a usual task
    own.write_bytes(content)
    with open_rows(find_task("flan"), own, cache=tmp_path / "cache") as file:
        assert difference(file) is None
