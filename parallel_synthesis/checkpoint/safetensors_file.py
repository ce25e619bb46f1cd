"""A streaming safetensors writer: the bytes of `safetensors.torch.save_file(state)` without metadata, hashed
on the way.

No torch: a tensor comes as its safetensors dtype name, its shape and its bytes (row-major, little-endian).
Layout: 8 bytes little-endian header length, the JSON header padded with spaces to a multiple of 8, then the
tensors, those with the most strictly aligned dtype first and by name within a dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.provenance.hashing import Bytes, HashingFile, sha256_bytes

# In the order in which the library lays them out, first to last, with bytes an element.
DTYPE_BYTES: Mapping[str, int] = {
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
    "F32": 4,
    "U32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "U16": 2,
    "I16": 2,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_ORDER = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """A tensor as bytes. dtype: a key of DTYPE_BYTES; data: exactly prod(shape) elements."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChunks:
    """A tensor whose bytes come in pieces, taken once and in the order of `layout`; in all exactly prod(shape)
    elements, so that a file larger than the memory can be written."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[Bytes]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


Tensors = Mapping[str, TensorBytes] | Mapping[str, TensorChunks] | Mapping[str, TensorBytes | TensorChunks]


def layout(tensors: Tensors) -> list[str]:
    """The names in the order in which the tensors lie in the file."""
    return sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode("utf-8")))


def write_safetensors(
    file: HashingFile, tensors: Tensors, *, metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Writes the whole file into `file` (which hashes it) and returns what the manifest adds to its entry:
    {header_sha256, tensors: {name: {offset, bytes, sha256}}}, offsets in bytes from the start of the file.

    The header's hash covers the 8 length bytes, the JSON and its padding. metadata: as save_file's argument; a
    model file needs {"format": "pt"}. ValueError for a tensor whose bytes do not fit its shape, or the reserved
    name "__metadata__".
    """
    names = layout(tensors)
    header = _header(names, tensors, metadata)
    details: dict[str, Any] = {"header_sha256": sha256_bytes(header), "tensors": {}}
    file.write(header)
    offset = len(header)
    for name in names:
        tensor = tensors[name]
        digest = hashlib.sha256()
        written = 0
        for chunk in (tensor.data,) if isinstance(tensor, TensorBytes) else tensor.chunks:
            digest.update(chunk)
            written += file.write(chunk)
        if written != tensor.nbytes:
            raise ValueError(f"tensor {name!r}: expected {tensor.nbytes} bytes in chunks, found {written}")
        details["tensors"][name] = {"offset": offset, "bytes": written, "sha256": digest.hexdigest()}
        offset += written
    return details


def _header(names: list[str], tensors: Tensors, metadata: Mapping[str, str] | None) -> bytes:
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        tensor = tensors[name]
        found = memoryview(tensor.data).nbytes if isinstance(tensor, TensorBytes) else tensor.nbytes
        if found != tensor.nbytes or name == "__metadata__":
            raise ValueError(
                f"tensor {name!r} {tensor.dtype} {list(tensor.shape)}: expected {tensor.nbytes} bytes of "
                f"data under another name than __metadata__, found {found}"
            )
        end = at + tensor.nbytes
        fields[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
