"""`ps inspect`: what a run covered and skipped, one of its steps, where two runs part, what a file holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from parallel_synthesis.errors import CheckpointError, ConfigError, ParallelSynthesisError
from pscli.context import Call
from pscli.options import HUB, Debug, Json, Quiet, Sets
from pscli.output import Output, plain

_PAUSE = 2.0  # seconds between two looks at a log that grows
_DATA_NAMES = (".jsonl", ".jsonl.gz", ".json.gz")
_EXPECTED = "a run, a train.log, a data file (.jsonl, .jsonl.gz), a checkpoint or RUN@NAME"


def inspect(
    ctx: typer.Context,
    path: Annotated[
        str,
        typer.Argument(
            help="A run or its train.log, ours or the reference implementation's; a checkpoint: a directory, RUN@NAME, or "
            f"{HUB}; a data file (.jsonl, .jsonl.gz); with --coverage a recipe or a run."
        ),
    ],
    against: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="Compare with another run or log.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=1, help="One global step: its record and rows.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the run's report as one HTML file.")
    ] = None,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Tokenise the rows: which steps will the guards skip?")
    ] = False,
    sets: Sets = None,
    lineage: Annotated[bool, typer.Option("--lineage", help="Show what a checkpoint descends from.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Keep watching a live run.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show what a run covered, what it skipped and why, and where it stands.

    \b
    ps inspect runs/a
    ps inspect runs/a --html report.html
    ps inspect runs/a --step 95060             which rows it took, its loss and digests
    ps inspect runs/a --against runs/b         the first step that differs; exit 1 when one does
    ps inspect general --coverage              what the guards will skip, before any GPU hour
    ps inspect general --coverage --set guards.live_tokens=2400
    ps inspect runs/a@general_step_95060       a checkpoint: tensors, metrics, parents
    """
    del as_json, quiet, debug
    call: Call = ctx.obj
    chosen = {
        "--against": against is not None,
        "--step": step is not None,
        "--html": html is not None,
        "--coverage": coverage,
        "--lineage": lineage,
        "--follow": follow,
    }
    if sum(chosen.values()) > 1:
        named = " and ".join(name for name, given in chosen.items() if given)
        raise ConfigError([f"{named} exclude each other: give one"])
    if sets and not coverage:
        raise ConfigError(
            ["--set goes with --coverage: a recipe or a run is looked at as if it had these values"]
        )
    if coverage:
        show_coverage(call.output, path, sets=sets or ())
    elif against is not None:
        _against(call.output, path, against)
    elif lineage:
        _lineage(call.output, path)
    elif step is not None:
        _step(call.output, path, step)
    else:
        _look(call.output, path, html=html, follow=follow)


def _look(output: Output, given: str, *, html: Path | None, follow: bool) -> None:
    from parallel_synthesis.training.inspection.run import is_run

    path = Path(given).expanduser()
    if is_run(path):
        _run(output, path, html=html, follow=follow)
    elif path.is_file() and not path.name.lower().endswith(_DATA_NAMES):
        _log(output, path, html=html, follow=follow)
    elif html is not None or follow:
        raise ConfigError([f"{given}: --html and --follow are for a run or a train.log"])
    elif path.is_file():
        _data(output, path)
    else:
        _checkpoint(output, given)


def _run(output: Output, path: Path, *, html: Path | None, follow: bool) -> None:
    from parallel_synthesis.training.inspection.run import inspect_run, read_plan
    from parallel_synthesis.training.inspection.runlog import RunLog
    from pscli import inspect_text

    plan = read_plan(path)
    log = RunLog(path / "train.log")
    report = inspect_run(path, log=log, plan=plan)
    paint = inspect_text.painter(output.colour)
    if follow and output.mode != "json":
        _follow(
            output,
            lambda: inspect_text.run(inspect_run(path, log=log, plan=plan), paint),
            lambda: _over(path),
        )
        report = inspect_run(path, log=log, plan=plan)
    else:
        output.text(inspect_text.run(report, paint))
    if html is not None:
        from pscli import inspect_html

        _write(output, html, inspect_html.run_page(report, lineage=_lineage_text(path)))
    output.document({"kind": "run", "run": plain(report)})


def _log(output: Output, path: Path, *, html: Path | None, follow: bool) -> None:
    from parallel_synthesis.training.inspection.report import LogReport, report
    from parallel_synthesis.training.inspection.runlog import RunLog
    from pscli import inspect_text

    log = RunLog(path)
    paint = inspect_text.painter(output.colour)

    def look() -> LogReport:
        log.update()
        return report(log)

    if follow and output.mode != "json":
        _follow(output, lambda: inspect_text.log_alone(look(), paint), lambda: False)
        found = look()
    else:
        found = look()
        output.text(inspect_text.log_alone(found, paint))
    if html is not None:
        from pscli import inspect_html

        _write(output, html, inspect_html.log_page(found))
    output.document({"kind": "log", "log": plain(found)})


def _follow(output: Output, view: Any, over: Any) -> None:
    """Shows a view again whenever it changes, in place on a terminal, until `over` or Ctrl-C."""
    shown = ""
    try:
        while True:
            text = view()
            if text != shown:
                output.text(("\x1b[H\x1b[2J" if output.stdout.isatty() else "") + text)
                shown = text
            if over():
                return
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        output.stops.forget()  # the ordinary end of watching


def _over(path: Path) -> bool:
    from parallel_synthesis.training.inspection.run import ends_here

    return ends_here(path)


def _write(output: Output, place: Path, text: str) -> None:
    place.write_text(text, encoding="utf-8")
    output.note(f"wrote {place} ({len(text.encode()):,} bytes)")


def _step(output: Output, given: str, step: int) -> None:
    from parallel_synthesis.training.inspection.run import EMPTY_PLAN, find_log, is_run, read_plan
    from parallel_synthesis.training.inspection.runlog import RunLog
    from parallel_synthesis.training.inspection.steps import inspect_step
    from pscli import inspect_text, inspect_views

    log = RunLog(find_log(given))
    log.update()
    path = Path(given).expanduser()
    found = inspect_step(log, read_plan(path) if is_run(path) else EMPTY_PLAN, step)
    output.text(inspect_views.step(found, inspect_text.painter(output.colour)))
    output.document({"kind": "step", "step": plain(found)})


def _against(output: Output, given: str, other: str) -> None:
    from parallel_synthesis.training.inspection.against import compare
    from pscli import inspect_text, inspect_views

    found = compare(given, other)
    output.text(inspect_views.against(found, inspect_text.painter(output.colour)))
    code = 1 if found.differs else 0
    output.document({"ok": not found.differs, "exit_code": code, "kind": "against", "against": plain(found)})
    raise typer.Exit(code)


def _checkpoint(output: Output, given: str) -> None:
    from parallel_synthesis.checkpoint.layout import locate
    from parallel_synthesis.checkpoint.nearby import nothing_at
    from parallel_synthesis.provenance import hub
    from parallel_synthesis.training.inspection.files import inspect_checkpoint
    from pscli import inspect_text, inspect_views

    run, at, _ = given.rpartition("@")
    named = at and Path(run).expanduser().is_dir()
    file = given.lower().endswith((*_DATA_NAMES, ".log"))
    if not Path(given).expanduser().exists() and not named and (file or hub.hub_id(given) is None):
        raise nothing_at(given, expected=_EXPECTED)
    # A Hub id is shown as one, at its commit, not as a long path into the cache.
    located = locate(given, quick=True)
    found = inspect_checkpoint(
        located.directory, source=located.name if hub.hub_id(given) is not None else None
    )
    output.text(inspect_views.checkpoint(found, inspect_text.painter(output.colour)))
    output.document({"kind": "checkpoint", "checkpoint": plain(found)})


def _data(output: Output, path: Path) -> None:
    from parallel_synthesis.training.inspection.files import inspect_data
    from pscli import inspect_text, inspect_views

    found = inspect_data(path)
    output.text(inspect_views.data(found, inspect_text.painter(output.colour)))
    output.document({"kind": "data", "data": plain(found)})


def _lineage(output: Output, given: str) -> None:
    from parallel_synthesis.checkpoint.layout import find_components
    from parallel_synthesis.provenance import lineage

    node = lineage.read(given, find=lambda source: find_components(source))
    output.text(lineage.render(node))
    output.document({"kind": "lineage", "lineage": lineage.to_dict(node)})


def _lineage_text(run: Path) -> str | None:
    """The lineage of a run's newest components, for its page; None when it has none yet."""
    from parallel_synthesis.checkpoint.layout import find_components
    from parallel_synthesis.provenance import lineage

    try:
        return lineage.render(lineage.read(find_components(run), find=lambda source: find_components(source)))
    except ParallelSynthesisError:
        return None


def show_coverage(output: Output, given: str, *, sets: Sequence[str] = ()) -> None:
    """The coverage of a run (compared with its log, if no field is overridden) or of a recipe."""
    from parallel_synthesis.provenance.schema import load_json
    from parallel_synthesis.recipe import load_recipe, load_record
    from parallel_synthesis.training.inspection.run import is_run
    from parallel_synthesis.training.inspection.runlog import RunLog
    from parallel_synthesis.training.task_names import with_canonical_tasks

    path = Path(given).expanduser()
    log = None
    if is_run(path):
        record = load_json(path / "run_args.json", "run_args")
        if "config" not in record:
            raise CheckpointError(f"{given}: a run of the reference; name a recipe to foretell its skips")
        config = load_record(record, path=path / "run_args.json", sets=sets).config
        if not sets:
            log = RunLog(path / "train.log")
            log.update()
    else:
        config = load_recipe(given, sets=sets, complete=with_canonical_tasks).config
    print_coverage(output, config, log)


def print_coverage(output: Output, config: Any, log: Any = None) -> None:
    """Foretells a config's skips and shows them."""
    from parallel_synthesis.training.inspection.coverage import cover
    from pscli import inspect_text, inspect_views

    found = cover(config, log=log, progress=_progress(output) if output.progress else None)
    output.text(inspect_views.coverage(found, inspect_text.painter(output.colour)))
    output.document({"kind": "coverage", "coverage": plain(found)})


def _progress(output: Output) -> Any:
    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        output.stderr.write(f"\rtokenised {done:,} of {total:,} rows{end}")
        output.stderr.flush()

    return show
