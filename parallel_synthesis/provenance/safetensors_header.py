"""The header of a safetensors file: read without the library, and every way in which it is not sound.

Format: 8 bytes little-endian length, a JSON object {name: {dtype, shape, data_offsets: [begin, end]}} beside
"__metadata__" {text: text}, then the tensors, without holes, to the end of the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LIMIT = 100_000_000  # bytes of a header, as in the library
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F32", "U32", "I32"), 32),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 16),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor of the file. start, bytes: where its data lies, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """tensors: those that are described soundly. bytes: of everything before the data. problems: all that is wrong."""

    tensors: Mapping[str, TensorPlace]
    bytes: int
    problems: tuple[str, ...]


def read_header(fd: int) -> Header:
    """Reads with pread; a forged length allocates nothing. Raises OSError only."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    if len(start) < 8:
        return _broken(f"truncated: {size} bytes; expected at least the 8 of the header's length")
    length = int.from_bytes(start, "little")
    if length > size - 8:
        return _broken(f"truncated: a header of {length} bytes in a file of {size}")
    if length > LIMIT:
        return _broken(f"a header of {length} bytes; expected at most {LIMIT}")
    raw = b""
    while len(raw) < length and (piece := os.pread(fd, length - len(raw), 8 + len(raw))):
        raw += piece
    if len(raw) < length:
        return _broken("truncated: the header ends early")
    if not raw.startswith(b"{"):
        return _broken("the header does not begin with {")
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        return _broken(f"the header is not JSON: {str(error)[:100]}")
    if not isinstance(document, dict):
        return _broken("the header is not a JSON object")
    found: list[str] = []
    tensors = _tensors(document, 8 + length, found)
    if not found:
        found += _layout(tensors, 8 + length, size)
    return Header(tensors=tensors, bytes=8 + length, problems=tuple(found))


def _tensors(document: Mapping[str, Any], base: int, found: list[str]) -> dict[str, TensorPlace]:
    tensors = {}
    for name, entry in document.items():
        if name == "__metadata__":
            texts = isinstance(entry, dict) and all(isinstance(value, str) for value in entry.values())
            found += [] if texts else ["__metadata__: expected an object of texts"]
            continue
        problem = _entry_problem(entry)
        if problem is not None:
            found.append(f"tensor {name[:200]!r}: {problem}")
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = TensorPlace(
            dtype=entry["dtype"], shape=tuple(entry["shape"]), start=base + begin, bytes=end - begin
        )
    return tensors


def _entry_problem(entry: Any) -> str | None:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return "expected dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {str(dtype)[:40]!r}"
    if not _counts(shape) or len(shape) > 64:
        return "expected a shape of whole numbers"
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return "expected data_offsets [begin, end]"
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        return f"{dtype} {shape} takes {bits / 8:g} bytes; data_offsets hold {offsets[1] - offsets[0]}"
    return None


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _layout(tensors: Mapping[str, TensorPlace], base: int, size: int) -> list[str]:
    found = []
    at = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start != at:
            what = "overlaps what is before it" if tensor.start < at else "leaves a hole before it"
            found.append(f"tensor {name!r} begins at byte {tensor.start} and {what}; expected byte {at}")
        at = max(at, tensor.start + tensor.bytes)
    if at > size:
        found.append(f"truncated: the tensors end at byte {at}, the file at {size}")
    elif at < size:
        found.append(f"{size - at} trailing bytes after the last tensor")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a name appears twice in one object")
    return document


def _broken(problem: str) -> Header:
    return Header(tensors={}, bytes=0, problems=(problem,))
