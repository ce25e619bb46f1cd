"""Cross-entropy at the target positions, in chunks: the logits of a whole sequence never exist."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 256  # target positions whose logits exist at once


def target_loss(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, chunk: int = CHUNK
) -> Tensor:
    """Sum of the cross-entropy over the target tokens, a scalar in (at least) fp32.

    `hidden` [T, H] are the final hidden states of the T positions that predict `targets` [T]. Of more than
    one chunk the logits are computed again in backward; of a single one they are kept, which peaks no higher.
    """

    def part(states: Tensor, wanted: Tensor) -> Tensor:
        logits = head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return functional.cross_entropy(logits, wanted, reduction="sum")

    pieces = list(zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True))
    if len(pieces) == 1:
        return part(*pieces[0])
    total = None
    for states, wanted in pieces:
        # The head draws no random numbers, so there is no RNG state to preserve.
        loss: Tensor = checkpoint(part, states, wanted, use_reentrant=False, preserve_rng_state=False)
        total = loss if total is None else total + loss
    assert total is not None
    return total
