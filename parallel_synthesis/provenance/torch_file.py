"""Looks into a torch .pt file without torch: the zip's entries and the pickle's operations are read, nothing is run.

The pickle's operations go through a small stack machine that knows plain values, tensors and ordered dicts. What
else a file asks for (a class, a function) is never looked up; its name is reported.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_READ_LIMIT = 64 << 20  # bytes of the pickle, and of the zip's directory
_ITEM_BYTES: Mapping[str, int] = {
    "DoubleStorage": 8,
    "LongStorage": 8,
    "ComplexFloatStorage": 8,
    "FloatStorage": 4,
    "IntStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
}
_DTYPES: Mapping[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}
# What states of random generators and scalars of the reference implementation hold; seen, never made.
_NUMPY = frozenset(
    f"numpy.{core}.multiarray {name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")
) | {"numpy ndarray", "numpy dtype"}


@dataclass(frozen=True, slots=True)
class TensorLook:
    """A tensor as the pickle describes it. dtype: safetensors' name, else the storage's."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that the file names; not looked up."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """value: the plain value with TensorLook for tensors, None when it can not be told. problems: what is wrong."""

    value: Any
    problems: tuple[str, ...]


class _Unsound(Exception):
    """The file is damaged, or asks for what is not plain data."""


def look(fd: int) -> Look:
    """The value of a .pt file in torch's zip format. Raises OSError only."""
    try:
        with zipfile.ZipFile(_Bounded(fd)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            root = _root(entries)
            raw = _stored(archive, entries[f"{root}/data.pkl"])
            sizes = {
                name.removeprefix(f"{root}/data/"): entry.file_size
                for name, entry in entries.items()
                if name.startswith(f"{root}/data/") and entry.compress_type == zipfile.ZIP_STORED
            }
        machine = _Machine(sizes)
        value = machine.run(raw)
    except _Unsound as error:
        return Look(value=None, problems=(str(error),))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, LookupError, TypeError,
            ArithmeticError, EOFError, AttributeError, struct.error) as error:  # fmt: skip
        # The zip reader and pickletools are fed arbitrary bytes.
        return Look(value=None, problems=(f"damaged: {str(error)[:120] or type(error).__name__}",))
    return Look(value=value, problems=tuple(machine.problems))


def _root(entries: Mapping[str, zipfile.ZipInfo]) -> str:
    roots = [name.removesuffix("/data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise _Unsound("expected a torch file: a zip with one data.pkl")
    return roots[0]


def _stored(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise _Unsound("data.pkl is compressed or encrypted; torch stores it plain")
    if entry.file_size > _READ_LIMIT:
        raise _Unsound(f"data.pkl has {entry.file_size:,} bytes; expected at most {_READ_LIMIT:,}")
    return archive.read(entry)


class _Bounded(io.RawIOBase):
    """A file read with pread, never more than the limit at once: a forged length can not fill the memory."""

    def __init__(self, fd: int) -> None:
        self._fd, self._at, self._size = fd, 0, os.fstat(fd).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise zipfile.BadZipFile("a place before the start of the file")
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        wanted = max(0, self._size - self._at) if size is None or size < 0 else size
        if wanted > _READ_LIMIT:
            raise zipfile.BadZipFile("its directory is too large")
        data = os.pread(self._fd, wanted, self._at)
        self._at += len(data)
        return data


_MARK = object()
_VALUES = frozenset(
    "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
}
_TUPLES: Mapping[str, int] = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Runs the operations of one pickle on inert values. storages: bytes of each storage in the zip."""

    def __init__(self, storages: Mapping[str, int]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.problems: list[str] = []

    def run(self, raw: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(raw):
            if operation.name == "STOP":
                return self._stack.pop()
            self._step(operation.name, argument)
        raise _Unsound("the pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = [stack.pop() for _ in range(count)]
            stack.append(tuple(reversed(items)))
        elif name in ("TUPLE", "LIST", "DICT"):
            items = self._to_mark()
            stack.append(tuple(items) if name == "TUPLE" else items if name == "LIST" else _pairs(items))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._to_mark()
            self._into(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self._to_mark()
            self._into(dict).update(_pairs(items))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            if name == "STACK_GLOBAL":
                argument = " ".join([stack.pop(), stack.pop()][::-1])
            stack.append(Named(argument))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(self._reduce(stack.pop(), arguments))
        elif name == "BUILD":  # the state of an object that is not made
            stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _Unsound(f"the pickle uses {name}, which plain values and tensors do not need")

    def _to_mark(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _into(self, kind: type[Any]) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise _Unsound("the pickle fills something that is no list or dict")
        return self._stack[-1]

    def _storage(self, identity: Any) -> tuple[str, str, int]:
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise _Unsound("the pickle refers to something that is no tensor storage")
        _, kind, key, _, count = identity
        name = kind.name.rpartition(" ")[2] if isinstance(kind, Named) else ""
        if not isinstance(key, str) or type(count) is not int:
            raise _Unsound("a tensor storage without key and size")
        held, item = self._storages.get(key), _ITEM_BYTES.get(name)
        if held is None:
            self.problems.append(f"the data of tensor storage {key!r} is missing")
        elif item is not None and held != count * item:
            self.problems.append(f"tensor storage {key!r} holds {held} bytes; expected {count * item}")
        return name, key, count

    def _reduce(self, function: Any, arguments: Any) -> Any:
        name = function.name if isinstance(function, Named) else "a value"
        if not isinstance(arguments, tuple):
            raise _Unsound("a call without arguments")
        if name == "torch._utils _rebuild_tensor_v2":
            return self._tensor(arguments)
        if name == "torch._utils _rebuild_parameter":
            return arguments[0]
        if name == "collections OrderedDict":
            return dict(arguments[0]) if arguments else {}
        if name == "_codecs encode" and arguments[1:] == ("latin1",) and isinstance(arguments[0], str):
            return arguments[0].encode("latin1")  # bytes, as protocol 2 writes them
        if name not in _NUMPY:
            self.problems.append(
                f"needs {name.replace(' ', '.')[:120]}, which is not plain data; do not load it"
            )
        return Named(name)

    def _tensor(self, arguments: Sequence[Any]) -> TensorLook:
        (kind, key, count), offset, shape, strides = arguments[:4]
        whole = all(type(number) is int and number >= 0 for number in (offset, *shape, *strides))
        if not whole or len(shape) != len(strides):
            raise _Unsound("a tensor whose shape is no shape")
        steps = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and offset + steps >= count:
            self.problems.append(f"a tensor of shape {list(shape)} reaches beyond its storage {key!r}")
        return TensorLook(_DTYPES.get(kind, kind), tuple(shape))


def _pairs(items: Sequence[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise _Unsound("a dict with a key without a value")
    return dict(zip(items[::2], items[1::2], strict=True))
