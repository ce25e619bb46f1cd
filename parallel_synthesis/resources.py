"""Finds schemas/, manifests/, recipes/ and artifacts/ in a checkout or in an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE_PREFIX = "package:"
_PACKAGE = Path(__file__).resolve().parent


def resource_root() -> Path:
    """The directory that holds schemas/, manifests/, recipes/ and artifacts/."""
    installed = _PACKAGE / "_resources"
    return installed if installed.is_dir() else _PACKAGE.parent


def resource(*parts: str) -> Path:
    """Path of a shipped file, e.g. resource("schemas", "manifest.schema.json")."""
    return resource_root().joinpath(*parts)


def resolve_path(value: str, base: Path | None = None) -> Path:
    """A path as recipes write it: `package:artifacts/x` is a shipped file, `~` the home, else relative to `base`."""
    if value.startswith(PACKAGE_PREFIX):
        return resource(value.removeprefix(PACKAGE_PREFIX))
    path = Path(value).expanduser()
    return path if path.is_absolute() or base is None else base / path
