"""Which steps the guards will skip, before any GPU hour: rows are tokenised on all cores, and the counts kept.
forecast.py makes the steps' figures of the counts.

The counts of a row (prefill, past, live, target) depend on the row, the tokenizer, the system message and `think`;
they are cached by the identities of these. Only the rows that the run takes are tokenised.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_synthesis.config import Config
from parallel_synthesis.data.cache import cache_directory
from parallel_synthesis.data.index import RowFile, open_rows
from parallel_synthesis.data.order import Order
from parallel_synthesis.data.tasks import find_task
from parallel_synthesis.errors import DataError, RefusedError
from parallel_synthesis.model.tokens import check_tokenizer, load_tokenizer, system_message, tokenize_row
from parallel_synthesis.training.extent import open_files, order_of, total_steps
from parallel_synthesis.training.inspection.forecast import Coverage, foretell
from parallel_synthesis.training.inspection.runlog import RunLog

if TYPE_CHECKING:
    from parallel_synthesis.training.inspection.forecast import Counts

_VERSION = 1  # of what is kept; goes up when the counting changes
_FEW = 256  # rows that are not worth another process, which loads the tokenizer library anew
_BATCH = 64  # rows a piece of work
Progress = Callable[[int, int], None]  # rows done, rows to do


def cover(
    config: Config,
    *,
    log: RunLog | None = None,
    cache: Path | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Coverage:
    """Predicts a run's skips. log: a run's log to compare with. jobs: processes, all cores by default.

    Raises DataError for a row that can not be tokenised (the run would stop there), RefusedError for a method whose
    branches are not known beforehand.
    """
    if config.run.method != "fixed_parallel_kv":
        raise RefusedError(
            f'run.method = "{config.run.method}": its branches are generated, so the guards can not be foretold; '
            'expected run.method = "fixed_parallel_kv"'
        )
    files = open_files(config, config.data.files, config.data.tasks)
    with contextlib.ExitStack() as stack:
        for file in files.values():
            stack.callback(file.close)
        order = order_of(config, {name: file.rows for name, file in files.items()})
        total = total_steps(config, order.steps_per_epoch)
        counts, tokenised, cached = _counts(config, files, order, total, cache, jobs, progress)
    return foretell(config, order, total, counts, tokenised=tokenised, cached=cached, log=log)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a process needs to count rows of one file."""

    model: str
    revision: str | None
    think: bool
    task: str
    path: str
    own: bool
    skip_bad: bool
    max_rows: int | None


def _counts(
    config: Config,
    files: Mapping[str, RowFile],
    order: Order,
    total: int,
    cache: Path | None,
    jobs: int | None,
    progress: Progress | None,
) -> tuple[dict[str, Counts], int, int]:
    import numpy as np

    needed = _needed(order, total, files)
    tokenizer = load_tokenizer(config.backbone.model, config.backbone.revision)
    check_tokenizer(tokenizer, config.backbone.model)
    identity = _identity(tokenizer, config)
    directory = (cache_directory() if cache is None else cache) / "coverage"
    to_do = done = 0
    found, missing, places = {}, {}, {}
    for name, file in files.items():
        key = hashlib.sha256(
            f"{_VERSION}\0{file.unpacked_sha256 or file.sha256}\0{identity}\0{config.data.on_bad_row}".encode()
        ).hexdigest()[:32]
        places[name] = directory / f"{key}.npy"
        counts = np.full((file.rows, 4), -1, dtype=np.int64)
        kept = _load(places[name])
        if kept is not None:
            shared = min(len(kept), file.rows)
            counts[:shared] = kept[:shared]
        found[name] = counts
        missing[name] = [row for row in needed[name] if counts[row, 0] < 0]
        to_do += len(missing[name])
    for name, rows in missing.items():
        if not rows:
            continue
        work = _Work(
            model=config.backbone.model,
            revision=config.backbone.revision,
            think=config.workers.think,
            task=name,
            path=str(files[name].path),
            own=name in config.data.files,
            skip_bad=config.data.on_bad_row == "skip",
            max_rows=config.data.max_rows,
        )
        pieces = [rows[at : at + _BATCH] for at in range(0, len(rows), _BATCH)]
        with contextlib.closing(
            _results(work, pieces, files[name], tokenizer, jobs, few=to_do <= _FEW)
        ) as results:
            for piece, result in zip(pieces, results, strict=True):
                found[name][piece] = result
                done += len(piece)
                if progress is not None:
                    progress(done, to_do)
        with contextlib.suppress(OSError):  # what can not be kept is counted again next time
            _store(places[name], found[name])
    cached = sum(map(len, needed.values())) - to_do
    return found, to_do, cached


def _needed(order: Order, total: int, files: Mapping[str, RowFile]) -> dict[str, list[int]]:
    """The rows that the run's steps take."""
    taken: dict[str, set[int]] = {name: set() for name in files}
    for number in range(total):
        index, place = divmod(number, order.steps_per_epoch)
        epoch = order.epoch(index)
        for rank in range(order.ranks):
            batch = epoch.batch(place, rank)
            taken[batch.task].update(batch.rows)
    return {name: sorted(rows) for name, rows in taken.items()}


def _results(
    work: _Work,
    pieces: Sequence[list[int]],
    file: RowFile,
    tokenizer: Any,
    jobs: int | None,
    *,
    few: bool,
) -> Generator[list[tuple[int, int, int, int]], None, None]:
    system = system_message(work.model)
    workers = min(jobs or os.cpu_count() or 1, len(pieces))
    if few or workers == 1:
        for piece in pieces:
            yield [_count(tokenizer, file, number, system=system, think=work.think) for number in piece]
        return
    # Spawned, not forked: the tokenizer library has threads.
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_open, initargs=(work,)
    ) as pool:
        yield from pool.map(_count_piece, pieces)


_opened: list[
    Any
] = []  # a worker process's tokenizer, file, system message and think; set once, when it starts


def _open(work: _Work) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    task = find_task(work.task, own=(work.task,) if work.own else ())
    _opened[:] = [
        load_tokenizer(work.model, work.revision),
        open_rows(
            task, Path(work.path), on_bad_row="skip" if work.skip_bad else "refuse", max_rows=work.max_rows
        ),
        system_message(work.model),
        work.think,
    ]


def _count_piece(numbers: list[int]) -> list[tuple[int, int, int, int]]:
    tokenizer, file, system, think = _opened
    return [_count(tokenizer, file, number, system=system, think=think) for number in numbers]


def _count(
    tokenizer: Any, file: RowFile, number: int, *, system: str, think: bool
) -> tuple[int, int, int, int]:
    row = file.read(number)
    try:
        tokens = tokenize_row(
            tokenizer,
            query=row.query,
            target=row.target,
            contexts=row.contexts,
            extracts=row.extracts,
            system=system,
            think=think,
        )
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error
    return tokens.prefill_tokens, tokens.past, tokens.live_tokens, tokens.target_tokens


def _identity(tokenizer: Any, config: Config) -> str:
    """What the counts of a row depend on besides the row."""
    backend = tokenizer.backend_tokenizer.to_str()
    parts = {
        "backend": hashlib.sha256(backend.encode()).hexdigest(),
        "template": str(getattr(tokenizer, "chat_template", None)),
        "eos": str(tokenizer.eos_token),
        "system": system_message(config.backbone.model),
        "think": config.workers.think,
        "versions": [metadata.version(name) for name in ("transformers", "tokenizers")],
    }
    return json.dumps(parts, sort_keys=True)


def _load(path: Path) -> Counts | None:
    import numpy as np

    try:
        kept: Counts = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return kept if kept.ndim == 2 and kept.shape[1] == 4 and kept.dtype == np.int64 else None


def _store(path: Path, counts: Counts) -> None:
    import numpy as np

    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            np.save(file, counts, allow_pickle=False)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
