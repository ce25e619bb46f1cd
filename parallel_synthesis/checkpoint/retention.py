"""Which step checkpoints to keep: a pure function of the steps there are."""

from __future__ import annotations

from collections.abc import Container, Iterable


def keep(steps: Iterable[int], *, last: int, every: int | None, named: Container[int]) -> set[int]:
    """The steps to keep: step 0, the newest, the named ones, multiples of `every`, and the `last` newest of
    those without a name (a named one never counts toward `last`).

    steps: global steps that have a committed checkpoint, in any order. last: 0 or more. every: 1 or more,
    None = off. Applying it to its own result changes nothing, so an interrupted removal is simply finished
    next time.
    """
    present = sorted(set(steps))
    if not present:
        return set()
    unnamed = [step for step in present if step not in named]
    kept = {
        step for step in present if step == 0 or step in named or (every is not None and step % every == 0)
    }
    return kept | set(unnamed[max(0, len(unnamed) - last) :]) | {present[-1]}
