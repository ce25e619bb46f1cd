"""One background thread that writes checkpoints while training goes on; its failure is never lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class BackgroundWriter:
    """Runs one job at a time. A job's exception is raised, as it is, by the next submit, raise_if_failed or
    wait.

    With enabled=False a job runs inside submit. Call from one thread only. As a context manager it waits at
    the end; when the block itself failed, the block's error is the one that is seen.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer") if enabled else None
        self._future: Future[object] | None = None

    @property
    def busy(self) -> bool:
        """A job is running or waiting to run."""
        return self._future is not None and not self._future.done()

    def submit(self, job: Callable[[], object]) -> None:
        """Waits for the job in flight, raises its failure, then starts `job`."""
        self.wait()
        if self._executor is None:
            job()
        else:
            self._future = self._executor.submit(job)

    def raise_if_failed(self) -> None:
        """Raises the failure of a job that has ended; does not wait."""
        if self._future is not None and self._future.done():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written; raises the failure of the job that was."""
        if self._future is not None:
            future = self._future
            # Forgotten only once it has ended: a KeyboardInterrupt while waiting must not lose the job.
            future.exception()
            self._future = None
            future.result()

    def close(self) -> None:
        """Waits as `wait` does and ends the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        failed = self._future.exception() if self._future is not None else None
        self._future = None
        if failed is not None and failed is not error:
            error.add_note(f"the checkpoint being written failed too: {failed}")
        self.close()
