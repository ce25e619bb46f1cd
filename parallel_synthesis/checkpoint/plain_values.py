"""Values out of a foreign file: how they are shown in few characters, and whether they are what they should be."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from parallel_synthesis.provenance.torch_file import ArrayLook, TensorLook

_LARGEST = 2**63  # of a counter
_ITEMS = 10_000  # plain values in one entry of a state that is carried along as it is


def shown(value: Any) -> str:
    """A value of a file in a few characters. Never the whole: nested lists of the same lists have no end in print."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"a whole number of {value.bit_length():,} bits"
    if isinstance(value, str):
        return repr(value[:40]) + ("..." if len(value) > 40 else "")
    if isinstance(value, bytes | list | tuple | dict):
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, TensorLook):
        return f"a tensor of {value.dtype[:20]} {list(value.shape)[:8]}"
    if isinstance(value, ArrayLook):
        return f"an array of {value.dtype[:20]} {list(value.shape)[:8]}"
    return f"a {type(value).__name__}"


def is_whole(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LARGEST


def is_count(value: Any) -> bool:
    """A count; one that was summed over processes may be a float."""
    return is_whole(value) or (type(value) is float and math.isfinite(value) and value >= 0)


def is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _LARGEST)


def is_small(value: Any, *, depth: int = 4) -> bool:
    """Plain values, and not too many. Lists of the same list count as often as they appear."""
    pending, seen = [(value, depth)], 0
    while pending:
        item, below = pending.pop()
        seen += 1
        if isinstance(item, dict | list | tuple):
            seen += len(item)
            if below and seen <= _ITEMS:
                pending += [(part, below - 1) for part in (item.values() if isinstance(item, dict) else item)]
                continue
        elif item is None or isinstance(item, bool | str | TensorLook) or is_number(item):
            continue
        return False
    return seen <= _ITEMS


def numpy_state(value: Any) -> Any:
    """A numpy random state in its five fields, also where it was saved as get_state(legacy=False); else as it is."""
    if not isinstance(value, dict) or not isinstance(value.get("state"), dict):
        return value
    inner = value["state"]
    return (
        value.get("bit_generator"),
        inner.get("key"),
        inner.get("pos"),
        value.get("has_gauss"),
        value.get("gauss"),
    )
