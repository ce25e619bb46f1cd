"""Commits, links, `latest`, removal and leftovers (kills at every point: tests/faults/test_commit.py)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint import commit as commits
from parallel_synthesis.checkpoint import disk as disks
from parallel_synthesis.checkpoint.commit import Staging
from parallel_synthesis.checkpoint.disk import Disk, hidden_name
from parallel_synthesis.checkpoint.layout import COMPONENT_ENTRIES, RunPaths
from parallel_synthesis.errors import CheckpointError, StorageError
from parallel_synthesis.provenance.hashing import Bytes
from parallel_synthesis.provenance.manifest import verify

Save = Callable[..., dict[str, Any]]


class Recorder(Disk):
    """Notes the order of the changes as (operation, file name)."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.names[fd] = path.name
        self.done.append(("create", path.name))
        return fd

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.done.append(("fsync", self.names[fd]))

    def fsync_directory(self, path: Path) -> None:
        super().fsync_directory(path)
        self.done.append(("fsync directory", path.name.split(".partial")[0].lstrip(".")))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.done.append(("rename", target.name))


class NoLinks(Disk):
    """A file system without hard links (and, as here, without reflinks)."""

    def __init__(self, code: int = errno.EPERM) -> None:
        self.code = code

    def link(self, source: Path, target: Path) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def reflink(self, source_fd: int, target_fd: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")
    }


def test_the_manifest_tells_the_bytes_of_each_file(run: RunPaths, save: Save) -> None:
    manifest = save(7)
    assert json.loads((run.step(7) / "manifest.json").read_text()) == manifest
    assert manifest["kind"] == "checkpoint" and manifest["global_step"] == 7
    content = b"adapter 7" * 50
    assert manifest["files"]["judger_lora/adapter_model.safetensors"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert sorted(entry.name for entry in run.step(7).iterdir()) == sorted(COMPONENT_ENTRIES)
    assert verify(run.step(7)) == []


def test_the_order_of_the_protocol(run: RunPaths, save: Save) -> None:
    recorder = Recorder()
    save(7, disk=recorder)
    files = [
        "cache_mapper.pt",
        "cache_mapper_config.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    files += ["training_state.pt", "checkpoint_meta.json", "manifest.json"]
    expected = [(act, name) for name in files for act in ("create", "fsync")]
    expected += [("fsync directory", name) for name in ("judger_lora", "step_000000007")]
    expected += [("rename", "step_000000007"), ("fsync directory", "step_checkpoints")]
    assert recorder.done[-len(expected) :] == expected


def test_the_final_manifest_comes_after_every_file_is_durable(run: RunPaths, save: Save) -> None:
    save(7)
    recorder = Recorder()
    commits.link_final(run.step(7), run.out, disk=recorder)
    assert recorder.done[-4:] == [
        ("fsync directory", "run"),
        ("fsync directory", "judger_lora"),
        ("rename", "manifest.json"),
        ("fsync directory", "run"),
    ]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_files_are_read_only_less_the_umask(umask: int, run: RunPaths, save: Save) -> None:
    before = os.umask(umask)
    try:
        save(1)
        commits.link_checkpoint(run.step(1), run.milestone("r", 1), disk=NoLinks())
    finally:
        os.umask(before)
    for directory in (run.step(1), run.milestone("r", 1)):
        for path in directory.rglob("*"):
            wanted = 0o777 if path.is_dir() else 0o444
            assert stat.S_IMODE(path.stat().st_mode) == wanted & ~umask, path


def test_a_symlinked_run_directory_works(tmp_path: Path, run: RunPaths, save: Save) -> None:
    (tmp_path / "elsewhere").mkdir()
    run.out.symlink_to("elsewhere")
    save(1)
    commits.set_latest(run.step_checkpoints, 1)
    commits.link_checkpoint(run.latest, run.milestone("r", 1))
    commits.link_final(run.latest, run.out)
    assert verify(tmp_path / "elsewhere", extra=False) == []
    assert verify(tmp_path / "elsewhere" / "milestones" / "r_step_1") == []


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_a_failing_fill_leaves_nothing(error: BaseException, run: RunPaths, save: Save) -> None:
    save(1)
    before = tree(run.out)

    def fail(staging: Staging) -> None:
        staging.write_bytes("judger_lora/a", b"x" * 3_000_000)
        raise error

    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        commits.commit(run.step(2), step=2, fill=fail)
    assert tree(run.out) == before


@pytest.mark.parametrize("operation", ["create", "write", "fsync", "fsync_directory", "rename", "mkdir"])
def test_a_failing_change_is_a_storage_error_and_leaves_nothing(
    operation: str, run: RunPaths, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)
    before = tree(run.out)
    disk = Disk()
    count = 0
    target = 1

    def fail(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == target:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(Disk, operation)(disk, *arguments)

    monkeypatch.setattr(disk, operation, fail)
    while target < 20:
        count = 0
        try:
            save(2, disk=disk)
        except StorageError as error:
            assert (
                str(run.step(2)) in str(error)
                and "No space left" in str(error)
                and "bytes free" in str(error)
            )
            assert tree(run.out) == before
            target += 1
        else:
            break
    assert target > 1
    assert verify(run.step(2)) == []


def test_short_writes_go_on(run: RunPaths, save: Save) -> None:
    class Short(Disk):
        def write(self, fd: int, data: Bytes) -> int:
            return super().write(fd, memoryview(data)[:7])

    save(3, disk=Short())
    assert verify(run.step(3)) == []


def test_a_taken_name_is_refused(run: RunPaths, save: Save) -> None:
    save(1)
    run.step(2).mkdir()  # rename alone would replace an empty directory
    run.step(3).symlink_to("nowhere")
    before = tree(run.out)
    for step in (1, 2, 3):
        with pytest.raises(CheckpointError, match="exists already"):
            save(step)
    assert tree(run.out) == before


def test_a_name_cannot_leave_the_directory_or_be_written_twice(run: RunPaths) -> None:
    for name in ("../x", "/x", "a/../x", "", "manifest.json", "a//b", "."):
        with pytest.raises(ValueError, match="relative path"):
            commits.commit(
                run.step(1), step=1, fill=lambda staging, name=name: staging.write_bytes(name, b"")
            )  # type: ignore[misc]

    def twice(staging: Staging) -> None:
        staging.write_bytes("a", b"")
        staging.write_bytes("a", b"")

    with pytest.raises(ValueError, match="not yet written"):
        commits.commit(run.step(1), step=1, fill=twice)
    assert not run.step(1).exists()


def test_an_invalid_document_is_never_committed(run: RunPaths) -> None:
    def fill(staging: Staging) -> None:
        staging.write_json("cache_mapper_config.json", {"hidden_dim": 0}, "cache_mapper_config")

    with pytest.raises(CheckpointError, match=r"hidden_dim.*minimum 1"):
        commits.commit(run.step(1), step=1, fill=fill)
    assert not run.step(1).exists()


def test_a_milestone_adds_no_bytes(run: RunPaths, save: Save) -> None:
    save(5)
    commits.set_latest(run.step_checkpoints, 5)
    assert commits.link_checkpoint(run.latest, run.milestone("general", 5)) == "link"
    for path in run.step(5).rglob("*"):
        if path.is_file():
            assert path.samefile(run.milestone("general", 5) / path.relative_to(run.step(5)))
    commits.remove_checkpoint(run.step(5))
    assert verify(run.milestone("general", 5)) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_links_are_not_possible_it_copies(code: int, run: RunPaths, save: Save) -> None:
    save(5)
    assert commits.link_checkpoint(run.step(5), run.milestone("general", 5), disk=NoLinks(code)) == "copy"
    assert commits.link_final(run.step(5), run.out, disk=NoLinks(code)) == "copy"
    assert tree(run.milestone("general", 5)) == tree(run.step(5))
    assert verify(run.out, extra=False) == []
    assert not (run.out / "cache_mapper.pt").samefile(run.step(5) / "cache_mapper.pt")


def test_a_link_that_fails_for_another_reason_is_an_error(run: RunPaths, save: Save) -> None:
    save(5)
    with pytest.raises(StorageError, match="Input/output error"):
        commits.link_checkpoint(run.step(5), run.milestone("general", 5), disk=NoLinks(errno.EIO))
    assert list(run.milestones.iterdir()) == []


def test_a_reflink_is_told_apart(run: RunPaths, save: Save) -> None:
    class Reflinks(NoLinks):
        def reflink(self, source_fd: int, target_fd: int) -> None:
            os.sendfile(target_fd, source_fd, 0, os.fstat(source_fd).st_size)

    save(5)
    assert commits.link_checkpoint(run.step(5), run.milestone("g", 5), disk=Reflinks()) == "reflink"
    assert verify(run.milestone("g", 5)) == []


def test_an_export_is_a_copy_and_a_damaged_source_is_refused(
    tmp_path: Path, run: RunPaths, save: Save
) -> None:
    save(5)
    assert commits.link_checkpoint(run.step(5), tmp_path / "export", copy=True) == "copy"
    assert verify(tmp_path / "export") == []
    damaged = run.step(5) / "training_state.pt"
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"training_state\.pt is damaged"):
        commits.link_checkpoint(run.step(5), tmp_path / "export2", copy=True)
    assert not (tmp_path / "export2").exists()
    damaged.write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"not whole: training_state\.pt: 5 bytes; expected 630"):
        commits.link_checkpoint(run.step(5), run.milestone("general", 5))


def test_the_final_set_replaces_an_older_one_and_is_left_alone_when_there(run: RunPaths, save: Save) -> None:
    save(5)
    save(10)
    commits.link_final(run.step(5), run.out)
    commits.link_final(run.step(10), run.out)
    assert verify(run.out, extra=False) == [] and verify(run.step(5)) == []
    assert json.loads((run.out / "manifest.json").read_text())["global_step"] == 10
    recorder = Recorder()
    commits.link_final(run.step(10), run.out, disk=recorder)
    assert recorder.done == []
    assert list(run.out.rglob(".*")) == []


def test_a_final_set_that_cannot_be_placed_has_no_manifest(run: RunPaths, save: Save) -> None:
    save(5)
    save(10)
    commits.link_final(run.step(5), run.out)

    class Full(Disk):
        def link(self, source: Path, target: Path) -> None:
            if "training_state" in target.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().link(source, target)

    with pytest.raises(StorageError, match=r"run/training_state\.pt"):
        commits.link_final(run.step(10), run.out, disk=Full())
    assert not (run.out / "manifest.json").exists()
    assert verify(run.step(5)) == [] and verify(run.step(10)) == []
    assert list(run.out.rglob(".*")) == []
    commits.link_final(run.step(10), run.out)
    assert verify(run.out, extra=False) == []


def test_latest_moves_to_committed_steps_only(run: RunPaths, save: Save) -> None:
    save(5)
    save(10)
    commits.set_latest(run.step_checkpoints, 10)
    assert run.latest.readlink() == Path("step_000000010")
    commits.set_latest(run.step_checkpoints, 5)
    assert run.latest.resolve() == run.step(5).resolve()
    run.step(15).mkdir()
    for step in (15, 20):
        with pytest.raises(CheckpointError, match="not a committed checkpoint"):
            commits.set_latest(run.step_checkpoints, step)
    assert run.latest.readlink() == Path("step_000000005")


def test_removal_takes_the_manifest_first_and_follows_no_link(
    tmp_path: Path, run: RunPaths, save: Save
) -> None:
    save(5)
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("x")
    (run.step(5) / "link").symlink_to(outside)
    order: list[str] = []

    class Watch(Disk):
        def unlink(self, path: Path) -> None:
            order.append(path.name)
            super().unlink(path)

    commits.remove_checkpoint(run.step(5), disk=Watch())
    assert order[0] == "manifest.json" and len(order) == 8
    assert (outside / "file").read_text() == "x"
    assert list(run.step_checkpoints.iterdir()) == []
    for path in (run.step(5), run.latest):
        with pytest.raises(CheckpointError, match="not a checkpoint directory"):
            commits.remove_checkpoint(path)


def test_prune_keeps_latest_and_what_is_not_a_step(run: RunPaths, save: Save) -> None:
    for step in (0, 5, 10, 15):
        save(step)
    (run.step_checkpoints / "step_000000006.bak").mkdir()
    run.step(7).mkdir()  # no manifest: not a checkpoint, so not retention's to delete
    commits.set_latest(run.step_checkpoints, 5)
    assert commits.prune(run.out, {0, 15}) == [10]
    assert sorted(path.name for path in run.step_checkpoints.iterdir()) == [
        "latest",
        "step_000000000",
        "step_000000005",
        "step_000000006.bak",
        "step_000000007",
        "step_000000015",
    ]


def test_only_leftovers_of_the_dead_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    leftover = tmp_path / hidden_name("step_000000001").replace(f"@{os.getpid()}-", f"@{int(dead.stdout)}-")
    living = tmp_path / hidden_name("step_000000002").replace(f"@{os.getpid()}-", f"@{os.getppid()}-")
    foreign = tmp_path / ".step_000000003.partial-other-host@1-0123456789abcdef"
    foreign_file = tmp_path / ".latest.partial-other-host@1-0123456789abcdef"
    old_file = tmp_path / ".latest.partial-other-host@2-0123456789abcdef"
    locked = tmp_path / ".step_000000004.partial-other-host@1-0123456789abcdef"
    not_ours = [tmp_path / name for name in (".git", ".step_000000005.partial", ".x.partial-h@1-zz")]
    for path in (leftover, living, foreign, locked, *not_ours):
        path.mkdir()
        (path / "file").write_text("x")
    for path in (foreign_file, old_file):
        path.write_text("x")
    for path in (old_file, locked):
        os.utime(path, (0, 0))
    with disks.claimed(locked):
        cleared = commits.clear_stale(tmp_path)
    assert sorted(cleared) == sorted([leftover.name, foreign.name, old_file.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (living, locked, foreign_file, *not_ours)
    )
    assert locked.name in commits.clear_stale(tmp_path)
    assert commits.clear_stale(tmp_path / "absent") == []


def test_an_unwritable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = RunPaths(tmp_path / "file" / "run")
    with pytest.raises(StorageError, match=r"step_000000001: Not a directory"):
        commits.commit(run.step(1), step=1, fill=lambda staging: None)
