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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
# What states of random generators and scalars of the reference implementation hold: their numbers are read as struct
# does, nothing of numpy's is made. dtype -> struct's letter.
_NUMBERS: Mapping[str, str] = {
    "b1": "?", "u1": "B", "u4": "I", "u8": "Q", "i4": "i", "i8": "q", "f4": "f", "f8": "d",
}  # fmt: skip
_ARRAY, _SCALAR = (
    tuple(f"numpy.{core}.multiarray {name}" for core in ("core", "_core"))
    for name in ("_reconstruct", "scalar")
)
# What torch's writer stores beside the pickle and the tensors' data; every one of them is small.
_BESIDE = ("version", "byteorder")
_BESIDE_BYTES = 4096
_BITS = 512  # of a whole number: counters and seeds have 64, and Python refuses to print those of some 10,000
_AXES = 64
_TOLD = 100  # problems of one file: who reads more?
_KEYS = (str, int, float, bytes, type(None))


@dataclass(frozen=True, slots=True)
class TensorLook:
    """A tensor as the pickle describes it. dtype: safetensors' name, else the storage's. storage: its data's entry."""

    dtype: str
    shape: tuple[int, ...]
    storage: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that the file names; not looked up."""

    name: str


@dataclass(slots=True)
class ArrayLook:
    """An array of numpy's as the pickle describes it. dtype: numpy's letter and bytes, as u4; "" when it is not told."""

    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class _DType:
    """numpy's dtype: the pickle makes it first and fills it afterwards."""

    code: str
    order: str = "<"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """value: the plain value with TensorLook for tensors, None when it can not be told. problems: what is wrong."""

    value: Any
    problems: tuple[str, ...]


class _Unsound(Exception):
    """The file is damaged, or asks for what is not plain data."""


def look(fd: int) -> Look:
    """The value of a .pt file in torch's zip format. Raises OSError only; no more than its pickle is read."""
    try:
        with zipfile.ZipFile(_Bounded(fd)) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            root = _root(entries)
            foreign = list(islice(_foreign(archive.infolist(), root, os.fstat(fd).st_size), _TOLD))
            raw = _stored(archive, entries[f"{root}/data.pkl"])
            sizes = {
                name.removeprefix(f"{root}/data/"): entry.file_size
                for name, entry in entries.items()
                if name.startswith(f"{root}/data/") and entry.compress_type == zipfile.ZIP_STORED
            }
        machine = _Machine(sizes)
        value = machine.run(raw)
        for key in sizes.keys() - machine.used:
            machine.say(f"holds data/{key[:80]}, which no tensor refers to")
    except _Unsound as error:
        return Look(value=None, problems=(str(error),))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, LookupError, TypeError,
            ArithmeticError, EOFError, AttributeError, struct.error) as error:  # fmt: skip
        # The zip reader and pickletools are fed arbitrary bytes.
        return Look(value=None, problems=(f"damaged: {str(error)[:120] or type(error).__name__}",))
    return Look(value=value, problems=(*foreign, *machine.problems))


def _foreign(entries: Iterable[zipfile.ZipInfo], root: str, size: int) -> Iterator[str]:
    """Entries that are not of torch's writer, which stores everything plain, once, and nothing else."""
    seen: set[str] = set()
    total = 0
    for entry in entries:
        name = entry.filename
        shown = repr(name[:80])
        inside = name.removeprefix(f"{root}/") if name.startswith(f"{root}/") else None
        if name in seen:
            yield f"holds two entries {shown}"
        seen.add(name)
        total += entry.file_size
        if inside is None or not (
            inside == "data.pkl"
            or inside.startswith("data/")
            or ((inside in _BESIDE or inside.startswith(".")) and entry.file_size <= _BESIDE_BYTES)
        ):
            yield f"holds an entry {shown} of {entry.file_size:,} bytes, which torch does not write"
        elif entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            yield f"its entry {shown} is compressed; torch stores it plain"
    if total > size:
        yield f"its entries have {total:,} bytes together, more than the file"


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
    """Runs the operations of one pickle on inert values. storages: bytes of each storage in the zip.

    used: the storages that tensors are made of. What is made is at most in proportion to the pickle's length.
    """

    def __init__(self, storages: Mapping[str, int]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0
        self.problems: list[str] = []
        self.used: set[str] = set()

    def say(self, problem: str) -> None:
        if len(self.problems) < _TOLD:
            self.problems.append(problem)

    def _copy(self, length: int) -> None:
        """Counts what a call copies: a few bytes can ask for the same large value again and again."""
        self._copied += length
        if self._copied > _READ_LIMIT:
            raise _Unsound("the pickle's calls copy more than plain values need")

    def run(self, raw: bytes) -> Any:
        for operation, argument, _ in pickletools.genops(raw):
            if operation.name == "STOP":
                return self._stack.pop()
            self._step(operation.name, argument)
        raise _Unsound("the pickle has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            if isinstance(argument, int) and argument.bit_length() > _BITS:
                raise _Unsound(f"a whole number of {argument.bit_length():,} bits; no counter is as large")
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
            state = stack.pop()
            self._fill(stack[-1], state)
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
        self.used.add(key)
        held, item = self._storages.get(key), _ITEM_BYTES.get(name)
        if held is None:
            self.say(f"the data of tensor storage {key[:80]!r} is missing")
        elif item is not None and held != count * item:
            self.say(f"tensor storage {key!r} holds {held} bytes; expected {count * item}")
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
            given = arguments[0] if arguments else ()
            self._copy(len(given))
            pairs = given.items() if isinstance(given, dict) else given
            return _pairs([item for key, value in pairs for item in (key, value)])
        if name == "_codecs encode" and arguments[1:] == ("latin1",) and isinstance(arguments[0], str):
            self._copy(len(arguments[0]))
            return arguments[0].encode("latin1")  # bytes, as protocol 2 writes them
        if name == "numpy dtype" and arguments and isinstance(arguments[0], str):
            if arguments[0] not in _NUMBERS:
                self.say(f"holds numpy values of type {arguments[0][:40]!r}; expected numbers")
            return _DType(arguments[0])
        if name in _ARRAY:
            return ArrayLook()
        if name in _SCALAR and len(arguments) == 2 and isinstance(arguments[0], _DType):
            return self._number(*arguments)
        self.say(f"needs {name.replace(' ', '.')[:120]}, which is not plain data; do not load it")
        return Named(name)

    def _number(self, dtype: _DType, raw: Any) -> Any:
        letter = _NUMBERS.get(dtype.code)
        if letter is None or not isinstance(raw, bytes):
            return Named("numpy scalar")
        return struct.unpack((">" if dtype.order == ">" else "<") + letter, raw)[0]

    def _fill(self, target: Any, state: Any) -> None:
        """What numpy's dtype and array get after they are made; of others it is passed over."""
        if isinstance(target, _DType) and isinstance(state, tuple) and state[1:2] == (">",):
            target.order = ">"
        if not isinstance(target, ArrayLook):
            return
        _, shape, dtype, _, raw = state
        if not isinstance(dtype, _DType) or not _is_shape(shape) or not isinstance(raw, bytes):
            self.say("holds an array of something else than numbers")
            return
        target.dtype, target.shape = dtype.code, tuple(shape)
        if dtype.code in _NUMBERS and len(raw) != math.prod(shape) * int(dtype.code[1:]):
            self.say(f"an array of shape {list(shape)} of {dtype.code} holds {len(raw)} bytes")

    def _tensor(self, arguments: Sequence[Any]) -> TensorLook:
        (kind, key, count), offset, shape, strides = arguments[:4]
        if not _is_shape((offset,)) or not _is_shape(shape) or not _is_shape(strides):
            raise _Unsound("a tensor whose shape is no shape")
        if len(shape) != len(strides):
            raise _Unsound("a tensor with a stride for other axes than its own")
        steps = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and offset + steps >= count:
            self.say(f"a tensor of shape {list(shape)} reaches beyond its storage {key!r}")
        return TensorLook(_DTYPES.get(kind, kind), tuple(shape), key)


def _is_shape(given: Any) -> bool:
    sized = isinstance(given, tuple | list) and len(given) <= _AXES
    return sized and all(type(number) is int and number >= 0 for number in given)


def _pairs(items: Sequence[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise _Unsound("a dict with a key without a value")
    # A tuple of tuples of the same would be hashed for ever.
    if not all(isinstance(key, _KEYS) for key in items[::2]):
        raise _Unsound("a dict with a key that is neither a text nor a number")
    return dict(zip(items[::2], items[1::2], strict=True))
