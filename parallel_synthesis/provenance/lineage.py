"""Where a checkpoint comes from: its parents and theirs as a tree, each edge proved by bytes or called unverified.

Every checkpoint_meta.json of ours lists `parents`: [{source, step, components: {file: sha256}}]; a run that went on from
another's checkpoint has it in `continued_from` of its run_args.json. An edge is verified when the parent is at hand and
its component files, read in full, have the digests that the child recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel_synthesis.errors import CheckpointError, ParallelSynthesisError
from parallel_synthesis.provenance import hub, manifest
from parallel_synthesis.provenance.check import Expected, Place, check
from parallel_synthesis.provenance.inside import Inside, is_inside
from parallel_synthesis.provenance.problems import Problem
from parallel_synthesis.provenance.schema import parse_json, problems

META = "checkpoint_meta.json"
MERGE_META = "checkpoint_merge_meta.json"
RUN_ARGS = "run_args.json"
_OF_A_RUN = ("step_checkpoints", "milestones")
_JSON_LIMIT = 16 << 20
_DEEPEST = 64  # generations; more is a circle
_NOT_CACHED = "is not in the local Hub cache"
_NO_MANIFEST = "as the child took it: it had no manifest to be compared with"
_RECORDS = hub.Wanted(required=("cache_mapper.pt",), optional=(META, MERGE_META, manifest.MANIFEST))

Edge = Literal["start", "verified", "unverified", "differs"]
Find = Callable[
    [str], Path
]  # a source as it was given -> the directory of its components, or CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A checkpoint and its parents.

    source: as it was given or recorded. path: where it is, None when it is not at hand. edge: what is known of the
    step from this parent to its child ("start": the checkpoint that was asked about); reason: why, in words.
    components: file -> sha256, as the child recorded them, or for the start as its own manifest lists them.
    how: "merge", "run", or "unknown" where the checkpoint does not say. merge: weights and method of a merge.
    """

    source: str
    path: Path | None
    edge: Edge
    reason: str
    step: int | None
    how: Literal["run", "merge", "unknown"]
    recipe: str | None
    recipe_sha256: str | None
    data: Mapping[str, str]
    components: Mapping[str, str]
    merge: Mapping[str, Any]
    parents: tuple[Node, ...]


def read(path: Path | str, *, find: Find | None = None, jobs: int | None = None) -> Node:
    """The tree of a checkpoint: a directory, a run, RUN@NAME, a Hub id. CheckpointError when it is none.

    find: how sources are turned into directories (checkpoint.layout.find_components knows all forms); by default
    a directory, RUN@NAME and the newest checkpoint of a run. Reads the components of every parent at hand. Of the
    checkpoint itself only records are read, and fetched from the Hub; parents are never fetched.
    """
    given = str(path)
    found: Inside | str
    if hub.hub_id(given) is not None:
        snapshot = hub.fetched(given, _RECORDS)
        given, found = snapshot.name, snapshot.inside
    else:
        found = _Finder(find)(given, ())
    if isinstance(found, str):
        raise CheckpointError(found)
    components: dict[str, str] = {}
    try:
        listed = manifest.listing(found.directory).files
        components = {
            name: expected.sha256 for name, expected in listed.items() if not name.endswith(".json")
        }
    except ParallelSynthesisError:
        pass  # a checkpoint of the reference implementation has no manifest
    start = {"source": given, "components": components}
    return _node(start, found, edge="start", reason="", finder=_Finder(find), jobs=jobs, depth=0)


def render(node: Node) -> str:
    """The tree as text, the checkpoint that was asked about first, its parents below it; no line end at the end."""
    lines: list[str] = []
    _lines(node, "", "", lines)
    return "\n".join(lines)


def to_dict(node: Node) -> dict[str, Any]:
    """The tree in JSON types; `parents` holds the same again."""
    return {
        "source": node.source,
        "path": None if node.path is None else str(node.path),
        "edge": node.edge,
        "reason": node.reason,
        "step": node.step,
        "how": node.how,
        "recipe": node.recipe,
        "recipe_sha256": node.recipe_sha256,
        "data": dict(node.data),
        "components": dict(node.components),
        "merge": dict(node.merge),
        "parents": [to_dict(parent) for parent in node.parents],
    }


def edges(node: Node) -> list[Node]:
    """Every parent in the tree, nearest first."""
    return [found for parent in node.parents for found in (parent, *edges(parent))]


class _Finder:
    def __init__(self, find: Find | None) -> None:
        self._find = find or _find

    def __call__(self, source: str, names: Collection[str]) -> Inside | str:
        """The directory, or why it is not at hand. names: files that a snapshot of the Hub cache must have."""
        try:
            named = hub.hub_id(source)
            if named is not None:
                snapshot = hub.cached(*named, names=names)
                return snapshot.inside if snapshot is not None else f"{source} {_NOT_CACHED}"
            return Inside.of(self._find(source))
        except ParallelSynthesisError as error:
            return str(error)


def _find(source: str) -> Path:
    given = Path(source).expanduser()
    places = [given, given / "step_checkpoints" / "latest", given / "latest"]
    run, at, name = source.rpartition("@")
    if at and not given.exists() and name not in ("", ".", "..") and "/" not in name:
        places = [Path(run).expanduser() / folder / name for folder in ("milestones", "step_checkpoints")]
    for place in places:
        if (place / META).is_file() or (place / "cache_mapper.pt").is_file():
            return place
    raise CheckpointError(f"{source} is not a checkpoint, or not at hand; expected a directory with {META}")


def _node(
    record: Mapping[str, Any],
    inside: Inside | str,
    *,
    edge: Edge,
    reason: str,
    finder: _Finder,
    jobs: int | None,
    depth: int,
) -> Node:
    meta, merge = {}, {}
    # What a parent that differs says of itself is not what the child was made from.
    if isinstance(inside, Inside) and edge != "differs":
        meta = _document(inside, META, "checkpoint_meta")
        merge = _document(inside, MERGE_META, "checkpoint_merge_meta")
    parents = tuple(
        _parent(parent, finder=finder, jobs=jobs, depth=depth + 1)
        for parent in _parents(inside, meta)
        if depth < _DEEPEST
    )
    step = record.get("step", meta.get("global_step"))
    kept = ("merge_type", "method", "weight_a", "weight_b", "lora_merge_mode", "cache_mapper_source")
    return Node(
        source=str(record["source"]),
        path=inside.directory if isinstance(inside, Inside) else None,
        edge=edge,
        reason=reason,
        step=step,
        how="merge" if merge else "run" if meta else "unknown",
        recipe=meta.get("recipe"),
        recipe_sha256=meta.get("recipe_sha256"),
        data=meta.get("data", {}),
        components=record["components"],
        merge={key: merge[key] for key in kept if key in merge},
        parents=parents,
    )


def _parents(inside: Inside | str, meta: Mapping[str, Any]) -> Collection[Mapping[str, Any]]:
    """What a checkpoint records; of one that a run took over from another run as it was: that one.

    Its bytes, the record of its parents too, are those of the other run's, which is what it has been made from.
    """
    listed: Collection[Mapping[str, Any]] = meta.get("parents", ())
    if isinstance(inside, str) or not meta:
        return listed
    place = inside.directory
    run = place.parent.parent if place.parent.name in _OF_A_RUN else place
    if not (run / RUN_ARGS).is_file():
        return listed
    taken = _document(Inside.of(run), RUN_ARGS, "run_args").get("continued_from")
    if taken is None or taken["step"] != meta["global_step"]:
        return listed
    try:
        files = manifest.listing(place).files
    except ParallelSynthesisError:
        return listed
    same = all(name in files and files[name].sha256 == sha256 for name, sha256 in taken["components"].items())
    return (taken,) if same else listed


def _parent(record: Mapping[str, Any], *, finder: _Finder, jobs: int | None, depth: int) -> Node:
    inside = finder(record["source"], record["components"])
    edge: Edge = "unverified"
    if isinstance(inside, str):
        reason = "the parent is not at hand"
        if inside.endswith(_NOT_CACHED):
            reason = f"the parent {_NOT_CACHED}"
    else:
        edge, reason = _check_edge(inside, record["components"], jobs)
        if edge == "verified" and record.get("checked") is False:
            reason += f", {_NO_MANIFEST}"
    return _node(record, inside, edge=edge, reason=reason, finder=finder, jobs=jobs, depth=depth)


def _check_edge(inside: Inside, components: Mapping[str, str], jobs: int | None) -> tuple[Edge, str]:
    """Reads the parent's components: are they those that the child recorded?"""
    if not components or not all(is_inside(name) for name in components):
        return "unverified", "the child recorded no components of it"
    files = {name: Expected(sha256=sha256) for name, sha256 in components.items()}
    damaged = []
    try:
        for name, listed in manifest.listing(inside.directory).files.items():
            if name in files and listed.sha256 == files[name].sha256:
                files[name] = listed  # the same file, with digests that several cores can check
            elif name in files:
                damaged.append(name)
    except ParallelSynthesisError:
        pass
    result = check([Place(inside=inside, files=files, extra=False)], jobs=jobs).places[0]
    if not result.problems and damaged:
        return (
            "unverified",
            f"{damaged[0]} is what the child recorded, but not what the parent's own manifest lists: it was damaged "
            f"before the child was made of it",
        )
    if not result.problems:
        return "verified", f"{len(files)} components have the recorded sha256"
    worst = next((problem for problem in result.problems if problem.kind == "unreadable"), result.problems[0])
    if worst.kind in ("unreadable", "changed"):
        return "unverified", str(worst)
    return "differs", str(worst)


def _document(inside: Inside, name: str, schema: str) -> dict[str, Any]:
    """A document of a checkpoint, empty when it is not there or not what it should be."""
    raw = inside.read(name, limit=_JSON_LIMIT)
    if isinstance(raw, Problem):
        return {}
    try:
        document = parse_json(raw, name)
    except CheckpointError:
        return {}
    return document if not problems(document, schema) else {}


def _lines(node: Node, first: str, rest: str, lines: list[str]) -> None:
    lines.append(first + _line(node))
    for at, parent in enumerate(node.parents):
        last = at == len(node.parents) - 1
        _lines(parent, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  "), lines)


def _line(node: Node) -> str:
    about = []
    if node.how == "merge":
        weights = [node.merge.get(key) for key in ("weight_a", "weight_b")]
        given = [f"{weight:g}" for weight in weights if isinstance(weight, int | float)]
        about.append("merge" + (f" {' + '.join(given)}" if given else ""))
    elif node.recipe is not None:
        about.append(f"recipe {node.recipe}")
    if node.step is not None and node.how != "merge":  # a merge is no step of any run
        about.append(f"step {node.step:,}")
    # The adapter stands for the rest: it is what every training step changes.
    by_name = sorted(
        node.components.items(), key=lambda item: (not item[0].endswith(".safetensors"), item[0])
    )
    short = by_name[0] if by_name else None
    if short is not None:
        about.append(f"{short[0].rsplit('/', 1)[-1]} {short[1][:12]}")
    told = f"  ({', '.join(about)})" if about else ""
    mark = {"start": "", "verified": "  verified", "unverified": "  UNVERIFIED", "differs": "  DIFFERS"}[
        node.edge
    ]
    why = f": {node.reason}" if node.edge in ("unverified", "differs") else ""
    if node.edge == "verified" and node.reason.endswith(_NO_MANIFEST):
        why = f", {_NO_MANIFEST}"
    return f"{node.source}{told}{mark}{why}"
