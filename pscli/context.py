"""What a subcommand gets besides its own options."""

from __future__ import annotations

from dataclasses import dataclass

from pscli.output import Output


@dataclass(frozen=True, kw_only=True)
class Call:
    """argv: as typed, without the program's name. torchrun: what followed `--`."""

    output: Output
    argv: tuple[str, ...]
    torchrun: tuple[str, ...]
