"""The frozen backbone: loaded, checked against what the method is exact for, and never trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from parallel_synthesis.config import BackboneConfig
from parallel_synthesis.errors import BackboneError
from parallel_synthesis.model.lanes import cache_argument, quiet_loading, rope_type, rotary_module
from parallel_synthesis.model.source import Source, find_source, hub_problem
from parallel_synthesis.model.tokens import check_tokenizer, load_tokenizer

# The block-mask check of these is in the test suite and passes with every transformers release in use.
TESTED_ARCHITECTURES = ("gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "stablelm")
TESTED_ROPES = ("default", "linear", "llama3", "yarn")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen causal LM in eval mode with its tokenizer. `name` is the model as the config writes it.

    `resized_from` is the number of embedding rows before a longer tokenizer resized it, None when it was not.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    device: torch.device
    dtype: torch.dtype
    resized_from: int | None

    @property
    def base(self) -> nn.Module:
        """The transformer without its LM head."""
        base: nn.Module = self.model.base_model
        return base

    @property
    def layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @property
    def embedding_rows(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])


def resolve_device(device: str) -> torch.device:
    """The device by name; "auto" is CUDA where there is any, else the CPU. BackboneError if it is missing."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BackboneError(f"backbone.device = {device}: expected auto, cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise BackboneError(f"backbone.device = {device}: expected auto, cpu, cuda or cuda:N")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        index = found.index if found.index is not None else (torch.cuda.current_device() if count else 0)
        if index >= count:
            raise BackboneError(
                f"backbone.device = {device}: this machine has {count} CUDA devices; use --device cpu"
            )
        found = torch.device("cuda", index)
    return found


def load_backbone(
    config: BackboneConfig, *, device: str = "auto", embedding_rows: int | None = None
) -> Backbone:
    """The backbone of `config` on `device`, frozen and in eval mode.

    embedding_rows: those of the adapter that will be loaded; a backbone that is padded to more is cut to them, so
    that the loss is taken over the same vocabulary.

    A local path (directory, .gguf file, `package:PATH`) beats a Hub id and is read without any network. The
    dtype "auto" is bfloat16 on CUDA and float32 on a CPU. BackboneError for a backbone that is missing,
    incomplete, or not among those that the method is exact for.
    """
    place = resolve_device(device)
    automatic = torch.bfloat16 if place.type == "cuda" else torch.float32
    dtype = automatic if config.dtype == "auto" else _DTYPES[config.dtype]
    source = find_source(config.model, config.revision)
    with quiet_loading():
        model_config = _load_config(source)
        check_config(model_config, source.name)
        tokenizer = load_tokenizer(config.model, config.revision)
        check_tokenizer(tokenizer, source.name)
        model = _load_model(source, model_config, dtype=dtype, attention=config.attention, device=place)
    if place.type == "cpu":
        _own_memory(model)
    check_model(model, source.name)
    resized_from = _fit_embedding(model, len(tokenizer))
    if embedding_rows is not None:
        _cut_embedding(model, embedding_rows, tokens=len(tokenizer), name=source.name)
    model.requires_grad_(False)
    model.eval()
    return Backbone(
        model=model,
        tokenizer=tokenizer,
        name=config.model,
        revision=config.revision,
        device=place,
        dtype=dtype,
        resized_from=resized_from,
    )


def _load_config(source: Source) -> Any:
    try:
        return AutoConfig.from_pretrained(source.where, trust_remote_code=False, **source.arguments)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise hub_problem(source, error) or BackboneError(
            f"backbone {source.name}: its config cannot be loaded: {_first_line(error)}; "
            "expected a directory with config.json, a Hub id or a .gguf file"
        ) from error


def _load_model(
    source: Source, model_config: Any, *, dtype: torch.dtype, attention: str, device: torch.device
) -> Any:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source.where,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            output_loading_info=True,
            # Straight onto the GPU: else every process of a machine would first hold the weights on the host.
            device_map={"": device} if device.type == "cuda" else None,
            **source.arguments,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise hub_problem(source, error) or BackboneError(
            f"backbone {source.name}: its weights cannot be loaded (attention {attention}): "
            f"{_first_line(error)}; "
            "check the files, backbone.attention and the installed packages"
        ) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise BackboneError(
            f"backbone {source.name}: {len(missing)} weights are missing, e.g. {missing[0]}; "
            "expected all of them, they would be random: use a complete copy"
        )
    return model.to(device)


def check_config(config: Any, name: str) -> None:
    """BackboneError for a model whose config already says that the method is not exact for it."""
    kind = config.model_type
    if kind not in TESTED_ARCHITECTURES:
        raise BackboneError(
            f"backbone {name}: architecture {kind!r} is not tested; "
            f"expected one of {', '.join(TESTED_ARCHITECTURES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise BackboneError(
            f"backbone {name}: quantised weights are not supported; expected plain float weights: "
            "use the unquantised model"
        )
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        window = getattr(config, "sliding_window", None)
        used = window is not None and getattr(config, "use_sliding_window", True)
        layer_types = ["sliding_attention"] if used else []
    other = sorted(set(layer_types) - {"full_attention"})
    if other:
        raise BackboneError(
            f"backbone {name}: layers of type {', '.join(other)} (sliding window = "
            f"{getattr(config, 'sliding_window', None)}) do not see a whole branch cache; "
            "expected full attention in every layer: use another backbone"
        )


def check_model(model: Any, name: str) -> None:
    """BackboneError for a model without a rope that can be re-rotated exactly, or without a cache."""
    base = model.base_model
    rotary = rotary_module(base)
    if rotary is None:
        raise BackboneError(
            f"backbone {name}: no rotary position embedding; branch caches cannot be moved to position 0"
        )
    kind = rope_type(rotary)
    if kind not in TESTED_ROPES:
        raise BackboneError(
            f"backbone {name}: rope type {kind!r} is not supported, its frequencies change with the length; "
            f"expected one of {', '.join(TESTED_ROPES)}"
        )
    if cache_argument(base) is None or model.get_output_embeddings() is None:
        raise BackboneError(f"backbone {name}: expected a causal LM with a key/value cache and an LM head")


def _own_memory(model: Any) -> None:
    """Copies weights that are a view of their file: a file that changes under a run must not change the run."""
    with torch.no_grad():
        for part in (*model.parameters(), *model.buffers()):
            part.data = part.data.clone()


def _fit_embedding(model: Any, tokens: int) -> int | None:
    """Resizes the embedding for a longer tokenizer; the old number of rows, or None if it was long enough.

    The new rows are the mean of the old ones: the same in every process, with no random number drawn.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    if tokens <= rows:
        return None
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(
        devices=devices
    ):  # transformers initialises the rows before they are filled here
        model.resize_token_embeddings(tokens, mean_resizing=False)
    with torch.no_grad():
        weights = {
            id(part.weight): part.weight
            for part in (model.get_input_embeddings(), model.get_output_embeddings())
        }
        for weight in weights.values():
            weight[rows:] = weight[:rows].mean(0, dtype=torch.float32).to(weight.dtype)
    return rows


def _cut_embedding(model: Any, rows: int, *, tokens: int, name: str) -> None:
    """Cuts a padded embedding and its head to `rows`; a tied pair stays one tensor, an untied one two.

    Not by resize_token_embeddings, which may tie the two anew. More rows than there are: the loader of the
    adapter compares, and refuses.
    """
    if rows < tokens:
        raise BackboneError(
            f"backbone {name}: the adapter has {rows} embedding rows, its tokenizer {tokens} tokens; "
            "expected a row a token: use the backbone and tokenizer the adapter was trained on"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if rows >= int(embedding.weight.shape[0]):
        return
    weights = {id(part.weight): part.weight for part in (embedding, head)}
    # Copies: a view would keep the whole alive.
    cut = {key: nn.Parameter(weight.detach()[:rows].clone()) for key, weight in weights.items()}
    for part in (embedding, head):
        part.weight = cut[id(part.weight)]
        if getattr(part, "bias", None) is not None:
            part.bias = nn.Parameter(part.bias.detach()[:rows].clone())
    embedding.num_embeddings = head.out_features = model.config.vocab_size = rows
    if embedding.padding_idx is not None and embedding.padding_idx >= rows:
        embedding.padding_idx = None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
