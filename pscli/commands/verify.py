"""`ps verify`: are the bytes those of a manifest, do the parts belong together, can a run's steps be reproduced."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel_synthesis.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    ManifestError,
    ParallelSynthesisError,
    RefusedError,
    StorageError,
    VerificationError,
)
from parallel_synthesis.provenance.problems import Problem
from pscli.context import Call
from pscli.options import HUB, Debug, Json, Quiet
from pscli.output import Output, failure_document, size
from pscli.verifying import Bar, described, exit_code, fail, tell

if TYPE_CHECKING:
    from parallel_synthesis.checkpoint.verification import Options, Report
    from parallel_synthesis.provenance.hub import Snapshot
    from parallel_synthesis.provenance.inside import Inside
    from parallel_synthesis.provenance.manifest import Listing

RELEASE = "release"
_ENDS = ((RefusedError, 2), (StorageError, 3), (VerificationError, 1))
_UNCHECKED: Mapping[str, Any] = {
    "manifest": None,
    "manifest_sha256": None,
    "content_checked": False,
    "counts": {},
    "bytes_hashed": 0,
    "seconds": 0.0,
    "problems": [],
}


def verify(
    ctx: typer.Context,
    path: Annotated[
        str | None,
        typer.Argument(help=f"A run, a checkpoint, RUN@NAME, any directory with a manifest, or {HUB}."),
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option("--manifest", metavar="release|FILE", help="Judge by this manifest, not by its own."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="RECIPE|FILE", help="Input files; PATH is then their data.root."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Sizes and headers only: contents are NOT checked.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The sha256 of whole files too, beside that of their tensors.")
    ] = False,
    complete: Annotated[
        bool, typer.Option("--complete", help="A run that has not come to its end fails.")
    ] = False,
    allow_extra: Annotated[
        bool, typer.Option("--allow-extra", help="Files that no manifest lists are named, not refused.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Threads that hash [all cores].")
    ] = None,
    write_manifest: Annotated[
        bool, typer.Option("--write-manifest", help="Make manifest.json for a directory that has none.")
    ] = False,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="sha256sum", help="Print the list for `sha256sum -c`.")
    ] = None,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="K", min=1, help="Do K steps again and compare them with the log."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check every byte against its manifest and that the parts belong together; with --replay, that steps repeat.

    \b
    ps verify runs/a                          all its checkpoints and milestones
    ps verify runs/a@general_step_95060
    ps verify DIR --manifest release          is this the released checkpoint?
    ps verify --data general                  the recipe's input files
    ps verify runs/a --replay 20              in a scratch directory; the run is not touched
    ps verify DIR --format sha256sum | (cd DIR && sha256sum -c)

    Runs and checkpoints of the reference implementation have no recorded hashes: their parts are held against each
    other, and it is said that no content is proved. What was not checked is named, whatever the code.

    Exit codes: 0 all that could be checked is right; 1 a content problem; 2 usage, or a manifest that can not be read;
    3 could not finish (I/O).
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    began = time.monotonic()
    bar = Bar(call.output)
    try:
        _refuse_mixed(
            path, manifest, data, quick=quick, full=full, write=write_manifest, format_=format_, replay=replay
        )
        if replay is not None and path is not None:
            _replay(call, path, replay)
        elif data:
            _data(call.output, data, path, quick=quick, jobs=jobs, bar=bar)
        elif path is not None and (write_manifest or format_ is not None):
            _make(
                call.output,
                path,
                manifest,
                write=write_manifest,
                listed=format_ is not None,
                jobs=jobs,
                bar=bar,
            )
        elif path is not None:
            from parallel_synthesis.checkpoint.verification import Options

            options = Options(
                quick=quick,
                full=full,
                jobs=jobs,
                allow_extra=allow_extra,
                complete=complete,
                progress=bar.start if call.output.progress else None,
            )
            name, report = _directory(path, manifest, options)
            bar.close()
            tell(call.output, name, report, released=manifest == RELEASE)
    except ParallelSynthesisError as error:
        code = next((code for kind, code in _ENDS if isinstance(error, kind)), None)
        if call.output.mode != "json" or code is None:
            raise
        document = failure_document(error, code, str(error))
        if isinstance(error, ManifestError):
            where = manifest if manifest is not None else "manifest.json"
            found = [Problem(path=where, kind="manifest", detail=problem) for problem in error.problems]
            document["problems"] = described(found)
        call.output.document({**_UNCHECKED, **document, "seconds": time.monotonic() - began})
        raise typer.Exit(code) from error
    finally:
        bar.close()


def _refuse_mixed(
    path: str | None,
    manifest: str | None,
    data: Sequence[str] | None,
    *,
    quick: bool,
    full: bool,
    write: bool,
    format_: str | None,
    replay: int | None,
) -> None:
    found = []
    if path is None and not data:
        found.append("expected something to verify: a run, a checkpoint, a directory, or --data RECIPE")
    if format_ not in (None, "sha256sum"):
        found.append(f"--format {format_}: expected sha256sum")
    if quick and full:
        found.append("--quick and --full exclude each other")
    others = {"--data": bool(data), "--replay": replay is not None, "--write-manifest": write}
    given = [name for name, there in others.items() if there]
    if len(given) > 1 or (
        given and (manifest is not None or (format_ is not None and given != ["--write-manifest"]))
    ):
        also = [
            name for name, there in (("--manifest", manifest), ("--format", format_)) if there is not None
        ]
        found.append(f"{' and '.join([*given, *also])} exclude each other: give one")
    if found:
        raise ConfigError(found)


def _directory(path: str, manifest: str | None, options: Options) -> tuple[str, Report]:
    """What was verified, a Hub id at its commit, and what was found."""
    from parallel_synthesis.checkpoint import verification
    from parallel_synthesis.checkpoint.layout import locate
    from parallel_synthesis.provenance import hub
    from parallel_synthesis.provenance.manifest import MANIFEST

    if hub.hub_id(path) is not None:
        own = hub.fetched(path, hub.Wanted(optional=(MANIFEST,)), check=False)
        if manifest is None and not (own.directory / MANIFEST).is_file():  # what can be said without one
            found = locate(own.name)
            return found.name, verification.verify_path(str(found.directory), options)
        snapshot, listing = _fetched(own.name, manifest)
        return snapshot.name, verification.verify_directory(snapshot.inside, listing, options)
    if manifest is None:
        return path, verification.verify_path(path, options)
    listing = _listing(manifest)
    place = _holding(Path(path).expanduser(), path, listing)
    return path, verification.verify_directory(place, listing, options)


def _fetched(path: str, manifest: str | None) -> tuple[Snapshot, Listing]:
    """Every file that the manifest lists, of a Hub repository, and the small ones that the parts are judged by."""
    from parallel_synthesis.checkpoint import layout
    from parallel_synthesis.provenance import hub
    from parallel_synthesis.provenance import manifest as manifests

    given = path
    if manifest is not None:
        listing = _listing(manifest)
    else:
        own = hub.Wanted(required=(manifests.MANIFEST,), what="checkpoint with a manifest.json")
        try:
            snapshot = hub.fetched(path, own, check=False)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; or judge it by another manifest: --manifest release|FILE"
            ) from error
        given, listing = snapshot.name, manifests.listing(snapshot.directory)
    # What the repository lacks of them is for the check to tell.
    names = tuple(dict.fromkeys([*listing.files, *layout.HUB_OPTIONAL]))
    return hub.fetched(given, hub.Wanted(optional=names, exact=tuple(listing.files)), check=False), listing


def _listing(manifest: str) -> Listing:
    from parallel_synthesis.checkpoint.verification import read_manifest
    from parallel_synthesis.resources import resource

    if manifest == RELEASE:
        return read_manifest(resource("artifacts", "release_checkpoint.json"))
    return read_manifest(Path(manifest).expanduser())


def _holding(directory: Path, given: str, listing: Listing) -> Inside:
    """The directory itself where it holds any of the listed files, else the components that it leads to."""
    from parallel_synthesis.checkpoint.layout import find_components
    from parallel_synthesis.provenance.inside import Inside

    here = Inside(directory)
    if any(map(here.has, listing.files)):
        return here
    try:
        return Inside.of(find_components(given))
    except CheckpointError:
        if directory.is_dir():
            return here
        raise


def _data(
    output: Output, what: Sequence[str], root: str | None, *, quick: bool, jobs: int | None, bar: Bar
) -> None:
    from parallel_synthesis.data.check import check_files, wanted_files
    from parallel_synthesis.provenance.check import default_jobs
    from parallel_synthesis.provenance.hashing import sha256_file

    began = time.monotonic()
    place = None if root is None else Path(root).expanduser()
    wanted = [file for each in what for file in wanted_files(each, root=place)]
    total = sum(file.path.stat().st_size for file in wanted if file.path.is_file())
    found = check_files(
        wanted,
        quick=quick,
        jobs=jobs or default_jobs(),
        progress=bar.start(total) if output.progress and not quick else None,
    )
    bar.close()
    problems = [problem for file in found for problem in file.problems]
    code = exit_code(problems)
    checked = [file for file in found if file.sha256 is not None]
    says = next((file.says for file in wanted if file.says is not None), None)
    by = _manifest_path(says)
    output.document(
        {
            "ok": code == 0,
            "exit_code": code,
            "manifest": by,
            "manifest_sha256": sha256_file(by) if by is not None else None,
            "content_checked": len(checked) == len(found),
            "counts": {"files": len(found), "problems": len(problems)},
            "bytes_hashed": sum(file.bytes or 0 for file in checked),
            "seconds": time.monotonic() - began,
            "problems": described(problems),
            "files": found,
        }
    )
    fail(
        output,
        ", ".join(what),
        problems,
        "copy or download the named files again, or name the right manifest",
    )
    lines = []
    for file in found:
        rows = f"{file.rows:,} rows, " if file.rows is not None else ""
        unpacked = f", {size(file.unpacked_bytes)} unpacked" if file.unpacked_bytes is not None else ""
        what_of_it = (
            "size only, contents NOT checked" if file.sha256 is None else f"sha256 {file.sha256[:16]}..."
        )
        lines.append(f"{file.task}: {file.path}: {rows}{size(file.bytes or 0)}{unpacked}, {what_of_it}")
        note = file.loose.note(file.task) if file.loose is not None else None
        lines += [f"note: {note}"] if note is not None else []
    files = f"{len(found)} files are" if len(found) != 1 else "the file is"
    output.text("\n".join([*lines, f"{files} as {says} says"]))


def _manifest_path(says: str | None) -> Path | None:
    from parallel_synthesis.data.check import TRAINING_DATA

    return None if says is None else TRAINING_DATA if says == TRAINING_DATA.name else Path(says)


def _make(
    output: Output, path: str, manifest: str | None, *, write: bool, listed: bool, jobs: int | None, bar: Bar
) -> None:
    """--write-manifest and --format sha256sum."""
    from parallel_synthesis.checkpoint.adopt import write_manifest
    from parallel_synthesis.checkpoint.layout import find_components
    from parallel_synthesis.provenance import hub
    from parallel_synthesis.provenance import manifest as manifests

    if hub.hub_id(path) is not None and write:
        raise CheckpointError(
            f"{path}: no such directory, and nothing is written into the Hub's cache; "
            f"`ps snapshot {path} --export DIR` makes a copy with a manifest"
        )
    directory = Path(path).expanduser()
    if write:
        document = write_manifest(directory, jobs=jobs, progress=bar.start if output.progress else None)
        bar.close()
        if not listed:
            files = document["files"]
            bytes_ = sum(entry["bytes"] for entry in files.values())
            output.text(f"{directory / manifests.MANIFEST}: {len(files)} files, {size(bytes_)}")
            output.document(
                {"manifest": directory / manifests.MANIFEST, "files": len(files), "bytes": bytes_}
            )
            return
    if manifest is not None:
        listing = _listing(manifest)
    else:
        own = directory / manifests.MANIFEST
        if hub.hub_id(path) is not None:
            listing = _fetched(path, None)[1]
        else:
            listing = manifests.listing(directory if own.is_file() else find_components(path))
    if not write:
        output.note("this is what the manifest says; contents NOT checked")
    output.text(manifests.sha256sum_lines(listing.files))
    output.document({"files": {name: expected.sha256 for name, expected in listing.files.items()}})


def _replay(call: Call, path: str, count: int) -> None:
    from parallel_synthesis.provenance import hub
    from parallel_synthesis.training.targets import find_target
    from pscli.progress import Watcher

    if hub.hub_id(path) is not None:
        raise CheckpointError(
            f"{path}: no such run; --replay needs a run directory, with its log and its data. Of a checkpoint of the Hub "
            f"the bytes can be checked: `ps verify {path}`"
        )
    target = find_target(path)
    watcher = Watcher(call.output, log_every=1)
    from parallel_synthesis.training.replay import replay

    call.output.stops.check()  # loading torch may lose an interrupt
    try:
        result = replay(target, count, observer=watcher)
    finally:
        watcher.close()
    if result.difference is not None:
        raise DivergenceError(
            f"{target.run}: from step {result.from_step} the replay differs: {result.difference}. "
            f"The data, the code, the libraries or the machine are not those that made the log"
        )
    saved = len(result.checkpoints)
    also = f", and the bytes of {saved} checkpoint{'s' * (saved > 1)}" if saved else ""
    what = f"{result.steps:,} step{'s' * (result.steps != 1)}"
    call.output.text(f"{what} reproduced from step {result.from_step}{also}")
    call.output.document(
        {"reproduced": result.steps, "from_step": result.from_step, "checkpoints": result.checkpoints}
    )
