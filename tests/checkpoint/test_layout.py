"""Names of steps and milestones, finding components, what a run needs of a disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.checkpoint import commit as commits
from parallel_synthesis.checkpoint import layout
from parallel_synthesis.checkpoint.layout import RunPaths, StepCheckpoint
from parallel_synthesis.checkpoint.retention import keep
from parallel_synthesis.config import CheckpointConfig
from parallel_synthesis.errors import CheckpointError, StorageError

Save = Callable[..., dict[str, Any]]


def test_step_names_are_golden() -> None:
    assert layout.step_name(0) == "step_000000000"
    assert layout.step_name(95060) == "step_000095060"
    assert layout.step_name(12345678901) == "step_12345678901"
    assert layout.parse_step("step_000095060") == 95060
    assert layout.parse_step("step_12345678901") == 12345678901


@pytest.mark.parametrize(
    "name",
    [
        "step_000000006.bak",
        "step_6",
        "step_0000000006",
        "xstep_000000006",
        "step_000000006\n",
        "step_-00000006",
        "step_٠٠٠٠٠٠٠٠٦",
        "Step_000000006",
        "",
        "latest",
        ".step_000000006",
    ],
)
def test_step_names_are_matched_whole(name: str) -> None:
    assert layout.parse_step(name) is None


@settings(derandomize=True, deadline=None, database=None)
@given(st.integers(0, 10**12))
def test_step_names_round_trip(step: int) -> None:
    assert layout.parse_step(layout.step_name(step)) == step
    assert layout.parse_milestone(layout.milestone_name("my_step_1", step)) == ("my_step_1", step)


def test_milestone_names() -> None:
    assert layout.milestone_name("general", 95060) == "general_step_95060"
    assert layout.parse_milestone("general_step_95060") == ("general", 95060)
    for name in (
        "general_step_",
        "_step_5",
        "general_step_05",
        "general_step_5.bak",
        ".general_step_5",
        "general",
    ):
        assert layout.parse_milestone(name) is None
    for recipe in ("", "../x", "a/b", ".hidden", "a@b", "a\nb"):
        with pytest.raises(CheckpointError, match="cannot name a milestone"):
            layout.milestone_name(recipe, 5)


def test_paths_of_a_run(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert run.run_args == tmp_path / "run_args.json"
    assert run.train_log == tmp_path / "train.log"
    assert run.summary == tmp_path / "train_mixed_summary.json"
    assert run.latest == tmp_path / "step_checkpoints" / "latest"
    assert run.superseded == tmp_path / "superseded"
    assert run.step(5) == tmp_path / "step_checkpoints" / "step_000000005"
    assert run.milestone("general", 5) == tmp_path / "milestones" / "general_step_5"


def test_newest_committed_lists_whole_names_with_a_manifest(run: RunPaths, save: Save) -> None:
    assert layout.newest_committed(run.out) == []
    for step in (5, 100, 20):
        save(step)
    shutil.copytree(run.step(100), run.step_checkpoints / "step_000000006.bak")
    run.step(200).mkdir()
    (run.step_checkpoints / "step_000000300").symlink_to("step_000000005")
    (run.step_checkpoints / "step_000000400").write_text("")
    assert layout.newest_committed(run.out) == [StepCheckpoint(step, run.step(step)) for step in (100, 20, 5)]


def test_components_of_a_run_of_ours(run: RunPaths, save: Save) -> None:
    for step in (0, 5, 10):
        save(step)
    assert layout.find_components(run.out) == run.step(10)  # latest is missing: the newest committed
    commits.set_latest(run.step_checkpoints, 5)
    assert layout.find_components(run.out) == run.step(5)
    commits.link_final(run.step(10), run.out)
    assert layout.find_components(run.out) == run.out
    (run.out / "manifest.json").unlink()  # going on beyond the end: the root's components do not count
    assert layout.find_components(str(run.out)) == run.step(5)
    run.latest.unlink()
    run.latest.symlink_to("step_000000999")
    assert layout.find_components(run.out) == run.step(10)
    assert layout.find_components(run.step(0)) == run.step(0)
    assert layout.find_components(run.step_checkpoints / "step_000000005") == run.step(5)


def foreign(directory: Path) -> Path:
    (directory / "judger_lora").mkdir(parents=True)
    (directory / "cache_mapper.pt").touch()
    (directory / "judger_lora" / "adapter_model.safetensors").touch()
    return directory


def test_components_of_a_run_of_the_reference(tmp_path: Path) -> None:
    steps = foreign(tmp_path / "run" / "step_checkpoints" / "latest")
    assert layout.find_components(tmp_path / "run") == steps
    latest = foreign(tmp_path / "run" / "latest")
    assert layout.find_components(tmp_path / "run") == latest
    foreign(tmp_path / "x")
    shutil.copytree(tmp_path / "x", tmp_path / "run", dirs_exist_ok=True)
    assert layout.find_components(tmp_path / "run") == tmp_path / "run"  # no manifest anywhere: its own count


def test_named_checkpoints(tmp_path: Path, run: RunPaths, save: Save) -> None:
    save(5)
    commits.link_checkpoint(run.step(5), run.milestone("general", 5))
    assert layout.find_components(f"{run.out}@general_step_5") == run.milestone("general", 5)
    assert layout.find_components(f"{run.out}@step_000000005") == run.step(5)
    for name in ("general_step_6", "..", "", "../milestones/general_step_5", "general_step_5/judger_lora"):
        with pytest.raises(CheckpointError, match="there are: general_step_5, step_000000005"):
            layout.find_components(f"{run.out}@{name}")
    own = foreign(tmp_path / "run@general_step_5")  # an existing path wins
    assert layout.find_components(own) == own
    assert list(layout.committed_milestones(run.out)) == ["general_step_5"]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path / "absent", "no such directory"), (tmp_path / "file", "not a directory")):
        with pytest.raises(CheckpointError, match=reason):
            layout.find_components(path)
    with pytest.raises(CheckpointError, match="holds no components"):
        layout.find_components(tmp_path)


def test_disk_needed_of_the_release() -> None:
    config = CheckpointConfig(every=5, keep_last=2, milestones=(95060, 176175))
    # step 0, two milestones, the last two and the one being written (the end)
    assert layout.kept_steps(220220, config) == [0, 95060, 176175, 220210, 220215, 220220]
    assert layout.disk_needed(250, 220220, config) == 6 * 250
    assert layout.disk_needed(250, 220220, config, links=False) == (6 + 3) * 250
    assert layout.disk_needed(250, 100_000, config) == 5 * 250
    assert layout.disk_needed(250, 7, CheckpointConfig(every=0)) == 2 * 250
    assert layout.saved_steps(12, CheckpointConfig(every=5, milestones=(3, 99))) == [0, 3, 5, 10, 12]


@settings(derandomize=True, deadline=None, database=None, max_examples=200)
@given(
    st.integers(1, 60),
    st.integers(0, 7),
    st.integers(1, 4),
    st.none() | st.integers(1, 12),
    st.lists(st.integers(1, 70), max_size=5),
)
def test_disk_needed_is_the_peak_of_the_run_played_through(
    total: int, every: int, last: int, keep_every: int | None, milestones: list[int]
) -> None:
    config = CheckpointConfig(
        every=every, keep_last=last, keep_every=keep_every, milestones=tuple(milestones)
    )
    there: set[int] = set()
    peak = 0
    for step in layout.saved_steps(total, config):
        there.add(step)
        peak = max(peak, len(there))
        there = keep(there, last=last, every=keep_every, named=set(milestones))
    assert layout.disk_needed(1, total, config) == peak


def test_free_bytes_of_a_directory_to_come(tmp_path: Path) -> None:
    free = layout.free_bytes(tmp_path / "not" / "yet")
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30


def test_a_directory_that_cannot_be_listed_is_no_empty_one(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        layout.newest_committed(run.out)
