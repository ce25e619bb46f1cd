"""What a merge does with whole LoRA deltas, scale * B @ A, without ever building one: concat, svd, and how far an
average of the factors is from the average of the deltas. numpy in fp64, one module at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel_synthesis.checkpoint.merge_average import count_nonfinite, from_bytes, to_bytes
from parallel_synthesis.checkpoint.merge_plan import MergeInput, MergeOptions, lora_modules
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.hashing import Bytes

Matrix = npt.NDArray[np.float64]
Term = tuple[float, Matrix, Matrix]  # c, B [out, r], A [r, in]: the matrix c * B @ A
LARGE_GAP = 0.1  # relative; above it a factor-wise average is a visibly different function


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A relative Frobenius norm over all modules together, and the largest of a single module."""

    overall: float
    worst: float
    worst_module: str | None


def factor(one: MergeInput, name: str) -> Matrix:
    """A 2-dimensional tensor of an input in fp64."""
    entry = one.tensors.entries[name]
    return from_bytes(one.tensors.tensor(name), entry.dtype).astype(np.float64).reshape(entry.shape)


def average_gap(inputs: Sequence[MergeInput], options: MergeOptions) -> Difference:
    """How far (sum w B)(sum w A) is from sum w B A, relative to the latter.

    For weights that sum to 1 and one scale the difference is -sum over pairs of w_i w_j (B_i - B_j)(A_i - A_j), so
    nothing cancels; norms come from r x r Gram matrices. Modules that are not linear, or not in all inputs, are
    left out.
    """
    scales = [one.scale for one in inputs]
    paired = abs(sum(one.weight for one in inputs) - 1) < 1e-9 and len(set(scales)) == 1
    differences: dict[str, tuple[float, float]] = {}
    for module, sides in lora_modules(inputs[0].tensors.entries).items():
        names = [sides.get("A", ""), sides.get("B", "")]
        found = [one.tensors.entries.get(name) for one in inputs for name in names]
        if any(entry is None or len(entry.shape) != 2 for entry in found):
            continue
        pairs = [(factor(one, names[1]), factor(one, names[0])) for one in inputs]
        deltas = [
            (one.weight * scale, b, a)
            for one, scale, (b, a) in zip(inputs, scales, pairs)
        ]  # fmt: skip
        if paired:
            difference = [
                (inputs[i].weight * inputs[j].weight * scales[0], pairs[i][0] - pairs[j][0], pairs[i][1] - pairs[j][1])
                for i in range(len(inputs))
                for j in range(i)
            ]  # fmt: skip
        else:
            mean_b = sum(one.weight * b for one, (b, _) in zip(inputs, pairs))
            mean_a = sum(one.weight * a for one, (_, a) in zip(inputs, pairs))
            averaged: Any = (scales[options.config_from], mean_b, mean_a)
            difference = [averaged, *((-c, b, a) for c, b, a in deltas)]
        differences[module] = (_norm(difference), _norm(deltas))
    return summarise(differences)


def summarise(differences: dict[str, tuple[float, float]]) -> Difference:
    """From (norm of the difference, norm of what it is relative to) of each module."""
    relative = {module: _ratio(part, whole) for module, (part, whole) in differences.items()}
    worst = max(relative, key=lambda module: relative[module], default=None)
    part = sum(part**2 for part, _ in differences.values()) ** 0.5
    whole = sum(whole**2 for _, whole in differences.values()) ** 0.5
    return Difference(
        overall=_ratio(part, whole), worst=relative[worst] if worst else 0.0, worst_module=worst
    )


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return float("inf") if part else 0.0


def _norm(terms: Sequence[Term]) -> float:
    """Frobenius norm of a sum of c * B @ A: <B_i A_i, B_j A_j> = sum((B_i^T B_j) * (A_i A_j^T))."""
    total = 0.0
    with np.errstate(all="ignore"):  # an inf or nan of an input is reported by name when it is merged
        for c_i, b_i, a_i in terms:
            for c_j, b_j, a_j in terms:
                total += c_i * c_j * float(np.sum((b_i.T @ b_j) * (a_i @ a_j.T)))
    return math.sqrt(max(total, 0.0))


class Stacked:
    """The factors of method concat or svd, module by module, with scale 1: their config has alpha = r.

    rank: of every module of the result. errors: of the svd, once its modules have been asked for.
    """

    def __init__(self, inputs: Sequence[MergeInput], options: MergeOptions) -> None:
        self._inputs = inputs
        self._options = options
        self._ready: dict[str, Bytes] = {}
        self.stacked_rank = int(sum(one.config["r"] for one in inputs))
        self.rank = self.stacked_rank if options.rank is None else options.rank
        self.modules = lora_modules({name for one in inputs for name in one.tensors.entries})
        self.errors: dict[str, tuple[float, float]] = {}

    def shape(self, side: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the merged factor, from that of an input's."""
        return (self.rank, shape[1]) if side == "A" else (shape[0], self.rank)

    def tensor(self, module: str, side: str, weights: Sequence[float | None]) -> Bytes:
        """Bytes of the merged factor in the first input's dtype. weights: None for an input without the module."""
        names = self.modules[module]
        if names[side] not in self._ready:
            self._compute(module, weights)
        return self._ready.pop(names[side])

    def _compute(self, module: str, weights: Sequence[float | None]) -> None:
        names = self.modules[module]
        having = [(one, w) for one, w in zip(self._inputs, weights) if w is not None]
        for one, _ in having:
            self._check_finite(one, names)
        # The weight and the input's own scale go into B, rounded once to its dtype; A is as it was.
        b = np.concatenate([w * one.scale * factor(one, names["B"]) for one, w in having], axis=1)
        a = np.concatenate([factor(one, names["A"]) for one, _ in having], axis=0)
        if self._options.method == "svd":
            b, a = self._truncated(module, b, a)
        b = np.pad(b, ((0, 0), (0, self.rank - b.shape[1])))
        a = np.pad(a, ((0, self.rank - a.shape[0]), (0, 0)))
        entries = having[0][0].tensors.entries
        self._ready[names["A"]] = to_bytes(a, entries[names["A"]].dtype)
        self._ready[names["B"]] = to_bytes(b, entries[names["B"]].dtype)

    def _check_finite(self, one: MergeInput, names: Mapping[str, str]) -> None:
        """An svd of an inf or nan has no meaning; a stack of them only when the user wants it."""
        if self._options.allow_nonfinite and self._options.method != "svd":
            return
        for name in names.values():
            if count_nonfinite(one.tensors.tensor(name), one.tensors.entries[name].dtype):
                raise CheckpointError(
                    f"{name} has inf or nan in {one.label}; nothing was written; use a checkpoint whose weights "
                    f"are finite"
                )

    def _truncated(self, module: str, b: Matrix, a: Matrix) -> tuple[Matrix, Matrix]:
        """The best factors of the wanted rank: QR of both, an SVD of the small core (Eckart-Young)."""
        q_b, r_b = np.linalg.qr(b)
        q_a, r_a = np.linalg.qr(a.T)
        left, values, right = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
        # An SVD is free in its signs; with the largest entry of each left vector positive there is one answer.
        signs = np.sign(left[np.argmax(np.abs(left), axis=0), np.arange(left.shape[1])])
        signs[signs == 0] = 1
        kept = slice(0, self.rank)
        root = np.sqrt(values[kept])
        self.errors[module] = (
            float(np.sqrt(np.sum(values[self.rank :] ** 2))),
            float(np.sqrt(np.sum(values**2))),
        )
        return (q_b @ (left * signs)[:, kept]) * root, ((right.T * signs)[:, kept] * root).T @ q_a.T
