"""Every error the library raises on purpose, one family.

ParallelSynthesisError
├── RefusedError            the input must change; nothing was done               (exit 2)
│   ├── ConfigError         recipe, --set or environment; carries every problem found
│   ├── DataError           a data file, a row or a task name
│   ├── BackboneError       a model or tokenizer this method cannot use exactly
│   ├── CheckpointError     not a checkpoint, or not one that fits this run
│   │   └── ManifestError   a manifest that can not be read; carries every problem found
│   └── RunExistsError      the output directory already holds a run
├── CheckFailedError        the work was done and a check said no                 (exit 1)
│   ├── DivergenceError     replicas or repeated steps are not bit-identical
│   ├── NonFiniteError      a loss or gradient is nan or inf
│   └── VerificationError    bytes are not what a manifest says; carries every problem found
├── StorageError            a file could not be read or written                   (exit 3)
├── PeerError               another rank failed; its own error says why           (exit 3)
└── StoppedError            a signal ended the run after a complete save          (exit 75)

The table from class to exit code is pscli's (pscli/main.py); the library never exits.
A message names the file, row, field or rank, says what was expected, and ends with what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class ParallelSynthesisError(Exception):
    """Base of all errors raised on purpose."""


class RefusedError(ParallelSynthesisError):
    """The input must change before this can work."""


class ConfigError(RefusedError):
    """One or more problems of a recipe or its overrides, all reported together."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DataError(RefusedError):
    """A data file, a row or a task name is not usable."""


class BackboneError(RefusedError):
    """The model or tokenizer is not one this method is exact for."""


class CheckpointError(RefusedError):
    """The directory is not a checkpoint, or does not belong to this run."""


class ManifestError(CheckpointError):
    """A manifest is malformed, so nothing can be judged by it; all its problems together."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class RunExistsError(RefusedError):
    """The output directory already holds a run."""


class CheckFailedError(ParallelSynthesisError):
    """A check of content failed."""


class DivergenceError(CheckFailedError):
    """Two things that must be bit-identical are not."""


class NonFiniteError(CheckFailedError):
    """A loss or gradient is nan or inf."""


class VerificationError(CheckFailedError):
    """Files that are not what their manifest says, all reported together."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class StorageError(ParallelSynthesisError):
    """A file could not be read or written."""


class PeerError(ParallelSynthesisError):
    """Another rank failed first."""


class StoppedError(ParallelSynthesisError):
    """A signal asked the run to stop; a complete checkpoint of `step` is committed."""

    def __init__(self, message: str, *, step: int) -> None:
        self.step = step
        super().__init__(message)
