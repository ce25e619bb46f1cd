"""Crash injection: a commit is killed at every single change it makes to the disk, all points enumerated.

Each scenario runs in a process of its own (this file as a script), which forks a child per point; the child
is ended by a real SIGKILL. In mode "power" what was not yet fsynced is lost too: data of files becomes empty,
new entries of directories vanish.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint import commit as commits
from parallel_synthesis.checkpoint.disk import Disk
from parallel_synthesis.checkpoint.layout import RunPaths, newest_committed
from parallel_synthesis.checkpoint.retention import keep
from parallel_synthesis.provenance.hashing import Bytes
from parallel_synthesis.provenance.manifest import MANIFEST, verify

ROOT = Path(__file__).resolve().parents[2]


class CrashDisk(Disk):
    """A disk that ends the process at its n-th point. A write has two: before it, and after half of it.

    Nothing is really fsynced (a kill loses no written byte): what was is noted, and in mode "power" the rest
    is lost. forget: an operation whose effect is left out, to see that its absence is noticed.
    """

    def __init__(self, n: int, *, power: bool, links: bool = True, forget: str = "") -> None:
        self.left = n
        self.power = power
        self.forget = forget
        self.links = links
        self.unsynced: dict[int, int] = {}  # descriptor -> a duplicate of it
        self.entries: list[tuple[int, int, str]] = []  # directory's inode, its descriptor, new name

    def point(self) -> None:
        if self.left == 0:
            self.crash()
        self.left -= 1

    def crash(self) -> None:
        if self.power:
            for fd in self.unsynced.values():
                os.ftruncate(fd, 0)
            for _, directory, name in reversed(self.entries):
                with contextlib.suppress(FileNotFoundError):
                    path = Path(f"/proc/self/fd/{directory}").resolve() / name
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    def note(self, path: Path) -> None:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self.entries.append((os.fstat(directory).st_ino, directory, path.name))

    def create(self, path: Path) -> int:
        self.point()
        fd = super().create(path)
        self.unsynced[fd] = os.dup(fd)
        self.note(path)
        return fd

    def write(self, fd: int, data: Bytes) -> int:
        self.point()
        half = super().write(fd, memoryview(data)[: len(data) // 2])
        self.point()
        return half + super().write(fd, memoryview(data)[half:])

    def fsync(self, fd: int) -> None:
        self.point()
        if self.forget != "fsync":
            os.close(self.unsynced.pop(fd))

    def fsync_directory(self, path: Path) -> None:
        self.point()
        inode = path.stat().st_ino
        if self.forget != "fsync_directory":
            self.entries = [entry for entry in self.entries if entry[0] != inode]

    def mkdir(self, path: Path) -> None:
        self.point()
        super().mkdir(path)
        self.note(path)

    def rename(self, source: Path, target: Path) -> None:
        self.point()
        super().rename(source, target)

    def symlink(self, content: str, path: Path) -> None:
        self.point()
        super().symlink(content, path)
        self.note(path)

    def link(self, source: Path, target: Path) -> None:
        if not self.links:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self.point()
        super().link(source, target)
        self.note(target)

    def reflink(self, source_fd: int, target_fd: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def unlink(self, path: Path) -> None:
        self.point()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self.point()
        super().rmdir(path)


def fill(step: int) -> Callable[[commits.Staging], None]:
    def write(staging: commits.Staging) -> None:
        staging.write_bytes("cache_mapper.pt", b"mapper %d" % step)
        staging.write_json(
            "cache_mapper_config.json", {"hidden_dim": 32, "metadata_features": "both"}, "cache_mapper_config"
        )
        staging.write_json("judger_lora/adapter_config.json", {"r": 16}, None)
        with staging.open("judger_lora/adapter_model.safetensors") as file:
            file.write(b"adapter %d" % step * 50)
        staging.write_bytes("training_state.pt", b"state %d" % step * 90)
        staging.write_json(
            "checkpoint_meta.json",
            {"global_step": step, "epoch": 1, "source_run_dir": None, "metrics": None},
            "checkpoint_meta",
        )

    return write


def save(run: RunPaths, step: int, disk: Disk) -> None:
    commits.commit(run.step(step), step=step, fill=fill(step), disk=disk)
    commits.set_latest(run.step_checkpoints, step, disk=disk)


def save_and_prune(run: RunPaths, disk: Disk) -> None:
    save(run, 15, disk)
    steps = [there.step for there in newest_committed(run.out)]
    commits.prune(run.out, keep(steps, last=1, every=None, named=()), disk=disk)


def milestone(run: RunPaths, disk: Disk) -> None:
    target = run.milestone("general", 10)
    if not target.exists():  # a kill after the rename leaves a whole one
        commits.link_checkpoint(run.step(10), target, disk=disk)


@dataclass(frozen=True)
class Scenario:
    """act is killed; doing `again` afterwards must work and leave no leftovers in the directories it commits
    to."""

    before: tuple[int, ...]
    act: Callable[[RunPaths, Disk], object]
    again: Callable[[RunPaths, Disk], object]
    removed: tuple[int, ...] = ()
    links: bool = True
    final: int | None = None


def again_save(run: RunPaths, disk: Disk) -> None:
    save(run, 99, disk)


SCENARIOS = {
    "first commit": Scenario((), lambda run, disk: save(run, 0, disk), again_save),
    "commit and retention": Scenario((0, 5, 10), save_and_prune, again_save, removed=(5, 10)),
    "latest": Scenario(
        (0, 5),
        lambda run, disk: commits.set_latest(run.step_checkpoints, 0, disk=disk),
        lambda run, disk: commits.set_latest(run.step_checkpoints, 0, disk=disk),
    ),
    "milestone": Scenario((0, 10), milestone, milestone),
    "milestone by copy": Scenario((0, 10), milestone, milestone, links=False),
    "final": Scenario(
        (0, 10),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
    ),
    "final over an older one": Scenario(
        (0, 5, 10),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
        final=5,
    ),
    "final by copy over an older one": Scenario(
        (0, 5, 10),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
        lambda run, disk: commits.link_final(run.step(10), run.out, disk=disk),
        links=False,
        final=5,
    ),
    "remove": Scenario(
        (0, 5), lambda run, disk: commits.remove_checkpoint(run.step(0), disk=disk), again_save, removed=(0,)
    ),
}


def hidden(run: RunPaths) -> list[str]:
    return [str(path.relative_to(run.out)) for path in run.out.rglob(".*")]


def broken(run: RunPaths, scenario: Scenario, earlier: dict[Path, bytes]) -> list[str]:
    """Everything that must hold after a kill and does not."""
    found = []
    removable = {run.step(step) for step in scenario.removed}
    for path, manifest in earlier.items():
        if not path.exists():
            found += [] if path in removable else [f"{path.name} is gone"]
        elif (path / MANIFEST).read_bytes() != manifest:
            found.append(f"{path.name} was changed")
    directories = [
        run.out,
        *(path for parent in (run.step_checkpoints, run.milestones) for path in parent.glob("[!.]*")),
    ]
    for path in directories:
        if path.is_symlink():
            continue
        if path == run.out:
            found += [str(problem) for problem in verify(path, extra=False) if (path / MANIFEST).exists()]
        else:  # under a final name there is a whole checkpoint or nothing
            found += [f"{path.name}: {problem}" for problem in verify(path)]
    if os.path.lexists(run.latest):
        found += [f"latest: {problem}" for problem in verify(run.latest)]
    elif earlier:
        found.append("latest is gone")
    return found


def enumerate_points(name: str, mode: str, base: Path) -> dict[str, object]:
    scenario = SCENARIOS[name]
    template = RunPaths(base / "template")
    template.step_checkpoints.mkdir(parents=True)
    for step in scenario.before:
        save(template, step, CrashDisk(-1, power=False))
    if scenario.final is not None:
        commits.link_final(template.step(scenario.final), template.out, disk=CrashDisk(-1, power=False))
    problems: list[str] = []
    for n in itertools.count():
        run = RunPaths(base / "run")
        shutil.copytree(template.out, run.out, symlinks=True)
        earlier = {run.step(step): (run.step(step) / MANIFEST).read_bytes() for step in scenario.before}
        forget = mode if mode.startswith("fsync") else ""
        disk = CrashDisk(n, power=mode != "kill", links=scenario.links, forget=forget)
        child = os.fork()
        if child == 0:
            scenario.act(run, disk)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status != 0:
            problems.append(f"point {n}: ended with {status}")
        problems += [f"point {n}: {problem}" for problem in broken(run, scenario, earlier)]
        scenario.again(run, CrashDisk(-1, power=False, links=scenario.links))
        problems += [f"point {n}, again: {problem}" for problem in broken(run, scenario, earlier)]
        problems += [f"point {n}, again: {left} is left over" for left in hidden(run)]
        shutil.rmtree(run.out)
        if not killed:
            return {"points": n, "problems": problems}
    raise AssertionError("unreachable")


# The least number of points each must have: fewer means that a step of the protocol was dropped.
LEAST = {
    "first commit": 37,
    "commit and retention": 59,
    "latest": 3,
    "milestone": 15,
    "milestone by copy": 36,
    "final": 19,
    "final over an older one": 19,
    "final by copy over an older one": 40,
    "remove": 11,
}


def enumerate_in_a_process(name: str, mode: str, base: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, name, mode, str(base)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("mode", ["kill", "power"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_any_point_leaves_everything_whole(name: str, mode: str, tmp_path: Path) -> None:
    result = enumerate_in_a_process(name, mode, tmp_path)
    assert result["problems"] == []
    assert result["points"] >= LEAST[name]


@pytest.mark.parametrize("forget", ["fsync", "fsync_directory"])
def test_the_injection_itself_notices_a_protocol_without(forget: str, tmp_path: Path) -> None:
    """The checker is not blind: what the protocol's fsyncs are there for is seen when one kind is left
    out."""
    assert enumerate_in_a_process("first commit", forget, tmp_path)["problems"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(enumerate_points(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
