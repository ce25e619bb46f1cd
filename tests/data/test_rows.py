"""What a row must hold, what is taken from it, and how each defect is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_synthesis.data.rows import Row, RowProblemError, parse_fields, parse_row
from parallel_synthesis.data.tasks import TASKS, Task, find_task
from parallel_synthesis.errors import DataError

FLAN = TASKS["flan"]
WIKI = TASKS["2wiki_multihopqa"]
RowMaker = Callable[..., dict[str, Any]]


def parse(document: object, task: Task = FLAN) -> Row:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_row(raw, task=task, path=Path("some/file.jsonl"), line=12, number=7)


def test_takes_what_training_needs(row: RowMaker) -> None:
    made = parse(row(3, extra={"any": [1]}))
    assert made == Row(
        task="flan",
        number=7,
        line=12,
        id="id-3",
        query="question 3?",
        target="gold 3",
        contexts=("history 3 and fact A", "history 3 and fact B"),
        extracts=("fact A", "fact B"),
        path=Path("some/file.jsonl"),
    )
    assert made.place == "some/file.jsonl:12 (task flan, row 7, id id-3)"
    assert parse(row(drop=("id",))).place == "some/file.jsonl:12 (task flan, row 7)"


def test_query_and_answer_come_first(row: RowMaker) -> None:
    assert parse(row(query="q")).query == "q"
    assert parse(row(answer="a")).target == "a"
    for blank in (None, "", "  "):
        assert parse(row(query=blank)).query == "question 0?"
    assert parse(row(answer=None)).target == "gold 0"
    assert parse(row(gold="", answer="a")).target == "a"


def test_query_and_target_are_kept_to_the_character(row: RowMaker) -> None:
    made = parse(row(query=" q\n", gold="\n a \u2028"))
    assert (made.query, made.target) == (" q\n", "\n a \u2028")


def test_contexts_are_stripped_and_blank_pairs_dropped(row: RowMaker) -> None:
    made = parse(
        row(
            agent_reference_contexts=["  one \n", "", " \u3000\t", "two", "three"],
            agent_extract_contexts=[" ne ", "lost", "lost", "", "  "],
        )
    )
    assert made.contexts == ("one", "two", "three")
    assert made.extracts == ("ne", "two", "three")


@pytest.mark.parametrize("absent", [{"drop": ("agent_extract_contexts",)}, {"agent_extract_contexts": None}])
def test_without_extracts_the_whole_context_counts(row: RowMaker, absent: dict[str, Any]) -> None:
    made = parse(row(agent_reference_contexts=[" a ", "b"], **absent))
    assert made.contexts == made.extracts == ("a", "b")


def test_extracts_that_are_not_the_end_of_their_context_are_counted(row: RowMaker) -> None:
    contexts = ["a b ", " a b", "a b", "a b", "a b", "  "]
    extracts = [" b", "a b", "", "a", "b a b", "x"]  # the last goes with its context, which is blank
    given = row(agent_reference_contexts=contexts, agent_extract_contexts=extracts)
    assert parse_fields(json.dumps(given).encode(), FLAN).loose == 2
    assert parse_fields(json.dumps(row(drop=("agent_extract_contexts",))).encode(), FLAN).loose == 0


def test_2wiki_may_give_contexts_and_no_references(row: RowMaker) -> None:
    bare = row(
        drop=("agent_reference_contexts", "agent_extract_contexts", "references"), contexts=["a", "b "]
    )
    assert parse(bare, WIKI).contexts == ("a", "b")
    with pytest.raises(DataError, match="references: expected a list, found no such field"):
        parse(bare, FLAN)
    assert parse(row(contexts=["other"]), WIKI).contexts[0] == "history 0 and fact A"
    with pytest.raises(DataError, match=r"agent_reference_contexts: .* here or in contexts, found neither"):
        parse(row(drop=("agent_reference_contexts",)), WIKI)
    with pytest.raises(
        DataError, match="agent_reference_contexts: expected a list of strings, found no such field"
    ):
        parse(row(drop=("agent_reference_contexts",), contexts=["a"]), FLAN)


@pytest.mark.parametrize(("value", "name"), [("x", "x"), (5, "5"), (None, None), ([1], None), (True, None)])
def test_an_id_only_names_the_row(row: RowMaker, value: object, name: str | None) -> None:
    assert parse(row(id=value)).id == name


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"drop": ("question",)}, "question: expected a string, found no such field"),
        ({"question": None}, "question: expected a string, found null"),
        ({"question": 3}, "question: expected a string, found a number"),
        ({"query": ["q"]}, "query: expected a string or nothing, found a list"),
        ({"drop": ("gold",)}, "gold: expected a string, found no such field"),
        ({"gold": None}, "gold: expected a string, found null"),
        ({"gold": None, "answer": "a"}, "gold: expected a string, found null"),
        ({"gold": {}}, "gold: expected a string, found an object"),
        ({"gold": ""}, "gold: expected a target that is not empty, found a blank string"),
        ({"gold": " \n"}, "gold: expected a target that is not empty, found a blank string"),
        ({"answer": ""}, "answer: expected a target that is not empty, found a blank string"),
        ({"answer": True}, "answer: expected a string or nothing, found true"),
        ({"drop": ("references",)}, "references: expected a list, found no such field"),
        ({"references": None}, "references: expected a list, found null"),
        ({"references": "r"}, "references: expected a list, found a string"),
        (
            {"agent_reference_contexts": None},
            "agent_reference_contexts: expected a list of strings, found null",
        ),
        (
            {"agent_reference_contexts": "text"},
            "agent_reference_contexts: expected a list of strings, found a string",
        ),
        (
            {"agent_reference_contexts": ["a", None]},
            "agent_reference_contexts[1]: expected a string, found null",
        ),
        (
            {"agent_extract_contexts": "fact"},
            "agent_extract_contexts: expected a list of strings, found a string",
        ),
        (
            {"agent_extract_contexts": ["a", 1.5]},
            "agent_extract_contexts[1]: expected a string, found a number",
        ),
        (
            {"agent_extract_contexts": ["a"]},
            "agent_extract_contexts: expected 2 strings, one for each of agent_reference_contexts, found 1",
        ),
        (
            {"agent_reference_contexts": [], "agent_extract_contexts": []},
            "agent_reference_contexts: expected at least one context that is not blank, found none",
        ),
        (
            {"agent_reference_contexts": ["", " \n"]},
            "agent_reference_contexts: expected at least one context that is not blank, found none",
        ),
    ],
)
def test_defects_are_named_with_place_and_field(row: RowMaker, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError) as refused:
        parse(row(**change))
    assert str(refused.value) == (
        f"some/file.jsonl:12: {problem}. "
        'Fix the file, or set data.on_bad_row = "skip" to leave such rows out and count them.'
    )


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"question": ', "row: expected valid JSON, found "),
        (b"{'question': 1}", "row: expected valid JSON, found .* at character 2 of the line"),
        (b'{"a": NaN}', "row: expected valid JSON"),
        (b'{"a": 1} {"b": 2}', "row: expected valid JSON"),
        (b'{"question": "caf\xe9"}', "row: expected UTF-8, found byte 0xe9 at byte 18 of the line"),
        (b"\xff\xfe{\x00}\x00", "row: expected UTF-8, found byte 0xff at byte 1 of the line"),
        (b'["a"]', "row: expected an object, found a list"),
        (b"null", "row: expected an object, found null"),
        (b'"text"', "row: expected an object, found a string"),
        (b"12", "row: expected an object, found a number"),
    ],
)
def test_lines_that_are_no_object(raw: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        parse(raw)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["question", "gold", "references", "agent_reference_contexts", "answer", "query"]
                ),
                inner,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_line_is_a_row_or_a_named_problem(raw: bytes) -> None:
    try:
        fields = parse_fields(raw, FLAN)
    except RowProblemError as problem:
        assert ": expected " in str(problem)
    else:
        assert fields.contexts
        assert len(fields.contexts) == len(fields.extracts)


def test_an_own_task_needs_only_what_training_uses(tmp_path: Path) -> None:
    own = find_task("mine", own={"mine"})
    row = parse_row(
        b'{"query": "What is it?", "answer": "This.", "agent_reference_contexts": ["a", "b"]}',
        task=own,
        path=tmp_path / "mine.jsonl",
        line=1,
        number=0,
    )
    assert (row.query, row.target, row.contexts) == ("What is it?", "This.", ("a", "b"))
    for raw, field in (
        (b'{"answer": "This.", "agent_reference_contexts": ["a"]}', "question"),
        (b'{"query": "What?", "agent_reference_contexts": ["a"]}', "gold"),
        (b'{"question": "What?", "gold": "x"}', "agent_reference_contexts"),
        (
            b'{"question": "What?", "gold": "x", "references": 3, "agent_reference_contexts": ["a"]}',
            "references",
        ),
    ):
        with pytest.raises(DataError, match=rf":1: {field}: expected"):
            parse_row(raw, task=own, path=tmp_path / "mine.jsonl", line=1, number=0)
    with pytest.raises(
        DataError, match="references: expected a list"
    ):  # the release's tasks keep their rules
        parse_row(
            b'{"question": "What?", "gold": "x", "agent_reference_contexts": ["a"]}',
            task=find_task("flan"),
            path=tmp_path / "flan.jsonl",
            line=1,
            number=0,
        )
