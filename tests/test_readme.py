"""The README is true: its console blocks are run in order, and every line they show is a line of the real output.

Numbers and white space may differ (another machine is quicker); `...` stands for lines left out.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_synthesis.config import Config

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[tuple[str, list[str]]]:
    """[(command, the lines shown below it)] of a console block. What `make` runs is shown with its own prompts."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ ") and not (found and found[-1][0].startswith("make ")):
            found.append((line.removeprefix("$ "), []))
        elif line.strip() and line.strip() != "...":
            found[-1][1].append(line)
    return found


def plain(line: str) -> str:
    """A line without its numbers, times and spacing; hashes count as numbers."""
    line = re.sub(r"\b[0-9a-f]{12,64}\b", "#", line)
    line = re.sub(r"-?\d[\d,.]*(e-?\d+)?", "#", line)
    line = re.sub(r"# (min # s|h # min|d # h)", "# s", line)
    line = re.sub(r"\b(kB|MB|GB|bytes)\b", "B", line)
    return " ".join(line.split())


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_do_what_it_shows(environment: dict[str, str], tmp_path: Path) -> None:
    scripts = tmp_path / "bin"
    scripts.mkdir()
    script = scripts / "ps"  # as installed, but from this checkout
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pscli.start import run\nsys.argv[0] = 'ps'\nrun()\n"
    )
    script.chmod(0o755)
    shims = {  # the same targets, without the installation
        "make": f"{shutil.which('make')} -C {ROOT} -o install BIN={scripts}",
        "python": sys.executable,
    }
    for name, command in shims.items():
        (scripts / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (scripts / name).chmod(0o755)
    environment["RELEASE_DEMO"] = str(tmp_path / "runs" / "release-demo")
    environment["PATH"] = f"{scripts}:{environment['PATH']}"
    ran = 0
    for block in BLOCKS:
        for command, shown in commands(block):
            command, _, comment = command.partition("  # exit ")
            result = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            output = result.stdout + result.stderr
            assert result.returncode == int(comment or 0), f"{command}\n{output}"
            there = {plain(line) for line in output.splitlines()}
            missing = [line for line in shown if plain(line) not in there]
            assert not missing, (
                f"{command}\nshows lines that it does not print: {missing}\nit prints\n{output}"
            )
            ran += 1
    assert ran >= 8


def test_every_command_shown_anywhere_exists() -> None:
    from pscli.system_ps import COMMANDS

    words = re.findall(r"^\s*(?:\$ )?ps ([a-z-]+)", README, re.MULTILINE)
    assert words
    assert set(words) <= {*COMMANDS, "aux"}
    for line in re.findall(r"^\s*(?:\$ )?(ps train .*)$", README, re.MULTILINE):
        assert shlex.split(line.partition("  #")[0])


def test_every_field_of_a_recipe_is_explained() -> None:
    for section in dataclasses.fields(Config):
        if section.name == "recipe":
            continue
        fields = dataclasses.fields(getattr(Config(), section.name))
        for field in fields:
            assert re.search(rf"^{field.name}\b", _table_of(section.name), re.MULTILINE), (
                f"{section.name}.{field.name}"
            )


def _table_of(section: str) -> str:
    found = re.search(rf"^\[{section}\].*?(?=^\[|^```)", README, re.DOTALL | re.MULTILINE)
    assert found is not None, f"the README does not explain [{section}]"
    return found[0]


def test_the_exit_codes_are_those_of_the_table() -> None:
    from pscli import main

    codes = {main.DONE, main.CHECK_FAILED, main.REFUSED, main.UNEXPECTED, main.STOPPED, main.INTERRUPTED}
    (section,) = re.findall(r"^## Exit codes\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == codes


def test_the_example_row_is_a_row(tmp_path: Path) -> None:
    from parallel_synthesis.data.rows import parse_row
    from parallel_synthesis.data.tasks import find_task

    (example,) = re.findall(r"^```json\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    row = parse_row(example.encode(), task=find_task("mine", own={"mine"}), path=tmp_path, line=1, number=0)
    assert len(row.contexts) == 2
