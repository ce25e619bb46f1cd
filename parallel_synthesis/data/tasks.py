"""The table of training tasks: their names, usual files and row rules."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.errors import DataError
from parallel_synthesis.resources import resolve_path


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a mix.

    `usual_file` is relative to `data.root`; None for a task of the user's own, which must be named in
    `data.files`. `contexts_may_stand_in`: rows may give `contexts` in place of `agent_reference_contexts`,
    and no `references`. `own`: a task of the user's; its rows need only a question or query, a gold or answer,
    and the branches.
    """

    name: str
    usual_file: str | None
    contexts_may_stand_in: bool = False
    own: bool = False


_KNOWN = (
    Task(name="wildchat", usual_file="data/wildchat/processed/train_all_lang_multi_turn_min3.jsonl"),
    Task(name="ultrachat", usual_file="data/ultrachat/processed/train_sft_multi_turn_min3.jsonl"),
    Task(name="lmsys_chat", usual_file="data/lmsys-chat/processed/train_all_lang_multi_turn_min3.jsonl"),
    Task(
        name="toucan_single_parallel",
        usual_file="data/toucan/processed/train_single_turn_parallel_tool_call_unified.jsonl",
    ),
    Task(
        name="toucan_multi_parallel",
        usual_file="data/toucan/processed/train_multi_turn_parallel_tool_call.jsonl",
    ),
    Task(name="dta_tool", usual_file="data/dta-tool/processed/train_parallel_function_calls.jsonl"),
    Task(name="flan", usual_file="data/flan/processed/train_in_context_examples.jsonl"),
    Task(
        name="2wiki_multihopqa",
        usual_file="data/2wiki-multihopqa/processed/train.jsonl",
        contexts_may_stand_in=True,
    ),
    Task(
        name="browsecomp_textmas_toolcall",
        usual_file="data/browsecomp-textmas/processed/filtered_train.jsonl.gz",
    ),
)

TASKS: Mapping[str, Task] = {task.name: task for task in _KNOWN}

_ALIASES: Mapping[str, str] = {
    "lmsys": "lmsys_chat",
    "2wiki": "2wiki_multihopqa",
    "dta": "dta_tool",
    "toucan_single": "toucan_single_parallel",
    "toucan_multi": "toucan_multi_parallel",
    "browsecomp": "browsecomp_textmas_toolcall",
    "browsecomp_textmas": "browsecomp_textmas_toolcall",
}


def canonical_name(name: str) -> str:
    """The task's one name: aliases, any case and hyphens resolved; an unknown name is only normalised."""
    plain = name.strip().lower().replace("-", "_")
    return _ALIASES.get(plain, plain)


def find_task(name: str, *, own: Collection[str] = ()) -> Task:
    """The task called `name`.

    A name that is not in TASKS but in `own` (it has an entry in `data.files`) is a task of the user's own,
    with the standard row rules. Raises DataError that lists the tasks that exist.
    """
    canonical = canonical_name(name)
    known = TASKS.get(canonical)
    if known is not None:
        return known
    if name in own or canonical in own:
        return Task(name=canonical, usual_file=None, own=True)
    near = difflib.get_close_matches(canonical, [*own, *TASKS, *_ALIASES], n=1)
    hint = f" (did you mean {canonical_name(near[0])}?)" if near else ""
    raise DataError(
        f"data.tasks: there is no task {name!r}{hint}; the tasks are {', '.join(TASKS)}. "
        f"Use one of these, or give a task of your own its file: data.files.{canonical} = PATH."
    )


def task_path(task: Task, *, root: str, files: Mapping[str, str]) -> Path:
    """Where the task's rows lie below `root`: its entry in `files` (by any of its names), else usual_file.

    Raises DataError for a task without either. The file need not exist.
    """
    named = {canonical_name(key): value for key, value in files.items()}.get(task.name, task.usual_file)
    if named is None:
        raise DataError(
            f"task {task.name} has no usual file: expected its path in the recipe; "
            f"set data.files.{task.name} = PATH (relative to data.root)."
        )
    return resolve_path(named, base=resolve_path(root))
