"""The optimizer's part of a training_state.pt: moments for every parameter, of its shape (no torch)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel_synthesis.checkpoint.plain_values import is_count, is_small, is_whole, shown
from parallel_synthesis.provenance.torch_file import TensorLook

_MOMENTS = ("exp_avg", "exp_avg_sq")
_FACTOR = re.compile(r"\.layers\.([0-9]+)\..*\.([qkvo]_proj)\.lora_([AB])\b")
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Shapes of what the components hold: the mapper's parameters in their order, the LoRA's by their names."""

    mapper: Sequence[Shape]
    lora: Mapping[str, Shape]


def optimizer_problems(optimizer: Any, trained: Trained | None, updates: Any) -> Iterator[str]:
    """Moments of another number of parameters, or of other shapes, would be taken for those of the wrong ones."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    moments = optimizer.get("state") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list | tuple) or not isinstance(moments, dict):
        yield "optimizer_state: expected a dict with state and param_groups"
        return
    numbers: list[int] = []
    for at, group in enumerate(groups):
        where = f"optimizer_state.param_groups[{at}]"
        given = group.get("params") if isinstance(group, dict) else None
        if not isinstance(given, list | tuple) or not all(map(is_whole, given)):
            yield f"{where}.params: expected the numbers of its parameters, found {shown(given)}"
            return
        numbers += given
        yield from _group_problems(group, where)
    if numbers != list(range(len(numbers))):
        yield f"optimizer_state.param_groups: expected the parameters 0 to {len(numbers) - 1} in order"
        return
    foreign = [key for key in moments if not is_whole(key) or key >= len(numbers)]
    if foreign:
        yield f"optimizer_state.state: holds moments of {shown(foreign[0])}, which is no parameter of its groups"
    if not moments and (updates == 0 or not is_whole(updates)):  # before the first update there are none
        found: list[Shape | None] = []
    else:
        if updates == 0:
            yield "optimizer_state.state: holds moments, after 0 updates"
        found = []
        for number in numbers:
            yield from _moment_problems(moments.get(number), number)
            found.append(_shape(moments.get(number)))
    if trained is not None:
        yield from _shape_problems(len(numbers), found, trained)


def _group_problems(group: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in ("lr", "eps", "weight_decay"):
        value = group.get(name, 0)
        if not isinstance(value, TensorLook) and not is_count(value):
            yield f"{where}.{name}: expected a finite number of at least 0, found {shown(value)}"
    betas = group.get("betas", ())
    if not isinstance(betas, list | tuple) or not all(is_count(beta) and beta < 1 for beta in betas):
        yield f"{where}.betas: expected two numbers below 1, found {shown(betas)}"
    if not is_small([value for name, value in group.items() if name != "params"]):
        yield f"{where}: holds more than AdamW's settings"


def _moment_problems(kept: Any, number: int) -> Iterator[str]:
    where = f"optimizer_state.state[{number}]"
    if not isinstance(kept, dict):
        yield f"{where}: missing; expected the moments of every parameter"
        return
    if not is_small(kept):
        yield f"{where}: holds more than moments"
    step = kept.get("step")
    if not (
        isinstance(step, TensorLook) and step.dtype == "F32" and math.prod(step.shape) == 1
    ) and not is_count(step):
        yield f"{where}.step: expected a number, found {shown(step)}"
    for name in _MOMENTS:
        part = kept.get(name)
        if not isinstance(part, TensorLook) or part.dtype != "F32":
            yield f"{where}.{name}: expected a tensor of F32, found {shown(part)}"
    shapes = {value.shape for name, value in kept.items() if isinstance(value, TensorLook) and name != "step"}
    if len(shapes) > 1:
        yield f"{where}: its moments have the shapes {sorted(shapes)[:4]}"


def _shape(kept: Any) -> Shape | None:
    part = kept.get("exp_avg") if isinstance(kept, dict) else None
    return part.shape if isinstance(part, TensorLook) else None


def _shape_problems(count: int, found: Sequence[Shape | None], trained: Trained) -> Iterator[str]:
    mapper, lora = list(trained.mapper), list(trained.lora.values())
    choices = [(mapper, True), (mapper, False), ([], True)]  # both, mapper_only, lora_only
    fitting = [(first, rest) for first, rest in choices if len(first) + len(lora) * rest == count]
    if not fitting:
        yield f"optimizer_state: is of {count} parameters; the mapper has {len(mapper)}, the LoRA {len(lora)}"
        return
    # A moment that is missing was told, and fits anything.
    order = _in_order(trained.lora)
    for first, rest in fitting:
        wanted: Sequence[Shape] = [*first, *(order or ())] if rest else first
        known = len(first) if rest and order is None else count
        same = all(one in (None, other) for one, other in zip(found[:known], wanted[:known], strict=False))
        others = Counter(shape for shape in found[known:] if shape is not None)
        if same and not others - Counter(lora if rest else ()):
            return
    if found:
        yield "optimizer_state: its moments have other shapes than the parameters of the mapper and the LoRA"


def _in_order(lora: Mapping[str, Shape]) -> list[Shape] | None:
    """Shapes in the model's own order: by layer, q, k, v, o, A before B. None where other modules have a LoRA too."""
    matches = [_FACTOR.search(name) for name in lora]
    if not all(matches):
        return None
    keys = [(int(match[1]), "qkvo".index(match[2][0]), match[3]) for match in matches if match is not None]
    return [shape for _, shape in sorted(zip(keys, lora.values(), strict=True))]
