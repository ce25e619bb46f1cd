"""Small things many tests share: a tiny backbone with a tokenizer, rows from a seed, a recipe, and `ps` as a process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORDS = [f"word{number}" for number in range(60)] + ["what", "does", "hold", "and", "the", "answer", "is"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Qwen3 of two layers and a byte-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("backbone") / "tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=512,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=4096,
                tie_word_embeddings=False,
            )
        )
    model.save_pretrained(directory)
    return directory


def make_row(rng: random.Random, *, branches: int, words: int) -> dict[str, Any]:
    """A row whose branches share a prefix in every second case."""

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    prefix = text(words) + "\n" if rng.random() < 0.5 else ""
    extracts = [text(rng.randint(2, words)) for _ in range(branches)]
    return {
        "id": f"row-{rng.randrange(10**9)}",
        "question": f"what does {rng.choice(WORDS)} hold?",
        "query": f"what does {rng.choice(WORDS)} and {rng.choice(WORDS)} hold?",
        "gold": text(3),
        "references": [],
        "agent_reference_contexts": [prefix + extract for extract in extracts],
        "agent_extract_contexts": extracts,
    }


@pytest.fixture
def write_rows() -> Callable[..., Path]:
    """write_rows(path, count, seed=0, words=8): a .jsonl file of seeded rows."""

    def write(path: Path, count: int, *, seed: int = 0, words: int = 8) -> Path:
        rng = random.Random(seed)
        rows = [make_row(rng, branches=rng.randint(1, 4), words=words) for _ in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        return path

    return write


def toml_recipe(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML of plain tables; JSON's scalars and arrays are TOML's."""
    lines = []
    for section, values in tables.items():
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {{{', '.join(f'{k} = {json.dumps(v)}' for k, v in value.items())}}}"
            if isinstance(value, dict)
            else f"{key} = {json.dumps(value)}"
            for key, value in values.items()
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def tiny_recipe(tiny_backbone: Path, tmp_path: Path, write_rows: Callable[..., Path]) -> Callable[..., Path]:
    """tiny_recipe(run={...}, guards={...}): a recipe file over two seeded tasks; 4 logical ranks, 5 steps an epoch."""

    def write(**sections: Mapping[str, Any]) -> Path:
        write_rows(tmp_path / "first.jsonl", 13, seed=1)
        write_rows(tmp_path / "second.jsonl", 9, seed=2)
        tables: dict[str, dict[str, Any]] = {
            "run": {"ranks": 4, "seed": 3},
            "backbone": {"model": str(tiny_backbone), "device": "cpu"},
            "lora": {"r": 4, "alpha": 8},
            "data": {
                "tasks": ["first", "second"],
                "root": str(tmp_path),
                "files": {"first": "first.jsonl", "second": "second.jsonl"},
            },
            "optim": {"learning_rate": 1e-2},
            "checkpoint": {"every": 2},
        }
        for section, values in sections.items():
            tables.setdefault(section, {}).update(values)
        path = tmp_path / "tiny.toml"
        path.write_text(toml_recipe(tables), "utf-8")
        return path

    return write


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For a child process: this checkout, no leftovers of a launcher, a cache of its own."""
    return process_environment(tmp_path)


class Started:
    """A `ps` call that runs: its pid, and `wait` for the result."""

    def __init__(self, server: subprocess.Popen[str], args: list[str], stdout: Path, stderr: Path) -> None:
        assert server.stdout is not None
        self._server, self._args, self._stdout, self._stderr = server, args, stdout, stderr
        self.pid = int(server.stdout.readline())

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> subprocess.CompletedProcess[str]:
        assert self._server.stdout is not None
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(
            self._args, code, self._stdout.read_text(), self._stderr.read_text()
        )


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    """See tests/forkserver.py."""
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "forkserver.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=process_environment(Path(os.devnull)),
    )
    yield server
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=30)


@pytest.fixture
def start_ps(fork_server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Started]:
    """start_ps("train", ...): the command as a running process; `env` adds variables, `script` replaces pscli's main."""
    calls: list[int] = []

    def start(
        *args: str | Path | int, env: Mapping[str, str] | None = None, script: str | None = None
    ) -> Started:
        calls.append(1)
        stdout, stderr = tmp_path / f"stdout-{len(calls)}", tmp_path / f"stderr-{len(calls)}"
        request: dict[str, Any] = {
            "argv": list(map(str, args)),
            "env": process_environment(tmp_path) | dict(env or {}),
            "cwd": str(tmp_path),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        if script is not None:
            request["script"] = script
        assert fork_server.stdin is not None
        fork_server.stdin.write(json.dumps(request) + "\n")
        fork_server.stdin.flush()
        return Started(fork_server, request["argv"], stdout, stderr)

    return start


@pytest.fixture
def ps(start_ps: Callable[..., Started]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """ps("train", ...): the command as a real process, to its end."""

    def run(*args: str | Path | int, **more: Any) -> subprocess.CompletedProcess[str]:
        return start_ps(*args, **more).wait()

    return run


def process_environment(cache: Path) -> dict[str, str]:
    """The environment of a child process: this checkout, no leftovers of a launcher, its own cache."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key
        not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MODEL_NAME", "STEPS_PER_EPOCH", "SAVE_EVERY_STEPS")
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PARALLEL_SYNTHESIS_CACHE": str(cache / "cache"),
        "OMP_NUM_THREADS": "1",
    }
