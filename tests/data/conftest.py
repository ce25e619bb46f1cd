"""Fixtures of the data tests: a valid row, and a writer of .jsonl files; no test touches the user's cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

RowMaker = Callable[..., dict[str, Any]]
Writer = Callable[[str, Iterable[object]], Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory of this test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("PARALLEL_SYNTHESIS_CACHE", str(directory))
    return directory


@pytest.fixture
def row() -> RowMaker:
    """Makes a valid row; keywords replace fields, `drop` removes some."""

    def make(number: int = 0, *, drop: tuple[str, ...] = (), **fields: object) -> dict[str, Any]:
        made: dict[str, Any] = {
            "id": f"id-{number}",
            "question": f"question {number}?",
            "gold": f"gold {number}",
            "references": ["somewhere"],
            "agent_reference_contexts": [f"history {number} and fact A", f"history {number} and fact B"],
            "agent_extract_contexts": ["fact A", "fact B"],
        } | fields
        return {key: value for key, value in made.items() if key not in drop}

    return make


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes a file of lines: dicts as JSON, strings and bytes as they are."""

    def make(name: str, lines: Iterable[object]) -> Path:
        path = tmp_path / name
        encoded = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return path

    return make
