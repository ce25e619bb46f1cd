"""Do the parts of a checkpoint belong together: schemas, tensors against configs, one step everywhere (no torch).

Nothing here trusts a manifest: a checkpoint whose bytes are as listed can still be put together wrongly.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_synthesis.checkpoint import layout
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance.inside import Inside
from parallel_synthesis.provenance.problems import Problem, ProblemKind
from parallel_synthesis.provenance.safetensors_header import TensorPlace, read_header
from parallel_synthesis.provenance.schema import parse_json, problems
from parallel_synthesis.provenance.torch_file import TensorLook, look
from parallel_synthesis.resources import resource

MERGE_META = "checkpoint_merge_meta.json"
OTHER_BACKBONE: ProblemKind = "backbone"
_SCHEMAS: Mapping[str, str] = {
    layout.CACHE_MAPPER_CONFIG: "cache_mapper_config",
    layout.CHECKPOINT_META: "checkpoint_meta",
    MERGE_META: "checkpoint_merge_meta",
    layout.RUN_ARGS: "run_args",
    layout.SUMMARY: "train_mixed_summary",
}
_JSON_LIMIT = 64 << 20
_FLOATS = ("F64", "F32", "F16", "BF16")
_FEATURES = {"both": 3, "length": 2, "num_agents": 2, "none": 1}
_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")
_MAPPER_KEYS = ("net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a release manifest says of the parts beside their bytes; None or empty where it says nothing."""

    mapper: Mapping[str, Any] = field(default_factory=dict)
    judger_lora: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None


def check_parts(
    inside: Inside,
    *,
    listed: Iterable[str] = (),
    listed_step: int | None = None,
    facts: Facts | None = None,
) -> list[Problem]:
    """Every problem of the parts that are there. Files that are absent are the manifest's business.

    listed: names in the directory's manifest; of every other safetensors file among them the header is checked.
    listed_step: global_step of that manifest. Reads JSON files, headers and the pickles' operations:
    some KiB, whatever the sizes.
    """
    looked = _Looked(inside, facts or Facts())
    documents = {name: looked.json(name, schema) for name, schema in _SCHEMAS.items() if inside.has(name)}
    if inside.has(layout.CACHE_MAPPER):
        looked.mapper(documents.get(layout.CACHE_MAPPER_CONFIG))
    if inside.has(layout.ADAPTER_MODEL) or inside.has(layout.ADAPTER_CONFIG):
        looked.adapter(documents.get(layout.CHECKPOINT_META))
    looked.identity(documents.get(layout.CHECKPOINT_META), listed_step)
    for name in listed:
        if name.endswith(".safetensors") and name != layout.ADAPTER_MODEL and inside.has(name):
            looked.header(name)
    return looked.found


def facts_of(document: Mapping[str, Any]) -> Facts:
    """The facts of a release manifest that was read."""
    return Facts(
        mapper=document.get("mapper") or {},
        judger_lora=document.get("judger_lora") or {},
        base_model=document.get("base_model"),
    )


class _Looked:
    """Collects problems while it looks at the parts of one directory."""

    def __init__(self, inside: Inside, facts: Facts) -> None:
        self._inside = inside
        self._facts = facts
        self.found: list[Problem] = []

    def say(
        self, path: str, kind: ProblemKind, detail: str, *, expected: Any = None, actual: Any = None
    ) -> None:
        self.found.append(Problem(path=path, kind=kind, detail=detail, expected=expected, actual=actual))

    def differs(
        self, path: str, what: str, expected: Any, actual: Any, *, kind: ProblemKind = "structure"
    ) -> None:
        if expected != actual:
            self.say(
                path, kind, f"{what}: expected {expected}, found {actual}", expected=expected, actual=actual
            )

    def json(self, name: str, schema: str | None) -> Any:
        """The document, None when it can not be used; what is wrong with it is noted."""
        raw = self._inside.read(name, limit=_JSON_LIMIT)
        if isinstance(raw, Problem):
            self._note(raw)
            return None
        try:
            document = parse_json(raw, name)
        except CheckpointError as error:
            self.say(name, "schema", str(error).removeprefix(f"{name}: "))
            return None
        wrong = problems(document, schema) if schema is not None else []
        for problem in wrong:
            self.say(name, "schema", problem)
        return None if wrong or not isinstance(document, dict) else document

    def header(self, name: str) -> Any:
        """The header of a safetensors file, None when it can not be read; what is wrong with it is noted."""
        header = self._opened(name, read_header)
        for problem in header.problems if header is not None else ():
            self.say(name, "structure", problem)
        return header

    def mapper(self, config: Mapping[str, Any] | None) -> None:
        name = layout.CACHE_MAPPER
        seen = self._opened(name, look)
        if seen is None:
            return
        for problem in seen.problems:
            self.say(name, "structure", problem)
        if not isinstance(seen.value, dict):
            if not seen.problems:
                self.say(name, "structure", "expected a state dict (name -> tensor)")
            return
        # The release has no config file: then these are its values.
        config = config or {"hidden_dim": 32, "metadata_features": "both"}
        for key, wanted in self._facts.mapper.items():
            if key in ("hidden_dim", "metadata_features"):
                self.differs(layout.CACHE_MAPPER_CONFIG, key, wanted, config[key])
        inputs = _FEATURES[config["metadata_features"]]
        hidden = config["hidden_dim"]
        shapes = dict(zip(_MAPPER_KEYS, ([hidden, inputs], [hidden], [4, hidden], [4]), strict=True))
        for key in sorted(shapes.keys() - seen.value.keys()):
            self.say(name, "structure", f"{key} is missing")
        for key, value in seen.value.items():
            shape = shapes.get(key)
            if shape is None:
                self.say(name, "structure", f"holds {str(key)[:80]!r}, which no cache mapper has")
            elif not isinstance(value, TensorLook):
                self.say(name, "structure", f"{key}: expected a tensor")
            else:
                self.differs(name, f"shape of {key}", shape, list(value.shape))
                self.differs(name, f"dtype of {key}", "F32", value.dtype)

    def adapter(self, meta: Mapping[str, Any] | None) -> None:
        header = self.header(layout.ADAPTER_MODEL)
        config = self.json(layout.ADAPTER_CONFIG, "adapter_config")
        if config is None:
            return
        self._plain_lora(config)
        facts = self._facts.judger_lora
        for key, named in (("rank", "r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout")):
            if key in facts:
                self.differs(layout.ADAPTER_CONFIG, named, facts[key], config.get(named, 0))
        if isinstance(facts.get("target_modules"), list) and isinstance(config["target_modules"], list):
            self.differs(
                layout.ADAPTER_CONFIG,
                "target_modules",
                sorted(facts["target_modules"]),
                sorted(config["target_modules"]),
            )
        if header is None or header.problems:
            return
        own = (meta or {}).get("base_model") or config.get("base_model_name_or_path")
        wanted = self._facts.base_model
        before = len(self.found)
        self._tensors(header.tensors, config, _backbone(wanted or own))
        if wanted is not None and own != wanted:
            self._foreign(own, wanted, before)

    def _plain_lora(self, config: Mapping[str, Any]) -> None:
        """What the schema can not say: JSON's readers know NaN, and variants of LoRA have tensors of their own."""
        for key in ("lora_alpha", "lora_dropout"):
            if isinstance(config.get(key), float) and not math.isfinite(config[key]):
                self.say(
                    layout.ADAPTER_CONFIG, "structure", f"{key} is {config[key]}; expected a finite number"
                )
        for key, plain in (("use_dora", False), ("bias", "none")):
            if config.get(key) not in (plain, None):
                detail = f"{key} is {str(config[key])[:40]!r}; expected {plain!r}: there are no tensors of such a LoRA"
                self.say(layout.ADAPTER_CONFIG, "structure", detail)

    def _foreign(self, own: Any, wanted: str, before: int) -> None:
        """An adapter of another name whose tensors have other widths too (a name alone may be a path to the same model)
        is one of another backbone: that is told in the place of every tensor."""
        told = self.found[before:]
        widths = [problem for problem in told if ": width of lora_" in problem.detail]
        if widths:
            del self.found[before:]
            self.say(
                layout.ADAPTER_CONFIG,
                OTHER_BACKBONE,
                f"is of {own or 'another backbone'}, not of {wanted}: {len(told)} differences in its tensors, the "
                f"first: {widths[0].detail}",
                expected=wanted,
                actual=own,
            )

    def _tensors(
        self,
        tensors: Mapping[str, TensorPlace],
        config: Mapping[str, Any],
        backbone: Mapping[str, Any] | None,
    ) -> None:
        name = layout.ADAPTER_MODEL
        factors: dict[str, dict[str, tuple[int, ...]]] = {}
        others: dict[str, TensorPlace] = {}
        for key, tensor in tensors.items():
            if tensor.dtype not in _FLOATS:
                self.say(
                    name, "structure", f"{key[:120]} is of {tensor.dtype}; expected floating-point weights"
                )
            match = _LORA.fullmatch(key)
            if match is None:
                others[key] = tensor
            else:
                factors.setdefault(match["module"], {})[match["factor"]] = tensor.shape
        if not factors:
            self.say(name, "structure", "holds no LoRA tensor")
        for module, pair in factors.items():
            if not _is_target(module, config["target_modules"]):
                self.say(
                    name, "structure", f"{module} is not among target_modules {config['target_modules']}"
                )
            self._pair(module, pair, _rank(module, config), backbone)
        self._layers(factors, config["target_modules"], backbone)
        self._embeddings(others, backbone)

    def _pair(
        self, module: str, pair: Mapping[str, tuple[int, ...]], rank: int, backbone: Mapping[str, Any] | None
    ) -> None:
        name = layout.ADAPTER_MODEL
        for factor, axis in (("A", 0), ("B", 1)):
            shape = pair.get(factor)
            if shape is None:
                self.say(name, "structure", f"{module}: lora_{factor} is missing")
            elif len(shape) != 2:
                self.say(
                    name, "structure", f"{module}: lora_{factor} has shape {list(shape)}; expected two axes"
                )
            else:
                self.differs(name, f"{module}: rank of lora_{factor}", rank, shape[axis])
                wanted = _sizes(module.rpartition(".")[2], backbone).get(factor)
                if wanted is not None:
                    self.differs(name, f"{module}: width of lora_{factor}", wanted, shape[1 - axis])

    def _layers(
        self,
        factors: Mapping[str, Mapping[str, tuple[int, ...]]],
        targets: Any,
        backbone: Mapping[str, Any] | None,
    ) -> None:
        """Every layer has the same modules with the same shapes; a known backbone says how many layers there are."""
        plain: dict[int, dict[str, Mapping[str, tuple[int, ...]]]] = {}
        for module, pair in factors.items():
            match = _LAYER.search(f".{module}")
            if match is not None:
                plain.setdefault(int(match[1]), {})[f".{module}"[match.end() :]] = pair
        if not plain:
            return
        known = backbone["num_hidden_layers"] if backbone is not None else max(plain) + 1
        missing = sorted(set(range(known)) - plain.keys())
        if missing:
            self.say(layout.ADAPTER_MODEL, "structure", f"no LoRA for layers {missing[:8]} of {known}")
        first = plain[min(plain)]
        for at, found in sorted(plain.items()):
            if at >= known:
                self.say(
                    layout.ADAPTER_MODEL, "structure", f"a LoRA for layer {at}; the backbone has {known}"
                )
            lacking = sorted(first.keys() - found.keys()) or sorted(found.keys() - first.keys())
            if lacking:
                detail = f"layer {at} differs from layer {min(plain)} in {', '.join(lacking)}"
                self.say(layout.ADAPTER_MODEL, "structure", detail)
            for key in sorted(first.keys() & found.keys()):
                if first[key] != found[key]:
                    detail = f"layer {at}: {key} has other shapes than in layer {min(plain)}"
                    self.say(layout.ADAPTER_MODEL, "structure", detail)
        if isinstance(targets, list):
            for target in targets:
                if not any(_is_target(module, [target]) for module in factors):
                    self.say(layout.ADAPTER_MODEL, "structure", f"no tensor for target module {target}")

    def _embeddings(self, others: Mapping[str, TensorPlace], backbone: Mapping[str, Any] | None) -> None:
        name = layout.ADAPTER_MODEL
        rows: dict[str, int] = {}
        for key, tensor in others.items():
            if re.search(r"\.(embed_tokens|lm_head)\.(?:.*\.)?weight$", f".{key}") and len(tensor.shape) == 2:
                rows[key] = tensor.shape[0]
                if backbone is not None:
                    self.differs(name, f"width of {key}", backbone["hidden_size"], tensor.shape[1])
            else:
                self.say(name, "structure", f"holds {key[:120]!r}, which is neither LoRA nor an embedding")
        wanted = self._facts.judger_lora.get("adapter_embedding_vocab_size")
        if wanted is not None and not rows:
            self.say(name, "structure", f"holds no embeddings; expected {wanted} vocabulary rows")
        for key, count in rows.items():
            self.differs(name, f"vocabulary rows of {key}", wanted or next(iter(rows.values())), count)

    def identity(self, meta: Mapping[str, Any] | None, listed_step: int | None) -> None:
        steps: dict[str, int] = {}
        if meta is not None:
            steps[layout.CHECKPOINT_META] = meta["global_step"]
        if listed_step is not None:
            steps["the manifest"] = listed_step
        named = layout.parse_step(self._inside.directory.name)
        milestone = layout.parse_milestone(self._inside.directory.name)
        if (
            named is None
            and milestone is not None
            and meta is not None
            and milestone[0] == meta.get("recipe")
        ):
            named = milestone[1]
        if named is not None:
            steps["the directory's name"] = named
        if self._inside.has(layout.TRAINING_STATE):
            state = self._opened(layout.TRAINING_STATE, look)
            for problem in state.problems if state is not None else ():
                self.say(layout.TRAINING_STATE, "structure", problem)
            if state is not None and isinstance(state.value, dict):
                step = state.value.get("global_step")
                if type(step) is int:
                    steps[layout.TRAINING_STATE] = step
                else:
                    self.say(layout.TRAINING_STATE, "structure", "holds no global_step")
        if len(set(steps.values())) > 1:
            told = ", ".join(f"{who} says {step}" for who, step in steps.items())
            self.say(
                layout.CHECKPOINT_META, "identity", f"the parts are not of one step: {told}", actual=steps
            )

    def _opened(self, name: str, read: Callable[[int], Any]) -> Any:
        fd = self._inside.open(name)
        if isinstance(fd, Problem):
            self._note(fd)
            return None
        try:
            return read(fd)
        except OSError as error:
            self.say(name, "unreadable", f"cannot be read: {error.strerror}")
            return None
        finally:
            os.close(fd)

    def _note(self, problem: Problem) -> None:
        self.found.append(problem)


def _is_target(module: str, targets: Any) -> bool:
    """PEFT's rule: a text is a pattern of the whole name, in a list each is a name or the end of one."""
    if isinstance(targets, str):
        try:
            return targets == "all-linear" or re.fullmatch(targets, module) is not None
        except re.error:
            return False
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _rank(module: str, config: Mapping[str, Any]) -> int:
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            return int(rank)
    return int(config["r"])


def _backbone(model: Any) -> Mapping[str, Any] | None:
    """Sizes of a backbone that manifests/backbones.json knows by name."""
    path = resource("manifests", "backbones.json")
    known: Mapping[str, Any] = parse_json(path.read_bytes(), str(path))["backbones"]
    return known.get(model) if isinstance(model, str) else None


def _sizes(projection: str, backbone: Mapping[str, Any] | None) -> Mapping[str, int]:
    """Input width (of lora_A) and output width (of lora_B) of an attention projection."""
    if backbone is None:
        return {}
    hidden = backbone["hidden_size"]
    queries = backbone["num_attention_heads"] * backbone["head_dim"]
    keys = backbone["num_key_value_heads"] * backbone["head_dim"]
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    if projection not in outputs:
        return {}
    return {"A": queries if projection == "o_proj" else hidden, "B": outputs[projection]}
