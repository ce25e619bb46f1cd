"""What has changed between a run's record and this moment, and what each change can do to the result (no
torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["changes the data or the loss", "breaks bit equality", "harmless"]
DATA: Kind = "changes the data or the loss"
BITS: Kind = "breaks bit equality"
HARMLESS: Kind = "harmless"

# Config fields, by section or by full name; what is not listed changes the data or the loss.
_HARMLESS_SECTIONS = ("checkpoint", "log", "evaluate")
_HARMLESS_FIELDS = ("run.max_steps", "run.epochs", "data.root", "data.files", "data.split", "backbone.model")
_BIT_FIELDS = ("backbone.threads_per_rank", "backbone.attention", "backbone.deterministic", "backbone.device")
# Versions that compute, shuffle or tokenise; the others only read and write.
_BIT_PACKAGES = ("torch", "transformers", "peft", "tokenizers", "numpy", "parallel-synthesis")
# threads_per_rank rules the threads, whatever these say; the visible devices are only a numbering.
RULED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference. `name` is what `--accept-drift` takes."""

    name: str
    saved: str
    now: str
    kind: Kind


def compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Drift]:
    """All differences between two run records (run_args.json), the gravest first.

    Data files and the backbone count by their content, not by their paths.
    """
    found = [*_config(saved, now), *_data(saved, now), *_backbone(saved, now), *_environment(saved, now)]
    if saved.get("recipe_sha256") != now.get("recipe_sha256"):
        found.append(_drift("recipe", saved.get("recipe_sha256"), now.get("recipe_sha256"), HARMLESS))
    gravity: Sequence[Kind] = (DATA, BITS, HARMLESS)
    return sorted(found, key=lambda drift: gravity.index(drift.kind))


def refused(found: Sequence[Drift], accepted: Sequence[str]) -> list[Drift]:
    """Those that stop a resume: not harmless and not accepted by name."""
    return [drift for drift in found if drift.kind != HARMLESS and drift.name not in accepted]


def _config(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Drift]:
    for section, fields in now["config"].items():
        if not isinstance(fields, Mapping):
            continue
        before = saved["config"].get(section, {})
        for field, value in fields.items():
            name = f"{section}.{field}"
            if field not in before or before[field] != value:
                kind = DATA
                if section in _HARMLESS_SECTIONS or name in _HARMLESS_FIELDS:
                    kind = HARMLESS
                elif name in _BIT_FIELDS:
                    kind = BITS
                yield _drift(name, before.get(field), value, kind)


def _data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Drift]:
    for task in sorted(saved["data"].keys() | now["data"].keys()):
        before, after = saved["data"].get(task, {}), now["data"].get(task, {})
        for key in ("sha256", "rows", "bad_rows_sha256"):
            # A gzip file and its text are the same data.
            one = before.get("unpacked_sha256") or before.get(key) if key == "sha256" else before.get(key)
            other = after.get("unpacked_sha256") or after.get(key) if key == "sha256" else after.get(key)
            if one != other:
                yield _drift(f"data.{task}", f"{key} {one}", f"{key} {other}", DATA)
                break


def _backbone(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Drift]:
    before, after = saved["backbone"], now["backbone"]
    files = sorted(before.get("files", {}).keys() | after.get("files", {}).keys())
    changed = [
        name for name in files if before.get("files", {}).get(name) != after.get("files", {}).get(name)
    ]
    for label, wanted in (("backbone", False), ("tokenizer", True)):
        names = [name for name in changed if name.startswith(_TOKENIZER_FILES) == wanted]
        if names:
            one = {name: before.get("files", {}).get(name) for name in names}
            other = {name: after.get("files", {}).get(name) for name in names}
            yield _drift(label, _files(one), _files(other), DATA)
    for key in ("revision", "resized_from"):
        if before.get(key) != after.get(key):
            yield _drift(f"backbone.{key}", before.get(key), after.get(key), DATA)
    if before.get("dtype") != after.get("dtype"):
        yield _drift("dtype", before.get("dtype"), after.get("dtype"), DATA)
    if before.get("device") != after.get("device"):
        yield _drift("device", before.get("device"), after.get("device"), BITS)


def _environment(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Drift]:
    before, after = saved["environment"], now["environment"]
    on_cpu = now["backbone"].get("device") == "cpu"
    for key in sorted(before.keys() | after.keys()):
        one, other = before.get(key), after.get(key)
        if one == other:
            continue
        if key in ("packages", "variables"):
            one, other = one or {}, other or {}
            for name in sorted(one.keys() | other.keys()):
                if one.get(name) != other.get(name):
                    yield _drift(name, one.get(name), other.get(name), _environment_kind(key, name))
        else:
            yield _drift(
                key, one, other, BITS if key == "machine" or (key == "cpu_model" and on_cpu) else HARMLESS
            )


def _environment_kind(group: str, name: str) -> Kind:
    if group == "packages":
        return BITS if name in _BIT_PACKAGES else HARMLESS
    return HARMLESS if name in RULED_VARIABLES else BITS


def _drift(name: str, saved: Any, now: Any, kind: Kind) -> Drift:
    return Drift(name=name, saved=_short(saved), now=_short(now), kind=kind)


def _files(digests: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {(digest or 'none')[:12]}" for name, digest in digests.items())


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
