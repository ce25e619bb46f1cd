"""Signals that ask a run to stop after the step: SIGTERM, SIGUSR1 (Slurm), SIGINT and SIGHUP (a closed terminal)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
SECOND_INTERRUPT_AFTER = 2.0  # seconds; torchrun and a terminal both send the first SIGINT, nearly at once


class StopRequest:
    """Remembers the first stop signal; a second SIGINT at least 2 s later raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._interrupted_at: float | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number).name
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= SECOND_INTERRUPT_AFTER:
                raise KeyboardInterrupt


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Installs the handlers for the block and puts the old ones back. Outside the main thread it only watches."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {
        number: signal.signal(number, request.handle)
        for number in _STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN  # under nohup a hangup stays ignored
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
