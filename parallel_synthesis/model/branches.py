"""Branch caches: how the branches of a row are prefilled, re-rotated, mapped and joined.

Shape legend: B branches of one forward, L layers, H key/value heads, T tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_synthesis.model.lanes import (
    PastLayer,
    States,
    make_cache,
    rotary_module,
    rotary_tables,
    run_base,
)
from parallel_synthesis.model.mapper import affine
from parallel_synthesis.model.tokens import BranchTokens

# In tokens. One more forward costs about as much as this many tokens more in another one; the others bound
# what a joint forward computes, holds and pads.
FORWARD_TOKENS = 128
GROUP_TOKENS = 4096
GROUP_CONTEXT = 32768
PADDING = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The forwards of a row's prefill: `shared` prefix tokens once (0: none), then group by group."""

    shared: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def forwards(self) -> int:
        return len(self.groups) + (self.shared > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCache:
    """What a branch leaves: keys and values per layer, [1, H, kept, D], the keys rotated to start at 0."""

    layers: tuple[States, ...]
    kept: int


def common_prefix(branches: Sequence[BranchTokens]) -> int:
    """Length of the longest token prefix that all branches share; 0 for fewer than two branches."""
    if len(branches) < 2:
        return 0
    first, *others = (branch.ids for branch in branches)
    length = min(map(len, (first, *others)))
    for ids in others:
        if ids[:length] != first[:length]:
            length = next(i for i in range(length) if ids[i] != first[i])
    return length


def plan_prefill(lengths: Sequence[int], prefix: int) -> PrefillPlan:
    """The forwards for branches of these lengths that share `prefix` tokens. From lengths alone.

    A shared prefix is prefilled once when that saves `FORWARD_TOKENS` tokens; each branch keeps at least one
    token of its own. Branches of similar length then go together as long as little is padded and the forward
    stays small: a long branch fills the device alone.
    """
    shared = min(prefix, min(lengths, default=0) - 1)
    if shared * (len(lengths) - 1) < FORWARD_TOKENS:
        shared = 0
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and _fits([lengths[i] - shared for i in (*groups[-1], number)], shared):
            groups[-1].append(number)
        else:
            groups.append([number])
    return PrefillPlan(shared=shared, groups=tuple(map(tuple, groups)))


def _fits(lengths: Sequence[int], shared: int) -> bool:
    padded, real = max(lengths) * len(lengths), sum(lengths)
    in_bounds = padded <= GROUP_TOKENS and padded + shared * len(lengths) <= GROUP_CONTEXT
    return in_bounds and padded - real <= max(PADDING * real, FORWARD_TOKENS)


@torch.no_grad()
def prefill(base: nn.Module, branches: Sequence[BranchTokens], plan: PrefillPlan) -> list[BranchCache]:
    """The branch caches, in branch order. `base` is the frozen transformer, without LoRA and LM head."""
    device = next(base.parameters()).device
    shared: list[States] = []
    if plan.shared:
        shared = _forward(base, torch.tensor([branches[0].ids[: plan.shared]], device=device), [])
    caches: dict[int, BranchCache] = {}
    for group in plan.groups:
        own = [branches[number].ids[plan.shared :] for number in group]
        width = max(map(len, own))
        # The padding's id is of no matter: it lies behind every real token of its row.
        ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in own], device=device)
        states = _forward(base, ids, shared)
        for row, number in enumerate(group):
            caches[number] = _keep(base, branches[number], row, states, shared, plan.shared)
    return [caches[number] for number in range(len(branches))]


def _forward(base: nn.Module, ids: Tensor, shared: list[States]) -> list[States]:
    """New keys and values per layer, each [B, H, T, D], of `ids` [B, T] behind a shared prefix."""
    length = shared[0][0].shape[-2] if shared else 0
    depth = int(base.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    pasts = [[states] for states in shared] if shared else [[] for _ in range(depth)]
    layers = [PastLayer(partial(list, past), length=length, record=True) for past in pasts]
    positions = torch.arange(length, length + ids.shape[1], device=ids.device).expand(len(ids), -1)
    run_base(base, ids, positions, make_cache(layers))
    new = [layer.new for layer in layers]
    assert all(new), "a layer of the backbone did not use its cache"
    return [states for states in new if states is not None]


def _keep(
    base: nn.Module, branch: BranchTokens, row: int, states: list[States], shared: list[States], prefix: int
) -> BranchCache:
    """The last `kept` keys and values of one branch, cut out of its forward and rotated to start at 0."""
    end = len(branch.ids) - prefix
    begin = branch.start - prefix  # negative: the kept part begins within the shared prefix
    kept = []
    for layer, (keys, values) in enumerate(states):
        pair = [part[row : row + 1, :, max(begin, 0) : end] for part in (keys, values)]
        if begin < 0:
            pair = [
                torch.cat([past[:, :, begin:], new], -2)
                for past, new in zip(shared[layer], pair, strict=True)
            ]
        kept.append((pair[0], pair[1]))
    return moved_to_start(base, branch, kept)


def moved_to_start(base: nn.Module, branch: BranchTokens, kept: Sequence[States]) -> BranchCache:
    """The branch's cache of its kept keys and values per layer [1, H, kept, D], as they were computed in place."""
    turn = _turn_back(base, branch, kept[0][0]) if branch.start else None
    layers = []
    for keys, values in kept:
        # A copy, unless it is all of the forward's: a view would keep padding and neighbours alive.
        layers.append((_own(rotate(keys, *turn) if turn else keys), _own(values)))
    return BranchCache(layers=tuple(layers), kept=branch.kept)


def _own(states: Tensor) -> Tensor:
    whole = states.untyped_storage().nbytes() == states.numel() * states.element_size()
    return states if whole else states.clone(memory_format=torch.contiguous_format)


def _turn_back(base: nn.Module, branch: BranchTokens, keys: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [kept, D_rotary] of the rotation by -start.

    Made of the two rotations a key had (at its position i) and should have (at i - start), not of the angle
    -start * frequency: the rounding of i * frequency in fp32, which grows with i, then drops out.
    """
    rotary = rotary_module(base)
    assert rotary is not None, "load_backbone refuses such a model"
    wide = torch.promote_types(keys.dtype, torch.float32)
    wanted = torch.arange(branch.kept, device=keys.device)
    cos_had, sin_had = rotary_tables(rotary, wanted + branch.start, wide)
    cos, sin = rotary_tables(rotary, wanted, wide)
    return cos * cos_had + sin * sin_had, sin * cos_had - cos * sin_had


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`keys` [B, H, T, D] rotated by `cos`, `sin` [T, D_rotary]: in their dtype, stored in the keys'.

    Half-split layout; where rope covers only the first D_rotary channels, the others stay. The backbones
    whose layout differs are not in the list that load_backbone accepts.
    """
    turned, rest = keys[..., : cos.shape[-1]].to(cos.dtype), keys[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    result = (turned * cos + torch.cat([-second, first], dim=-1) * sin).to(keys.dtype)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


def join(caches: Sequence[BranchCache], coefficients: Tensor) -> Any:
    """The joined cache: each branch mapped by its `coefficients` [N, L, 4], one behind the other.

    A transformers cache that already reports its length; the map is applied layer by layer when the live
    forward gets there, and gradients flow through it to the coefficients.
    """
    length = sum(cache.kept for cache in caches)
    layers = range(coefficients.shape[1])

    def past(layer: int) -> list[States]:
        mapped = []
        for number, cache in enumerate(caches):
            keys, values = cache.layers[layer]
            alpha_k, beta_k, alpha_v, beta_v = coefficients[number, layer].unbind()
            mapped.append((affine(keys, alpha_k, beta_k), affine(values, alpha_v, beta_v)))
        return mapped

    return make_cache([PastLayer(partial(past, layer), length=length, record=False) for layer in layers])


def empty_cache(layers: int) -> Any:
    """A cache with nothing in it, for a live sequence without branches."""
    return make_cache([PastLayer(list, length=0, record=False) for _ in range(layers)])
