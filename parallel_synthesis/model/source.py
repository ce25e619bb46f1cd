"""Where a model's files are: a local path beats a Hub id, and a local path never leads to the network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_synthesis.errors import BackboneError, ParallelSynthesisError
from parallel_synthesis.provenance import hub, hub_errors
from parallel_synthesis.provenance.hub_names import SCHEME, right_form
from parallel_synthesis.resources import PACKAGE_PREFIX, resolve_path


@dataclass(frozen=True, kw_only=True)
class Source:
    """What `from_pretrained` takes: `where` and `arguments`. `name` is the model as the user wrote it."""

    name: str
    where: str
    arguments: dict[str, Any]

    @property
    def local(self) -> bool:
        return bool(self.arguments.get("local_files_only"))


def find_source(model: str, revision: str | None) -> Source:
    """Source of a Hub id, directory, `package:PATH` or .gguf file. BackboneError if a path is not there."""
    path = resolve_path(model)
    if path.is_dir():
        return Source(name=model, where=str(path), arguments={"local_files_only": True})
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BackboneError(
                f"backbone.model = {model}: a file; expected a directory, a .gguf file or a Hub id"
            )
        arguments = {"local_files_only": True, "gguf_file": path.name}
        return Source(name=model, where=str(path.parent), arguments=arguments)
    named = right_form(model)
    if model.startswith(SCHEME) or named is not None:
        raise BackboneError(
            f"backbone.model = {model}: expected OWNER/NAME as on the Hub, and its revision as backbone.revision"
            + (f"; {named}" if named is not None else "")
        )
    if looks_like_path(model):
        raise BackboneError(f"backbone.model = {model}: no such file or directory ({path})")
    return Source(name=model, where=model, arguments={"revision": revision} if revision else {})


def hub_problem(source: Source, error: Exception) -> ParallelSynthesisError | None:
    """The error to raise for one of transformers' that comes from the Hub; None for any other.

    BackboneError for what is not there or not allowed, StorageError for what may be better next time.
    """
    if source.local or not hub_errors.is_of_hub(error):
        return None
    request = hub_errors.Request(
        given=source.name,
        repository=source.where,
        revision=source.arguments.get("revision"),
        what="model",
        refused=BackboneError,
        known=hub.is_known(source.where),
    )
    return hub_errors.explain(error, request)


def looks_like_path(model: str) -> bool:
    """Whether `model` cannot be a Hub id (`name` or `owner/name`)."""
    return (
        model.startswith((PACKAGE_PREFIX, "/", ".", "~"))
        or model.lower().endswith(".gguf")
        or model.count("/") > 1
        or Path(model).is_absolute()
    )
