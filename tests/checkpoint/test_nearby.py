"""What is said of a path that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallel_synthesis.checkpoint.layout import find_components
from parallel_synthesis.checkpoint.nearby import nothing_at
from parallel_synthesis.errors import BackboneError, CheckpointError, StorageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "demo2", "general", ".hidden"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("given", "starts", "ends"),
    [
        ("runs/deno", "no such directory; in runs there are: demo, demo2.", "hf://runs/deno would be a repository of the Hub"),
        ("runs/deno@x", "no such directory; in runs there are: demo, demo2.", "the Hub"),
        ("runs/zzz", "no such directory; in runs there are: demo, demo2, general.", "the Hub"),
        ("runs/generel/latest", "no such directory; in runs there are: general.", "RUN@NAME"),
        ("runs/demo/x", "no such directory; in runs/demo there is none.", "RUN@NAME"),
        ("rums", "no such directory; here there are: runs.", "RUN@NAME"),
        ("runs/file/x", "no such directory: runs/file is a file.", "RUN@NAME"),
        ("runs/" + "x" * 300, "no such directory; in runs", "the Hub"),
    ],
)  # fmt: skip
def test_where_it_stops_and_what_there_is(given: str, starts: str, ends: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_components(given)
    assert str(caught.value).startswith(f"{given}: {starts}") and str(caught.value).endswith(ends)


def test_a_link_to_nothing(here: Path) -> None:
    (here / "runs" / "old").symlink_to("/nowhere/old")
    with pytest.raises(CheckpointError, match="runs/old is a link to /nowhere/old, which is not there"):
        find_components("runs/old/latest")


def test_many_are_counted(here: Path) -> None:
    for number in range(20):
        (here / "many" / f"{number}").mkdir(parents=True)
    assert "11, 12, 13, 14, 15 and 12 more." in str(nothing_at("many/zzz"))


def test_the_class_and_what_was_expected() -> None:
    error = nothing_at("runs/base", expected="a model", refused=BackboneError)
    assert isinstance(error, BackboneError) and "Expected a model" in str(error)


def test_permission_denied(here: Path) -> None:
    for parent in (here, *here.parents[:2]):
        parent.chmod(parent.stat().st_mode | 0o755)
    (here / "closed" / "x").mkdir(parents=True)
    (here / "closed").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match="closed/x: permission denied in closed"):
            find_components("closed/x")
    finally:
        if root:
            os.seteuid(0)
        (here / "closed").chmod(0o755)
