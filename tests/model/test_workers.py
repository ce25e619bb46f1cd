"""Workers: what they write, the cache they leave, where they end, and what they draw."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from parallel_synthesis.config import LoraConfig, MapperConfig, WorkersConfig
from parallel_synthesis.model.branches import PrefillPlan, prefill
from parallel_synthesis.model.synthesizer import Synthesizer
from parallel_synthesis.model.tokens import WORKER_PROMPT, RowTokens, tokenize_row, tokenize_worker_prompt
from parallel_synthesis.model.workers import WorkedRow, end_tokens, sample, work

pytestmark = pytest.mark.lane
BOUND = 1e-5  # design.md, "Check that must hold"


def asked(tools: Any, *, prompt: int = 40, live: int = 12, seed: int = 0) -> RowTokens:
    """A row before its workers have written."""
    draw = random.Random(seed)
    ids = tuple(draw.randrange(tools.VOCABULARY) for _ in range(prompt))
    bare = tools.make_row([], live=live, seed=seed)
    return RowTokens(branches=(), live=bare.live, target_start=bare.target_start, worker_prompt=ids)


def write(
    backbone: Any,
    row: RowTokens,
    *,
    ends: frozenset[int] = frozenset(),
    seed: int = 5,
    **changes: Any,
) -> WorkedRow:
    given = {"count": 3, "max_new_tokens": 9, "temperature": 1.0, "top_p": 0.9} | changes
    generator = torch.Generator().manual_seed(seed)
    return work(backbone, row, WorkersConfig(**given), ends=ends, generator=generator)


def texts(worked: WorkedRow) -> list[tuple[int, ...]]:
    return [branch.ids[branch.start :] for branch in worked.branches]


def names() -> list[str]:
    from_mask = ["qwen3", "llama", "gpt_neox", "mistral", "qwen2", "olmo2", "phi3", "stablelm"]
    return [*from_mask, "qwen3 yarn", "llama yarn", "llama llama3", "llama linear"]


@pytest.mark.parametrize("name", names())
def test_generated_branches_equal_one_forward_with_a_block_mask(tools: Any, name: str) -> None:
    """The prompt is in the branch but not kept; positions and mask as in the fixed route."""
    model = tools.make_model(name)
    backbone = tools.wrap(model)
    lora = LoraConfig(r=4, alpha=8, target_modules=tools.BACKBONES[name][2])
    reader = Synthesizer(backbone, mapper=MapperConfig(), lora=lora, seed=1)
    row = asked(tools)
    free = texts(write(backbone, row))
    for ends in (frozenset(), frozenset({free[1][4]})):  # with and without a worker that ends early
        worked = write(backbone, row, ends=ends)
        assert all(branch.start == 40 for branch in worked.branches)
        expected = tools.block_mask_logits(model, worked)
        assert expected.abs().max() <= 3, "the bound is stated for logits up to 3"
        assert (reader.logits(worked) - expected).abs().max() < BOUND
        without = (reader.logits(row) - expected).abs().max()
        assert without > 100 * BOUND, "the branches must matter for this check to say something"


@pytest.mark.parametrize("ended", [False, True])
def test_the_cache_is_that_of_exactly_the_generated_tokens(tools: Any, ended: bool) -> None:
    """Prompt out, last token in, start at position 0: equal to prefilling prompt + text and keeping the text."""
    backbone = tools.make_backbone("qwen3")
    row = asked(tools)
    free = texts(write(backbone, row))
    worked = write(backbone, row, ends=frozenset({free[0][5], free[2][3]}) if ended else frozenset())
    lengths = [len(text) for text in texts(worked)]
    assert lengths == [9, 9, 9] if not ended else min(lengths) < 9
    plan = PrefillPlan(shared=0, groups=tuple((number,) for number in range(len(worked.branches))))
    for ours, theirs in zip(worked.caches, prefill(backbone.base, worked.branches, plan), strict=True):
        assert ours.kept == theirs.kept
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            assert layer[0].shape == other[0].shape == (1, 2, ours.kept, 16)
            assert (layer[0] - other[0]).abs().max() < BOUND
            assert (layer[1] - other[1]).abs().max() < BOUND
            # nothing but the branch's own states is kept alive
            assert layer[1].untyped_storage().nbytes() == layer[1].numel() * 4


def test_greedy_is_the_most_probable_token_each_time(tools: Any) -> None:
    model = tools.make_model("llama")
    row = asked(tools)
    ids = list(row.worker_prompt)
    with torch.no_grad():
        for _ in range(9):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    state = torch.get_rng_state()
    worked = write(tools.wrap(model), row, temperature=0.0, count=2)
    assert texts(worked) == [tuple(ids[40:])] * 2
    work(tools.wrap(model), row, WorkersConfig(temperature=0.0, max_new_tokens=2), ends=frozenset())
    assert torch.equal(torch.get_rng_state(), state), "greedy workers draw nothing"


def test_a_worker_ends_before_its_end_token_and_none_remains_of_one_that_begins_with_it(tools: Any) -> None:
    backbone = tools.make_backbone("qwen3")
    row = asked(tools)
    free = texts(write(backbone, row))
    assert len({text[0] for text in free}) == 3
    # worker 0 begins with an end token, worker 1 writes two tokens, worker 2 goes to the limit or to one of these
    ends = frozenset({free[0][0], free[1][2]})
    worked = write(backbone, row, ends=ends)
    expected = []
    for text in free:
        stop = next((place for place, token in enumerate(text) if token in ends), len(text))
        expected.append(text[:stop])
    assert expected[0] == ()
    assert texts(worked) == expected[1:], "what the others write does not depend on who has ended"
    assert len(worked.caches) == len(worked.branches) == 2
    none = write(backbone, row, ends=frozenset(text[0] for text in free))
    assert (none.branches, none.caches, none.past, none.forwards) == ((), (), 0, 1)


def test_workers_draw_from_streams_of_their_own(tools: Any) -> None:
    backbone = tools.make_backbone("qwen3")
    row = asked(tools)
    worked = write(backbone, row)
    assert len(set(texts(worked))) == 3
    assert texts(write(backbone, row)) == texts(worked)
    assert set(texts(write(backbone, row, seed=6))).isdisjoint(texts(worked))
    assert texts(write(backbone, row, count=5))[:3] == texts(worked)
    torch.manual_seed(5)
    config = WorkersConfig(count=3, max_new_tokens=9, temperature=1.0, top_p=0.9)
    assert texts(work(backbone, row, config, ends=frozenset())) == texts(worked), "torch's global generator"
    assert texts(work(backbone, row, config, ends=frozenset())) != texts(worked), "which has moved on"


def test_the_prompt_is_prefilled_once_and_the_workers_go_together(tools: Any) -> None:
    backbone = tools.make_backbone("qwen3")
    reader = Synthesizer(backbone, mapper=MapperConfig(), lora=LoraConfig(r=4), seed=1)
    worked = write(backbone, asked(tools))
    assert worked.forwards == 1 + 9
    assert worked.prefill_tokens == 40 + 3 * 9
    reader.loss(worked)
    assert reader.forwards == 1, "what the workers left is not computed again"


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_sampling_follows_the_nucleus_distribution(temperature: float, top_p: float) -> None:
    """Evenly spaced draws must hit each token in proportion to its probability; the nucleus counted by hand."""
    logits = torch.randn(11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = {token: torch.exp(value / temperature).item() for token, value in enumerate(logits)}
    total, nucleus, reached = sum(weights.values()), {}, 0.0
    for token in sorted(weights, key=lambda token: -weights[token]):
        if reached >= top_p:
            break
        nucleus[token] = weights[token] / total
        reached += nucleus[token]
    count = 20000
    draws = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sample(logits.float().expand(count, -1), draws, temperature=temperature, top_p=top_p)
    hits = torch.bincount(drawn, minlength=11) / count
    for token in range(11):
        assert hits[token].item() == pytest.approx(nucleus.get(token, 0.0) / reached, abs=2 / count)


def test_a_sharp_distribution_has_a_nucleus_of_one() -> None:
    logits = torch.tensor([[0.0, 80.0, 0.0]])
    for draw in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, torch.tensor([draw]).double(), temperature=0.1, top_p=0.01).tolist() == [1]


def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary() -> None:
    logits = torch.full((2, 5), float("nan"))
    logits[1] = float("inf")
    assert all(0 <= token < 5 for token in sample(logits, torch.rand(2).double(), temperature=1, top_p=0.9))


def test_end_tokens_are_the_tokenizers_and_the_models(tools: Any) -> None:
    model = tools.make_model("qwen3")
    backbone = tools.wrap(model)
    object.__setattr__(backbone, "tokenizer", tools.make_tokenizer(90))
    model.generation_config.eos_token_id = None
    assert end_tokens(backbone) == {89}
    model.generation_config.eos_token_id = [7, 89]
    assert end_tokens(backbone) == {7, 89}
    model.generation_config.eos_token_id = 3
    assert end_tokens(backbone) == {3, 89}


def test_the_worker_prompt_is_the_query_under_the_fixed_prompt(tools: Any) -> None:
    class Characters:
        """Tokens are characters; so the prompt can be read back."""

        is_fast, eos_token = True, "#"

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            return {"input_ids": [ord(character) for character in text]}

        def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
            return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"

        chat_template = "yes"

    tokenizer = Characters()
    ids = tokenize_worker_prompt(tokenizer, query="why?", system="be kind")
    text = "".join(map(chr, ids))
    assert text == f"[system]be kind[user]{WORKER_PROMPT}\n\nwhy?[assistant]"
    row = tokenize_row(
        tokenizer, query="why?", target="so", contexts=(), extracts=(), system="be kind", think=False
    )
    assert "".join(map(chr, row.live)) == "[system]be kind[user]why?[assistant]\nso#"
    assert (row.branches, row.past, row.prefill_tokens) == ((), 0, 0)
