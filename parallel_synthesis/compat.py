"""The reference implementation's flags and file layouts, mapped onto our config. Nothing else knows their names.

Source: formats.md, "`parallel-synthesis-train` flags" and "Training directory". A flag is mapped onto a field, has
its own meaning (a directory, a step), or is said by name to have none here; none is passed over in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from parallel_synthesis.recipe import BROWSECOMP, sections
from parallel_synthesis.values import nearest, to_field

RECIPE_NAME = "mixed_train"  # of a run whose settings came as flags; names its milestones
STEP_CHECKPOINTS, LATEST = "step_checkpoints", "latest"
Kind = Literal["text", "names", "whole", "number", "switch"]


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag. target: our `section.field`, None when it has no counterpart.

    unset: values up to 0 mean "not set". least: smaller values mean this one. why: what is said of a flag without
    a counterpart. refused: it would change the result, so a run with it is not begun.
    """

    kind: Kind = "text"
    target: str | None = None
    unset: bool = False
    least: int | None = None
    why: str = ""
    refused: bool = False


FLAGS: Mapping[str, Flag] = {
    "method": Flag(target="run.method"),
    "model_name": Flag(target="backbone.model"),
    "tasks": Flag(kind="names", target="data.tasks"),
    "train_split": Flag(target="data.split"),
    "train_samples_per_task": Flag(kind="whole", target="data.max_rows", unset=True),
    "browsecomp_textmas_data_file": Flag(target=f"data.files.{BROWSECOMP}"),
    "device": Flag(target="backbone.device"),
    "seed": Flag(kind="whole", target="run.seed"),
    "think": Flag(kind="switch", target="workers.think"),
    "dist_backend": Flag(why="the backend follows from the device: NCCL on CUDA, gloo on a CPU"),
    "generate_bs": Flag(kind="whole", target="data.batch_size"),
    "max_new_tokens": Flag(kind="whole", target="workers.max_new_tokens"),
    "temperature": Flag(kind="number", target="workers.temperature"),
    "top_p": Flag(kind="number", target="workers.top_p"),
    "attn_implementation": Flag(target="backbone.attention"),
    "num_epochs": Flag(kind="whole", target="run.epochs"),
    "steps_per_epoch": Flag(kind="whole", target="run.steps_per_epoch", unset=True),
    "learning_rate": Flag(kind="number", target="optim.learning_rate"),
    "weight_decay": Flag(kind="number", target="optim.weight_decay"),
    "log_every_steps": Flag(kind="whole", target="log.every", least=1),
    "parallel_kv_train_components": Flag(target="run.components"),
    "parallel_kv_mapper_hidden_dim": Flag(kind="whole", target="mapper.hidden_dim"),
    "parallel_kv_mapper_metadata_features": Flag(target="mapper.metadata_features"),
    "parallel_kv_num_parallel_agents": Flag(kind="whole", target="workers.count"),
    "parallel_kv_lora_r": Flag(kind="whole", target="lora.r"),
    "parallel_kv_lora_alpha": Flag(kind="whole", target="lora.alpha"),
    "parallel_kv_lora_dropout": Flag(kind="number", target="lora.dropout"),
    "parallel_kv_target_position_logits": Flag(
        kind="switch", why="logits are always computed at the target positions alone, with the same loss"
    ),
    "parallel_kv_target_position_logit_chunk_size": Flag(
        kind="whole", why="the size of a chunk of logits is chosen here; the loss does not depend on it"
    ),
    "parallel_kv_skip_train_if_total_tokens_exceed": Flag(
        kind="whole", target="guards.total_tokens", least=-1
    ),
    "parallel_kv_skip_train_if_live_tokens_exceed": Flag(kind="whole", target="guards.live_tokens", least=-1),
    "parallel_kv_skip_train_if_attention_area_exceed": Flag(
        kind="whole", target="guards.attention_area", least=-1
    ),
    "parallel_kv_save_dir": Flag(),
    "parallel_kv_load_dir": Flag(),
    "resume_from_global_step": Flag(kind="whole", unset=True),
    "parallel_kv_save_every_steps": Flag(kind="whole", target="checkpoint.every", least=0),
    "run_name": Flag(why="a run is named by its directory, --parallel_kv_save_dir"),
    "output_root": Flag(why="everything of a run lies in its directory, --parallel_kv_save_dir"),
    "fixed_parallel_kv_cache_max_tokens_per_text": Flag(
        kind="whole",
        unset=True,
        refused=True,
        why="texts are never cut here; guards.prefill_tokens skips what is too long",
    ),
    "fixed_parallel_kv_skip_train_if_cache_total_prefill_tokens_exceed": Flag(
        kind="whole", target="guards.prefill_tokens", least=-1
    ),
}
_OURS = frozenset({"parallel_kv_save_dir", "parallel_kv_load_dir", "resume_from_global_step"})
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What flags say. fields: `section.field` -> value (None: explicitly not set).

    warnings: flags without a counterpart, one sentence each. problems: those that can not be heeded.
    """

    fields: Mapping[str, Any]
    save_dir: str | None = None
    load_dir: str | None = None
    step: int | None = None
    warnings: Sequence[str] = ()
    problems: Sequence[str] = ()

    def assignments(self) -> list[str]:
        """The fields as `--set` takes them."""
        return [f"{name}={_toml(value)}" for name, value in self.fields.items()]

    def sections(self) -> dict[str, dict[str, Any]]:
        """The fields as a recipe's tables."""
        tables: dict[str, dict[str, Any]] = {}
        for name, value in self.fields.items():
            section, key, *inner = name.split(".", 2)
            table = tables.setdefault(section, {})
            if inner:
                table.setdefault(key, {})[inner[0]] = value
            else:
                table[key] = value
        return tables


@dataclass(slots=True, kw_only=True)
class Words:
    """A command line taken apart. flags: the reference's, by name; own: our options' words, in order."""

    flags: dict[str, Any] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def take_apart(words: Sequence[str], *, options: Mapping[str, bool]) -> Words:
    """Separates the reference's flags from our own options, in any order, `--x v` and `--x=v`.

    options: our own, with True for those that take a value; an option of both (`--device`) means the same in both.
    A word that is neither is a problem that names what may have been meant.
    """
    found = Words()
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.partition("=")
        key, negated = _flag_name(name)
        if word.startswith("--") and key in FLAGS:
            given = [text] if equals else []
            kind = FLAGS[key].kind
            while (
                not equals and waiting and not waiting[0].startswith("--") and _takes(kind, given, waiting[0])
            ):
                given.append(waiting.pop(0))
            if negated:
                given = ["false"]
            if not given and kind != "switch":
                found.problems.append(f"{name}: a value is missing")
            else:
                found.flags[key] = given if kind == "names" else given[0] if given else True
        elif name in options:
            found.own.append(word)
            if options[name] and not equals:
                if not waiting:
                    found.problems.append(f"{name}: a value is missing")
                found.own += waiting[:1]
                del waiting[:1]
        else:
            known = [f"--{flag}" for flag in FLAGS] + sorted(options)
            found.problems.append(f"{name}: no such flag{nearest(name, known)}")
            while name.startswith("--") and waiting and not waiting[0].startswith("--"):
                del waiting[0]  # its values: one complaint is enough
    return found


def _flag_name(word: str) -> tuple[str, bool]:
    """A flag's name, and True for the `--no-` form of a switch."""
    name = word.removeprefix("--").replace("-", "_")
    positive = name.removeprefix("no_")
    if positive != name and positive in FLAGS and FLAGS[positive].kind == "switch":
        return positive, True
    return name, False


def _takes(kind: Kind, given: Sequence[str], word: str) -> bool:
    if kind == "names":
        return True
    return not given and (kind != "switch" or word.lower() in _TRUTH)


def settings(flags: Mapping[str, Any], *, recorded: bool = False) -> Settings:
    """Maps flags onto our fields. flags: name -> the text as typed, or a value of the reference's run_args.json.

    recorded: the flags are a record, where null is "not given" and foreign names are said, not refused.
    """
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    warnings: list[str] = []
    problems: list[str] = []
    types = sections()
    for name, given in flags.items():
        flag = FLAGS.get(name)
        if flag is None:
            text = f"{name} = {given!r}: not a flag that is known here"
            if given not in (None, False, "", [], {}):
                (warnings if recorded else problems).append(f"{text}; it has no effect")
            continue
        if given is None:
            continue
        value, expected = _value(flag, given)
        if expected is not None:
            problems.append(f"--{name} {given}: expected {expected}")
        elif name in _OURS:
            own[name] = value
        elif flag.target is not None:
            # Here, where the flag's name is known: later it would be told of as a --set that nobody typed.
            expected = _unfit(flag.target, value, types)
            if expected is not None:
                problems.append(f"--{name} {given}: expected {expected}")
            else:
                fields[flag.target] = value
        elif flag.refused and value is not None:
            problems.append(f"--{name} {given}: {flag.why}; leave it out")
        elif not flag.refused and not recorded:
            warnings.append(f"--{name} has no effect: {flag.why}")
    if fields.get("data.max_rows") is not None:
        warnings.append(
            f"--train_samples_per_task: the first {fields['data.max_rows']} valid rows of each task"
        )
    return Settings(
        fields=fields,
        save_dir=own.get("parallel_kv_save_dir"),
        load_dir=own.get("parallel_kv_load_dir"),
        step=own.get("resume_from_global_step"),
        warnings=warnings,
        problems=problems,
    )


def _unfit(target: str, value: Any, types: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What a field expects, when it is something else than the value."""
    section, key, *inner = target.split(".", 2)
    return None if value is None else to_field(value, str if inner else types[section][key])[1]


def _value(flag: Flag, given: Any) -> tuple[Any, str | None]:
    """(the value as our field holds it, None), or (None, what was expected)."""
    if flag.kind == "text":
        return (given, None) if isinstance(given, str) and given else (None, "a text")
    if flag.kind == "names":
        names = given if isinstance(given, list) else [given]
        if not all(isinstance(name, str) for name in names):
            return None, "names, with spaces or commas between them"
        return [part for name in names for part in name.replace(",", " ").split()], None
    if flag.kind == "switch":
        truth = given if isinstance(given, bool) else _TRUTH.get(str(given).lower())
        return (None, "true or false") if truth is None else (truth, None)
    if flag.kind == "number":
        number = _number(given)
        return (None, "a finite number") if number is None else (number, None)
    whole = _whole(given)
    if whole is None:
        return None, "a whole number"
    if flag.unset and whole <= 0:
        return None, None
    return whole if flag.least is None else max(flag.least, whole), None


def _number(given: Any) -> float | None:
    try:
        number = float("nan" if isinstance(given, bool) else given)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole(given: Any) -> int | None:
    """A whole number, also when it is written as 64.0."""
    number = _number(given)
    if number is None or not number.is_integer():
        return None
    return (
        int(number)
        if isinstance(given, float) or "." in str(given) or "e" in str(given).lower()
        else int(given)
    )


def _toml(value: Any) -> str:
    """JSON's scalars and arrays are TOML's; `none` is what --set takes for a field that is not set."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def is_reference_record(record: Any) -> bool:
    """run_args.json of the reference: its flags as one flat object, where ours has a config."""
    return isinstance(record, Mapping) and "schema_version" not in record and "config" not in record


def save_directory(fields: Mapping[str, Any], *, model: str, tasks: Sequence[str], now: str) -> str:
    """Where a run without --parallel_kv_save_dir goes. now: YYYYmmdd_HHMMSS."""
    method = fields.get("run.method", "fixed_parallel_kv")
    return f"checkpoints/mixed_train_{method}_{'-'.join(tasks)}_{model.replace('/', '-')}_{now}"
