"""The only file that knows how transformers releases differ: cache argument and layers, rope, loading.

Shape legend: B batch, H key/value heads, T tokens, D head width.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import logging as transformers_logging

States = tuple[Tensor, Tensor]  # keys and values, each [B, H, T, D]


class PastLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer whose past is given, and which never copies more than attention needs.

    `past` gives the keys and values [1 or B, H, length, D] that come before the new ones, in order; it is
    called when the layer is reached, so that a mapped copy of the cache exists for one layer at a time. The
    new ones are kept in `new` when `record` is set.
    """

    def __init__(self, past: Callable[[], Sequence[States]], *, length: int, record: bool) -> None:
        super().__init__()
        self.is_initialized = True  # transformers takes an uninitialised layer for an empty one
        self._past = past
        self._length = length
        self._record = record
        self.new: States | None = None

    def get_seq_length(self) -> int:
        """Length of the past; right from the start, since masks and positions are made from it."""
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> States:
        """Past and new, joined along the sequence. Further arguments (rotary tables) are not needed."""
        if self._record:
            self.new = (key_states, value_states)
        batch = key_states.shape[0]
        past = [(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in self._past()]
        if not past:
            return key_states, value_states
        keys = torch.cat([*(k for k, _ in past), key_states], dim=-2)
        return keys, torch.cat([*(v for _, v in past), value_states], dim=-2)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer for generation: what it has seen lies in a buffer [B, H, capacity, D] that doubles when full.

    (The library's own layer copies all of the past at every token.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True  # transformers takes an uninitialised layer for an empty one
        self._length = 0
        self._buffers: list[Tensor] = []

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> States:
        """Takes the new ones in; returns all seen so far. Further arguments (rotary tables) are not needed."""
        begin, end = self._length, self._length + key_states.shape[-2]
        new = (key_states, value_states)
        if not self._buffers or end > self._buffers[0].shape[-2]:
            seen, self._buffers = self._buffers, []
            for part, states in enumerate(new):
                buffer = states.new_empty((*states.shape[:-2], max(2 * begin, end), states.shape[-1]))
                if seen:
                    buffer[..., :begin, :] = seen[part][..., :begin, :]
                self._buffers.append(buffer)
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[..., begin:end, :] = states
        self._length = end
        return self.states(slice(None), 0)

    def take(self, rows: Tensor) -> None:
        """Goes on with these rows of the batch, in this order; a row may be taken several times."""
        self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]

    def states(self, rows: slice, begin: int) -> States:
        """Keys and values of some rows, from position `begin` on: views."""
        keys, values = (buffer[rows, :, begin : self._length] for buffer in self._buffers)
        return keys, values


def make_cache(layers: Sequence[PastLayer | GrowingLayer]) -> Any:
    """A transformers cache of hand-made layers."""
    return Cache(layers=list(layers))


def cache_argument(base: nn.Module) -> str | None:
    """The name under which a transformer takes its cache (`cache` or `past_key_values`), or None."""
    names = inspect.signature(base.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def run_base(base: nn.Module, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
    """Final hidden states [B, T, hidden] of `ids` [B, T] at `positions` [B, T] behind what `cache` holds.

    No attention mask: what is left is the causal one, and padding on the right is never seen by a real token.
    """
    name = cache_argument(base)
    assert name is not None, "load_backbone refuses such a model"
    output = base(input_ids=ids, position_ids=positions, use_cache=True, **{name: cache})
    hidden: Tensor = output.last_hidden_state
    return hidden


def rotary_module(base: nn.Module) -> nn.Module | None:
    """The backbone's own rotary module, or None."""
    module = getattr(base, "rotary_emb", None)
    return module if isinstance(module, nn.Module) else None


def rope_type(rotary: nn.Module) -> str:
    """Kind of rope as transformers names it ("default", "yarn", ...), the same in all releases."""
    kind = getattr(rotary, "rope_type", None)
    return kind if isinstance(kind, str) else f"unknown ({kind!r})"


def rotary_tables(rotary: nn.Module, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D_rotary] of `positions` [T], pure rotations: YaRN's scaling is divided out."""
    like = torch.empty(1, dtype=dtype, device=positions.device)
    cos, sin = rotary(like, positions[None])
    scaling = getattr(rotary, "attention_scaling", 1.0)
    return cos[0] / scaling, sin[0] / scaling


@contextmanager
def quiet_attach() -> Iterator[None]:
    """PEFT reads a property that transformers 5 calls deprecated; that is between the two of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)
        yield


@contextmanager
def quiet_loading() -> Iterator[None]:
    """The library prints nothing: no progress bars. The caller's setting comes back afterwards.

    The one for .gguf files knows no setting, so what goes to stderr while loading is dropped; errors are raised,
    and log records go to the stream that their handler already holds.
    """
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
