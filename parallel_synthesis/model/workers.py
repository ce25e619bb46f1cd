"""The workers of the parallel_kv route: each generates a branch on the frozen backbone and leaves its cache.

Shape legend: W workers that still write, L layers, H key/value heads, P prompt tokens, T tokens generated so
far, V vocabulary, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel_synthesis.config import WorkersConfig
from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.branches import BranchCache, moved_to_start
from parallel_synthesis.model.lanes import GrowingLayer, make_cache, run_base
from parallel_synthesis.model.tokens import BranchTokens, RowTokens

# Probabilities are summed as whole numbers of 2^-40: exact in any order, so the same token is drawn on every
# run, also on CUDA, where the cumulative sum of floats is not repeatable to the bit.
_WEIGHT_BITS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedRow(RowTokens):
    """A row whose branches were generated: `caches[i]` is what branch i left. A branch is prompt + generated tokens,
    the generated ones kept; workers that generated nothing have none. forwards: backbone forwards it took."""

    caches: tuple[BranchCache, ...]
    forwards: int


def end_tokens(backbone: Backbone) -> frozenset[int]:
    """The tokens that end a worker: the tokenizer's EOS and those of the model's own generation config."""
    ends = {backbone.tokenizer.eos_token_id}
    config = getattr(backbone.model, "generation_config", None)
    more = getattr(config, "eos_token_id", None)
    ends |= set(more) if isinstance(more, list | tuple) else {more}
    return frozenset(ends - {None})


@torch.no_grad()
def work(
    backbone: Backbone,
    row: RowTokens,
    config: WorkersConfig,
    *,
    ends: frozenset[int],
    generator: torch.Generator | None = None,
) -> WorkedRow:
    """Lets `config.count` workers write on `row.worker_prompt`; returns the row with their branches, in worker order.

    A worker ends at a token of `ends`, which is not part of its branch, or after `max_new_tokens`. Its cache holds
    exactly what it wrote: the prompt is left out, the last token is in. Sampling takes one number from
    `generator` (a CPU generator; None: torch's global one), from which every worker gets a stream of its own;
    greedy workers take none.
    """
    greedy = config.temperature == 0
    draws = None if greedy else _draws(config.count, config.max_new_tokens, generator)
    return _Writing(backbone, row, config, draws).run(ends)


def _draws(count: int, length: int, generator: torch.Generator | None) -> Tensor:
    """Uniform numbers [count, length] in [0, 1), fp64: worker w's are row w, from a stream of its own.

    So what a worker writes does not depend on when the others end.
    """
    first = int(torch.randint(2**62, (), generator=generator))
    streams = [torch.Generator().manual_seed(first + worker) for worker in range(count)]
    return torch.stack([torch.rand(length, generator=stream, dtype=torch.float64) for stream in streams])


class _Writing:
    """Generation for one row: the prompt is prefilled once; then all workers that still write go forward together."""

    def __init__(
        self, backbone: Backbone, row: RowTokens, config: WorkersConfig, draws: Tensor | None
    ) -> None:
        self._backbone = backbone
        self._row = row
        self._config = config
        self._draws = None if draws is None else draws.to(backbone.device)
        self._layers = [GrowingLayer() for _ in range(backbone.layers)]
        self._cache = make_cache(self._layers)
        self._written: list[list[int]] = [[] for _ in range(config.count)]
        self._caches: dict[int, BranchCache] = {}
        self._forwards = 0

    def run(self, ends: frozenset[int]) -> WorkedRow:
        prompt, limit = self._row.worker_prompt, self._config.max_new_tokens
        logits = self._forward([list(prompt)], begin=0)
        active = list(range(self._config.count))
        self._take([0] * len(active))
        logits = logits.expand(len(active), -1)
        for position in range(limit):
            chosen = self._choose(logits, active, position)
            going = [place for place, token in enumerate(chosen) if token not in ends]
            if len(going) < len(active):
                for place, worker in enumerate(active):
                    if place not in going:
                        self._leave(place, worker)
                active, chosen = [active[place] for place in going], [chosen[place] for place in going]
                if not active:
                    break
                self._take(going)
            for worker, token in zip(active, chosen, strict=True):
                self._written[worker].append(token)
            # Also after the last token: it is a token of the branch like the others, so its states must be there.
            logits = self._forward([[token] for token in chosen], begin=len(prompt) + position)
        for place, worker in enumerate(active):
            self._leave(place, worker)
        wrote = sorted(self._caches)
        return WorkedRow(
            branches=tuple(self._branch(worker) for worker in wrote),
            live=self._row.live,
            target_start=self._row.target_start,
            worker_prompt=prompt,
            caches=tuple(self._caches[worker] for worker in wrote),
            forwards=self._forwards,
        )

    def _forward(self, ids: list[list[int]], *, begin: int) -> Tensor:
        """Logits [W, V] behind the last of `ids`, in at least fp32; their states go into the cache."""
        tokens = torch.tensor(ids, device=self._backbone.device)
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device).expand(len(ids), -1)
        hidden = run_base(self._backbone.base, tokens, positions, self._cache)
        self._forwards += 1
        logits: Tensor = self._backbone.model.get_output_embeddings()(hidden[:, -1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _take(self, places: Sequence[int]) -> None:
        rows = torch.tensor(places, device=self._backbone.device)
        for layer in self._layers:
            layer.take(rows)

    def _branch(self, worker: int) -> BranchTokens:
        written = self._written[worker]
        return BranchTokens(ids=(*self._row.worker_prompt, *written), kept=len(written))

    def _leave(self, place: int, worker: int) -> None:
        """Cuts the worker's cache out of the batch; nothing is left of one that wrote nothing."""
        if not self._written[worker]:
            return
        begin = len(self._row.worker_prompt)
        states = [layer.states(slice(place, place + 1), begin) for layer in self._layers]
        self._caches[worker] = moved_to_start(self._backbone.base, self._branch(worker), states)

    def _choose(self, logits: Tensor, active: Sequence[int], position: int) -> list[int]:
        """The next token of each worker. One device-to-host transfer."""
        if self._draws is None:
            tokens = logits.argmax(-1)
        else:
            draws = self._draws[torch.tensor(active, device=logits.device), position]
            tokens = sample(logits, draws, temperature=self._config.temperature, top_p=self._config.top_p)
        chosen: list[int] = tokens.tolist()
        return chosen


def sample(logits: Tensor, draws: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Tokens [W] of `logits` [W, V] by nucleus sampling; `draws` [W] are uniform in [0, 1), fp64.

    The nucleus is the fewest most probable tokens whose probabilities reach `top_p`; never empty. Logits that are
    not finite give some token; the loss over its cache will not be finite either, and that is dealt with there.
    """
    likely = torch.softmax(logits / temperature, dim=-1).nan_to_num(0.0)
    probabilities, order = likely.sort(dim=-1, descending=True, stable=True)
    weights = (probabilities.double() * 2**_WEIGHT_BITS).to(torch.int64)
    sums = weights.cumsum(-1)
    before = sums - weights
    nucleus = before < (sums[:, -1:].double() * top_p).to(torch.int64)
    nucleus[:, 0] = True
    total = (weights * nucleus).sum(-1, keepdim=True)
    wanted = (draws[:, None] * total.double()).to(torch.int64).minimum(total - 1)
    place = (sums <= wanted).sum(-1, keepdim=True)
    chosen: Tensor = order.gather(-1, place).squeeze(-1)
    return chosen
