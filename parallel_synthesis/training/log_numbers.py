"""Columns of numbers as text into arrays, many at once; each is exactly what int() or float() makes of it.

A plain decimal d.ddd of at most 15 digits is the whole number dddd over a power of ten: both are exact in binary64, so
that one division rounds as float() does (IEEE 754). Whole numbers are parsed by numpy in one pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parallel_synthesis.training.log_reader import NUMBER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

_DIGITS = b"0123456789"
_MOST_DIGITS = 15  # as log_reader.py has it for a count; 10**15 is below 2**53
_POWERS = [float(10**digits) for digits in range(_MOST_DIGITS + 1)]
_SPACE, _DOT = 0x20, 0x2E
Column = Sequence[bytes]  # no text holds a space


def counts(columns: Sequence[Column]) -> Ints | None:
    """Whole numbers [columns, texts] of 1 to 15 digits; None when a text is none. All columns are of one length."""
    import numpy as np

    joined = b" ".join(itertools.chain.from_iterable(columns)) + b" "
    if joined.translate(None, _DIGITS + b" "):
        return None
    width = np.diff(np.flatnonzero(np.frombuffer(joined, dtype=np.uint8) == _SPACE), prepend=-1) - 1
    if width.min() < 1 or width.max() > _MOST_DIGITS:
        return None
    return np.fromstring(joined, dtype=np.int64, sep=" ").reshape(len(columns), -1)


def lengths(texts: Column) -> Ints | None:
    """How many numbers each text holds, digits with `,` or `;` between; None when a text is none of that."""
    import numpy as np

    joined = b" ".join(texts) + b" "
    if joined.translate(None, _DIGITS + b",; "):
        return None
    text = np.frombuffer(joined, dtype=np.uint8)
    marks = np.flatnonzero((text < ord("0")) | (text == ord(";")))
    if np.diff(marks, prepend=-1).min() < 2:  # no digit between two marks
        return None
    return np.diff(np.flatnonzero(text[marks] == _SPACE), prepend=-1)


def reals(columns: Sequence[Column]) -> Floats | None:
    """Numbers [columns, texts] as log_reader.py takes them, nan, inf and exponents too; None when a text is none."""
    import numpy as np

    found = _decimals(columns)
    if found is not None:
        return found
    if len(columns) > 1:  # one column of odd numbers does not hold up the others
        parts = [reals([column]) for column in columns]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    if not all(map(NUMBER.fullmatch, columns[0])):
        return None
    return np.array([list(map(float, columns[0]))], dtype=np.float64)


def _decimals(columns: Sequence[Column]) -> Floats | None:
    """Numbers that are all digits with at most one dot among or behind them; None when one is another."""
    import numpy as np

    joined = b" ".join(itertools.chain.from_iterable(columns)) + b" "
    if joined.translate(None, _DIGITS + b". "):
        return None
    text = np.frombuffer(joined, dtype=np.uint8)
    marks = np.flatnonzero(text < ord("0"))  # spaces and dots
    since = np.diff(marks, prepend=-1) - 1  # digits since the mark before
    dot = text[marks] == _DOT
    after_dot = np.append(False, dot[:-1])
    ends = ~dot
    if (dot & (after_dot | (since == 0))).any():
        return None
    width = np.diff(marks[ends], prepend=-1) - 1
    if width.min() < 1 or width.max() > _MOST_DIGITS:
        return None
    whole = np.fromstring(joined.translate(None, b"."), dtype=np.int64, sep=" ")
    power = np.array(_POWERS)[np.where(after_dot, since, 0)[ends]]
    found: Floats = (whole / power).reshape(len(columns), -1)
    return found
