"""The background writer: one job at a time, no failure lost."""

from __future__ import annotations

import threading

import pytest

from parallel_synthesis.checkpoint.background import BackgroundWriter
from parallel_synthesis.errors import StorageError


def fail() -> None:
    raise StorageError("disk is full")


def test_submit_does_not_wait_and_the_next_one_does() -> None:
    go = threading.Event()
    done: list[str] = []

    def first() -> None:
        assert go.wait(20)
        done.append("first")

    with BackgroundWriter() as writer:
        writer.submit(first)
        assert writer.busy and done == []
        writer.raise_if_failed()  # does not wait
        threading.Timer(0.05, go.set).start()
        writer.submit(lambda: done.append(f"second after {done[0]}"))
    assert done == ["first", "second after first"]


@pytest.mark.parametrize("surface", ["submit", "raise_if_failed", "wait", "close"])
def test_a_failure_surfaces_once_at_the_next_call(surface: str) -> None:
    ran: list[int] = []
    writer = BackgroundWriter()
    writer.submit(fail)
    while writer.busy:
        pass
    with pytest.raises(StorageError, match="disk is full"):
        writer.submit(lambda: ran.append(1)) if surface == "submit" else getattr(writer, surface)()
    assert ran == []
    writer.wait()
    writer.close()


def test_even_an_exit_of_the_job_is_not_lost() -> None:
    def leave() -> None:
        raise SystemExit(3)

    writer = BackgroundWriter()
    writer.submit(leave)
    with pytest.raises(SystemExit):
        writer.wait()
    writer.close()


def test_the_end_of_a_block_waits_and_raises() -> None:
    with pytest.raises(StorageError, match="disk is full"), BackgroundWriter() as writer:
        writer.submit(fail)


def test_an_error_of_the_block_is_the_one_seen() -> None:
    with pytest.raises(KeyError) as caught, BackgroundWriter() as writer:
        writer.submit(fail)
        raise KeyError("training")
    assert "disk is full" in caught.value.__notes__[0]


def test_disabled_it_runs_inside_submit() -> None:
    place: list[int | None] = []
    with BackgroundWriter(enabled=False) as writer:
        writer.submit(lambda: place.append(threading.get_ident()))
        assert place == [threading.get_ident()] and not writer.busy
        with pytest.raises(StorageError):
            writer.submit(fail)
