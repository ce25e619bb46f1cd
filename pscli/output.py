"""The one sink of the command line: human, json or quiet. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from parallel_synthesis.errors import ConfigError, PeerError
from pscli.start import Stops

Mode = Literal["human", "json", "quiet"]
REPORT_DIRECTORY = (
    "PSCLI_REPORT_DIRECTORY"  # set by launch.py for its workers: the parent prints their document
)
RESULT_FILE = "result.json"
ARGV_FILE = "argv.json"  # in the same directory: the call as typed, for the run's records


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a command prints.

    rank: this process among those of the run, None when it is not a worker. Only rank 0 shows data and notes;
    every rank shows its errors. reports: where a worker leaves its document for the process that started it.
    stops: the stop signals of the call; what tells how it ended settles them.
    """

    mode: Mode = "human"
    debug: bool = False
    rank: int | None = None
    reports: Path | None = None
    stdout: TextIO = dataclasses.field(default_factory=lambda: sys.stdout)
    stderr: TextIO = dataclasses.field(default_factory=lambda: sys.stderr)
    stops: Stops = dataclasses.field(default_factory=Stops)

    @staticmethod
    def from_call(
        arguments: Sequence[str], environ: Mapping[str, str], *, stops: Stops | None = None
    ) -> Output:
        """Read from the raw arguments, so that a usage error is reported in the wanted form too."""
        mode: Mode = "json" if "--json" in arguments else "quiet" if "--quiet" in arguments else "human"
        rank = environ.get("RANK", "")
        reports = environ.get(REPORT_DIRECTORY)
        return Output(
            mode=mode,
            debug="--debug" in arguments,
            rank=int(rank) if rank.isdigit() else None,
            reports=Path(reports) if reports else None,
            stops=stops or Stops(),
        )

    @property
    def speaks(self) -> bool:
        return self.rank in (None, 0)

    @property
    def progress(self) -> bool:
        """True where a moving progress line has a reader."""
        return self.speaks and self.mode == "human" and self.stderr.isatty()

    @property
    def colour(self) -> bool:
        return self.stdout.isatty() and not os.environ.get("NO_COLOR")

    def text(self, text: str) -> None:
        """Data for a human: stdout, unless the call wants JSON (`document`)."""
        if self.speaks and self.mode != "json":
            self._write(text if text.endswith("\n") else text + "\n")

    def document(self, data: Mapping[str, Any]) -> None:
        """The one JSON document of a successful call; nothing in the other modes. Settles it in all of them.

        Raises Interrupted where a stop signal came before.
        """
        self.stops.settle()
        if not self.speaks:
            return
        text = _json({"ok": True, "exit_code": 0, **data})
        if self.reports is not None:
            (self.reports / RESULT_FILE).write_text(text, encoding="utf-8")
        elif self.mode == "json":
            self._write(text)

    def raw(self, text: str) -> None:
        """A document that a worker made; as `document`."""
        self.stops.settle()
        self._write(text)

    def note(self, text: str) -> None:
        """What a human should know besides the data: stderr, not with --quiet."""
        if self.speaks and self.mode != "quiet":
            self._say(text)

    def warning(self, text: str) -> None:
        """Shown in every mode."""
        if self.speaks:
            self._say(f"warning: {text}")

    def failure(
        self,
        error: BaseException,
        exit_code: int,
        *,
        message: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """The end of a call that failed: its message on stderr and, with --json, its document on stdout.

        more: what the call found nevertheless, for the document.

        A worker's document goes to the process that started it; the same message is shown by one rank only.
        """
        self.stops.settled = True
        text = str(error) if message is None else message
        document = {**(more or {}), **failure_document(error, exit_code, text)}
        if self.debug:
            traceback.print_exception(error, file=self.stderr)
        if self.reports is not None:
            first = not any(self.reports.glob("error-*.json"))  # a rank ended for another's error is quiet
            if self._leave(document) and not isinstance(error, PeerError) and (first or exit_code != 130):
                self._say(_described(document, self.rank))
            return
        self._say(_described(document, self.rank))
        if self.mode == "json" and self.speaks:
            self._write(_json(document))

    def worker_failure(self, document: Mapping[str, Any], *, said: bool) -> None:
        """The end of a call whose workers failed. said: a worker has shown the message already."""
        self.stops.settled = True
        if not said:
            self._say(_described(document, None))
        if self.mode == "json":
            self._write(_json({key: value for key, value in document.items() if key != "rank"}))

    def _leave(self, document: Mapping[str, Any]) -> bool:
        """Leaves a worker's document for its parent; False when another rank had the same to say."""
        assert self.reports is not None
        name = hashlib.sha256(document["error"]["message"].encode()).hexdigest()[:16]
        try:
            with (self.reports / f"error-{name}.json").open("x", encoding="utf-8") as file:
                json.dump({**document, "rank": self.rank}, file)
        except FileExistsError:
            return False
        except FileNotFoundError:  # who started this worker is gone, and its directory with it
            return True
        return True

    def _write(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()

    def _say(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # a reader that went away must not end a training run
            self.stderr.write(text + "\n")
            self.stderr.flush()


def _described(document: Mapping[str, Any], rank: int | None) -> str:
    """A failure for a human, its problems one a line."""
    error = document["error"]
    label = {75: "stopped", 130: "interrupted"}.get(document["exit_code"], "error")
    where = "" if rank is None or label != "error" else f" (rank {rank})"
    problems = error.get("problems", ())
    if len(problems) > 1:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        return f"{label}{where}: {len(problems)} problems\n{lines}"
    message = error["message"]
    return message if message.startswith(label) else f"{label}{where}: {message}"


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def failure_document(error: BaseException, exit_code: int, message: str) -> dict[str, Any]:
    """The document of a failed call."""
    described: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if isinstance(error, ConfigError):
        described["problems"] = list(error.problems)
    return {"ok": False, "exit_code": exit_code, "error": described}


def plain(value: Any) -> Any:
    """JSON types: dataclasses and errors as objects, paths as text, nan and inf as null."""
    if isinstance(value, Exception):
        return {"type": type(value).__name__, "message": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), indent: int = 0) -> str:
    """Aligned columns in plain text: the last column as it is, numbers to the right."""
    lines = [list(map(str, row)) for row in ([header] if header else [])] + [
        list(map(str, row)) for row in rows
    ]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    right = [bool(rows) and all(_numeric(str(row[i])) for row in rows) for i in range(len(widths))]
    out = []
    for line in lines:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        out.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(out)


def _numeric(text: str) -> bool:
    return text in ("", "-", "?") or text.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()


def size(count: float) -> str:
    """Bytes for humans: 84.1 MB (powers of ten, as disks are sold)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def batches(count: int) -> str:
    """A step is skipped for one batch of one rank or several, so these can be more than the steps."""
    return f"{count:,} batch{'es' * (count != 1)}"


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 5 h 12 min, 2 d 3 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
