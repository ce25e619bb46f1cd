"""The demo's files: what the manifest says, made again from the seed, and honest (two branches needed, floor derived)."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.recipe import load_recipe

DEMO = Path(__file__).resolve().parents[2] / "artifacts" / "demo"
MANIFEST = json.loads((DEMO / "manifest.json").read_text())
FAMILIES = 24


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / "data" / name).read_text().splitlines()]


def test_every_file_is_the_one_of_the_manifest() -> None:
    found = {
        str(path.relative_to(DEMO)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in DEMO.rglob("*")
        if path.is_file() and path.parent.name in ("data", "backbone")
    }
    assert found == MANIFEST["files"]
    assert found["backbone/model.safetensors"]["bytes"] < 5_000_000


def test_the_data_come_out_of_the_seed_again(tmp_path: Path) -> None:
    again = tmp_path / "demo"
    again.mkdir()
    shutil.copy(DEMO / "make.py", again)
    subprocess.run([sys.executable, again / "make.py", "data"], check=True, capture_output=True)
    for path in (DEMO / "data").iterdir():
        assert (again / "data" / path.name).read_bytes() == path.read_bytes()


def needed_facts(row: dict[str, Any]) -> list[str]:
    """The facts behind an answer, as the branches state them: "Hugo Archer"."""
    return [reference.rstrip(".") for reference in row["references"]]


@pytest.mark.parametrize("task", ["demo_pair", "demo_hop"])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_no_answer_stands_in_a_single_branch(task: str, split: str) -> None:
    for row in rows(f"{task}.{split}.jsonl"):
        kept = row.get("agent_extract_contexts", row["agent_reference_contexts"])
        facts = needed_facts(row)
        places = [{at for at, text in enumerate(kept) if re.search(rf"\b{fact}\b", text)} for fact in facts]
        assert len(facts) == 2, row["id"]
        assert all(len(place) == 1 for place in places), row["id"]
        assert places[0] != places[1], row["id"]
        for fact in facts:  # the answer is these facts, and the question does not say it
            assert fact in row["gold"]
            assert fact not in row["query"]


def test_held_out_questions_were_not_trained_on() -> None:
    pairs = {
        split: {
            frozenset(re.findall(r"names of (\w+) and (\w+)", row["query"])[0])
            for row in rows(f"demo_pair.{split}.jsonl")
        }
        for split in ("train", "heldout")
    }
    assert not pairs["train"] & pairs["heldout"]
    chains = {
        split: {row["gold"] for row in rows(f"demo_hop.{split}.jsonl")} for split in ("train", "heldout")
    }
    assert not chains["train"] & chains["heldout"]


def test_the_recipes_floor_is_the_entropy_of_the_answers() -> None:
    """pair: two families out of 24, independent. hop: a family and a city out of 24 x 24, a quarter of them held out."""
    from parallel_synthesis.model.tokens import load_tokenizer, system_message, tokenize_row

    config = load_recipe("demo").config
    tokenizer = load_tokenizer(config.backbone.model, None)
    nats, tokens = 0.0, 0
    for task, entropy in (("demo_pair", 2 * math.log(FAMILIES)), ("demo_hop", math.log(FAMILIES * 24 / 4))):
        for row in rows(f"{task}.heldout.jsonl"):
            contexts = tuple(row["agent_reference_contexts"])
            found = tokenize_row(
                tokenizer,
                query=row["query"],
                target=row["gold"],
                contexts=contexts,
                extracts=tuple(row.get("agent_extract_contexts", contexts)),
                system=system_message(config.backbone.model),
                think=False,
            )
            nats += entropy
            tokens += found.target_tokens
    assert config.evaluate.blind_floor == pytest.approx(nats / tokens, abs=1e-6)
    assert MANIFEST["branch_blind_floor_nats"] == pytest.approx(nats / tokens, abs=1e-6)
