"""One global step: each logical rank's gradient, their ordered mean, the digest, the optimizer.

Gradient of a step: (((g0 + g1) + g2) + ...) / ranks in fp32; design.md, "The method, exactly".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel_synthesis.config import WorkersConfig
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import RowTokens
from parallel_synthesis.training.ranks import Processes
from parallel_synthesis.training.rng import RankStreams

_DIGEST_CHUNK = 1 << 20
_ODD_STEP = 0x9E3779B97F4A7C15 - 2**64  # golden ratio * 2^64, as a signed 64-bit number


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one device-to-host transfer brought back. Digests are 16 hex digits; losses are fp32 values."""

    losses: tuple[float, ...]
    loss_bits: tuple[str, ...]
    finite: tuple[bool, ...]
    gradients: tuple[str, ...]
    reduced: str
    norm: float
    norm_finite: bool


def bit_digest(values: Tensor) -> Tensor:
    """Sum mod 2^64 of the fp32 bit patterns times odd weights by position; an int64 scalar on the device.

    Integer sums do not depend on the order of addition, so the digest is the same on any device.
    """
    bits = values.detach().reshape(-1).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _DIGEST_CHUNK):
        chunk = bits[start : start + _DIGEST_CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=values.device)
        total += (chunk * (position * _ODD_STEP | 1)).sum()
    return total


class Stepper:
    """Computes and applies steps for one process's logical ranks. Holds the flat gradient buffers."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        parameters: Sequence[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        streams: RankStreams,
    ) -> None:
        self._synthesizer = synthesizer
        self._parameters = [parameter for _, parameter in parameters]
        self._optimizer = optimizer
        self._processes = processes
        self._streams = streams
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._size = sum(self._sizes)
        device = self._parameters[0].device
        # One row per rank carried here: the gradient and, last, the rank's loss.
        self._flat = torch.zeros(len(processes.mine), self._size + 1, device=device)
        self._received = torch.zeros(self._size + 1, device=device) if processes.world.size > 1 else None
        self._total = torch.zeros(self._size, device=device)

    def compute(self, batches: Mapping[int, Sequence[RowTokens]]) -> StepOutcome:
        """Forward and backward of the ranks carried here, then the ordered reduction over all ranks.

        batches: logical rank -> its rows. Collective: every process calls it at the same step.
        """
        for place, rank in enumerate(self._processes.mine):
            with self._streams.active(rank):
                self._rank_gradient(batches[rank], self._flat[place])
        return self._reduce()

    def generate(
        self, batches: Mapping[int, Sequence[RowTokens]], workers: WorkersConfig
    ) -> dict[int, tuple[RowTokens, ...]]:
        """The rows of the ranks carried here with the branches their workers generate, from the ranks' streams."""
        worked: dict[int, tuple[RowTokens, ...]] = {}
        for rank in self._processes.mine:
            with self._streams.active(rank):
                worked[rank] = tuple(self._synthesizer.work(row, workers) for row in batches[rank])
        return worked

    def update(self) -> None:
        """Lets the optimizer use the reduced gradient of the last `compute`."""
        offset = 0
        for parameter, size in zip(self._parameters, self._sizes, strict=True):
            parameter.grad = self._total[offset : offset + size].view_as(parameter)
            offset += size
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _rank_gradient(self, rows: Sequence[RowTokens], out: Tensor) -> None:
        """Writes the gradient of the rank's mean target cross-entropy, and that loss, into `out`."""
        targets = sum(row.target_tokens for row in rows)
        out.zero_()
        for row in rows:
            summed, _ = self._synthesizer.loss(row)
            loss = summed / targets
            loss.backward()  # type: ignore[no-untyped-call]
            out[-1] += loss.detach()
        offset = 0
        for parameter, size in zip(self._parameters, self._sizes, strict=True):
            if parameter.grad is not None:
                out[offset : offset + size] = parameter.grad.reshape(-1)
                parameter.grad = None
            offset += size

    def _reduce(self) -> StepOutcome:
        processes, first = self._processes, self._processes.mine[0]
        facts: list[Tensor] = []
        for rank in range(processes.ranks):
            source = processes.owner(rank)
            here = source == processes.world.index
            flat = self._flat[rank - first] if here else self._received
            assert flat is not None
            processes.broadcast(flat, source=source)
            gradient, loss = flat[:-1], flat[-1:]
            if rank == 0:
                self._total.copy_(gradient)
            else:
                self._total.add_(gradient)
            facts += [
                loss.view(torch.int32).to(torch.int64).squeeze(0),
                bit_digest(gradient),
                torch.isfinite(flat).all().to(torch.int64),
            ]
        self._total.div_(processes.ranks)
        norm = torch.linalg.vector_norm(self._total).to(torch.float32)
        facts += [
            bit_digest(self._total),
            norm.view(torch.int32).to(torch.int64),
            torch.isfinite(norm).to(torch.int64),
        ]
        host = torch.stack(facts).cpu()  # the step's one transfer
        floats = host.to(torch.int32).view(torch.float32).tolist()
        numbers: list[int] = host.tolist()
        return StepOutcome(
            losses=tuple(floats[0:-3:3]),
            loss_bits=tuple(_hex(number, 8) for number in numbers[0:-3:3]),
            finite=tuple(bool(number) for number in numbers[2:-3:3]),
            gradients=tuple(_hex(number, 16) for number in numbers[1:-3:3]),
            reduced=_hex(numbers[-3], 16),
            norm=floats[-2],
            norm_finite=bool(numbers[-1]),
        )


def _hex(number: int, digits: int) -> str:
    return f"{number % 16**digits:0{digits}x}"


def replica_difference(
    parameters: Sequence[tuple[str, nn.Parameter]], exchange: Callable[[list[int]], list[list[int]]]
) -> tuple[str, int] | None:
    """The first tensor (name, process) in which a replica differs from the first process's; None when all agree."""
    digests = torch.stack([bit_digest(parameter.to(torch.float32)) for _, parameter in parameters]).tolist()
    everyone = exchange(digests)
    for process, theirs in enumerate(everyone[1:], start=1):
        for (name, _), ours, other in zip(parameters, everyone[0], theirs, strict=True):
            if ours != other:
                return name, process
    return None
