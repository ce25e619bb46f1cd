"""The arithmetic of an average, bit for bit: (a.float()*w_a + b.float()*w_b + ...).to(a.dtype), in numpy, in blocks.

Every product and every sum is rounded to fp32 on its own, the result to the nearest, ties to even, as torch does
on any device. lerp, addcmul, add_(alpha=) and fp64 give other bits. A nan stays a nan; its payload is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_synthesis.provenance.hashing import Bytes

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}  # the dtypes with an exact fp32 value, bytes an element
_NUMPY: dict[str, Any] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<f2")}
_BLOCK = 1 << 15  # elements; two fp32 scratch blocks stay in a core's own cache
_NAN = np.uint16(0x7FC0)
_LARGEST: dict[str, Any] = {"BF16": np.uint16(0x7F80), "F16": np.uint16(0x7C00), "F32": np.uint32(0x7F800000)}

Array = npt.NDArray[Any]


class WeightedSum:
    """The weighted sum of chunks of one element count. weights: one an input, in the order of the inputs.

    Holds scratch memory: for one thread at a time.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # torch takes a Python float times an fp32 tensor as an fp32 scalar.
        self.weights = [np.float32(weight) for weight in weights]
        self._sum = np.empty(_BLOCK, np.float32)
        self._term = np.empty(_BLOCK, np.float32)

    def __call__(self, chunks: Sequence[Bytes | None], dtypes: Sequence[str], out_dtype: str) -> memoryview:
        """The sum's bytes in `out_dtype`; a chunk that is None counts as zeros. All have one element count."""
        inputs = [
            None if chunk is None else np.frombuffer(chunk, _NUMPY[dtype])
            for chunk, dtype in zip(chunks, dtypes)
        ]
        count = next(len(array) for array in inputs if array is not None)
        out: Array = np.empty(count, _NUMPY[out_dtype])
        mixed = any(dtype != out_dtype for dtype in dtypes)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, count, _BLOCK):
                end = min(start + _BLOCK, count)
                total, term = self._sum[: end - start], self._term[: end - start]
                for place, (array, dtype) in enumerate(zip(inputs, dtypes)):
                    into = term if place else total
                    _to_float(None if array is None else array[start:end], dtype, into)
                    np.multiply(into, self.weights[place], out=into)
                    if place:
                        np.add(total, term, out=total)
                _from_float(total, term, out_dtype, out[start:end], mixed=mixed)
        return _view(out)

    def keeps_bits(self, dtype: str) -> bool:
        """Whether the average of equal inputs is that input, proven by trying every value a 16-bit dtype has.

        Then equal bytes may be copied. False for fp32, whose values are too many to try.
        """
        if FLOATS[dtype] != 2:
            return False
        bits = np.arange(1 << 16, dtype=np.uint16)
        values = bits[(bits & np.uint16(0x7FFF)) <= _LARGEST[dtype]]  # all but the nans
        result = self([values.tobytes()] * len(self.weights), [dtype] * len(self.weights), dtype)
        return bytes(result) == bytes(values.tobytes())


def _view(array: Array) -> memoryview:
    """An array's bytes."""
    return array.view(np.uint8).data


def _to_float(array: Array | None, dtype: str, into: Array) -> None:
    if array is None:
        into.fill(0)
    elif dtype == "BF16":
        np.left_shift(array, 16, out=into.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(into, array, casting="same_kind")


def _from_float(total: Array, scratch: Array, dtype: str, out: Array, *, mixed: bool) -> None:
    if dtype != "BF16":
        np.copyto(out, total, casting="same_kind")
        return
    nans = np.isnan(total) if mixed else None  # only an fp32 nan has low bits that rounding could carry away
    bits, odd = total.view(np.uint32), scratch.view(np.uint32)
    np.right_shift(bits, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(bits, odd, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    out[:] = bits.view(np.uint16)[1::2]
    if nans is not None:
        out[nans] = _NAN


def from_bytes(data: Bytes, dtype: str) -> Array:
    """The elements as fp32, flat."""
    array = np.frombuffer(data, _NUMPY[dtype])
    out: Array = np.empty(len(array), np.float32)
    _to_float(array, dtype, out)
    return out


def to_bytes(values: Array, dtype: str) -> Bytes:
    """Values rounded to fp32, then to `dtype`, flat."""
    with np.errstate(over="ignore", under="ignore"):
        total: Array = np.array(values, np.float32, order="C").reshape(-1)
        out: Array = np.empty(total.size, _NUMPY[dtype])
        _from_float(total, np.empty_like(total), dtype, out, mixed=True)
    return _view(out)


def count_negative(data: Bytes) -> int:
    """How many fp32 elements are below zero."""
    return int(np.count_nonzero(np.frombuffer(data, np.float32) < 0))


def count_nonfinite(data: Bytes, dtype: str) -> int:
    """How many elements are inf or nan."""
    word: Any = np.uint32 if FLOATS[dtype] == 4 else np.uint16
    bits: Array = np.frombuffer(data, word)
    largest = _LARGEST[dtype]
    # A maximum of the bits without the sign is the quick test that a good file always passes.
    if not len(bits) or (bits & word(np.iinfo(word).max >> 1)).max() < largest:
        return 0
    return int(np.count_nonzero((bits & largest) == largest))
