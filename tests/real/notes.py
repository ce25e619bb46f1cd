"""The data of the real-model check: workers' notes in plain English, questions that need several of them.

The demo's tasks (artifacts/demo/make.py) in sentences that a pretrained model can read. A few workers have gone round a
village and each has written a note (a branch). Every question asks for two facts that stand in two different notes,
among facts about other people. Everything follows from SEED; nothing is downloaded.

    notes_pair    where two people live            two facts of the same kind, from two notes
    notes_hop     the employer, and its town       the first fact, in one note, says what to look up in another
    notes_count   how much two people brought      numbers

Held out by combination, as in the demo: no held-out row asks for a pair of people (notes_hop: for a person, firm and
town) that any training row asks for.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

SEED = 20260614
TASKS = ("notes_pair", "notes_hop", "notes_count")

PEOPLE = """Anna Ben Carl Diana Emma Frank George Helen Ivan Jack Kate Leo Mary Nick Oscar Paul
Rosa Sam Tom Vera Will Alice Bob Clara Daniel Eric Fiona Grace Henry Irene James Laura""".split()
TOWNS = """Rome Oslo Paris London Berlin Madrid Vienna Prague Lisbon Dublin Athens Warsaw Cairo Delhi Tokyo Lima
Boston Denver Miami Geneva Milan Naples Seoul Perth""".split()
FIRMS = """Baker Fisher Miller Mason Cook Hunter Carter Porter Taylor Turner Walker Parker Palmer Cooper
Butler Foster""".split()
GOODS = ("apples", "books", "candles", "eggs")
LEAST, MOST = 11, 98  # of the goods: two digits, so that every number is as long as the others

SAID = {
    "town": (
        "{of} lives in {value}.",
        "{of} has a small flat in {value}.",
        "The home of {of} is in {value}.",
        "{of} moved to {value} some years ago.",
    ),
    "firm": (
        "{of} works for the {value} company.",
        "{of} has a job at the {value} company.",
        "The employer of {of} is the {value} company.",
    ),
    "seat": (
        "The {of} company has its office in {value}.",
        "The office of the {of} company is in {value}.",
        "The {of} company is run from {value}.",
    ),
    "count": (
        "{of} brought {value} to the market.",
        "{of} came to the market with {value}.",
        "At the market {of} sold {value}.",
    ),
}
OPENINGS = (
    "I talked to the neighbours this morning.",
    "These are my notes from the town archive.",
    "I read the local newspaper from the first page to the last.",
    "The postman told me a few things on his way.",
    "I asked around in the old café by the river.",
    "My part of the work is done, and this is what I found.",
)
FILLERS = (
    "It rained most of the day.",
    "Nobody wanted to be named.",
    "Some of the pages were hard to read.",
    "The rest was not important.",
    "I checked this twice.",
)
HISTORY = (
    "The helper opened the archive, asked the clerk for the list of people and went through it page by page. "
    "Most of it was about the harvest of last year."
)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """`kind` of SAID, whom or what it is `of`, and its value."""

    kind: str
    of: str
    value: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, the two facts it needs, and the answer: these facts, in a short sentence."""

    text: str
    answer: str
    needed: tuple[Fact, Fact]
    combination: int  # of what is asked for; the split is by its remainder


@dataclass(kw_only=True)
class World:
    """The facts of one row, of one task."""

    people: list[str]
    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)

    def add(self, kind: str, of: str, value: str) -> Fact:
        return self.facts.setdefault((kind, of), Fact(kind=kind, of=of, value=value))


def make_world(rng: random.Random, task: str) -> tuple[World, Question]:
    """A few people with what the task wants to know of them, and the question about the first of them."""
    world = World(people=rng.sample(PEOPLE, rng.randint(4, 6)))
    a, b = world.people[:2]
    pair = PEOPLE.index(a) + PEOPLE.index(b)
    if task == "notes_hop":
        for person in world.people:
            firm = world.add("firm", person, rng.choice(FIRMS))
            world.add("seat", firm.value, rng.choice(TOWNS))
        first = world.facts["firm", a]
        second = world.facts["seat", first.value]
        return world, Question(
            text=f"Which company does {a} work for, and where is its office?",
            answer=f"{a} works for {first.value} in {second.value}.",
            needed=(first, second),
            combination=PEOPLE.index(a) + FIRMS.index(first.value) + TOWNS.index(second.value),
        )
    kind = "town" if task == "notes_pair" else "count"
    goods = rng.choice(GOODS)
    for person in world.people:
        value = rng.choice(TOWNS) if kind == "town" else f"{rng.randint(LEAST, MOST)} {goods}"
        world.add(kind, person, value)
    first, second = world.facts[kind, a], world.facts[kind, b]
    text, verb, word = f"Where do {a} and {b} live?", "lives in", " in"
    if kind == "count":
        text, verb, word = f"How many {goods} did {a} and {b} bring to the market?", "brought", ""
    # A number stands without its goods, which the question has.
    at, there = (fact.value.removesuffix(f" {goods}") for fact in (first, second))
    answer = f"{a} {verb} {at} and {b}{word} {there}."
    return world, Question(text=text, answer=answer, needed=(first, second), combination=pair)


def note(rng: random.Random, facts: list[Fact]) -> str:
    """One worker's note: an opening, its facts, and perhaps a remark."""
    sentences = [rng.choice(SAID[fact.kind]).format(of=fact.of, value=fact.value) for fact in facts]
    if rng.random() < 0.5:
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(FILLERS))
    return " ".join([rng.choice(OPENINGS), *sentences])


def make_row(rng: random.Random, task: str, number: int, *, heldout: bool) -> dict[str, object]:
    """One row in the project's format (README, "Train your own")."""
    while True:
        world, asked = make_world(rng, task)
        if (asked.combination % 4 == 0) == heldout:
            break
    others = [fact for fact in world.facts.values() if fact not in asked.needed]
    rng.shuffle(others)
    notes: list[list[Fact]] = [[] for _ in range(rng.randint(2, 4))]
    for place, fact in enumerate(others):
        notes[place % len(notes)].append(fact)
    # The two facts asked for go into two different notes.
    for fact, place in zip(asked.needed, rng.sample(range(len(notes)), 2), strict=True):
        notes[place].insert(rng.randint(0, len(notes[place])), fact)
    texts = [note(rng, facts) for facts in notes if facts]
    row: dict[str, object] = {
        "id": f"{task}-{'heldout' if heldout else 'train'}-{number:04d}",
        "question": asked.text,
        "gold": asked.answer,
        "agent_reference_contexts": texts,
    }
    if number % 3 == 2:
        # As in a tool history: all branches share what went before, and only their own end is kept.
        row["agent_extract_contexts"] = texts
        row["agent_reference_contexts"] = [f"{HISTORY} {text}" for text in texts]
    return row


def write_data(directory: Path, *, train_rows: int, heldout_rows: int) -> None:
    """TASK.train.jsonl and TASK.heldout.jsonl of every task, that many rows of each; the same bytes everywhere."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        for split, rows in (("train", train_rows), ("heldout", heldout_rows)):
            rng = random.Random(f"{SEED} {task} {split}")  # a text seeds alike on every machine
            made = [make_row(rng, task, number, heldout=split == "heldout") for number in range(rows)]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
            (directory / f"{task}.{split}.jsonl").write_text(text, encoding="utf-8", newline="\n")


def blind_nats(task: str) -> float:
    """Entropy in nats of a held-out answer given its question alone: no reader without the notes gets below it.

    Exact, because the generator draws what the question does not give uniformly: two towns, two numbers, or a firm
    and a town of which the split leaves every fourth. All other words of the answer follow from the question.
    """
    if task == "notes_hop":
        return math.log(len(FIRMS) * len(TOWNS) / 4)
    return 2 * math.log(len(TOWNS) if task == "notes_pair" else MOST - LEAST + 1)


def prose(rng: random.Random, sentences: int) -> str:
    """A long note for the timings: openings, facts and remarks of several people."""
    parts: list[str] = []
    while len(parts) < sentences:
        world, _ = make_world(rng, rng.choice(TASKS))
        parts.append(note(rng, list(world.facts.values())))
    return " ".join(parts)
