"""Embeddings that checkpoints were saved without, put back from the adapter they came with (no torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from parallel_synthesis.checkpoint.commit import Staging, commit
from parallel_synthesis.checkpoint.layout import ADAPTER_MODEL, CHECKPOINT_META, find_components
from parallel_synthesis.checkpoint.merge_files import TensorFile
from parallel_synthesis.checkpoint.parts import MERGE_META
from parallel_synthesis.checkpoint.safetensors_file import TensorChunks, write_safetensors
from parallel_synthesis.errors import CheckpointError
from parallel_synthesis.provenance import manifest
from parallel_synthesis.provenance.hashing import sha256_file
from parallel_synthesis.provenance.schema import load_json

_CHUNK = 1 << 20  # bytes
_DEEPEST = 100  # generations; a chain of runs is short, and a meta that names itself must not hang


def is_incomplete(checkpoint: Path) -> bool:
    """The checkpoint was saved with checkpoint.embeddings = "drop" and lacks embeddings of its adapter."""
    return _left_out(_meta(checkpoint)) is not None


def export_whole(checkpoint: Path, destination: Path) -> None:
    """Commits a copy of the checkpoint whose adapter has its embeddings again: the bytes it would have been saved with.

    They are read from the adapter of the checkpoint that the run was started from, as its parents record it,
    and that adapter's sha256 is checked; so is every other byte. Raises CheckpointError.
    """
    meta = _meta(checkpoint)
    left_out = _left_out(meta)
    assert left_out is not None, "is_incomplete says so"
    document = manifest.read(checkpoint)
    files: Mapping[str, Any] = document["files"]
    source = _source(checkpoint, meta, left_out)

    def fill(staging: Staging) -> None:
        # First, since what describes a merge has its sha256.
        _write_adapter(staging, checkpoint / ADAPTER_MODEL, files[ADAPTER_MODEL], source, left_out["tensors"])
        for name, entry in files.items():
            if name == CHECKPOINT_META:
                whole = meta | {"embeddings": {**left_out, "saved": True}}
                staging.write_json(name, whole, "checkpoint_meta")
            elif name == MERGE_META:
                merge = load_json(checkpoint / name, "checkpoint_merge_meta")
                outputs = merge["components"] | {ADAPTER_MODEL: staging.entry(ADAPTER_MODEL)["sha256"]}
                staging.write_json(name, merge | {"components": outputs}, "checkpoint_merge_meta")
            elif name != ADAPTER_MODEL:
                _copy(staging, name, checkpoint / name, entry["sha256"])

    commit(destination, step=document["global_step"], fill=fill)


def _source(checkpoint: Path, meta: Mapping[str, Any], left_out: Mapping[str, Any]) -> Path:
    """The adapter that holds the embeddings: that of the nearest ancestor that was not saved without them.

    A merge has several parents, which agreed in them: the first line that leads to one is taken.
    """
    missing = f"{checkpoint} was saved without its embeddings ({', '.join(left_out['tensors'])})"
    failed = ""
    waiting = [(dict(parent), 1) for parent in meta.get("parents") or []]
    while waiting:
        parent, depth = waiting.pop(0)
        if depth > _DEEPEST:
            raise CheckpointError(f"{missing}, and its parents go round in a circle")
        given, sha256 = parent["source"], parent["components"][ADAPTER_MODEL]
        try:
            components = find_components(given)
            found = sha256_file(components / ADAPTER_MODEL)
        except (CheckpointError, OSError) as error:
            failed = failed or (
                f"{missing}; they are in the adapter of {given} (sha256 {sha256[:16]}...), which can not be read "
                f"here: {error}; put it back, or start this from the directory the run was started in"
            )
            continue
        if found != sha256:
            failed = failed or (
                f"{missing}; they were in the adapter of {given} with sha256 {sha256[:16]}..., but it now has "
                f"{found[:16]}...; put the one back that the run was started from"
            )
            continue
        meta = _meta(components)
        if _left_out(meta) is None:
            return components / ADAPTER_MODEL
        waiting[:0] = [(dict(further), depth + 1) for further in meta.get("parents") or []]
    raise CheckpointError(failed or f"{missing}, and no parent is recorded to take them from")


def _write_adapter(
    staging: Staging, path: Path, entry: Mapping[str, Any], source: Path, names: list[str]
) -> None:
    with ExitStack() as stack:
        lora, embeddings = (stack.enter_context(TensorFile(file)) for file in (path, source))
        lacking = sorted(set(names) - embeddings.entries.keys())
        if lacking:
            raise CheckpointError(
                f"{source}: it has no {lacking[0]}; expected the embeddings left out of {path}"
            )
        taken = dict.fromkeys(lora.entries, lora) | dict.fromkeys(names, embeddings)
        tensors = {name: _chunks(file, name) for name, file in taken.items()}
        with staging.open(ADAPTER_MODEL) as file:
            details = write_safetensors(file, tensors)
        for name, expected in entry["tensors"].items():
            if details["tensors"][name]["sha256"] != expected["sha256"]:
                raise CheckpointError(f"{path} is damaged: tensor {name} has changed since it was saved")
        embeddings.check_unchanged()
    staging.describe(ADAPTER_MODEL, details)


def _chunks(file: TensorFile, name: str) -> TensorChunks:
    place = file.entries[name]

    def read() -> Iterator[bytes]:
        for at in range(0, place.bytes, _CHUNK):
            yield file.read(place.start + at, min(_CHUNK, place.bytes - at))

    return TensorChunks(dtype=place.dtype, shape=place.shape, chunks=read())


def _copy(staging: Staging, name: str, path: Path, sha256: str) -> None:
    with staging.open(name) as target, path.open("rb") as file:
        while data := file.read(_CHUNK):
            target.write(data)
    if staging.entry(name)["sha256"] != sha256:
        raise CheckpointError(f"{path} is damaged: it is not what its manifest says; use another checkpoint")


def _meta(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / CHECKPOINT_META
    meta: dict[str, Any] = load_json(path, "checkpoint_meta") if path.is_file() else {}
    return meta


def _left_out(meta: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = meta.get("embeddings")
    return found if isinstance(found, Mapping) and found.get("saved") is False else None
