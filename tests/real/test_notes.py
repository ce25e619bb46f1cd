"""The real-model check keeps working without the model: its data is honest, and what it times is the synthesizer."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from parallel_synthesis.config import BackboneConfig, LoraConfig, MapperConfig
from parallel_synthesis.resources import resource

TRAIN, HELDOUT = 120, 60
ANSWERS = {
    "notes_pair": r"\w+ lives in (\w+) and \w+ in (\w+)\.",
    "notes_hop": r"\w+ works for (\w+) in (\w+)\.",
    "notes_count": r"\w+ brought (\d\d) and \w+ (\d\d)\.",
}


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("notes")


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    command = [sys.executable, Path(__file__).parent / "smollm2.py", "--gguf", tmp_path / "nope.gguf"]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nope.gguf: no such file" in done.stderr and "Traceback" not in done.stderr


def test_every_question_needs_two_notes_and_no_held_out_combination_is_trained(
    notes: ModuleType, tmp_path: Path
) -> None:
    notes.write_data(tmp_path, train_rows=TRAIN, heldout_rows=HELDOUT)
    for task in notes.TASKS:
        asked: dict[str, set[tuple[str, ...]]] = {}
        for split, count in (("train", TRAIN), ("heldout", HELDOUT)):
            rows = [
                json.loads(line) for line in (tmp_path / f"{task}.{split}.jsonl").read_text().splitlines()
            ]
            assert len(rows) == count
            for row in rows:
                texts = row.get("agent_extract_contexts", row["agent_reference_contexts"])
                contexts = row["agent_reference_contexts"]
                assert all(text.endswith(end) for text, end in zip(contexts, texts, strict=True))
                names = [person for person in notes.PEOPLE if person in row["question"].rstrip("?").split()]
                answer = re.fullmatch(ANSWERS[task], row["gold"])
                assert answer, row
                values = answer.groups()
                # Whoever is asked for is spoken of in one sentence of one note, which states the answer's part.
                if task == "notes_hop":
                    names = [names[0], values[0]]
                    combination: tuple[str, ...] = (*names, values[1])
                else:
                    names.sort(key=row["question"].index)
                    combination = tuple(sorted(names))
                places = []
                for name, value in zip(names, values, strict=True):
                    kind = f"The {name} company", f"the {name} company"
                    seats = [
                        (place, sentence)
                        for place, text in enumerate(texts)
                        for sentence in text.split(". ")
                        if (
                            value in sentence and any(words in sentence for words in kind)
                            if name in notes.FIRMS
                            else name in sentence.rstrip(".").split() and value in sentence
                        )
                    ]
                    assert len(seats) == 1, (row, name, value)
                    places.append(seats[0][0])
                assert places[0] != places[1], row
                asked.setdefault(split, set()).add(combination)
        assert not asked["train"] & asked["heldout"]


def test_what_is_timed_is_the_synthesizer(notes: ModuleType) -> None:
    from parallel_synthesis.model.backbone import load_backbone
    from parallel_synthesis.model.synthesizer import Synthesizer

    first_token = importlib.import_module("first_token")
    model = str(resource("artifacts/demo/backbone"))
    backbone = load_backbone(BackboneConfig(model=model), device="cpu")
    synthesizer = Synthesizer(backbone, mapper=MapperConfig(), lora=LoraConfig(), seed=1)
    case = first_token.make_case(backbone, total=64, workers=4)
    assert [branch.kept for branch in case.branches] == [16] * 4
    assert all(branch.start for branch in case.branches)  # workers write behind their own prompt
    first_token.check(synthesizer, case)
    (timing,) = first_token.measure(synthesizer, totals=[64], workers=4, repeats=1, say=lambda text: None)
    assert 0 < timing.turn < timing.over_caches
    assert timing.re_prefill > 0
