"""The cache mapper: a small MLP that gives each branch and layer an affine map of its keys and values.

Shape legend: N branches, L layers, F inputs (3 in the release), D hidden width; 4 outputs are alpha_k,
beta_k, alpha_v, beta_v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel_synthesis.config import MapperConfig

SCALE = 0.1  # alpha in (0.9, 1.1), beta in (-0.1, 0.1)


class CacheMapper(nn.Module):
    """(kept length, number of branches, layer) -> alpha_k, beta_k, alpha_v, beta_v (design.md, "Mapper").

    The last layer starts at zero, so a new mapper is the identity. `generator` draws the first layer, so that
    the weights depend on nothing else. State dict: net.0.weight [D, F], net.0.bias [D], net.2.weight [4, D],
    net.2.bias [4], all fp32; F counts the inputs that `metadata_features` leaves.
    """

    def __init__(self, config: MapperConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.features = config.metadata_features
        inputs = 1 + self._uses_length + self._uses_agents
        # Built on "meta" and filled here: nn.Linear's own initialisation would draw from the global RNG.
        self.net = nn.Sequential(
            nn.Linear(inputs, config.hidden_dim, device="meta"),
            nn.SiLU(),
            nn.Linear(config.hidden_dim, 4, device="meta"),
        )
        self.net.to_empty(device="cpu")
        generator = generator if generator is not None else torch.Generator().manual_seed(0)
        bound = 1 / math.sqrt(inputs)  # torch's own range of nn.Linear
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith("net.0."):
                    parameter.uniform_(-bound, bound, generator=generator)
                else:
                    parameter.zero_()

    @property
    def _uses_length(self) -> bool:
        return self.features in ("both", "length")

    @property
    def _uses_agents(self) -> bool:
        return self.features in ("both", "num_agents")

    def forward(self, kept: Sequence[int], layers: int) -> Tensor:
        """Coefficients [N, L, 4] for branches that keep `kept[n]` tokens, in a backbone of L = `layers`."""
        weight = next(self.parameters())
        rows = []
        for length in kept:
            inputs = [math.log1p(length)] if self._uses_length else []
            inputs += [math.log1p(len(kept))] if self._uses_agents else []
            rows.append([[*inputs, layer / max(layers - 1, 1)] for layer in range(layers)])
        outputs = self.net(torch.tensor(rows, dtype=weight.dtype, device=weight.device))
        scale, shift = SCALE * torch.tanh(outputs), torch.tensor([1.0, 0.0, 1.0, 0.0], device=weight.device)
        coefficients: Tensor = scale + shift.to(weight.dtype)
        return coefficients


class _Affine(torch.autograd.Function):
    """alpha * states + beta in at least fp32, stored in the states' dtype.

    Not left to autograd, which would keep an fp32 copy of a bf16 cache alive until backward. The states come
    from the frozen backbone and get no gradient.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        wide = torch.promote_types(states.dtype, alpha.dtype)
        ctx.save_for_backward(states)
        ctx.wide = wide
        return torch.addcmul(beta.to(wide), states.to(wide), alpha.to(wide)).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (states,) = ctx.saved_tensors
        gradient = gradients[0].to(ctx.wide)
        return None, (gradient * states.to(ctx.wide)).sum(), gradient.sum()


def affine(states: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """alpha * states + beta, alpha and beta scalars; gradients flow to alpha and beta only."""
    mapped: Tensor = _Affine.apply(states, alpha, beta)  # type: ignore[no-untyped-call]
    return mapped
