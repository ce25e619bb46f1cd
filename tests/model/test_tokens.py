"""Tokenisation decides guards and targets: kept tokens, the merged newline, the prompt renderings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parallel_synthesis.errors import BackboneError, DataError
from parallel_synthesis.model.tokens import (
    BranchTokens,
    RowTokens,
    check_tokenizer,
    render_prompt,
    system_message,
    tokenize_row,
)

pytestmark = pytest.mark.lane
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE, **special: Any) -> Any:
    """One token for each of: a pair of letters (BPE), a single character, two newlines. NFC as in Qwen's."""
    letters = [chr(c) for c in range(32, 127)] + ["\n", "é", "€"]
    vocabulary = {text: i for i, text in enumerate([*letters, "ab", "\n\n", "cd"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("\n", "\n"), ("c", "d")]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+| ?[^ \n]+| +"), "isolated")
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]} | special
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=30, **special)
    fast.chat_template = template
    return fast


def tokens(tokenizer: Any, contexts: list[str], extracts: list[str], **changes: Any) -> RowTokens:
    given = {"query": "ab?", "target": "cd", "system": "S", "think": False} | changes
    return tokenize_row(tokenizer, contexts=contexts, extracts=extracts, **given)


@pytest.mark.parametrize(
    ("context", "extract", "ids", "kept"),
    [
        ("abcd", "abcd", ["ab", "cd"], 2),  # equal: all
        ("abcd", "cd", ["ab", "cd"], 1),
        ("abcd", "bcd", ["ab", "cd"], 2),  # the token that holds the first character of the extract is kept
        ("abcd", "d", ["ab", "cd"], 1),
        ("ab cd cd", "cd", ["ab", " ", "cd", " ", "cd"], 1),  # the suffix, not the first occurrence
        ("abcdx", "cdab", ["ab", "cd", "x"], 2),  # no suffix: as many as the extract's own tokens
        ("ab", "xyzxyz", ["ab"], 1),  # ... at most all
        ("ab e\u0301 cd", "cd", ["ab", " ", "é", " ", "cd"], 1),  # offsets are those of the text before NFC
    ],
)
def test_kept_tokens(context: str, extract: str, ids: list[str], kept: int) -> None:
    tokenizer = make_tokenizer()
    (branch,) = tokens(tokenizer, [context], [extract]).branches
    assert tokenizer.convert_ids_to_tokens(list(branch.ids)) == ids
    assert branch.kept == kept
    assert branch.start == len(ids) - kept


def test_the_prompt_and_the_target_are_tokenised_as_one_string() -> None:
    """The newlines that end the prompt and begin the target are one token, and it is no target."""
    tokenizer = make_tokenizer()
    row = tokens(tokenizer, ["ab"], ["ab"])
    texts = tokenizer.convert_ids_to_tokens(list(row.live))
    assert texts[-4:] == ["t", "\n\n", "cd", "<|im_end|>"]
    assert row.target_tokens == 2
    assert texts[: row.target_start] == [
        *["<|im_start|>", *"system", "\n", "S", "<|im_end|>", "\n"],
        *["<|im_start|>", *"user", "\n", "ab", "?", "<|im_end|>", "\n"],
        *["<|im_start|>", *"assistant", "\n\n"],
    ]
    # Apart, the target would have one token more.
    apart = tokenizer("\ncd<|im_end|>", add_special_tokens=False)["input_ids"]
    assert len(apart) == row.target_tokens + 1


def test_think_and_plain_rendering() -> None:
    tokenizer = make_tokenizer()
    assert render_prompt(tokenizer, query="q", system="S", think=True).endswith("assistant\n<think>")
    plain = render_prompt(make_tokenizer(template=None), query="q", system="S", think=False)
    assert plain == "<|system|>\nS\n<|user|>\nq\n<|assistant|>\n"


def test_no_special_tokens_are_added() -> None:
    """Neither in a branch nor in the live sequence, even by a tokenizer that would put BOS in front."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos_token="<s>")
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    assert tokenizer("ab")["input_ids"][0] == bos
    row = tokens(tokenizer, ["ab"], ["ab"])
    assert bos not in row.live
    assert bos not in row.branches[0].ids


def test_a_long_text_is_not_truncated_and_not_complained_about(caplog: pytest.LogCaptureFixture) -> None:
    row = tokens(make_tokenizer(), ["x" * 100], ["x" * 100])
    assert row.prefill_tokens == 100  # model_max_length is 30
    assert not caplog.records


def test_a_branch_of_no_tokens_is_an_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("z", "")
    with pytest.raises(DataError, match="branch 1"):
        tokens(tokenizer, ["ab", "zz"], ["ab", "zz"])


def test_counts_for_the_guards() -> None:
    row = RowTokens(
        branches=(BranchTokens(ids=(1,) * 10, kept=3), BranchTokens(ids=(1,) * 7, kept=7)),
        live=(1,) * 5,
        target_start=2,
    )
    assert row.prefill_tokens == 17
    assert row.past == 10
    assert row.offset == 7
    assert row.live_tokens == 5
    assert row.target_tokens == 3
    assert row.total_tokens == 15
    assert row.attention_area == 75


def test_tokenizers_that_cannot_do_it_are_refused() -> None:
    class Slow:
        is_fast = False
        eos_token = "</s>"

    with pytest.raises(BackboneError, match=r"owner/name: Slow gives no character offsets"):
        check_tokenizer(Slow(), "owner/name")
    with pytest.raises(BackboneError, match="no eos token"):
        check_tokenizer(make_tokenizer(eos_token=None), "owner/name")
    check_tokenizer(make_tokenizer(), "owner/name")


def test_system_message() -> None:
    qwen = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert system_message("Qwen/Qwen3-14B") == qwen
    assert system_message("my-QWEN") == qwen
    assert system_message("meta-llama/Llama-3.1-8B") == "You are a helpful assistant."


def test_planning_modules_import_no_torch() -> None:
    code = (
        "import sys, parallel_synthesis.model.tokens, parallel_synthesis.model.sizes;"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
