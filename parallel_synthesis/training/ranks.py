"""Logical ranks on processes: who carries which rank, and how the processes talk.

A run has `ranks` logical ranks and any number of processes that divides it. Process p carries the ranks
[p * n, (p + 1) * n), one after another. Nothing here depends on the number of processes but who does the work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from parallel_synthesis.errors import ConfigError, ParallelSynthesisError, PeerError

T = TypeVar("T")
PEER_PAUSE_SECONDS = 2.0  # the failing rank's own error is to be seen, and its exit code counted, first


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where this process stands among the processes of the run."""

    index: int
    size: int
    local_index: int

    @staticmethod
    def from_environment(environ: Mapping[str, str] | None = None) -> World:
        """Reads RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; one process when RANK is not set."""
        environ = os.environ if environ is None else environ
        index = int(environ.get("RANK", "0"))
        size = int(environ.get("WORLD_SIZE", "1"))
        return World(index=index, size=size, local_index=int(environ.get("LOCAL_RANK", index)))


class Processes:
    """The processes of a run: collectives that keep the order of the logical ranks.

    Objects travel over gloo on the host; gradients over NCCL where the device is CUDA.
    """

    def __init__(self, world: World, *, ranks: int, device: torch.device) -> None:
        if ranks % world.size:
            raise ConfigError(
                [
                    f"{world.size} processes can not carry run.ranks = {ranks}: "
                    f"start a number of processes that divides {ranks}"
                ]
            )
        self.world = world
        self.ranks = ranks
        share = ranks // world.size
        self.mine: Sequence[int] = range(world.index * share, (world.index + 1) * share)
        self._share = share
        self._host_group: Any = None
        if world.size > 1:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, rank=world.index, world_size=world.size, timeout=timedelta(minutes=60)
            )
            self._host_group = dist.new_group(backend="gloo", timeout=timedelta(minutes=60))

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and shows progress."""
        return self.world.index == 0

    def owner(self, rank: int) -> int:
        """The process that carries a logical rank."""
        return rank // self._share

    def exchange(self, item: T) -> list[T]:
        """Every process's item, in process order."""
        if self.world.size == 1:
            return [item]
        items: list[Any] = [None] * self.world.size
        with _peer_failures():
            dist.all_gather_object(items, item, group=self._host_group)
        return items

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> None:
        """Overwrites the tensor with that of process `source`."""
        if self.world.size > 1:
            with _peer_failures():
                dist.broadcast(tensor, src=source)

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Runs `work` in the first process, then (it may have filled a cache) in all others."""
        result = work() if self.is_first else None
        self.exchange(None)
        return result if result is not None else work()

    def close(self) -> None:
        if self.world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def fail_together(processes: Processes, error: ParallelSynthesisError) -> NoReturn:
    """For an error that every process has found: the first raises it, the others PeerError, after a pause."""
    if processes.is_first:
        raise error
    time.sleep(PEER_PAUSE_SECONDS)
    raise PeerError(str(error))


@contextmanager
def _peer_failures() -> Iterator[None]:
    """A broken connection means that a peer ended: say so, after a pause that lets its own error come first."""
    try:
        yield
    except RuntimeError as error:  # torch's distributed errors have no closer common base
        time.sleep(PEER_PAUSE_SECONDS)
        raise PeerError(
            f"another rank ended while this one waited for it; its own error is above ({error})"
        ) from error
