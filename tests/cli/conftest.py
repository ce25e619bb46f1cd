"""Fixtures of the command-line tests: real processes, judged by exit code, stdout and stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MODEL_NAME", "STEPS_PER_EPOCH", "SAVE_EVERY_STEPS")
OURS += ("ATTN_IMPLEMENTATION", "DATA_FILE", "NO_COLOR", "PSCLI_REPORT_DIRECTORY")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(extra_path: Path | None = None, **more: str) -> dict[str, str]:
    """This process's environment without what would change a run; both packages importable."""
    clean = {key: value for key, value in os.environ.items() if key not in OURS}
    paths = [str(path) for path in (ROOT, extra_path) if path is not None]
    return clean | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


@pytest.fixture
def ps(tmp_path: Path) -> Run:
    """Runs `python -m pscli ARGUMENTS` in an empty directory."""
    work = tmp_path / "work"
    work.mkdir()

    def run(
        *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = work, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pscli", *arguments],
            cwd=cwd,
            env=environment(PARALLEL_SYNTHESIS_CACHE=str(tmp_path / "cache"), **(env or {})),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, Sequence[str]], Path]:
    """Writes an executable Python script as pip would install it."""

    def write(body: str, parts: Sequence[str]) -> Path:
        path = tmp_path.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable}\n{body}", encoding="utf-8")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def clean_environment() -> Callable[..., dict[str, str]]:
    return environment
