"""A recipe's values: TOML, or text of `--set`, into what the config's field holds; and the word that was meant."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing when no known word is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def from_text(text: str, hint: Any) -> object:
    """Text of `--set` or of an environment variable -> what TOML would have given."""
    optional = get_origin(hint) is UnionType and NoneType in get_args(hint)
    if optional and text.lower() == "none":
        return None
    try:
        table = tomllib.loads(f"value = {text}")
        parsed = table["value"] if len(table) == 1 else text  # a line break must not smuggle in a second key
    except tomllib.TOMLDecodeError:
        parsed = text
    inner = next((t for t in get_args(hint) if t is not NoneType), hint) if optional else hint
    if inner is str or get_origin(inner) is Literal:
        return parsed if isinstance(parsed, str) else text  # a revision like 123 is text, not a number
    if get_origin(inner) is tuple and not isinstance(parsed, list):
        return _list(text, get_args(inner)[0])
    return parsed


def _list(text: str, element: Any) -> object:
    """`a,b` or `[a, b]`, of bare words too: a shell takes the quotes of TOML away. The text itself when it is neither."""
    inside = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if any(mark in inside for mark in "[]{}"):
        return text  # half a list, or lists in it: for to_field to refuse
    parts = [part.strip() for part in inside.split(",")]
    if inside is not text and not parts[-1]:
        parts.pop()  # TOML allows a comma at the end
    return [from_text(part, element) for part in parts] if inside.strip() else []


def to_field(value: object, hint: Any) -> tuple[Any, str | None]:
    """(the value as its field holds it, None), or (None, what was expected)."""
    origin = get_origin(hint)
    if origin is UnionType:
        if value is None:
            return None, None
        inner = next(t for t in get_args(hint) if t is not NoneType)
        typed, expected = to_field(value, inner)
        return typed, expected if expected is None else f"{expected} (or none)"
    if origin is Literal:
        choices = get_args(hint)
        if value in choices:
            return value, None
        return None, f"one of {', '.join(choices)}{nearest(str(value), choices)}"
    if origin is tuple:
        element = get_args(hint)[0]
        if not isinstance(value, list | tuple):
            example = "[1, 2]" if element is int else '["a", "b"]'
            return None, f"a list of {_plural(element)}, such as {example}"
        results = [to_field(item, element) for item in value]
        bad = any(expected is not None for _, expected in results)
        return (None, f"a list of {_plural(element)}") if bad else (tuple(v for v, _ in results), None)
    if origin is Mapping:
        if isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()):
            return dict(value), None
        return None, "a table of strings"
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), None
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value, None
    return None, {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[hint]


def _plural(element: Any) -> str:
    return "whole numbers" if element is int else "strings"


def show(value: object) -> str:
    """A TOML value on one short line."""
    if isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, str):
        text = f'"{value}"'
    else:
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
