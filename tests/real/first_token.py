"""Time to the first token: over the branch caches that workers left, against reading the branches' text again.

Both ways end with the logits that give the first token of the answer, and hold a cache to go on from.

    over caches   what the product does from the moment the workers are done: turn each branch's keys back to
                  position 0, map, join, and forward the synthesizer's prompt (LoRA on) behind the joined cache
    re-prefill    one forward of the same backbone (without the LoRA, which would only slow it down) over the text of
                  all branches and the same prompt; logits at the last position only, sdpa, same dtype and threads
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from notes import SEED, prose
from torch import Tensor

from parallel_synthesis.model.backbone import Backbone
from parallel_synthesis.model.branches import join, moved_to_start, plan_prefill, prefill
from parallel_synthesis.model.lanes import States, run_base
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import (
    BranchTokens,
    RowTokens,
    render_prompt,
    system_message,
    tokenize_worker_prompt,
)

QUESTION = "Where do Anna and Carl live?"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Branches of `total` tokens together. `left[i]` are the keys and values per layer that worker i left for its
    kept tokens, at the positions where it wrote them; `prompt` is the synthesizer's."""

    total: int
    branches: tuple[BranchTokens, ...]
    left: tuple[list[States], ...]
    prompt: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds, medians over the repeats; `turn` is the part of `over_caches` that turns the keys back."""

    total: int
    prompt: int
    over_caches: float
    turn: float
    re_prefill: float

    @property
    def faster(self) -> float:
        return self.re_prefill / self.over_caches


def make_case(backbone: Backbone, *, total: int, workers: int) -> Case:
    """`workers` notes of total / workers tokens each, written behind the worker prompt of the parallel_kv route."""
    tokenizer, system = backbone.tokenizer, system_message(backbone.name)
    asked = tokenize_worker_prompt(tokenizer, query=QUESTION, system=system)
    branches = []
    for worker in range(workers):
        text = prose(random.Random(f"{SEED} prose {worker}"), total // workers // 16 + 4)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: total // workers]
        assert len(ids) == total // workers, "the note is too short"
        branches.append(BranchTokens(ids=(*asked, *ids), kept=len(ids)))
    prompt = render_prompt(tokenizer, query=QUESTION, system=system, think=False)
    return Case(
        total=total,
        branches=tuple(branches),
        left=tuple(_left(backbone, branch) for branch in branches),
        prompt=tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"]),
    )


def _left(backbone: Backbone, branch: BranchTokens) -> list[States]:
    """What generation leaves of a branch: views of its cache from its first kept token on, not turned back yet."""
    whole = BranchTokens(ids=branch.ids, kept=len(branch.ids))
    (cache,) = prefill(backbone.base, [whole], plan_prefill([whole.kept], 0))
    return [(keys[:, :, branch.start :], values[:, :, branch.start :]) for keys, values in cache.layers]


@torch.no_grad()
def over_caches(synthesizer: Synthesizer, case: Case) -> tuple[Tensor, float]:
    """Logits [vocabulary] of the first token, and the seconds that turning back took."""
    backbone = synthesizer.backbone
    started = time.perf_counter()
    caches = [
        moved_to_start(backbone.base, branch, left)
        for branch, left in zip(case.branches, case.left, strict=True)
    ]
    turned = time.perf_counter() - started
    kept = [cache.kept for cache in caches]
    joined = join(caches, synthesizer.mapper(kept, backbone.layers))
    model = synthesizer.peft_model.get_base_model()
    ids = torch.tensor([case.prompt])
    positions = torch.arange(max(kept), max(kept) + len(case.prompt))[None]
    hidden = run_base(model.base_model, ids, positions, joined)
    logits: Tensor = model.get_output_embeddings()(hidden[0, -1])
    return logits, turned


@torch.no_grad()
def re_prefill(backbone: Backbone, case: Case) -> Tensor:
    """Logits [vocabulary] of the first token behind the branches' text and the prompt."""
    texts = [token for branch in case.branches for token in branch.ids[branch.start :]]
    ids = torch.tensor([[*texts, *case.prompt]])
    logits: Tensor = backbone.model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1]
    return logits


def check(synthesizer: Synthesizer, case: Case) -> None:
    """What is timed is what the synthesizer computes from the tokens: the logits are the same."""
    row = RowTokens(branches=case.branches, live=(*case.prompt, 0), target_start=len(case.prompt))
    expected = synthesizer.logits(row)[row.target_start - 1]
    torch.testing.assert_close(over_caches(synthesizer, case)[0], expected, atol=1e-3, rtol=1e-4)


def measure(
    synthesizer: Synthesizer,
    *,
    totals: Sequence[int],
    workers: int,
    repeats: int,
    say: Callable[[str], None],
) -> list[Timing]:
    """One Timing a length. The two ways take turns, so that what else the machine does meets both; one warm-up."""
    found = []
    for number, total in enumerate(totals):
        say(f"first token over {workers} branches of {total} tokens together, {repeats} times")
        case = make_case(synthesizer.backbone, total=total, workers=workers)
        if number == 0:
            check(synthesizer, case)
        ours, turns, theirs = [], [], []
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            _, turned = over_caches(synthesizer, case)
            middle = time.perf_counter()
            re_prefill(synthesizer.backbone, case)
            ended = time.perf_counter()
            if repeat:
                ours.append(middle - started)
                turns.append(turned)
                theirs.append(ended - middle)
        found.append(
            Timing(
                total=total,
                prompt=len(case.prompt),
                over_caches=statistics.median(ours),
                turn=statistics.median(turns),
                re_prefill=statistics.median(theirs),
            )
        )
    return found
