"""The cache of indices: reused, never trusted wrongly, never needed, safe for several processes at once."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from parallel_synthesis.data import rows as rows_module
from parallel_synthesis.data.cache import Entry, cache_directory
from parallel_synthesis.data.index import Loose, RowFile, open_rows
from parallel_synthesis.data.tasks import TASKS
from parallel_synthesis.errors import DataError, StorageError

FLAN = TASKS["flan"]
RowMaker = Callable[..., dict[str, Any]]
Writer = Callable[[str, Iterable[object]], Path]


@pytest.fixture(params=["plain", "gzip"])
def path(request: pytest.FixtureRequest, tmp_path: Path, row: RowMaker) -> Path:
    """A file of 30 rows, plain and packed."""
    text = b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(30))
    if request.param == "plain":
        path = tmp_path / "rows.jsonl"
        path.write_bytes(text)
    else:
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(gzip.compress(text))
    return path


def opened(path: Path, **options: Any) -> tuple[RowFile, list[str | None]]:
    with open_rows(FLAN, path, **options) as file:
        return file, [file.read(number).id for number in range(file.rows)]


IDS = [f"id-{number}" for number in range(30)]


def test_the_second_start_does_not_read_the_file_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, ids = opened(path)
    assert (first.reused, first.not_kept, ids) == (False, None, IDS)

    def no_reading(*_: Any) -> bytes:
        raise AssertionError("the file is read again")

    monkeypatch.setattr(os, "read", no_reading)
    second, ids = opened(path)
    assert (second.reused, ids) == (True, IDS)
    for name in ("rows", "bad", "bytes", "sha256", "unpacked_bytes", "unpacked_sha256"):
        assert getattr(first, name) == getattr(second, name)


def test_bad_rows_are_remembered(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0), "x", row(1)])
    first, _ = opened(path, on_bad_row="skip")
    second, _ = opened(path, on_bad_row="skip")
    assert second.reused
    assert first.bad == second.bad != ()
    with pytest.raises(DataError, match="1 of 3 rows are not valid"):
        open_rows(FLAN, path)


def test_loose_extracts_are_remembered(write: Writer, row: RowMaker) -> None:
    loose = {"agent_reference_contexts": ["a b", "c d"], "agent_extract_contexts": ["a", "c"]}
    path = write("rows.jsonl", [row(0), row(1, **loose), "x", row(2), row(3, **loose)])
    for reused in (False, True):
        file, _ = opened(path, on_bad_row="skip")
        assert file.reused is reused
        assert file.loose == Loose(branches=4, rows=2, first_line=2)
        assert opened(path, on_bad_row="skip", max_rows=3)[0].loose == Loose(branches=2, rows=1, first_line=2)
        assert opened(path, on_bad_row="skip", max_rows=1)[0].loose.note("flan") is None
    note = file.loose.note("flan")
    assert note is not None and note.startswith(
        "flan: 4 branches in 2 rows have an extract that is not the end"
    )


def rewrite_in_place(path: Path) -> None:
    content = path.read_bytes()
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace_by_copy(path: Path) -> None:
    stat = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    copy.replace(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [rewrite_in_place, replace_by_copy, touch])
def test_any_sign_of_a_change_makes_the_index_anew(path: Path, change: Callable[[Path], None]) -> None:
    opened(path)
    before = path.stat()
    change(path)
    assert path.stat().st_size == before.st_size
    assert (path.stat().st_mtime_ns == before.st_mtime_ns) == (change is not touch)
    again, ids = opened(path)
    assert (again.reused, ids) == (False, IDS)
    assert opened(path)[0].reused


def test_other_content_of_the_same_size_written_at_once_is_noticed(write: Writer, row: RowMaker) -> None:
    # Within one tick of the file system's clock, where time stamps alone could not tell.
    for number in range(20):
        path = write("rows.jsonl", [row(0, gold=f"gold {number:02}")])
        os.utime(path, ns=(1, 1))
        with open_rows(FLAN, path) as file:
            assert file.read(0).target == f"gold {number:02}"


def test_a_file_is_not_indexed_in_the_tick_of_its_last_change(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_read: list[int] = []
    real = os.read

    def noting(fd: int, size: int) -> bytes:
        first_read.append(time.time_ns())
        return real(fd, size)

    monkeypatch.setattr(os, "read", noting)
    path.write_bytes(path.read_bytes())
    opened(path)
    assert first_read[0] - path.stat().st_ctime_ns >= 15_000_000


def test_a_larger_file_is_indexed_anew(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0)])
    assert opened(path)[1] == ["id-0"]
    with path.open("ab") as file:
        file.write(json.dumps(row(1)).encode())
    assert opened(path)[1] == ["id-0", "id-1"]


def test_every_damage_to_an_entry_is_found(path: Path, cache: Path) -> None:
    opened(path)
    entry = next(cache.glob("*.index"))
    whole = entry.read_bytes()
    positions = [0, 20, 45, 60, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1]
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in positions]
    for content in [*damaged, b"", whole[:10], whole[:-1], whole + b"\0", os.urandom(500), b"\n" * 99]:
        entry.write_bytes(content)
        file, ids = opened(path)
        assert (file.reused, file.not_kept, ids) == (False, None, IDS)
        assert opened(path)[0].reused


def test_an_index_by_other_row_rules_is_made_anew(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(path)
    entry = next(cache.glob("*.index"))
    rules = f"rules {rows_module.RULES_VERSION} ".encode()
    assert rules in entry.read_bytes()[:60]
    entry.write_bytes(entry.read_bytes().replace(rules, b"rules 0 ", 1))
    assert not opened(path)[0].reused


def test_a_task_with_other_rules_has_its_own_entry(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0), row(1, drop=("references",))])
    wiki = TASKS["2wiki_multihopqa"]
    open_rows(wiki, path).close()
    with pytest.raises(DataError, match="references"):
        open_rows(FLAN, path)
    with open_rows(wiki, path) as file:
        assert (file.rows, file.reused) == (2, True)


def test_a_touched_or_lost_text_is_unpacked_again(tmp_path: Path, row: RowMaker, cache: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row(0)).encode()))
    opened(path)
    text = next(cache.glob("*.jsonl"))
    stat = text.stat()
    with text.open("r+b") as file:
        file.write(text.read_bytes().replace(b"gold 0", b"gold 9"))
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with open_rows(FLAN, path) as found:
        assert (found.reused, found.read(0).target) == (False, "gold 0")
    text.unlink()
    assert not opened(path)[0].reused
    assert opened(path)[0].reused


def test_an_unwritable_cache_is_no_failure(path: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for _ in range(2):
        file, ids = opened(path, cache=tmp_path / "a file" / "cache")
        assert (file.reused, ids) == (False, IDS)
        assert "Not a directory" in str(file.not_kept)


@contextlib.contextmanager
def on_a_full_disk(self: Entry, *_: Any) -> Iterator[BinaryIO]:
    with open("/dev/full", "wb") as file:  # noqa: PTH123 - writing to it fails with "no space left"
        yield file
        file.flush()


def test_a_full_cache_is_no_failure(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entry, "_replacing", on_a_full_disk)
    file, ids = opened(path)
    assert (file.reused, ids) == (False, IDS)
    assert "No space left" in str(file.not_kept)
    assert [left.suffix for left in cache.iterdir()] == [".lock"]


def test_no_room_for_the_text_anywhere_is_refused(tmp_path: Path, row: RowMaker) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row(0, gold="x" * 3_000_000)).encode()))
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from parallel_synthesis.data.index import open_rows\n"
        "from parallel_synthesis.data.tasks import TASKS\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))\n"
        "try: open_rows(TASKS['flan'], Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(f"{StorageError.__name__} {path}: expected room for its text in ")
    assert "File too large. Set PARALLEL_SYNTHESIS_CACHE to a directory that has the room." in result.stdout
    left = [file.suffix for file in (tmp_path / "cache").iterdir()]
    assert left == [".lock"]


def test_a_failed_write_leaves_nothing_behind(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sync(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_sync)
    file, ids = opened(path)
    assert (ids, file.not_kept) == (IDS, "[Errno 28] No space left on device")
    assert [left.suffix for left in cache.iterdir()] == [".lock"]


def test_leftovers_of_a_killed_process_are_removed(path: Path, cache: Path) -> None:
    opened(path)
    key = next(cache.glob("*.index")).stem
    next(cache.glob("*.index")).unlink()
    (cache / f"{key}.abc123.tmp").write_bytes(b"half")
    (cache / "another.abc123.tmp").write_bytes(b"half")
    opened(path)
    assert [left.name for left in cache.glob("*.tmp")] == ["another.abc123.tmp"]


def test_a_refused_gzip_leaves_nothing_behind(path: Path, cache: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])
    if path.suffix == ".gz":
        with pytest.raises(DataError, match="ends too early"):
            open_rows(FLAN, path)
        assert [left.suffix for left in cache.iterdir()] == [".lock"]


def test_several_processes_at_once(tmp_path: Path, path: Path, row: RowMaker, cache: Path) -> None:
    # Row by row slow enough that all four are there before the first is done.
    start = time.time() + 1.5
    script = (
        "import sys, time; from pathlib import Path\n"
        "from parallel_synthesis.data.index import open_rows\n"
        "from parallel_synthesis.data.tasks import TASKS\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "file = open_rows(TASKS['flan'], Path(sys.argv[1]), progress=lambda *_: time.sleep(0.3))\n"
        "print(file.reused, file.not_kept, [file.read(n).id for n in range(file.rows)] == "
        "[f'id-{n}' for n in range(30)])"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), str(start)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    printed = sorted(process.communicate(timeout=60)[0].strip() for process in processes)
    assert [process.returncode for process in processes] == [0] * 4
    assert printed == ["False None True", "True None True", "True None True", "True None True"]
    assert sorted(left.suffix for left in cache.iterdir() if left.suffix not in (".jsonl",)) == [
        ".index",
        ".lock",
    ]


def test_without_locks_two_at_once_are_still_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    inner: list[list[str | None]] = []

    def meanwhile(done: int, size: int) -> None:
        if not inner:
            inner.append([])
            inner[0] = opened(path)[1]

    with open_rows(FLAN, path, progress=meanwhile) as outer:
        assert [outer.read(number).id for number in range(outer.rows)] == IDS == inner[0]
    assert opened(path)[0].reused
    assert opened(path)[1] == IDS


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARALLEL_SYNTHESIS_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("PARALLEL_SYNTHESIS_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "parallel-synthesis"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say to ignore such a value
    assert cache_directory() == tmp_path / "home" / ".cache" / "parallel-synthesis"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / "home" / ".cache" / "parallel-synthesis"


def test_the_cache_costs_little(write: Writer, row: RowMaker, cache: Path) -> None:
    opened(write("rows.jsonl", [row(number) for number in range(2000)]))
    assert sum(file.stat().st_size for file in cache.iterdir()) < 2000 * 24 + 1000


MEMORY_SCRIPT = """
import random, sys
from pathlib import Path
from parallel_synthesis.data.index import open_rows
from parallel_synthesis.data.tasks import TASKS
with open_rows(TASKS["flan"], Path(sys.argv[1])) as file:
    for number in random.Random(0).sample(range(file.rows), min(file.rows, 500)):
        file.read(number)
status = Path("/proc/self/status").read_text().split()
print(status[status.index("VmHWM:") + 1])
"""


def peak_kib(path: Path) -> int:
    """Peak memory of a process that indexes `path` and reads rows of it, in KiB."""
    # VmHWM and not ru_maxrss: the latter begins with what the parent had.
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(path)], capture_output=True, text=True, check=True
    )
    return int(result.stdout)


def block_of_rows(row: RowMaker, size: int) -> bytes:
    """About `size` bytes of rows of 30 KB."""
    lines = []
    while sum(map(len, lines)) < size:
        text = f"fact {len(lines)} naïve \\ " * 1000
        lines.append(json.dumps(row(len(lines), agent_reference_contexts=[text, text])).encode() + b"\n")
    return b"".join(lines)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, row: RowMaker, packed: bool) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    block = block_of_rows(row, 1_000_000)
    block = gzip.compress(block, 1) if packed else block
    small.write_bytes(block)
    with large.open("wb") as file:
        for _ in range(150):
            file.write(block)
    grown = peak_kib(large) - peak_kib(small)
    sys.stdout.write(f"peak memory of 150 MB above that of 1 MB: {grown / 1024:.0f} MiB\n")
    assert grown < 60 * 1024


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_memory_of_one_gigabyte(tmp_path: Path, row: RowMaker, packed: bool) -> None:
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    block = block_of_rows(row, 1_000_000)
    block = gzip.compress(block, 1) if packed else block
    small.write_bytes(block)
    with large.open("wb") as file:
        for _ in range(1000):
            file.write(block)
    grown = peak_kib(large) - peak_kib(small)
    sys.stdout.write(f"peak memory of 1 GB above that of 1 MB: {grown / 1024:.0f} MiB\n")
    assert grown < 150 * 1000 * 1000 / 1024


def test_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys\n"
        "from parallel_synthesis.data import index, manifests, order\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'jsonschema') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
