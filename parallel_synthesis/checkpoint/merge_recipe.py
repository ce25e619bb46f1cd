"""Merge recipes: recipes/merge/NAME.toml, a kind of its own, since nothing in one is about training (no torch)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from parallel_synthesis.checkpoint.merge_plan import Method, Missing
from parallel_synthesis.errors import ConfigError
from parallel_synthesis.provenance.schema import validate
from parallel_synthesis.resources import resource
from parallel_synthesis.values import nearest

DEFAULT = "release-merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRecipe:
    """A recipe's values; fields as in schemas/merge_recipe.schema.json."""

    name: str
    method: Method = "average"
    rank: int | None = None
    weights: tuple[float, ...]
    mapper_from: str
    config_from: str = "a"
    missing: Missing = "error"
    manifest: str | None = None


def merge_recipes() -> list[str]:
    """Names of the shipped merge recipes."""
    return sorted(path.stem for path in resource("recipes", "merge").glob("*.toml"))


def load_merge_recipe(name_or_path: str) -> MergeRecipe:
    """A shipped merge recipe by name, or a file. ConfigError with every problem of it."""
    names = merge_recipes()
    path = Path(name_or_path).expanduser()
    if name_or_path in names:
        path = resource("recipes", "merge", f"{name_or_path}.toml")
    elif not path.is_file():
        raise ConfigError(
            [f"no merge recipe {name_or_path!r}{nearest(name_or_path, names)} Shipped: {', '.join(names)}"]
        )
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: not TOML: {error}"]) from error
    validate(document, "merge_recipe", str(path), error=lambda text: ConfigError([text]))
    table = document["merge"]
    return MergeRecipe(name=path.stem, **{**table, "weights": tuple(map(float, table["weights"]))})


def place_of(word: str, count: int, *, flag: str) -> int:
    """Which input (0-based) a word names: its letter, or its number from 1. ConfigError naming the flag."""
    letter = word.strip().lower()
    if letter.isdecimal():
        place = int(letter) - 1
    else:
        place = ord(letter) - ord("a") if len(letter) == 1 and letter.isascii() and letter.isalpha() else -1
    if not 0 <= place < count:
        letters = [chr(ord("a") + number) for number in range(min(count, 26))]
        raise ConfigError(
            [f"{flag} {word}: expected one of {', '.join(letters)}, or a number from 1 to {count}"]
        )
    return place
