"""A row in tokens: prefill and kept tokens of each branch, the live sequence, where its targets start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.errors import BackboneError, DataError
from parallel_synthesis.model.source import find_source, hub_problem

QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
PLAIN_SYSTEM = "You are a helpful assistant."
THINK = "<think>"
# What a worker of the parallel_kv route is asked, in front of the row's query (as user message). Fixed: another
# wording is another run.
WORKER_PROMPT = (
    "You are one of several workers who work on the same request independently. Write down what you know and "
    "what follows from it, so that the one who answers can use your notes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchTokens:
    """One branch: all of `ids` are prefilled, the last `kept` of them leave their keys and values."""

    ids: tuple[int, ...]
    kept: int

    @property
    def start(self) -> int:
        """Position p in the prefill at which the kept part begins."""
        return len(self.ids) - self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """One training row in tokens. All counts that the guards need follow from it, without a forward.

    worker_prompt: what every worker of the parallel_kv route reads; such a row has no branches until the workers
    have generated them (model/workers.py). Empty in the fixed route.
    """

    branches: tuple[BranchTokens, ...]
    live: tuple[int, ...]
    target_start: int
    worker_prompt: tuple[int, ...] = ()

    @property
    def prefill_tokens(self) -> int:
        """Tokens the branches run through the backbone: each branch counted whole, a worker prompt only once."""
        if self.worker_prompt:
            return len(self.worker_prompt) + self.past
        return sum(len(branch.ids) for branch in self.branches)

    @property
    def past(self) -> int:
        """Length of the joined cache: kept tokens of all branches."""
        return sum(branch.kept for branch in self.branches)

    @property
    def live_tokens(self) -> int:
        return len(self.live)

    @property
    def offset(self) -> int:
        """Position of the first live token: the longest kept part."""
        return max((branch.kept for branch in self.branches), default=0)

    @property
    def target_tokens(self) -> int:
        return len(self.live) - self.target_start

    @property
    def attention_area(self) -> int:
        """live * (past + live), in tokens squared."""
        return self.live_tokens * self.total_tokens

    @property
    def total_tokens(self) -> int:
        """past + live."""
        return self.past + self.live_tokens


def system_message(model_name: str) -> str:
    """The synthesizer's system message (design.md, "Live sequence")."""
    return QWEN_SYSTEM if "qwen" in model_name.lower() else PLAIN_SYSTEM


def check_tokenizer(tokenizer: Any, name: str) -> None:
    """BackboneError unless the tokenizer gives offsets and knows an end-of-sequence token."""
    if not getattr(tokenizer, "is_fast", False):
        raise BackboneError(
            f"tokenizer of {name}: {type(tokenizer).__name__} gives no character offsets, which decide "
            "the kept tokens of a branch; use a model that ships a tokenizer.json"
        )
    if not tokenizer.eos_token:
        raise BackboneError(
            f"tokenizer of {name}: no eos token; expected one, it ends every target; "
            "set eos_token in the model's tokenizer_config.json"
        )


def render_prompt(tokenizer: Any, *, query: str, system: str, think: bool) -> str:
    """The synthesizer's prompt as text, up to where the answer begins."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": query}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    else:
        prompt = f"<|system|>\n{system}\n<|user|>\n{query}\n<|assistant|>\n"
    return prompt + THINK if think else prompt


def tokenize_row(
    tokenizer: Any,
    *,
    query: str,
    target: str,
    contexts: Sequence[str],
    extracts: Sequence[str],
    system: str,
    think: bool,
) -> RowTokens:
    """The tokens of a row (design.md, "Tokenisation"). `extracts[i]` goes with `contexts[i]`, both stripped.

    The tokenizer must have passed `check_tokenizer`. DataError when a branch or the target comes to no token.
    """
    pairs = zip(contexts, extracts, strict=True)
    branches = tuple(_branch(tokenizer, number, *pair) for number, pair in enumerate(pairs))
    prompt = render_prompt(tokenizer, query=query, system=system, think=think)
    # One string, tokenised once: the prompt's last token may merge with the newline that begins the target.
    live = _ids(tokenizer, f"{prompt}\n{target}{tokenizer.eos_token}")
    target_start = len(_ids(tokenizer, prompt))
    if not 0 < target_start < len(live):
        raise DataError(
            f"the target comes to no token ({len(live)} live tokens, {target_start} of them prompt); "
            "expected one or more: check the tokenizer and the row's answer"
        )
    return RowTokens(branches=branches, live=live, target_start=target_start)


def tokenize_worker_prompt(tokenizer: Any, *, query: str, system: str) -> tuple[int, ...]:
    """What a worker reads: the query under WORKER_PROMPT, in the chat template, up to where it begins to write."""
    asked = f"{WORKER_PROMPT}\n\n{query}"
    return _ids(tokenizer, render_prompt(tokenizer, query=asked, system=system, think=False))


def _branch(tokenizer: Any, number: int, context: str, extract: str) -> BranchTokens:
    encoded = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = tuple(encoded["input_ids"])
    if context.endswith(extract):
        begin = len(context) - len(extract)
        first = next((i for i, (_, end) in enumerate(encoded["offset_mapping"]) if end > begin), len(ids))
        kept = len(ids) - first
    else:
        kept = min(len(ids), len(_ids(tokenizer, extract)))
    if kept < 1:
        raise DataError(
            f"branch {number} comes to no kept token; expected one or more: "
            "the tokenizer drops all of its text, remove the context from the row"
        )
    return BranchTokens(ids=ids, kept=kept)


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    # verbose=False: the guards, not a log line of the tokenizer, say what is too long.
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def load_tokenizer(model: str, revision: str | None) -> Any:
    """The tokenizer of a Hub id, directory, `package:PATH` or .gguf file; no network for a local path."""
    # Here, not above: planning imports this module and must not pay for it.
    from transformers import AutoConfig, AutoTokenizer

    source = find_source(model, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.where, trust_remote_code=False, **source.arguments)
        if "gguf_file" in source.arguments:
            # transformers 4 guesses the eos token of a .gguf file; the one the file names ends every target.
            end = AutoConfig.from_pretrained(source.where, **source.arguments).eos_token_id
            if isinstance(end, int):
                tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    except (OSError, ValueError, KeyError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise hub_problem(source, error) or BackboneError(
            f"tokenizer of {model}: it cannot be loaded: {lines[0]}; "
            "expected tokenizer.json beside the model's config"
        ) from error
    return tokenizer
