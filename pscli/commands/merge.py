"""`ps merge`: one checkpoint of two or more, bit for bit as the release was made; or a full model of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parallel_synthesis.errors import ConfigError, VerificationError
from pscli.context import Call
from pscli.options import HUB, Debug, Json, Quiet
from pscli.output import Output, plain, size, table

if TYPE_CHECKING:
    from parallel_synthesis.checkpoint.merge import MergeResult
    from parallel_synthesis.checkpoint.merge_plan import MergeOptions
    from parallel_synthesis.checkpoint.merge_recipe import MergeRecipe
    from parallel_synthesis.checkpoint.merge_stream import Progress

Sources = list[tuple[str, float]]


def merge(
    ctx: typer.Context,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[A B]",
            help=f"Two checkpoints: directories, runs, RUN@NAME, or {HUB}. One with --onto-base.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The new checkpoint.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="How to merge A and B [release-merge]; a name or a file.")
    ] = None,
    weight_a: Annotated[float | None, typer.Option("--weight-a", help="Weight of A [0.5].")] = None,
    weight_b: Annotated[float | None, typer.Option("--weight-b", help="Weight of B [0.5].")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="CKPT=W",
            help="In place of A B: a checkpoint, named as these, and its weight; repeat.",
        ),
    ] = None,
    mapper_from: Annotated[
        str | None,
        typer.Option("--mapper-from", metavar="a|b|1..", help="Whose cache mapper is taken [b]."),
    ] = None,
    config_from: Annotated[
        str | None,
        typer.Option("--config-from", metavar="a|b|1..", help="Whose adapter_config.json is taken [a]."),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="average (default), concat or svd; see above.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", help="Rank of the result of svd.")
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option("--missing", help="A tensor only some inputs have: error (default), copy or zero."),
    ] = None,
    allow_mismatch: Annotated[
        list[str] | None,
        typer.Option("--allow-mismatch", metavar="FIELD", help="Merge although this differs; recorded."),
    ] = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Merge although weights are inf or nan.")
    ] = False,
    onto_base: Annotated[
        str | None,
        typer.Option(
            "--onto-base",
            metavar="MODEL",
            help="Fold one checkpoint's LoRA into this model: a directory, or OWNER/NAME of the Hub.",
        ),
    ] = None,
    scale: Annotated[
        float | None, typer.Option("--scale", help="With --onto-base: how much of the delta, 0 to 1 [1].")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="With --onto-base: relative difference of logits that is accepted."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read, check and hash everything; write nothing.")
    ] = False,
    verify: Annotated[
        str | None,
        typer.Option("--verify", metavar="MANIFEST", help="Then compare with a manifest file, or `release`."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make one checkpoint of two, as the release was made: half of A, half of B, B's cache mapper.

    The default averages the LoRA factors A and B, each for itself. That is not the average of the deltas B @ A,
    which are what the model feels; the output says how far the two are apart for these inputs. `concat` is the
    exact weighted sum of the deltas, at the sum of the ranks; `svd --rank R` its best approximation of rank R.

    \b
    ps merge runs/browsecomp runs/general@general_step_95060 --out release
    ps merge A B --out DIR --weight-a 0.3 --weight-b 0.7 --dry-run
    ps merge A B --out DIR --method svd --rank 16
    ps merge --input A=0.5 --input B=0.3 --input C=0.2 --mapper-from 1 --out DIR
    ps merge A --onto-base Qwen3-14B --out full-model
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    if out is None:
        raise ConfigError(["--out is missing: the directory of the new checkpoint"])
    if onto_base is not None:
        averaging = {
            "--input": inputs, "--recipe": recipe, "--weight-a": weight_a, "--weight-b": weight_b,
            "--mapper-from": mapper_from, "--config-from": config_from, "--method": method, "--rank": rank,
            "--missing": missing, "--allow-mismatch": allow_mismatch, "--verify": verify,
        }  # fmt: skip
        given = [flag for flag, value in averaging.items() if value is not None]
        given += ["--allow-nonfinite"] if allow_nonfinite else []
        if given or len(checkpoints or ()) != 1:
            wrong = f", without {', '.join(given)}" if given else ""
            raise ConfigError([f"--onto-base takes one checkpoint{wrong}: ps merge CKPT --onto-base MODEL"])
        _onto_base(
            call, (checkpoints or [""])[0], onto_base, out, scale=scale, tolerance=tolerance, dry_run=dry_run
        )
        return
    if scale is not None or tolerance is not None:
        raise ConfigError(["--scale and --tolerance go with --onto-base"])
    from parallel_synthesis.checkpoint.merge_recipe import DEFAULT, load_merge_recipe

    if inputs and (checkpoints or recipe or weight_a is not None or weight_b is not None):
        raise ConfigError(
            ["--input stands in place of A B, their weights and --recipe: give one or the other"]
        )
    loaded = None if inputs else load_merge_recipe(recipe or DEFAULT)
    if inputs:
        sources = [_source(item) for item in inputs]
    else:
        assert loaded is not None
        if len(checkpoints or ()) != 2 or len(loaded.weights) != 2:
            raise ConfigError(
                [f"expected two checkpoints, A and B, found {len(checkpoints or ())}; --input for others"]
            )
        weights = [w if w is not None else of for w, of in zip((weight_a, weight_b), loaded.weights)]
        sources = list(zip(checkpoints or (), weights))
    options = _options(
        len(sources),
        method=method or (loaded.method if loaded else "average"),
        rank=rank if rank is not None or loaded is None else loaded.rank,
        mapper_from=mapper_from or (loaded.mapper_from if loaded else None),
        config_from=config_from or (loaded.config_from if loaded else "a"),
        missing=missing or (loaded.missing if loaded else "error"),
        allow_mismatch=tuple(allow_mismatch or ()),
        allow_nonfinite=allow_nonfinite,
    )
    from parallel_synthesis.checkpoint import merge as library

    with _progress(call.output, "merging") as progress:
        result = library.merge(
            sources, out, options, recipe=loaded.name if loaded else None, dry_run=dry_run, progress=progress
        )
    for warning in result.warnings:
        call.output.warning(warning)
    call.output.text(_report(result, options, sources))
    found = library.differences(result, verify) if verify is not None else None
    if found:
        raise VerificationError([f"{out}: {problem}" for problem in found])
    if verify is not None:
        call.output.text(f"every file is as {verify} lists it")
    elif (
        loaded
        and loaded.manifest
        and not dry_run
        and _as_written(loaded, sources, options)
        and _of_its_backbone(out, loaded.manifest)
    ):
        call.output.note(f"next, on the release's own inputs: ps verify {out} --manifest {loaded.manifest}")
    call.output.document({**plain(result), "verified": verify})


def _as_written(recipe: MergeRecipe, sources: Sources, options: MergeOptions) -> bool:
    """Whether no flag has changed what the recipe's manifest is of."""
    weights = tuple(weight for _, weight in sources)
    return weights == recipe.weights and options.method == recipe.method and not options.allow_mismatch


def _of_its_backbone(out: Path, manifest: str) -> bool:
    """Whether a merge can be what the release's manifest is of; a name may be the path of a copy."""
    from parallel_synthesis.checkpoint.layout import ADAPTER_CONFIG
    from parallel_synthesis.checkpoint.merge import RELEASE
    from parallel_synthesis.provenance.schema import read_json
    from parallel_synthesis.resources import resource

    if manifest != RELEASE:
        return True
    released = read_json(resource("artifacts", "release_checkpoint.json"))["base_model"]
    own = read_json(out / ADAPTER_CONFIG).get("base_model_name_or_path")
    return Path(str(own)).name == Path(released).name


def _source(item: str) -> tuple[str, float]:
    given, equals, text = item.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        equals = ""
    if not given or not equals:
        raise ConfigError([f"--input {item}: expected CKPT=WEIGHT, e.g. runs/a=0.5"])
    return given, weight


def _options(
    count: int,
    *,
    method: str,
    rank: int | None,
    mapper_from: str | None,
    config_from: str,
    missing: str,
    allow_mismatch: tuple[str, ...],
    allow_nonfinite: bool,
) -> MergeOptions:
    from parallel_synthesis.checkpoint.merge_plan import METHODS, MISSING, MergeOptions
    from parallel_synthesis.checkpoint.merge_recipe import place_of
    from parallel_synthesis.values import nearest

    if method not in METHODS:
        raise ConfigError(
            [f"--method {method}: expected one of {', '.join(METHODS)}{nearest(method, list(METHODS))}"]
        )
    if missing not in MISSING:
        raise ConfigError(
            [f"--missing {missing}: expected one of {', '.join(MISSING)}{nearest(missing, list(MISSING))}"]
        )
    if mapper_from is None and count > 1:
        raise ConfigError(["--mapper-from is missing: whose cache mapper is taken, e.g. --mapper-from 1"])
    return MergeOptions(
        method=METHODS[method],
        rank=rank,
        mapper_from=place_of(mapper_from or "a", count, flag="--mapper-from"),
        config_from=place_of(config_from, count, flag="--config-from"),
        missing=MISSING[missing],
        allow_mismatch=allow_mismatch,
        allow_nonfinite=allow_nonfinite,
    )


def _report(result: MergeResult, options: MergeOptions, sources: Sources) -> str:
    adapter = result.components["judger_lora/adapter_model.safetensors"]
    rows = [
        (
            chr(ord("A") + number),
            f"{weight:g}",
            "-" if parent["step"] is None else f"{parent['step']:,}",
            parent["source"],
        )
        for number, ((_, weight), parent) in enumerate(zip(sources, result.parents))
    ]
    lines = [table(rows, header=("input", "weight", "step", "checkpoint"))]
    done = "would write" if result.dry_run else "wrote"
    lines.append(f"{done} {result.out}: {options.method}, adapter {size(adapter['bytes'])}")
    lines += [f"  {entry['sha256']}  {name}" for name, entry in sorted(result.components.items())]
    lines += [f"accepted: {finding}" for finding in result.accepted]
    if result.gap is not None:
        lines.append(
            f"averaging the factors differs from averaging the deltas by {result.gap.overall:.2%} of the latter "
            f"(worst module {result.gap.worst:.2%})"
        )
    if result.truncation is not None:
        lines.append(
            f"rank {options.rank} leaves out {result.truncation.overall:.2%} of the summed deltas "
            f"(worst module {result.truncation.worst:.2%})"
        )
    return "\n".join(lines)


def _onto_base(
    call: Call,
    checkpoint: str,
    model: str,
    out: Path,
    *,
    scale: float | None,
    tolerance: float | None,
    dry_run: bool,
) -> None:
    with _progress(call.output, "folding") as progress:
        from parallel_synthesis.training import onto_base as library

        result = library.fold(
            checkpoint,
            model,
            out,
            scale=1.0 if scale is None else scale,
            tolerance=tolerance,
            dry_run=dry_run,
            progress=progress,
        )
    for warning in result.warnings:
        call.output.warning(warning)
    done = "would write" if dry_run else "wrote"
    lines = [
        f"{done} {out}: {result.modules} modules with {result.scale:g} of their delta folded in, "
        f"{result.tensors - result.changed} of {result.tensors} tensors byte for byte as in {model}"
    ]
    if result.logits is not None:
        lines.append(
            f"logits against backbone + adapter: relative difference {result.logits:.2e} "
            f"(tolerance {result.tolerance:.0e})"
        )
    call.output.text("\n".join(lines))
    library.check_logits(result)
    call.output.document(plain(result))


@contextmanager
def _progress(output: Output, what: str) -> Iterator[Progress | None]:
    """A moving bar on a terminal, nothing elsewhere."""
    if not output.progress:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns: list[Any] = [TextColumn(what), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn()]
    with Bar(*columns, console=Console(file=output.stderr), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
