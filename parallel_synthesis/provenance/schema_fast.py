"""Says quickly that a document follows a schema; never that it does not. What is doubtful goes to jsonschema.

Importing jsonschema takes a tenth of a second, and judging a manifest of many tensors by it many times what this
takes. Only the keywords that schemas/ use are known here; a schema with another one is always doubtful.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_Schema = Mapping[str, Any]
# then and else belong to if.
_WITHOUT_EFFECT = frozenset("$schema $id $defs title description default then else".split())
_TYPES: Mapping[str, Any] = {"object": dict, "array": list, "string": str, "null": type(None)}


def surely_follows(document: Any, schema: _Schema) -> bool:
    """True only when every keyword is known and met."""
    return _follows(document, schema, schema)


def _follows(value: Any, schema: Any, root: _Schema) -> bool:
    if not isinstance(schema, dict):
        return schema is True
    return all(
        keyword in _WITHOUT_EFFECT or _meets(value, keyword, wanted, schema, root)
        for keyword, wanted in schema.items()
    )


def _meets(value: Any, keyword: str, wanted: Any, schema: _Schema, root: _Schema) -> bool:
    match keyword:
        case "type":
            return any(_is(value, name) for name in ([wanted] if isinstance(wanted, str) else wanted))
        case "enum":
            return any(_same(value, one) for one in wanted)
        case "const":
            return _same(value, wanted)
        case "allOf":
            return all(_follows(value, inner, root) for inner in wanted)
        case "anyOf":
            return any(_follows(value, inner, root) for inner in wanted)
        case "$ref":
            place, _, name = str(wanted).rpartition("/")
            known = root.get("$defs", {})
            return place == "#/$defs" and name in known and _follows(value, known[name], root)
        case "if":
            return _condition(value, wanted, schema, root)
        case "required" | "properties" | "additionalProperties" | "propertyNames" | "dependentRequired":
            return not isinstance(value, dict) or _fields(value, keyword, wanted, schema, root)
        case "items":
            return not isinstance(value, list) or all(_follows(item, wanted, root) for item in value)
        case "minItems":
            return not isinstance(value, list) or len(value) >= wanted
        case "minProperties":
            return not isinstance(value, dict) or len(value) >= wanted
        case "minLength":
            return not isinstance(value, str) or len(value) >= wanted
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "minimum" | "maximum" | "exclusiveMinimum":
            return not _is(value, "number") or _within(value, keyword, wanted)
    return False


def _fields(value: Mapping[str, Any], keyword: str, wanted: Any, schema: _Schema, root: _Schema) -> bool:
    match keyword:
        case "required":
            return all(key in value for key in wanted)
        case "properties":
            return all(_follows(value[key], inner, root) for key, inner in wanted.items() if key in value)
        case "additionalProperties":
            named = schema.get("properties", {})
            return all(_follows(item, wanted, root) for key, item in value.items() if key not in named)
        case "propertyNames":
            return all(_follows(key, wanted, root) for key in value)
    return all(need in value for key, needs in wanted.items() if key in value for need in needs)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer":
        return isinstance(value, int)  # a float without a fraction is one too: left to jsonschema
    if name == "number":
        return isinstance(value, int | float)
    return isinstance(value, _TYPES.get(name, ()))


def _same(value: Any, wanted: Any) -> bool:
    # 1 is not True, and numbers of two kinds are jsonschema's to compare.
    return type(value) is type(wanted) and not isinstance(value, dict | list) and bool(value == wanted)


def _within(value: float, keyword: str, wanted: float) -> bool:
    if keyword == "maximum":
        return value <= wanted
    return value >= wanted if keyword == "minimum" else value > wanted


def _condition(value: Any, wanted: Any, schema: _Schema, root: _Schema) -> bool:
    then = _follows(value, schema.get("then", True), root)
    other = _follows(value, schema.get("else", True), root)
    if _follows(value, wanted, root):
        return then
    # What is not surely met may still be met: then both branches must hold.
    return other if _surely_not(value, wanted) else then and other


def _surely_not(value: Any, schema: Any) -> bool:
    """The conditions of our schemas: a field is required, or must be a certain text."""
    if not isinstance(schema, dict) or not isinstance(value, dict):
        return False
    if any(key not in value for key in schema.get("required", ())):
        return True
    texts = {key: inner.get("const") for key, inner in schema.get("properties", {}).items()}
    return any(
        isinstance(text, str) and isinstance(value.get(key), str) and value[key] != text
        for key, text in texts.items()
    )
