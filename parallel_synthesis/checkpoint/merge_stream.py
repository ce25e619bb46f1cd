"""The merged adapter as a stream of chunks of about 1 MiB, made in one thread while another writes and hashes it."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parallel_synthesis.checkpoint.merge_average import FLOATS, WeightedSum, count_nonfinite
from parallel_synthesis.checkpoint.merge_lowrank import Stacked
from parallel_synthesis.checkpoint.merge_plan import MergeInput, MergeOptions
from parallel_synthesis.checkpoint.safetensors_file import TensorChunks, layout, write_safetensors
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.hashing import Bytes, HashingFile

CHUNK = 1 << 20  # bytes; two tensors hold 97 % of a release adapter, so whole tensors would be no stream
_AHEAD = 4  # chunks made before they are written
_POLL = 0.1  # seconds after which a producer with a full queue looks whether anybody still wants its chunks

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class AdapterStream:
    """Shapes, dtypes and content of the merged adapter.

    After `write`: nonfinite: tensor -> inf and nan elements let through; copied: tensors that are the same in all
    inputs and in the output; digests: tensor -> sha256 in the output.
    """

    def __init__(self, inputs: Sequence[MergeInput], options: MergeOptions) -> None:
        self._inputs = inputs
        self._options = options
        self._sums: dict[tuple[float, ...], tuple[WeightedSum, dict[str, bool]]] = {}
        self.stacked = None if options.method == "average" else Stacked(inputs, options)
        self._factors = {
            name: (module, side)
            for module, names in (self.stacked.modules if self.stacked else {}).items()
            for side, name in names.items()
        }
        self.nonfinite: dict[str, int] = {}
        self.copied: set[str] = set()
        self.digests: dict[str, str] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for one in inputs:
            for name, entry in one.tensors.entries.items():
                shape = entry.shape
                if self.stacked and name in self._factors:
                    shape = self.stacked.shape(self._factors[name][1], shape)
                self.tensors.setdefault(name, (entry.dtype, shape))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._described(iter(())).values())

    def write(self, file: HashingFile, progress: Progress | None = None) -> dict[str, Any]:
        """Writes the adapter file; what the manifest adds to its entry. CheckpointError for inf or nan."""
        total, done = self.nbytes, 0

        def counted(chunks: Iterator[Bytes]) -> Iterator[Bytes]:
            nonlocal done
            for chunk in chunks:
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
                yield chunk

        with contextlib.closing(_ahead(self._all_chunks())) as chunks:
            details = write_safetensors(file, self._described(counted(chunks)))
        self.digests = {name: tensor["sha256"] for name, tensor in details["tensors"].items()}
        return details

    def _described(self, chunks: Iterator[Bytes]) -> Mapping[str, TensorChunks]:
        described = {}
        for name, (dtype, shape) in self.tensors.items():
            tensor = TensorChunks(dtype=dtype, shape=shape, chunks=())
            taken = _take(chunks, tensor.nbytes)
            described[name] = TensorChunks(dtype=dtype, shape=shape, chunks=taken)
        return described

    def _all_chunks(self) -> Iterator[Bytes]:
        for name in layout(self._described(iter(()))):
            weights = self._weights(name)
            if name in self._factors and self.stacked is not None:
                module, side = self._factors[name]
                data = self.stacked.tensor(module, side, weights)
                self._check(name, data, ())
                yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
            else:
                yield from self._average(name, weights)

    def _weights(self, name: str) -> list[float | None]:
        """One an input; None where an input lacks the tensor and that is not the same as zeros."""
        having = [name in one.tensors.entries for one in self._inputs]
        weights = [one.weight for one in self._inputs]
        if self._options.missing == "zero":
            present: list[float | None] = list(weights)
        else:
            present = [weight if there else None for weight, there in zip(weights, having)]
        # A delta may be scaled by weights that do not sum to 1, a whole weight matrix may not.
        whole_matrix = self.stacked is not None and name not in self._factors
        if whole_matrix or None in present:
            total = sum(weight for weight in present if weight is not None)
            if total == 0:
                raise CheckpointError(
                    f"{name}: the weights of those that have it sum to 0; give other weights"
                )
            present = [None if weight is None else weight / total for weight in present]
        if name in self._factors:
            return [weight if there else None for weight, there in zip(present, having)]
        return present

    def _average(self, name: str, weights: Sequence[float | None]) -> Iterator[Bytes]:
        used = [(one, weight) for one, weight in zip(self._inputs, weights) if weight is not None]
        entries = [one.tensors.entries.get(name) for one, _ in used]
        dtype, _ = self.tensors[name]
        dtypes = [dtype if entry is None else entry.dtype for entry in entries]
        add, copies = self._sum(tuple(weight for _, weight in used))
        if dtype not in copies:
            copies[dtype] = add.keeps_bits(dtype)
        may_copy = copies[dtype] and dtypes.count(dtype) == len(dtypes) and None not in entries
        elements = math.prod(next(entry.shape for entry in entries if entry is not None))
        step = CHUNK // max(FLOATS[kind] for kind in (dtype, *dtypes))
        all_equal, hashing = True, False
        for start in range(0, elements, step):
            count = min(step, elements - start)
            chunks: list[Bytes | None] = []
            for (one, _), entry in zip(used, entries):
                if entry is None:
                    chunks.append(None)
                else:
                    size = FLOATS[entry.dtype]
                    chunks.append(one.tensors.read(entry.start + start * size, count * size))
            equal = may_copy and all(chunk == chunks[0] for chunk in chunks[1:])
            all_equal = all_equal and equal
            # A tensor that begins equal is taken to be so; where it is not, its digest is made by reading it again.
            hashing = hashing or (start == 0 and not equal)
            if hashing:
                for (one, _), chunk in zip(used, chunks):
                    if chunk is not None:
                        one.tensors.feed(name, chunk)
            data = chunks[0] if equal and chunks[0] is not None else add(chunks, dtypes, dtype)
            self._check(
                name, data, [(one, chunk, kind) for (one, _), chunk, kind in zip(used, chunks, dtypes)]
            )
            yield data
        if all_equal and len(used) == len(self._inputs):
            self.copied.add(name)

    def _sum(self, weights: tuple[float, ...]) -> tuple[WeightedSum, dict[str, bool]]:
        if weights not in self._sums:
            self._sums[weights] = (WeightedSum(weights), {})
        return self._sums[weights]

    def _check(self, name: str, data: Bytes, sources: Sequence[tuple[MergeInput, Bytes | None, str]]) -> None:
        """An inf or nan of an input always shows in the result, so only the result is looked at."""
        bad = count_nonfinite(data, self.tensors[name][0])
        if not bad:
            return
        self.nonfinite[name] = self.nonfinite.get(name, 0) + bad
        if self._options.allow_nonfinite:
            return
        guilty = [
            one.label for one, chunk, kind in sources if chunk is not None and count_nonfinite(chunk, kind)
        ]
        where = (
            f"in {' and '.join(guilty)}"
            if guilty
            else f"in the result, which {self.tensors[name][0]} cannot hold"
        )
        raise CheckpointError(
            f"{name} has inf or nan {where}; nothing was written; use a checkpoint whose weights are finite, or "
            f"--allow-nonfinite"
        )


def _take(chunks: Iterator[Bytes], nbytes: int) -> Iterator[Bytes]:
    """The next chunks, up to a tensor's size."""
    taken = 0
    while taken < nbytes:
        chunk = next(chunks, None)
        if chunk is None:
            return  # the writer reports how many bytes came
        taken += len(chunk)
        yield chunk


def _ahead(source: Iterator[Bytes]) -> Generator[Bytes, None, None]:
    """`source`, run in a thread a few chunks ahead. Its error is raised here; closing this ends the thread."""
    ready: queue.Queue[Bytes | None] = queue.Queue(maxsize=_AHEAD)
    stop = threading.Event()

    def put(item: Bytes | None) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_POLL)
                return

    def produce() -> None:
        try:
            for item in source:
                put(item)
                if stop.is_set():
                    return
        finally:
            put(None)

    pool = ThreadPoolExecutor(1, thread_name_prefix="merge-arithmetic")
    # An interrupt may come at any point, also right after the thread has begun: `stop` must be set before it is awaited.
    try:
        future = pool.submit(produce)
        while (item := ready.get()) is not None:
            yield item
        future.result()
    finally:
        stop.set()
        pool.shutdown()
