"""Which texts name a Hub repository, which a path, and what is said of the near misses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.hub_names import hub_id

COMMIT = "0123456789abcdef" * 2 + "01234567"
FOLDER = "a folder inside a repository can not be named; download it by `hf download a/b"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    return tmp_path


def said(given: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        hub_id(given)
    assert str(caught.value).startswith(f"{given}: ")
    return str(caught.value).removeprefix(f"{given}: ")


def test_the_form_of_an_id() -> None:
    assert hub_id(f"hf://a/b@{COMMIT}") == ("a/b", COMMIT)
    assert hub_id("a/b@refs/pr/1") == ("a/b", "refs/pr/1")
    assert hub_id("hf://a/b@v1/of-may") == ("a/b", "v1/of-may")
    assert hub_id("a/b@v1.0+cu12") == ("a/b", "v1.0+cu12")
    for given in ("a/b@", "a/b@../c", "a/b@c//d", "a/b@.hidden", "a/b@c/..", "a b/c", "a/b/c", "a/b?c"):
        assert hub_id(given) is None
        assert "expected hf://OWNER/NAME" in said(f"hf://{given}")


@pytest.mark.parametrize("given", ["a/b", "a/b@c", "a/other", "a/other@c"])
def test_a_local_path_or_folder_comes_first(here: Path, given: str) -> None:
    assert hub_id(given) is not None
    (here / "a").mkdir()
    (here / "a" / "b").symlink_to("nowhere")  # broken, but a path: no name for something else
    assert hub_id(given) is None
    assert hub_id(f"hf://{given}") is not None
    (here / "a" / "b").unlink()
    (here / "a").rmdir()
    (here / "a").symlink_to("a-disk-that-is-not-mounted")
    assert hub_id(given) is None


@pytest.fixture
def nobody() -> Iterator[None]:
    """Permissions bind this process for once: root may enter everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.fixture
def closed(here: Path) -> Iterator[Path]:
    """A directory that may not be entered."""
    for parent in (here, *here.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o755)
    directory = here / "closed"
    (directory / "x").mkdir(parents=True)
    directory.chmod(0)
    yield directory
    directory.chmod(0o755)


@pytest.mark.usefixtures("closed", "nobody")
def test_what_may_not_be_looked_at_is_a_path() -> None:
    assert hub_id("closed/x") is None and hub_id("closed/y@z") is None


def test_a_folder_inside() -> None:
    assert f"{FOLDER} --revision main --include 'runs/x/*' --local-dir DIR` and name DIR/runs/x" in said(
        "hf://a/b@main/runs/x"
    )
    assert f"{FOLDER} --revision {COMMIT} --include 'x/*'" in said(f"hf://a/b@{COMMIT}/x")
    assert f"{FOLDER} --include 'runs/x/*'" in said("hf://a/b/runs/x")
    assert f"{FOLDER} --revision v2 --include 'runs/x/*'" in said("hf://a/b/runs/x@v2")
    assert said("a/b@main/runs/x").startswith("no such directory, and as a Hub id: a folder inside")
    assert "name the repository: hf://a/b@main" in said("hf://a/b@main/cache_mapper.pt")


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("https://huggingface.co/a/b", "hf://a/b"),
        ("http://www.huggingface.co/a/b/", "hf://a/b"),
        ("https://hf.co/a/b.git", "hf://a/b"),
        ("huggingface.co/a/b/tree/v2", "hf://a/b@v2"),
        ("https://huggingface.co/a/b/tree/refs%2Fpr%2F1?x=y#z", "hf://a/b@refs/pr/1"),
        ("https://huggingface.co/a/b/resolve/v2/cache_mapper.pt", "hf://a/b@v2"),
        (f"https://huggingface.co/a/b/commit/{COMMIT}", f"hf://a/b@{COMMIT}"),
        ("HF://a/b", "hf://a/b"),
        ("hf:/a/b@v1", "hf://a/b@v1"),
        ("hf:a/b", "hf://a/b"),
        ("https://mirror.example/hub/a/b", "hf://a/b"),
    ],
)
def test_another_spelling(given: str, right: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert said(given).endswith(f" {right}")
    assert hub_id(right) is not None


def test_other_addresses() -> None:
    assert f"hf://a/b@v2; {FOLDER} --revision v2" in said("https://huggingface.co/a/b/tree/v2/runs/x")
    assert "no model repository" in said("https://huggingface.co/datasets/a/b")
    assert "expected hf://OWNER/NAME" in said("https://huggingface.co/a")
    assert "addresses are not read" in said("s3://bucket/x")


def test_a_file_of_such_a_name_is_still_a_path(here: Path) -> None:
    (here / "hf:a").mkdir()
    assert hub_id("hf:a/b") is None
    assert hub_id("runs/a/step_checkpoints") is None and hub_id("/a/b") is None and hub_id("run@x") is None
