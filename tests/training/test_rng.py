"""Random streams per logical rank: separate, restorable, and safe from what happens between steps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.training.rng import RankStreams

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def drawn(streams: RankStreams, rank: int) -> tuple[float, float, float]:
    with streams.active(rank):
        return draw()


def test_each_rank_draws_as_if_it_were_alone() -> None:
    alone = []
    for rank in (0, 1):
        random.seed(5 + rank)
        np.random.seed(5 + rank)
        torch.manual_seed(5 + rank)
        alone.append([draw() for _ in range(3)])
    streams = RankStreams([0, 1], seed=5, device=CPU)
    mixed: list[list[tuple[float, float, float]]] = [[], []]
    for _ in range(3):
        for rank in (1, 0):
            mixed[rank].append(drawn(streams, rank))
            draw()  # what saving or logging might do between the ranks
    assert mixed == alone


def test_saved_streams_survive_a_weights_only_file(tmp_path: Path) -> None:
    streams = RankStreams([0, 3], seed=1, device=CPU)
    drawn(streams, 3)
    with streams.active(3):
        np.random.normal()  # leaves a cached gaussian, which is part of numpy's state
    path = tmp_path / "state.pt"
    torch.save(streams.saved(3), path)
    before = streams.digest(3)
    expected = [drawn(streams, 3) for _ in range(2)]
    other = RankStreams([3], seed=99, device=CPU)
    other.restore(3, torch.load(path, weights_only=True))
    assert other.digest(3) == before
    assert [drawn(other, 3) for _ in range(2)] == expected


def test_the_digest_sees_every_stream() -> None:
    streams = RankStreams([0], seed=1, device=CPU)
    digests = [streams.digest(0)]
    for use in (random.random, np.random.random, lambda: torch.rand(())):
        with streams.active(0):
            use()
        digests.append(streams.digest(0))
    assert len(set(digests)) == 4


def test_a_missing_stream_is_named() -> None:
    streams = RankStreams([0], seed=1, device=CPU)
    saved = streams.saved(0)
    del saved["numpy"]
    with pytest.raises(CheckpointError, match="rank 0: the saved random state lacks numpy"):
        streams.restore(0, saved)


@pytest.mark.parametrize("stream", ["python", "torch_cpu"])
def test_a_state_that_no_generator_takes_is_refused_as_a_checkpoint(stream: str) -> None:
    streams = RankStreams([0], seed=1, device=CPU)
    saved = streams.saved(0)
    if stream == "python":
        version, keys, gauss = saved["python"]
        saved["python"] = (version, (2**70, *keys[1:]), gauss)
    else:
        saved["torch_cpu"] = saved["torch_cpu"][:-8]
    with pytest.raises(CheckpointError, match="rank 0: the saved random state is not one of a generator"):
        streams.restore(0, saved)
