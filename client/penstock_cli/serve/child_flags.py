"""Checks that the router and the shards of `penstock serve` accept their flags.

Before anything starts, separate processes parse the flags. Errors are rewritten for the command
that the user typed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_common.child_environment import child_environment
from penstock_common.flags import UNKNOWN_FLAGS, did_you_mean
from penstock_common.shared_flags import USAGE_STATUS

# Exit status if the process would run; after --help it is 0.
_WOULD_RUN_STATUS = 3
_READ_FLAGS = f"""
import sys
try:
    from penstock_{{process}}.cli import parse_config
except ImportError as error:
    from penstock_common.version import why_not_imported
    sys.exit(why_not_imported(error, "{{process}}"))
parse_config(sys.argv[1:])
sys.exit({_WOULD_RUN_STATUS})
"""
_ROUTER, _SHARD = "router", "shard"
# Required flags: a process reports missing ones before unknown ones.
_NEEDED: dict[str, list[str]] = {_ROUTER: ["--shards", "127.0.0.1:1"], _SHARD: []}


@dataclass(frozen=True, slots=True)
class Typed:
    """The command line of a process to start."""

    flags: Sequence[str]
    # Names of our environment variables that the process gets; below, additional variables.
    variables: Sequence[str]
    environment: Mapping[str, str]


class Unusable(Exception):
    """Invalid flags; the text is one line."""


@dataclass(frozen=True, slots=True)
class _Reading:
    status: int
    said: str

    @property
    def unknown(self) -> str:
        """The unknown arguments as typed, or ""."""
        return self.said.partition(UNKNOWN_FLAGS)[2].partition(" (see ")[0].partition("; did ")[0]

    @property
    def resembled(self) -> list[str]:
        """The known flags that the error suggests for unknown ones."""
        return re.findall(r"; did you mean (\S+)\?", self.said)


def check(router: Typed, shards: Sequence[Typed], own: Sequence[str]) -> bool:
    """True if all processes would run; false if one printed its help. `own`: the flags of `penstock
    serve` itself, which users type among shards' flags. Raise `Unusable` if a process would not
    start.
    """
    would_run = True
    checks = [*((_SHARD, shard, router) for shard in shards), (_ROUTER, router, shards[0])]
    for process, typed, other in checks:
        reading = _read(process, typed.flags, typed)
        if reading.status == USAGE_STATUS:
            raise Unusable(_told(reading, process, other, own if process == _SHARD else ()))
        if reading.status not in (0, _WOULD_RUN_STATUS):
            lines = reading.said.strip().splitlines() or [f"status {reading.status}"]
            raise Unusable(f"the {process} cannot start: {lines[-1]}")
        would_run = would_run and reading.status == _WOULD_RUN_STATUS
    return would_run


def _read(process: str, flags: Sequence[str], typed: Typed) -> _Reading:
    read = subprocess.run(
        [sys.executable, "-c", _READ_FLAGS.format(process=process), *flags],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**child_environment(*typed.variables), **typed.environment},
        check=False,
    )
    return _Reading(read.returncode, read.stderr)


def _told(reading: _Reading, process: str, other_process: Typed, own: Sequence[str]) -> str:
    if not reading.unknown:
        return reading.said.strip().removeprefix(f"penstock {process}: ")
    flag = reading.unknown.split()[0]
    if not flag.startswith("-"):
        return f"{UNKNOWN_FLAGS}{reading.unknown} (a MODEL comes first: penstock serve MODEL ...)"
    other = _ROUTER if process == _SHARD else _SHARD
    there = _read(other, [*_NEEDED[other], flag], other_process)
    side = "after" if other == _ROUTER else "before"
    if not there.unknown:
        return f"{flag} is a flag of the {other}: put it {side} -- (see penstock {other} --help)"
    where = "" if process == _SHARD else " after --"
    helps = f"penstock serve --help and penstock {process} --help"
    here = [*own, *reading.resembled]
    meant = did_you_mean([flag], [*here, *there.resembled])
    if meant and not any(f" {each}?" in meant for each in here):
        meant = meant.replace("?", f" {side} --?")
    return f"{UNKNOWN_FLAGS}{reading.unknown}{where}{meant} (see {helps})"
