"""Opening and reading .jsonl and .jsonl.gz: what is accepted, what is refused and how, what is read."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_synthesis.data import rows as rows_module
from parallel_synthesis.data import scan as scan_module
from parallel_synthesis.data import source as source_module
from parallel_synthesis.data.index import BadRow, open_rows
from parallel_synthesis.data.tasks import TASKS
from parallel_synthesis.errors import DataError, StorageError

FLAN = TASKS["flan"]
RowMaker = Callable[..., dict[str, Any]]
Writer = Callable[[str, Iterable[object]], Path]
SKIP_HINT = 'Fix the file, or set data.on_bad_row = "skip" to leave such rows out and count them.'


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as refused:
        open_rows(FLAN, path, **options)
    return str(refused.value)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_reads_each_row_exactly(row: RowMaker, write: Writer) -> None:
    path = write("rows.jsonl", [row(number) for number in range(50)])
    with open_rows(FLAN, path) as file:
        assert (file.task, file.path, file.rows, file.bad) == ("flan", path, 50, ())
        assert file.bytes == path.stat().st_size
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (file.unpacked_bytes, file.unpacked_sha256) == (None, None)
        for number in (49, 0, 17):
            found = file.read(number)
            assert (found.number, found.line, found.target) == (number, number + 1, f"gold {number}")
            assert found.extracts == ("fact A", "fact B")
        for outside in (50, -1):
            with pytest.raises(IndexError, match="expected 0 to 49"):
                file.read(outside)


def test_blank_lines_crlf_bom_line_separators_and_no_last_newline(row: RowMaker, tmp_path: Path) -> None:
    text = "line\u2028para\u2029graph\x85next"
    lines = [
        b"\xef\xbb\xbf" + json.dumps(row(0)).encode() + b"\r\n",
        b"\n",
        b"   \r\n",
        json.dumps(row(1, gold=text), ensure_ascii=False).encode() + b"\r\n",
        b"\t" + json.dumps(row(2, gold="😀 \ud83d\ude00 é")).encode() + b" \n",
        json.dumps(row(3)).encode(),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(lines))
    with open_rows(FLAN, path) as file:
        assert [file.read(number).line for number in range(file.rows)] == [1, 4, 5, 6]
        assert file.read(1).target == text
        assert file.read(2).target == "😀 😀 é"
        assert file.read(3).id == "id-3"


def test_a_row_of_many_megabytes(row: RowMaker, write: Writer) -> None:
    long = 'naïve \\ " 日本 ' * 900_000
    path = write("rows.jsonl", [row(0), row(1, agent_reference_contexts=[long, "b"]), row(2)])
    assert path.stat().st_size > 4 * source_module.CHUNK_BYTES
    with open_rows(FLAN, path) as file:
        assert file.read(1).contexts[0] == long.strip()
        assert file.read(2).id == "id-2"


@pytest.mark.parametrize("members", [1, 3, 40])
def test_gzip_of_several_members(row: RowMaker, tmp_path: Path, members: int) -> None:
    text = b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(200))
    cut = -(-len(text) // members)
    packed = b"".join(gzip.compress(text[at : at + cut]) for at in range(0, len(text), cut))
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed + bytes(512))  # padded, as tapes and some tools do
    with open_rows(FLAN, path) as file:
        assert file.rows == 200
        assert [file.read(number).id for number in range(200)] == [f"id-{number}" for number in range(200)]
        assert (file.bytes, file.sha256) == (
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        assert (file.unpacked_bytes, file.unpacked_sha256) == (len(text), hashlib.sha256(text).hexdigest())


def test_gzip_is_known_by_its_bytes_whatever_its_name(row: RowMaker, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(json.dumps(row(5)).encode()))
    with open_rows(FLAN, path) as file:
        assert file.read(0).id == "id-5"


def test_a_truncated_gzip_is_refused_wherever_it_ends(row: RowMaker, tmp_path: Path) -> None:
    member = gzip.compress(b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(20)))
    path = tmp_path / "rows.jsonl.gz"
    whole = member + member
    before = open_descriptors()
    for end in [*range(2, len(member), 37), len(member) - 1, len(member) + 5, len(whole) - 8, len(whole) - 1]:
        path.write_bytes(whole[:end])
        message = refusal(path)
        assert f"{path}: the gzip data ends too early" in message
        assert message.endswith("Copy or download the file again.")
    path.write_bytes(whole[: len(member)])
    open_rows(FLAN, path).close()
    assert open_descriptors() == before


def test_damaged_and_false_gzip_is_refused(row: RowMaker, tmp_path: Path, cache: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(20)))
    path = tmp_path / "rows.jsonl.gz"
    for at in (len(whole) // 2, len(whole) - 6, len(whole) - 2):  # the data, its CRC, its length
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert f"{path}: the gzip data is damaged" in refusal(path)
    path.write_bytes(whole + b"no member")
    assert "in member 2" in refusal(path)
    path.write_bytes(json.dumps(row()).encode())
    assert "expected gzip data in a file named .gz, found something else" in refusal(path)
    path.write_bytes(b"")
    assert "found an empty file" in refusal(path)
    assert [left.suffix for left in cache.iterdir()] == [".lock"]


def test_bad_rows_are_listed_with_place_field_and_total(row: RowMaker, write: Writer) -> None:
    lines: list[object] = [row(number) for number in range(60)]
    for number in range(30):
        lines[2 * number] = row(number, gold=None)
    lines[4] = b'{"question": "caf\xe9"}'
    lines[6] = "{"
    path = write("rows.jsonl", lines)
    message = refusal(path).splitlines()
    assert message[0] == f"{path}: 30 of 60 rows are not valid:"
    assert message[1] == f"  {path}:1: gold: expected a string, found null"
    assert message[3].startswith(f"  {path}:5: row: expected UTF-8, found byte 0xe9")
    assert message[4].startswith(f"  {path}:7: row: expected valid JSON, found ")
    assert message[20].startswith(f"  {path}:39: gold")
    assert message[21:] == ["  ... and 10 more", SKIP_HINT]
    assert refusal(path).splitlines() == message  # the same from the cache


def test_bad_rows_can_be_skipped_and_are_counted(row: RowMaker, write: Writer) -> None:
    path = write("rows.jsonl", ["", row(0), "[]", row(1), row(2, gold=""), row(3)])
    with open_rows(FLAN, path, on_bad_row="skip") as file:
        assert [file.read(number).id for number in range(file.rows)] == ["id-0", "id-1", "id-3"]
        assert [file.read(number).line for number in range(3)] == [2, 4, 6]
        assert file.bad == (
            BadRow(3, "row: expected an object, found a list"),
            BadRow(5, "gold: expected a target that is not empty, found a blank string"),
        )


def test_max_rows_counts_valid_rows_and_ignores_what_lies_behind(row: RowMaker, write: Writer) -> None:
    path = write("rows.jsonl", [row(0), row(1), "bad", row(2), "bad"])
    with open_rows(FLAN, path, max_rows=2) as file:
        assert (file.rows, file.bad) == (2, ())
        with pytest.raises(IndexError):
            file.read(2)
    assert "1 of 4 rows" in refusal(path, max_rows=3)
    with open_rows(FLAN, path, max_rows=3, on_bad_row="skip") as file:
        assert (file.rows, [bad.line for bad in file.bad]) == (3, [3])
    with open_rows(FLAN, path, max_rows=99, on_bad_row="skip") as file:
        assert (file.rows, [bad.line for bad in file.bad]) == (3, [3, 5])


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    for option in ("refuse", "skip"):
        message = refusal(path, on_bad_row=option)
        assert (
            f"{path}: expected at least one valid row, found none in {content.count(10)}"
            in message.replace("in 1 lines", "in 0 lines")
        )


def test_a_file_with_bad_rows_only_is_refused_also_when_skipping(write: Writer) -> None:
    path = write("rows.jsonl", ["{}", "x"])
    message = refusal(path, on_bad_row="skip")
    assert "expected at least one valid row, found 2 that are not:" in message
    assert f"{path}:1: question: expected a string, found no such field" in message


def test_a_file_of_another_kind_is_given_up_early(
    write: Writer, row: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "BAD_ROWS_MOST", 10)
    path = write("rows.jsonl", [row()] + ["["] * 12)
    before = open_descriptors()
    message = refusal(path, on_bad_row="skip")
    assert "more than 10 of the first 12 lines are not valid rows" in message
    assert "Expected one JSON object a line" in message
    assert open_descriptors() == before


@pytest.mark.parametrize("chunk", [64, 4096])
def test_a_line_beyond_the_limit_is_a_bad_row_and_is_not_kept(
    write: Writer, row: RowMaker, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    for module in (scan_module, rows_module):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(source_module, "CHUNK_BYTES", chunk)
    path = write("rows.jsonl", [row(0), row(1, gold="x" * 5000), row(2), "x" * 2000])
    with open_rows(FLAN, path, on_bad_row="skip") as file:
        assert [file.read(number).id for number in range(file.rows)] == ["id-0", "id-2"]
        assert [bad.line for bad in file.bad] == [2, 4]
        assert file.bad[1].problem == "row: expected at most 1000 bytes, found 2000"


def test_an_endless_line_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "MAX_ROW_BYTES", 100_000)
    tracemalloc.start()
    found = scan_module.scan((b"x" * 10_000 for _ in range(1000)), FLAN, Path("endless.json"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [bad.problem for bad in found.bad] == ["row: expected at most 100000 bytes, found 10000000"]
    assert peak < 1_000_000


def test_missing_files_directories_and_pipes(tmp_path: Path) -> None:
    missing = refusal(tmp_path / "none" / "rows.jsonl")
    assert f"{tmp_path}/none/rows.jsonl: expected the data file of task flan, found no such file" in missing
    assert "Set data.files.flan to the file, or data.root" in missing
    assert "found a directory" in refusal(tmp_path)
    (tmp_path / "file").touch()
    assert "found no such file" in refusal(tmp_path / "file" / "rows.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "found neither a file nor a directory" in refusal(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(
        StorageError, match=r"loop: the data file of task flan cannot be opened: .*symbolic links"
    ):
        open_rows(FLAN, tmp_path / "loop")


def test_no_permission(write: Writer, row: RowMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("rows.jsonl", [row()])
    real = os.open

    def refuse(
        name: Any, *rest: Any, **more: Any
    ) -> int:  # root may read everything, so the mode bits will not do
        if Path(name) == path:
            raise PermissionError(13, "Permission denied", str(path))
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"found no permission\. Give this user read permission"):
        open_rows(FLAN, path)


def test_a_read_error_is_a_storage_error(
    write: Writer, row: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("rows.jsonl", [row()])
    file = open_rows(FLAN, path)

    def fail(*_: Any) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StorageError, match=r"rows\.jsonl: reading \d+ bytes at 0 failed: Input/output error"):
        file.read(0)
    monkeypatch.undo()
    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(StorageError, match=r"reading failed: .* Input/output error"):
        open_rows(FLAN, path, cache=path.parent / "other")
    file.close()


def test_a_file_that_changes_under_the_run_is_noticed(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(number) for number in range(10)])
    with open_rows(FLAN, path) as file, path.open("r+b") as writing:
        writing.seek(path.read_bytes().index(b"gold 6"))
        writing.write(b"GOLD 6")
        writing.flush()
        assert file.read(5).target == "gold 5"
        with pytest.raises(DataError, match=r"rows\.jsonl:7: row: .* found other bytes of the same length"):
            file.read(6)
        writing.truncate(700)
        with pytest.raises(DataError, match=r"found 700 bytes: the file was changed while it was in use"):
            file.read(9)


def test_a_file_that_is_replaced_under_the_run_stays_what_it_was(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0)])
    with open_rows(FLAN, path) as file:
        write("other.jsonl", [row(1), row(2)]).replace(path)
        assert file.read(0).id == "id-0"


def test_a_file_that_grows_while_it_is_indexed_is_refused(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0)])

    def grow(done: int, size: int) -> None:
        with path.open("ab") as writing:
            writing.write(json.dumps(row(1)).encode() + b"\n")

    with pytest.raises(DataError, match=r"it changed while it was indexed\. Wait until it is complete"):
        open_rows(FLAN, path, progress=grow)
    with open_rows(FLAN, path) as file:
        assert file.rows > 1


def test_progress_counts_the_bytes_of_the_file(
    write: Writer, row: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 1000)
    path = write("rows.jsonl", [row(number) for number in range(20)])
    calls: list[tuple[int, int]] = []
    open_rows(FLAN, path, progress=lambda *call: calls.append(call)).close()
    size = path.stat().st_size
    assert calls == sorted(calls)
    assert calls[-1] == (size, size)
    assert len(calls) == -(-size // 1000)


def test_closing(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(0)])
    before = open_descriptors()
    file = open_rows(FLAN, path)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(0)
    forgotten = open_rows(FLAN, path)
    assert open_descriptors() == before + 1
    del forgotten
    assert open_descriptors() == before


def test_rows_may_be_read_from_many_threads(write: Writer, row: RowMaker) -> None:
    path = write("rows.jsonl", [row(number, gold=f"{number} " * (number % 97 + 1)) for number in range(400)])
    numbers = [random.Random(1).randrange(400) for _ in range(4000)]
    with open_rows(FLAN, path) as file, ThreadPoolExecutor(8) as pool:
        assert [found.id for found in pool.map(file.read, numbers)] == [f"id-{number}" for number in numbers]


GOOD = json.dumps(
    {"question": "q", "gold": "é", "references": [], "agent_reference_contexts": ["a\u2028"]},
    ensure_ascii=False,
).encode()
line_kinds = st.sampled_from([GOOD, GOOD + b"\r", b" " + GOOD, b"", b"\r", b"  ", b"{}", b"\xff", b"[1]"])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(line_kinds, max_size=12),
    st.booleans(),
    st.booleans(),
    st.integers(1, 200),
    st.integers(1, 40),
    st.data(),
)
def test_cuts_of_chunks_and_members_do_not_matter(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    bom: bool,
    ended: bool,
    chunk: int,
    packed_chunk: int,
    data: st.DataObject,
) -> None:
    text = (b"\xef\xbb\xbf" if bom else b"") + b"\n".join(lines) + (b"\n" if ended else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    directory = tmp_path_factory.mktemp("cuts")
    path = directory / "rows.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(piece, 1) for piece in pieces))
    expected = [number for number, line in enumerate(lines, 1) if line.strip() == GOOD]
    bad = [number for number, line in enumerate(lines, 1) if line.strip() not in (GOOD, b"")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "CHUNK_BYTES", chunk)
        patch.setattr(source_module, "PACKED_BYTES", packed_chunk)
        if not expected:
            with pytest.raises(DataError, match="expected at least one valid row"):
                open_rows(FLAN, path, on_bad_row="skip", cache=directory / "cache")
            return
        with open_rows(FLAN, path, on_bad_row="skip", cache=directory / "cache") as file:
            assert [file.read(number).line for number in range(file.rows)] == expected
            assert [found.line for found in file.bad] == bad
            assert all(file.read(number).contexts == ("a",) for number in range(file.rows))
            assert file.unpacked_sha256 == hashlib.sha256(text).hexdigest()


def test_a_member_that_unpacks_to_far_more_than_a_chunk(
    row: RowMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CHUNK_BYTES", 10_000)
    sizes: list[int] = []
    real = source_module.GzipSource.next_chunk

    def watched(self: source_module.GzipSource) -> bytes:
        chunk = real(self)
        sizes.append(len(chunk))
        return chunk

    monkeypatch.setattr(source_module.GzipSource, "next_chunk", watched)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row(0, gold="x" * 3_000_000)).encode()))
    with open_rows(FLAN, path) as file:
        assert zlib.crc32(file.read(0).target.encode()) == zlib.crc32(b"x" * 3_000_000)
    assert max(sizes) <= 10_000
