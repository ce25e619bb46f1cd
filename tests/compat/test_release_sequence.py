"""`make release-demo`, run as it is: general -> BrowseComp -> merge -> verify with the real recipes and launchers."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from parallel_synthesis.data.tasks import TASKS
from parallel_synthesis.resources import resource

pytestmark = pytest.mark.lane

SCRIPT = resource("artifacts", "demo", "release.sh")
EARLY, LATE = 19, 35  # of the general run's 46 steps; release.sh says so
ADAPTER = "judger_lora/adapter_model.safetensors"
Ps = Any  # tests/conftest.py, Calls


class Demo(NamedTuple):
    place: Path
    said: str

    def meta(self, name: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(
            (self.place / "runs" / name / "checkpoint_meta.json").read_text()
        )
        return document


def call(place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, place],
        env={**environment, "PYTHON": sys.executable},
        cwd=place.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def demo(module_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo's second call in the same directory: the first one left it half done."""
    place = tmp_path_factory.mktemp("release") / "demo"
    for name in (".release-demo", "runs/general/run_args.json", "data/old.jsonl"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    result = call(place, module_environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (place / "data/old.jsonl").exists()
    return Demo(place, result.stdout)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_it_takes_no_directory_that_holds_something_else(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "runs").touch()
    result = call(tmp_path / "mine", environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert "holds something else" in result.stderr
    assert (tmp_path / "mine" / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_signal_ends_the_stage_first(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """Through a link, which finds the rest of the demo all the same. The stand-in for Python is a stage that takes its
    time to end when it is told to."""
    (tmp_path / "link.sh").symlink_to(SCRIPT)
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, signal, sys, time\n"
        "if '-c' in sys.argv: sys.exit()\n"
        "assert pathlib.Path(sys.argv[1]).is_file(), sys.argv\n"
        "def end(number, frame):\n"
        "    time.sleep(1)\n"
        "    pathlib.Path('ended').touch()\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('began').touch()\n"
        "time.sleep(60)\n"
    )
    python.chmod(0o755)
    with subprocess.Popen(
        [tmp_path / "link.sh", "demo"],
        env={**environment, "PYTHON": str(python)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        until = time.monotonic() + 20
        while not (tmp_path / "demo" / "began").exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(timeout=20)
        assert (tmp_path / "demo" / "ended").exists()
        assert process.returncode == 128 + number
        process.communicate()


def test_the_recipes_are_the_releases_but_for_what_tiny_scale_needs(demo: Demo) -> None:
    changed = {}
    for name in ("general", "browsecomp"):
        record = json.loads((demo.place / "runs" / name / "run_args.json").read_text())
        assert record["recipe_sha256"] == sha256(resource("recipes", f"{name}.toml"))
        changed[name] = {
            field for field, origin in record["origins"].items() if origin not in ("recipe", "default")
        }
        config = record["config"]
        assert (config["run"]["ranks"], config["run"]["seed"], config["lora"]["r"]) == (4, 42, 16)
        files = {task: demo.place / TASKS[task].usual_file for task in config["data"]["tasks"]}
        assert {task: sha256(path) for task, path in files.items()} == {
            task: entry["sha256"] for task, entry in record["data"].items()
        }
        assert len(files) == {"general": 8, "browsecomp": 1}[name]
    # The Hub revision is of the model that the tiny one stands in for.
    backbone = {"backbone.model", "backbone.revision"}
    assert changed == {
        "general": {*backbone, "checkpoint.milestones"},
        "browsecomp": {*backbone, "guards.prefill_tokens"},
    }
    packed = demo.place / str(TASKS["browsecomp_textmas_toolcall"].usual_file)
    assert packed.suffix == ".gz"
    assert len(gzip.decompress(packed.read_bytes()).splitlines()) == 48


def test_each_stage_starts_from_the_one_before(demo: Demo) -> None:
    runs = demo.place / "runs"
    early, late = (f"runs/general@general_step_{step}" for step in (EARLY, LATE))
    kept = {step: runs / "general" / "milestones" / f"general_step_{step}" for step in (EARLY, LATE)}
    assert sorted(path.name for path in kept[EARLY].parent.iterdir()) == [
        f"general_step_{s}" for s in (EARLY, LATE)
    ]
    assert (demo.meta("general")["global_step"], demo.meta("browsecomp")["global_step"]) == (46, 12)
    summary = json.loads((runs / "browsecomp" / "train_mixed_summary.json").read_text())["train_metrics"]
    assert (summary["optimizer_steps"], summary["skipped_sync_steps"]) == (7, 5)
    # Step 0 of the second stage is the late milestone, byte for byte.
    for name in ("cache_mapper.pt", ADAPTER):
        assert sha256(runs / "browsecomp/step_checkpoints/step_000000000" / name) == sha256(kept[LATE] / name)
        assert demo.meta("browsecomp")["parents"][0]["components"][name] == sha256(kept[LATE] / name)
    assert [parent["source"] for parent in demo.meta("browsecomp")["parents"]] == [late]
    assert [(p["source"], p["step"]) for p in demo.meta("release")["parents"]] == [
        ("runs/browsecomp", 12),
        (early, EARLY),
    ]


def test_the_merge_is_the_releases(demo: Demo) -> None:
    import torch
    from safetensors.torch import load_file

    runs = demo.place / "runs"
    early = runs / "general" / "milestones" / f"general_step_{EARLY}"
    assert (runs / "release/cache_mapper.pt").read_bytes() == (early / "cache_mapper.pt").read_bytes()
    assert (runs / "release/cache_mapper.pt").read_bytes() != (runs / "general/cache_mapper.pt").read_bytes()
    a, b, merged = (load_file(place / ADAPTER) for place in (runs / "browsecomp", early, runs / "release"))
    assert merged.keys() == a.keys() == b.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, a[name] * 0.5 + b[name] * 0.5)
        assert not torch.equal(a[name], b[name])
    meta = json.loads((runs / "release/checkpoint_merge_meta.json").read_text())
    assert (meta["recipe"], meta["cache_mapper_source"], meta["weight_a"]) == ("release-merge", "b", 0.5)


def test_it_says_what_it_does_and_shows_the_lineage(demo: Demo) -> None:
    assert len(re.findall(r"^== ", demo.said, re.MULTILINE)) == 5
    shown = [line.removeprefix("$ ") for line in demo.said.splitlines() if line.startswith("$ ")]
    assert shown[1:] == [
        f"01_train_general.sh --set checkpoint.milestones=[{EARLY},{LATE}]",
        f"GENERAL_CHECKPOINT=runs/general@general_step_{LATE} 02_train_browsecomp.sh --set guards.prefill_tokens=130",
        f"GENERAL_EARLY_CHECKPOINT=runs/general@general_step_{EARLY} 03_merge_release_checkpoint.sh",
        *(f"ps verify runs/{name}" for name in ("general", "browsecomp", "release")),
        "ps inspect runs/release --lineage",
    ]
    assert demo.said.count("every byte is as its manifest says, and the parts belong together") == 3
    tree = demo.said[demo.said.index("$ ps inspect") :].splitlines()[1:5]
    runs = demo.place / "runs"
    for line, (head, path) in zip(
        tree,
        [
            ("runs/release  (merge 0.5 + 0.5", runs / "release"),
            ("├─ runs/browsecomp  (recipe browsecomp, step 12", runs / "browsecomp"),
            (f"│  └─ runs/general@general_step_{LATE}  (recipe general, step {LATE}", runs / f"general/milestones/general_step_{LATE}"),
            (f"└─ runs/general@general_step_{EARLY}  (recipe general, step {EARLY}", runs / f"general/milestones/general_step_{EARLY}"),
        ],
        strict=True,
    ):  # fmt: skip
        assert line.startswith(f"{head}, adapter_model.safetensors {sha256(path / ADAPTER)[:12]})")
        assert line.endswith("  verified") == (line != tree[0])


def test_what_it_shows_can_be_typed(demo: Demo, module_environment: dict[str, str], tmp_path: Path) -> None:
    """In a shell that knows nothing of it: first the lines at its start, then commands as they are shown."""
    settings = [line.strip() for line in demo.said.splitlines() if line.startswith("  ")][:7]
    settings = settings[: next(at for at, line in enumerate(settings) if "CACHE=" in line) + 1]
    assert settings[0] == f"cd {demo.place}"
    shown = [line.removeprefix("$ ") for line in demo.said.splitlines() if line.startswith("$ ")]
    commands = [f"{shown[2]} --dry-run", *(line for line in shown if line.startswith("ps verify runs/rel"))]
    commands.append(f"{shown[3].replace(' 03', ' OUTPUT_DIR=' + str(tmp_path / 'again') + ' 03')}")
    bare = {"PATH": "/usr/bin:/bin", "PYTHONPATH": module_environment["PYTHONPATH"], "HOME": str(tmp_path)}
    result = subprocess.run(
        ["bash", "-ec", "\n".join([*settings, *commands])],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "browsecomp (nothing is written)" in result.stdout
    assert "every byte is as its manifest says" in result.stdout
    assert sha256(tmp_path / "again" / ADAPTER) == sha256(demo.place / "runs/release" / ADAPTER)


def test_damage_to_it_is_an_exit_code(demo: Demo, ps: Ps) -> None:
    """Last: it spoils the merged checkpoint, which is put right again."""
    assert ps("verify", demo.place / "runs/release").returncode == 0
    path = demo.place / "runs/release/cache_mapper.pt"
    sound = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert ps("verify", demo.place / "runs/release").returncode == 1
    path.write_bytes(sound)
