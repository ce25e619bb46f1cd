"""A recipe file plus overrides becomes a validated config; every problem is found before any is reported.

Precedence: flag (its own flag, then `--set`) > environment variable > recipe > default. `origins` says where
each field's value came from, so that nothing changes a run unseen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from parallel_synthesis import config as config_module
from parallel_synthesis.config import Config, problems
from parallel_synthesis.errors import ConfigError, StorageError
from parallel_synthesis.resources import resource
from parallel_synthesis.values import from_text, nearest, show, to_field

BROWSECOMP = "browsecomp_textmas_toolcall"
FLAGS: Mapping[str, str] = {"--device": "backbone.device", "--max-steps": "run.max_steps"}
ENVIRONMENT: Mapping[str, str] = {
    "MODEL_NAME": "backbone.model",
    "STEPS_PER_EPOCH": "run.steps_per_epoch",
    "SAVE_EVERY_STEPS": "checkpoint.every",
    "ATTN_IMPLEMENTATION": "backbone.attention",
    "DATA_FILE": f"data.files.{BROWSECOMP}",  # read only by a run that has this task
}
_HUB = "hf://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Complete = Callable[[Config, Sequence[str]], tuple[Config, list[str]]]


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """A shipped recipe: its name, its file and the first comment line of that file."""

    name: str
    path: Path
    summary: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config and where it came from.

    origins: `section.field` -> "recipe", "default", "--set", "flag --x" or "environment NAME".
    sha256: of the recipe file's bytes.
    """

    config: Config
    origins: Mapping[str, str]
    name: str
    path: Path
    sha256: str

    @property
    def from_environment(self) -> dict[str, str]:
        """Fields that an environment variable set -> the variable. Worth a line wherever a run starts."""
        prefix = "environment "
        return {k: v.removeprefix(prefix) for k, v in self.origins.items() if v.startswith(prefix)}


def list_recipes() -> list[RecipeInfo]:
    """The shipped recipes, by name."""
    found = []
    for path in sorted(resource("recipes").glob("*.toml"), key=lambda path: path.stem):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        found.append(RecipeInfo(name=path.stem, path=path, summary=first.removeprefix("#").strip()))
    return found


def load_recipe(
    name_or_path: str,
    *,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    complete: Complete | None = None,
) -> Resolved:
    """Reads a shipped recipe (a name) or a file (a path), applies the overrides and checks the whole.

    sets: `section.field=value`, or `section.field.key=value` for a table. flags: those of FLAGS -> value,
    None is not given. complete: a further check by whoever knows the task table, given the config and the tasks
    that the recipe itself lists (overrides may take some of them away); it may put canonical names into the
    config. A relative `data.root` is relative to the current directory, `package:` is shipped.
    ConfigError carries every problem of the file, the overrides and the values together; StorageError: the file can
    not be read.
    """
    path = _find(name_or_path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: the recipe cannot be read: {error.strerror}") from error
    builder = _Builder()
    builder.recipe(_parse(raw, path), path.name)
    listed = builder.tasks()
    has_browsecomp = any(task.lower().startswith("browsecomp") for task in builder.tasks())
    for variable, target in ENVIRONMENT.items():
        value = (environ or {}).get(variable, "")
        if value and (variable != "DATA_FILE" or has_browsecomp):
            shown = f"{variable}={value} (environment)"
            builder.text(target, value, origin=f"environment {variable}", shown=shown)
    builder.overrides(sets, flags or {})
    if not _NAME.fullmatch(path.stem):
        builder.problems.append(
            f"{path.name}: a recipe's name names milestones; expected letters, digits, '.', '_' and '-' only"
        )
    builder.drop_foreign_revision()
    config = builder.build(path.stem)
    found = list(builder.problems)
    found += [p for p in problems(config) if re.split(r"[\s:]", p, maxsplit=1)[0] not in builder.broken]
    if complete is not None:
        config, more = complete(config, listed)
        found += [p for p in more if p not in found]
    if found:
        raise ConfigError(found)
    return Resolved(
        config=config,
        origins=builder.origins,
        name=path.stem,
        path=path,
        sha256=hashlib.sha256(raw).hexdigest(),
    )


def load_record(
    record: Mapping[str, Any],
    *,
    path: Path,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Resolved:
    """The config a run wrote down (run_args.json), with overrides; the recipe file is not read again."""
    builder = _Builder()
    builder.recipe(record["config"], path.name)
    builder.overrides(sets, flags or {})
    config = builder.build(record["recipe"])
    found = builder.problems + problems(config)
    if found:
        raise ConfigError(found)
    return Resolved(
        config=config,
        origins=builder.origins,
        name=record["recipe"],
        path=path,
        sha256=record["recipe_sha256"],
    )


def _find(name_or_path: str) -> Path:
    shipped = {info.name: info.path for info in list_recipes()}
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path).expanduser()
    names = ", ".join(sorted(shipped))
    try:
        if path.is_file():
            return path
        if name_or_path and path.is_dir():
            raise ConfigError([f"{path}: a directory; expected a recipe file, or a shipped recipe ({names})"])
    except PermissionError as error:  # a directory that must not be entered
        raise StorageError(f"{path}: the recipe cannot be read: {error.strerror}") from error
    except OSError as error:  # a name too long
        raise ConfigError([f"{path}: no recipe file can be found there: {error.strerror}"]) from error
    if path.suffix == ".toml" or "/" in name_or_path:
        raise ConfigError([f"{path}: no such recipe file; write one, or use a shipped recipe ({names})"])
    raise ConfigError(
        [f"no recipe {name_or_path!r}{nearest(name_or_path, list(shipped)) or ';'} shipped: {names}"]
    )


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 ({error.reason} at byte {error.start})"]) from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number too long, nesting too deep
        raise ConfigError([f"{path}: not TOML: {error}"]) from error


def sections() -> dict[str, dict[str, Any]]:
    """section -> field -> type, as the dataclasses of config.py declare them."""
    return {
        f.name: typing.get_type_hints(_section_class(f.name), vars(config_module))
        for f in dataclasses.fields(Config)
        if f.name != "recipe"
    }


def _section_class(section: str) -> type[Any]:
    found: type[Any] = typing.get_type_hints(Config, vars(config_module))[section]
    return found


class _Builder:
    """Collects typed values, their origins and every problem on the way to one Config."""

    def __init__(self) -> None:
        self._types = sections()
        self._values: dict[str, dict[str, Any]] = {section: {} for section in self._types}
        self.origins = {f"{s}.{k}": "default" for s, fields in self._types.items() for k in fields}
        self.problems: list[str] = []
        self.broken: set[str] = set()  # fields already complained about; their range is not checked again

    def tasks(self) -> tuple[str, ...]:
        tasks: tuple[str, ...] = self._values["data"].get("tasks", ())
        return tasks

    def recipe(self, table: Mapping[str, Any], file: str) -> None:
        for section, fields in table.items():
            if section == "recipe" and isinstance(fields, str) and file == "run_args.json":
                continue  # the recipe's name, which a record keeps with the config
            if section not in self._types:
                self.problems.append(
                    f"{file}: [{section}]: no such section{nearest(section, list(self._types))}"
                )
            elif not isinstance(fields, Mapping):
                self.problems.append(f"{file}: {section} = {show(fields)}: expected a table, [{section}]")
            else:
                for key, value in fields.items():
                    name = f"{section}.{key}"
                    self.value(name, value, origin="recipe", shown=f"{file}: {name} = {show(value)}")

    def overrides(self, sets: Sequence[str], flags: Mapping[str, object]) -> None:
        for item in sets:
            self.assignment(item)
        for flag, given in flags.items():
            if given is not None:
                self.value(FLAGS[flag], given, origin=f"flag {flag}", shown=f"{flag} {given}")

    def assignment(self, item: str) -> None:
        """One `--set`: split at the first `=`."""
        name, equals, text = item.partition("=")
        if not equals:
            self.problems.append(f"--set {item}: expected section.field=value")
            return
        self.text(name.strip(), text.strip(), origin="--set", shown=f"--set {item}")

    def text(self, name: str, text: str, *, origin: str, shown: str) -> None:
        """A value written as text: TOML where it is TOML, else a bare string where the field takes one."""
        hint, key = self._field(name, shown)
        if hint is not None:
            self._store(name, key, from_text(text, str if key else hint), hint, origin, shown)

    def value(self, name: str, value: object, *, origin: str, shown: str) -> None:
        hint, key = self._field(name, shown)
        if hint is not None:
            self._store(name, key, value, hint, origin, shown)

    def _field(self, name: str, shown: str) -> tuple[Any, str | None]:
        """The field's type, and the key within it for `section.field.key`. (None, None) after a complaint."""
        section, _, rest = name.partition(".")
        field, _, key = rest.partition(".")
        if section not in self._types:
            known = [f"{s}.{k}" for s, fields in self._types.items() for k in fields]
            bare = [full for full in known if full.endswith(f".{name}")]
            close = f"; did you mean {bare[0]}?" if len(bare) == 1 else nearest(name, known)
            self.problems.append(f"{shown}: no such field{close}")
            return None, None
        hint = self._types[section].get(field)
        if hint is None or (key and get_origin(hint) is not Mapping):
            known = [f"{section}.{k}" for k in self._types[section]]
            fields = ", ".join(self._types[section])
            close = nearest(f"{section}.{field}", known) or f"; [{section}] has {fields}"
            self.problems.append(f"{shown}: no such field{close}")
            return None, None
        return hint, key or None

    def _store(self, name: str, key: str | None, value: object, hint: Any, origin: str, shown: str) -> None:
        section, field = name.split(".")[:2]
        typed, expected = to_field(value, str if key else hint)
        if expected is not None:
            self.problems.append(f"{shown}: expected {expected}")
            self.broken.add(f"{section}.{field}")
            return
        if name == "backbone.model" and typed.startswith(_HUB):
            typed, problem = _without_scheme(typed)
            if problem is not None:
                self.problems.append(f"{shown}: {problem}")
                self.broken.add(name)
                return
        if key is not None:
            typed = {**self._values[section].get(field, {}), key: typed}
        self._values[section][field] = typed
        self.origins[f"{section}.{field}"] = origin

    def drop_foreign_revision(self) -> None:
        """A revision is one of its own model: it does not outlive the model it was written with."""
        model, revision = self.origins["backbone.model"], self.origins["backbone.revision"]
        if revision == "recipe" and model not in ("recipe", "default"):
            del self._values["backbone"]["revision"]
            self.origins["backbone.revision"] = f"default, since {model} replaces the model"

    def build(self, name: str) -> Config:
        parts = {section: _section_class(section)(**values) for section, values in self._values.items()}
        return Config(recipe=name, **parts)


def _without_scheme(model: str) -> tuple[str, str | None]:
    """The plain id of hf://OWNER/NAME, which is what records and adapters keep, or why there is none."""
    plain, at, revision = model.removeprefix(_HUB).partition("@")
    if at:
        return plain, f"give {_HUB}{plain}, and {revision!r} as backbone.revision"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", plain, re.ASCII):
        return plain, f"expected {_HUB}OWNER/NAME"
    if Path(plain).exists():  # the plain id would mean it, now and at every resume
        return plain, f"there is a local path {plain}, which would be taken for it; rename that"
    return plain, None


def recipe_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe, made from the dataclasses; in JSON `null` is "not set"."""
    properties = {}
    for section, types in sections().items():
        fields = {f.name: f for f in dataclasses.fields(_section_class(section))}
        properties[section] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                key: _schema_of(hint)
                | _bounds(f"{section}.{key}")
                | {"description": _describe(fields[key]), "default": _default(fields[key])}
                for key, hint in types.items()
            },
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "recipe.schema.json",
        "title": "A recipe: the config of a training run",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def _schema_of(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    if origin is UnionType:
        inner = _schema_of(next(t for t in get_args(hint) if t is not NoneType))
        return inner | {"type": [inner["type"], "null"]}
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if origin is tuple:
        return {"type": "array", "items": _schema_of(get_args(hint)[0])}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    return {"type": {int: "integer", float: "number", bool: "boolean", str: "string"}[hint]}


def _bounds(name: str) -> dict[str, int]:
    least = config_module.AT_LEAST.get(name)
    return {} if least is None else {"minimum": least}


def _describe(field: dataclasses.Field[Any]) -> str:
    unit = field.metadata["unit"]
    return f"{field.metadata['meaning']} [{unit}]" if unit else str(field.metadata["meaning"])


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is dataclasses.MISSING:
        return {}
    return list(field.default) if isinstance(field.default, tuple) else field.default
