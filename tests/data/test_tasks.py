"""Task names, aliases and the files they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel_synthesis.data.tasks import TASKS, Task, canonical_name, find_task, task_path
from parallel_synthesis.errors import DataError


def test_the_nine_tasks_in_the_order_of_the_mix() -> None:
    assert list(TASKS) == [
        "wildchat",
        "ultrachat",
        "lmsys_chat",
        "toucan_single_parallel",
        "toucan_multi_parallel",
        "dta_tool",
        "flan",
        "2wiki_multihopqa",
        "browsecomp_textmas_toolcall",
    ]
    assert [name for name, task in TASKS.items() if task.contexts_may_stand_in] == ["2wiki_multihopqa"]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("lmsys", "lmsys_chat"),
        ("2wiki", "2wiki_multihopqa"),
        ("2Wiki-MultihopQA", "2wiki_multihopqa"),
        ("dta", "dta_tool"),
        ("toucan_single", "toucan_single_parallel"),
        ("Toucan-Multi", "toucan_multi_parallel"),
        ("browsecomp_textmas", "browsecomp_textmas_toolcall"),
        ("BROWSECOMP-TEXTMAS-TOOLCALL", "browsecomp_textmas_toolcall"),
        ("My-Task", "my_task"),
    ],
)
def test_aliases(name: str, canonical: str) -> None:
    assert canonical_name(name) == canonical
    if canonical in TASKS:
        assert find_task(name) is TASKS[canonical]


def test_an_unknown_task_lists_those_that_exist() -> None:
    with pytest.raises(DataError) as refused:
        find_task("ultrachta")
    message = str(refused.value)
    assert "'ultrachta' (did you mean ultrachat?)" in message
    assert all(name in message for name in TASKS)
    assert message.endswith("data.files.ultrachta = PATH.")


def test_a_task_of_ones_own_needs_a_file() -> None:
    own = {"My-Task": "rows.jsonl"}
    task = find_task("My-Task", own=own)
    assert task == Task(name="my_task", usual_file=None, own=True)
    assert task_path(task, root="somewhere", files=own) == Path("somewhere/rows.jsonl")
    with pytest.raises(DataError, match=r"data\.files\.my_task = PATH"):
        task_path(task, root=".", files={})


def test_where_a_file_lies(tmp_path: Path) -> None:
    wiki = TASKS["2wiki_multihopqa"]
    assert (
        task_path(wiki, root=str(tmp_path), files={})
        == tmp_path / "data/2wiki-multihopqa/processed/train.jsonl"
    )
    assert task_path(wiki, root=str(tmp_path), files={"2wiki": "a.jsonl"}) == tmp_path / "a.jsonl"
    assert task_path(wiki, root=".", files={"2wiki_multihopqa": "/b.jsonl"}) == Path("/b.jsonl")
