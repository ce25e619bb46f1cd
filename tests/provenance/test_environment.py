"""The fingerprint: complete, plain, and silent about machine, user and directory names."""

from __future__ import annotations

import getpass
import json
import platform
import socket
from pathlib import Path

import pytest

from parallel_synthesis.provenance import environment


def test_the_fingerprint_is_plain_and_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    found = environment.fingerprint()
    assert json.loads(json.dumps(found)) == found == environment.fingerprint()
    assert found["python"] == platform.python_version()
    assert set(found["packages"]) >= {"torch", "transformers", "peft", "numpy", "tokenizers", "safetensors"}
    assert found["packages"]["torch"] is not None
    assert found["variables"]["OMP_NUM_THREADS"] == "3" and "MKL_CBWR" not in found["variables"]
    text = json.dumps(found)
    assert socket.gethostname() not in text and str(Path.home()) not in text
    assert getpass.getuser() not in text or len(getpass.getuser()) < 5


def test_what_is_not_installed_is_none() -> None:
    assert environment.version("no-such-distribution-of-ours") is None


def test_the_processor_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Fast One @ 2: GHz\n")
    assert environment.cpu_model(cpuinfo) == "A Fast One @ 2: GHz"
    assert environment.cpu_model(tmp_path / "absent") == (platform.processor() or None)
