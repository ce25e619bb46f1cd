"""A full disk: a file-size limit in a process of its own and, where mounting works, a tiny tmpfs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.checkpoint import commit as commits
from parallel_synthesis.checkpoint.layout import RunPaths
from parallel_synthesis.errors import StorageError
from parallel_synthesis.provenance.manifest import verify

ROOT = Path(__file__).resolve().parents[2]
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from parallel_synthesis.checkpoint.components import capture, write_checkpoint
from parallel_synthesis.errors import StorageError

resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
big = torch.zeros(300_000)
state = {"mapper": {}, "adapter": {}, "training_state": {}}
state[sys.argv[2]] = {"big": big}
meta = {"global_step": 2, "epoch": 1, "source_run_dir": None, "metrics": None}
config = {"hidden_dim": 32, "metadata_features": "both"}
host = capture(step=2, mapper_config=config, adapter_config={"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"]}, meta=meta, **state)
try:
    write_checkpoint(Path(sys.argv[1]), host)
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("mapper", "cache_mapper.pt"),
        ("adapter", "judger_lora/adapter_model.safetensors"),
        ("training_state", "training_state.pt"),
    ],
)
def test_a_file_size_limit(part: str, file: str, run: RunPaths, save: Callable[..., dict[str, Any]]) -> None:
    """Inside torch's zip writer too, the error that is seen is the disk's, with the path."""
    save(1)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(run.step(2)), part],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"cannot write {run.step(2) / file}: File too large" in done.stdout
    assert [path.name for path in run.step_checkpoints.iterdir()] == ["step_000000001"]
    assert verify(run.step(1)) == []


@pytest.fixture
def tiny(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("96k")


def test_a_full_file_system(tiny: Path, tmp_path: Path, save: Callable[..., dict[str, Any]]) -> None:
    run = RunPaths(tiny / "run")

    def fill(staging: commits.Staging) -> None:
        staging.write_bytes("cache_mapper.pt", b"m" * 10_000)
        staging.write_bytes("training_state.pt", b"s" * 20_000)

    commits.commit(run.step(0), step=0, fill=fill)
    commits.commit(run.step(5), step=5, fill=fill)
    commits.set_latest(run.step_checkpoints, 5)
    for attempt in (
        lambda: commits.commit(run.step(10), step=10, fill=fill),
        lambda: commits.link_checkpoint(run.step(0), tiny / "export", copy=True),
    ):
        with pytest.raises(StorageError, match=r"No space left on device \(\d+ bytes free there\)") as caught:
            attempt()
        assert str(tiny) in str(caught.value)
        assert list(tiny.rglob(".*")) == [] and not run.step(10).exists() and not (tiny / "export").exists()
        assert verify(run.step(0)) == [] and verify(run.latest) == []
    commits.link_checkpoint(run.step(5), run.milestone("g", 5))  # links still fit
    commits.remove_checkpoint(run.step(0))  # space is freed: the same save works
    commits.commit(run.step(10), step=10, fill=fill)
    commits.set_latest(run.step_checkpoints, 10)
    commits.link_final(run.latest, run.out)
    assert verify(run.out, extra=False) == [] and verify(run.milestone("g", 5)) == []


def test_a_milestone_on_another_file_system_is_a_copy(
    tiny: Path, run: RunPaths, save: Callable[..., dict[str, Any]]
) -> None:
    save(5)
    assert commits.link_checkpoint(run.step(5), tiny / "elsewhere") == "copy"
    assert verify(tiny / "elsewhere") == []
