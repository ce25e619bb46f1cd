"""The gradient's digest: against plain integers, on any chunking, and sensitive to every bit and place."""

from __future__ import annotations

import struct

import torch

from parallel_synthesis.training.step import bit_digest

GOLDEN = 0x9E3779B97F4A7C15


def plain(values: list[float]) -> int:
    total = 0
    for position, value in enumerate(values):
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        total += bits * (position * GOLDEN | 1)
    return total % 2**64


def test_the_digest_is_the_sum_of_bit_patterns_times_odd_weights() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert int(bit_digest(values)) % 2**64 == plain(values.tolist())


def test_chunks_do_not_change_it() -> None:
    values = torch.randn((1 << 20) + 777, generator=torch.Generator().manual_seed(0))
    bits = values.view(torch.int32).to(torch.int64)
    weights = torch.arange(values.numel()) * (GOLDEN - 2**64) | 1
    assert int(bit_digest(values)) == int((bits * weights).sum())


def test_one_bit_or_a_swap_changes_it() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    flipped = values.clone()
    flipped.view(torch.int32)[17] ^= 1
    swapped = values.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    negative_zero = torch.zeros(64)
    negative_zero[5] = -0.0
    assert len({int(bit_digest(item)) for item in (values, flipped, swapped)}) == 3
    assert int(bit_digest(torch.zeros(64))) != int(bit_digest(negative_zero))
