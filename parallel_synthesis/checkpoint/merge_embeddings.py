"""Embeddings that inputs of a merge carry, or were saved without: do they agree, and what the result's record says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parallel_synthesis.checkpoint.merge_plan import Finding, MergeInput, MergeOptions


def embedding_findings(inputs: Sequence[MergeInput], options: MergeOptions) -> Iterator[Finding]:
    """How the inputs disagree where some were saved with checkpoint.embeddings = "drop".

    What lies in the files is compared with all other tensors; here are those that lie in none, or in some only.
    """
    known = [(one, _content(one.embeddings)) for one in inputs if one.embeddings is not None]
    without = [one for one, _ in known if not _saved(one)]
    if not without:
        return
    first, expected = known[0]
    for other, content in known[1:]:
        if content != expected:
            yield Finding(
                field="embeddings",
                text=f"{first.label} has {_shown(expected)}, {other.label} {_shown(content)}: other vocabularies",
            )
            return
    others = [one for one in inputs if one not in without]
    if not others:
        return
    lacks = f"{without[0].label} was saved without its {_shown(expected)}"
    labels = " and ".join(one.label for one in others)
    back = f"put them back by `ps snapshot {without[0].given} --export DEST` and merge DEST"
    if any(name in one.tensors.entries for one in others for name in expected[1]):
        text = f"{lacks}, {labels} has them: {back}, or take those of {labels} by --missing copy"
    else:
        text = f"{lacks}, {labels} was trained without any: --missing copy gives the result those of {without[0].label}"
    # Copied, they are right: none is ever trained. Counted as zeros they would be halved.
    yield Finding(field="embeddings", text=text, allowed=options.missing == "copy")


def embeddings_record(inputs: Sequence[MergeInput]) -> dict[str, Any]:
    """What the merged checkpoint's meta says of them, for inputs that agree: {"embeddings": ...}, or nothing."""
    records = [one.embeddings for one in inputs if one.embeddings is not None]
    if not records:
        return {}
    saved = all(any(name in one.tensors.entries for one in inputs) for name in records[0]["tensors"])
    return {"embeddings": {**records[0], "saved": saved}}


def left_out(inputs: Sequence[MergeInput]) -> bool:
    """The result lacks embeddings that its inputs were saved without."""
    return embeddings_record(inputs).get("embeddings", {}).get("saved") is False


def _saved(one: MergeInput) -> bool:
    return one.embeddings is None or one.embeddings["saved"] is True


def _content(record: Mapping[str, Any] | None) -> tuple[int, tuple[str, ...]]:
    assert record is not None
    return record["rows"], tuple(sorted(record["tensors"]))


def _shown(content: tuple[int, tuple[str, ...]]) -> str:
    rows, names = content
    return f"embeddings of {rows:,} rows ({', '.join(name.rpartition('.weight')[0].rsplit('.', 1)[-1] for name in names)})"
