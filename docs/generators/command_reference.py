"""What `penstock COMMAND --help` says, as a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_INTRODUCTION = """\
# Command line

What `penstock COMMAND --help` says. A value that is wrong is refused in one line that names the
flag, the value and the bound.
"""
_COLUMNS = "88"
# Of a command with many flags the usage only repeats their names.
_LONGEST_USAGE_LINES = 12


def page() -> str:
    overview = _help([])
    commands = re.findall(r"^  (\w+) ", overview, re.MULTILINE)
    with ThreadPoolExecutor() as threads:
        sections = threads.map(_section, commands)
        return "\n".join([_INTRODUCTION, _fenced(overview), *sections])


def _section(command: str) -> str:
    usage, blank, rest = _help([command]).partition("\n\n")
    short = usage.count("\n") < _LONGEST_USAGE_LINES
    return f"\n## penstock {command}\n\n{_fenced(usage + blank + rest if short else rest)}"


def _fenced(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def _help(command: Sequence[str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "penstock_cli.main", *command, "--help"],
        env={**os.environ, "COLUMNS": _COLUMNS},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout
