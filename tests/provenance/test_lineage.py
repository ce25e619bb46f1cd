"""The tree of parents: edges proved by bytes, or called unverified; Hub ids through the local cache."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import hub, lineage, schema
from pscli.main import call

ADAPTER = "judger_lora/adapter_model.safetensors"
Relist = Callable[..., None]


def record(source: str, directory: Path, step: int | None = 5) -> dict[str, Any]:
    names = ("cache_mapper.pt", ADAPTER)
    return {
        "source": source,
        "step": step,
        "components": {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names},
    }


@pytest.fixture
def family(pristine: Path, tmp_path: Path, relist: Relist) -> Path:
    """general (a run with a milestone) -> browsecomp -> merged, whose other parent is the same milestone."""
    general = tmp_path / "general" / "milestones" / "general_step_5"
    browsecomp, merged = tmp_path / "browsecomp", tmp_path / "merged"

    def make(place: Path, **changes: Any) -> None:
        shutil.copytree(pristine, place)
        meta = json.loads((place / "checkpoint_meta.json").read_text())
        (place / "checkpoint_meta.json").write_text(json.dumps(meta | changes))
        relist(place)

    make(general, recipe="general")
    source = f"{tmp_path / 'general'}@general_step_5"
    make(browsecomp, recipe="browsecomp", parents=[record(source, general)])
    parents = [record(str(browsecomp), browsecomp), record(source, general)]
    make(merged, recipe="release-merge", parents=parents)
    (merged / "checkpoint_merge_meta.json").write_text(
        json.dumps(
            {
                "merge_type": "weighted_average",
                "checkpoint_a": str(browsecomp),
                "checkpoint_b": source,
                "weight_a": 0.5,
                "weight_b": 0.5,
                "merged_artifacts": [ADAPTER],
                "components": record("", merged)["components"],
                "parents": parents,
            }
        )
    )
    relist(merged)
    return merged


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_tree(family: Path) -> None:
    tree = lineage.read(family)
    assert [(node.recipe, node.edge) for node in lineage.edges(tree)] == [
        ("browsecomp", "verified"),
        ("general", "verified"),
        ("general", "verified"),
    ]
    text = lineage.render(tree).split("\n")
    assert len(text) == 4 and "merge 0.5 + 0.5" in text[0]
    assert text[1].startswith("├─ ") and "recipe browsecomp" in text[1] and text[1].endswith("verified")
    assert text[2].startswith("│  └─ ") and "general_step_5" in text[2] and "step 5" in text[2]
    assert text[3].startswith("└─ ")
    plain = json.loads(json.dumps(lineage.to_dict(tree)))
    assert plain["how"] == "merge" and plain["parents"][0]["parents"][0]["edge"] == "verified"


def test_what_is_not_at_hand_is_unverified(family: Path) -> None:
    shutil.rmtree(family.parent / "general")
    tree = lineage.read(family)
    assert [node.edge for node in lineage.edges(tree)] == ["verified", "unverified", "unverified"]
    assert "UNVERIFIED: the parent is not at hand" in lineage.render(tree)
    assert tree.parents[1].path is None and tree.parents[1].components  # what was recorded is still told


def test_a_parent_that_has_changed_is_told_and_not_followed(family: Path) -> None:
    spoil(family.parent / "browsecomp" / ADAPTER)
    tree = lineage.read(family)
    assert [node.edge for node in lineage.edges(tree)] == ["differs", "verified"]
    assert "DIFFERS" in lineage.render(tree)


def test_a_circle_ends(pristine: Path, tmp_path: Path, relist: Relist) -> None:
    place = tmp_path / "self"
    shutil.copytree(pristine, place)
    meta = json.loads((place / "checkpoint_meta.json").read_text())
    (place / "checkpoint_meta.json").write_text(json.dumps(meta | {"parents": [record(str(place), place)]}))
    relist(place)
    assert len(lineage.edges(lineage.read(place))) == 64


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not at hand"):
        lineage.read(tmp_path)


def verdict(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    code = call(["verify", *map(str, arguments), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert schema.problems(document, "verify_report") == []
    return code, document


def test_a_merge_is_checked_against_its_metadata_and_sources(
    family: Path, relist: Relist, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = verdict(capsys, family)
    assert code == 0 and document["not_checked"] == []
    shutil.rmtree(family.parent / "general")
    code, document = verdict(capsys, family)
    assert code == 0 and "the parent is not at hand" in document["not_checked"][0]
    spoil(family.parent / "browsecomp" / ADAPTER)
    code, document = verdict(capsys, family)
    assert code == 1 and [problem["status"] for problem in document["problems"]] == ["identity"]
    assert "is not what was merged" in document["problems"][0]["detail"]


def test_another_output_than_the_metadata_describes(
    family: Path, relist: Relist, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(family / ADAPTER)
    relist(family)
    code, document = verdict(capsys, family)
    assert code == 1 and "is not the output that this file describes" in document["problems"][0]["detail"]


@pytest.fixture
def cache(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one repository: a snapshot of links into blobs."""
    repository = tmp_path / "hub" / "models--owner--name"
    commit = "0" * 39 + "1"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for path in sorted(pristine.rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            name = path.relative_to(pristine)
            blob = hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, repository / "blobs" / blob)
            place = repository / "snapshots" / commit / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(Path(*[".."] * (len(name.parts) + 1), "blobs", blob))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return repository


def test_a_hub_id_is_checked_through_its_cache(
    cache: Path, pristine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "sums"
    names = [path.relative_to(pristine) for path in pristine.rglob("*") if path.is_file()]
    lines.write_text(
        "".join(
            f"{hashlib.sha256((pristine / name).read_bytes()).hexdigest()}  {name}\n"
            for name in names
            if name.name != "manifest.json"
        )
    )
    for given in ("owner/name", "hf://owner/name"):
        assert verdict(capsys, given, "--manifest", lines)[0] == 0
    snapshot = next((cache / "snapshots").iterdir())
    (snapshot / "cache_mapper.pt").unlink()
    (snapshot / "cache_mapper.pt").symlink_to(pristine / "cache_mapper.pt")  # right, and outside the cache
    code, document = verdict(capsys, "owner/name", "--manifest", lines)
    assert code == 1 and document["problems"][0]["status"] == "escapes"
    blob = (snapshot / ADAPTER).resolve()
    spoil(blob)
    code, document = verdict(capsys, "owner/name", "--manifest", lines)
    assert {problem["status"] for problem in document["problems"]} == {"escapes", "digest"}


def test_hub_ids_and_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.hub_id("owner/name") == ("owner/name", None) == hub.hub_id("hf://owner/name")
    assert hub.hub_id("owner/name@abc") == ("owner/name", "abc")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert hub.hub_id("owner/name") is None and hub.hub_id("owner/name@milestone") is None
    assert hub.hub_id("hf://owner/name") == ("owner/name", None)
    for given in ("name", "/a/b", "a/b/c", "../a", "./a"):
        assert hub.hub_id(given) is None
    assert hub.cached("no/such") is None
