"""Small things many tests share: a tiny backbone with a tokenizer, rows from a seed, a recipe, and `ps` as a process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
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
OTHER_LANE = "PARALLEL_SYNTHESIS_OTHER_PYTHON"
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


def write_rows(path: Path, count: int, *, seed: int = 0, words: int = 8) -> Path:
    """A .jsonl file of seeded rows."""
    rng = random.Random(seed)
    rows = [make_row(rng, branches=rng.randint(1, 4), words=words) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


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


def write_tiny_recipe(directory: Path, backbone: Path, /, **sections: Mapping[str, Any]) -> Path:
    """tiny.toml over two seeded tasks; 4 logical ranks, 5 steps an epoch. sections: run={...}, guards={...}"""
    write_rows(directory / "first.jsonl", 13, seed=1)
    write_rows(directory / "second.jsonl", 9, seed=2)
    tables: dict[str, dict[str, Any]] = {
        "run": {"ranks": 4, "seed": 3},
        "backbone": {"model": str(backbone), "device": "cpu"},
        "lora": {"r": 4, "alpha": 8},
        "data": {
            "tasks": ["first", "second"],
            "root": str(directory),
            "files": {"first": "first.jsonl", "second": "second.jsonl"},
        },
        "optim": {"learning_rate": 1e-2},
        "checkpoint": {"every": 2},
    }
    for section, values in sections.items():
        tables.setdefault(section, {}).update(values)
    path = directory / "tiny.toml"
    path.write_text(toml_recipe(tables), "utf-8")
    return path


@pytest.fixture
def tiny_recipe(tiny_backbone: Path, tmp_path: Path) -> Callable[..., Path]:
    """tiny_recipe(run={...}): see write_tiny_recipe."""

    def write(**sections: Mapping[str, Any]) -> Path:
        return write_tiny_recipe(tmp_path, tiny_backbone, **sections)

    return write


@pytest.fixture(scope="module")
def module_recipe(tiny_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As `tiny_recipe`, for what a whole module shares."""

    def write(**sections: Mapping[str, Any]) -> Path:
        return write_tiny_recipe(tmp_path_factory.mktemp("recipe"), tiny_backbone, **sections)

    return write


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


@contextlib.contextmanager
def forking(python: str) -> Iterator[subprocess.Popen[str]]:
    """tests/forkserver.py under one of the lanes' interpreters."""
    server = subprocess.Popen(
        [python, str(ROOT / "tests" / "forkserver.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=process_environment(Path(os.devnull)),
    )
    yield server
    assert server.stdin is not None
    server.stdin.close()
    server.wait(timeout=30)
    assert server.stdout is not None
    server.stdout.close()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    """See tests/forkserver.py."""
    with forking(sys.executable) as server:
        yield server


@pytest.fixture(scope="module")
def other_ps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    """As `module_ps`, in the other lane's virtual environment (marker `lanes`; `make test-lanes` says which it is)."""
    python = os.environ.get(OTHER_LANE)
    if not python:
        pytest.skip(f"not run: {OTHER_LANE}, the other lane's python, is not set; `make test-lanes` sets it")
    with forking(python) as server:
        yield Calls(server, tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def module_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As `environment`, for what a whole module shares."""
    return process_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For a child process: this checkout, no leftovers of a launcher, a cache of its own."""
    return process_environment(tmp_path)


@pytest.fixture
def torchrun(environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """torchrun(2, "train", recipe, ...): a torchrun of the user's own, to its end.

    script: what its workers run in the place of pscli. env adds variables.
    """

    def run(
        processes: int,
        *args: str | Path | int,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        worker = ["-m", "pscli"]
        if script is not None:
            (tmp_path / "worker.py").write_text(script, "utf-8")
            worker = [str(tmp_path / "worker.py")]
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return subprocess.run(
            [sys.executable, "-m", *launcher, *worker, *map(str, args)],
            capture_output=True,
            text=True,
            env=environment | dict(env or {}),
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def unprivileged() -> str:
    """A `script` for `ps` in which the kernel heeds permission bits, also where the tests run as root: the owner's."""
    return (
        "import ctypes, sys\n"
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"  # _LINUX_CAPABILITY_VERSION_3, this thread
        "assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0\n"  # no capability is left
        "from pscli.main import call\n"
        "raise SystemExit(call(sys.argv[1:]))\n"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """small_disk("96k"): a new file system of that size; skips where mounting is not allowed."""
    place = tmp_path / "disk"

    def mount(size: str) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("a small file system needs root and mount; the file-size limit's tests do not")
        return place

    yield mount
    if os.path.ismount(place):
        subprocess.run(["umount", "-l", place], check=True)


class Calls:
    """Starts `ps` calls in one directory. `env` adds variables, `script` replaces pscli's main."""

    def __init__(self, server: subprocess.Popen[str], directory: Path) -> None:
        self._server, self._directory, self._count = server, directory, 0

    def start(
        self, *args: str | Path | int, env: Mapping[str, str] | None = None, script: str | None = None
    ) -> Started:
        self._count += 1
        stdout = self._directory / f"stdout-{self._count}"
        stderr = self._directory / f"stderr-{self._count}"
        request: dict[str, Any] = {
            "argv": list(map(str, args)),
            "env": process_environment(self._directory) | dict(env or {}),
            "cwd": str(self._directory),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        if script is not None:
            request["script"] = script
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Started(self._server, request["argv"], stdout, stderr)

    def __call__(self, *args: str | Path | int, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.start(*args, **more).wait()


@pytest.fixture
def ps(fork_server: subprocess.Popen[str], tmp_path: Path) -> Calls:
    """ps("train", ...): the command as a real process, to its end; ps.start(...): while it runs."""
    return Calls(fork_server, tmp_path)


@pytest.fixture(scope="module")
def module_ps(fork_server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """As `ps`, for what a whole module shares."""
    return Calls(fork_server, tmp_path_factory.mktemp("module"))


def component_hashes(directory: Path) -> dict[str, str]:
    """sha256 of the component files and of the training state's file (same content, same bytes)."""
    names = (
        "cache_mapper.pt",
        "judger_lora/adapter_model.safetensors",
        "judger_lora/adapter_config.json",
        "training_state.pt",
    )
    return {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}


@pytest.fixture(scope="session")
def hashes() -> Callable[[Path], dict[str, str]]:
    return component_hashes


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


@pytest.fixture(scope="session")
def lora_checkpoint() -> Callable[..., Path]:
    """lora_checkpoint(directory, seed=1, r=4, ...): a small component checkpoint, see write_lora_checkpoint."""
    return write_lora_checkpoint


def write_lora_checkpoint(
    directory: Path,
    *,
    seed: int,
    r: int = 4,
    alpha: int = 8,
    dtype: str = "float32",
    modules: Mapping[str, tuple[int, int]] | None = None,
    embeddings: Mapping[str, Any] | None = None,
    hidden: int = 32,
    step: int = 7,
    meta: bool = True,
    **config: Any,
) -> Path:
    """Mapper, configs and an adapter of seeded LoRA factors as the reference implementation writes them: no manifest.

    modules: PEFT's module name -> (inputs, outputs). embeddings: further tensors. config: over adapter_config.json.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    sizes = modules or {
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj": (24, 24 if part == "q" else 8)
        for layer in range(3)
        for part in "qv"
    }
    state = {}
    for module, (inputs, outputs) in sizes.items():
        for side, shape in (("A", (r, inputs)), ("B", (outputs, r))):
            tensor = torch.randn(shape, generator=generator) / r
            state[f"{module}.lora_{side}.weight"] = tensor.to(getattr(torch, dtype))
    state |= dict(embeddings or {})
    (directory / "judger_lora").mkdir(parents=True)
    save_file(state, directory / "judger_lora" / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny/base",
        "revision": None,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({module.rpartition(".")[2] for module in sizes}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    (directory / "judger_lora" / "adapter_config.json").write_text(json.dumps(content | config, indent=1))
    mapper = {
        "net.0.weight": torch.randn((hidden, 3), generator=generator),
        "net.0.bias": torch.randn((hidden,), generator=generator),
        "net.2.weight": torch.randn((4, hidden), generator=generator),
        "net.2.bias": torch.randn((4,), generator=generator),
    }
    torch.save(mapper, directory / "cache_mapper.pt")
    if meta:
        described = {"global_step": step, "epoch": 1, "source_run_dir": None, "metrics": None}
        (directory / "checkpoint_meta.json").write_text(json.dumps(described))
        (directory / "cache_mapper_config.json").write_text(
            json.dumps({"hidden_dim": hidden, "metadata_features": "both"})
        )
    return directory


@pytest.fixture
def hub_server() -> Iterator[Any]:
    """A Hugging Face Hub on loopback; see tests/hub_server.py."""
    spec = importlib.util.spec_from_file_location("hub_server", ROOT / "tests" / "hub_server.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hub_server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    server = module.Hub()
    yield server
    server.close()


@pytest.fixture
def hub_environment(hub_server: Any, tmp_path: Path) -> dict[str, str]:
    """For a child process that is to use `hub_server`, with an empty cache."""
    inherited = process_environment(tmp_path)
    kept = {key: inherited[key] for key in inherited if not key.startswith(("HF_", "TRANSFORMERS_"))}
    return kept | {"HF_ENDPOINT": hub_server.url, "HF_HOME": str(tmp_path / "hf")}
