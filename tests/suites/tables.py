"""The table of a suite: which tests of another project pass, and why the others do not.

    tests/test_completion.py
    pass -     test_a_completion
    fail gap   test_beam_search  # beam search is not served
    skip n/a   test_on_a_gpu  # there is none

A line without an outcome names the file of those below it. Kinds of what does not pass:

- `fault`: penstock should do it, and the reason says until what (`until ...`);
- `gap`: penstock does not serve it, or means something else by it, as its documentation says;
- `n/a`: not applicable, it asks for another model or a larger one, or for what is inside of the
  other server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "tables"
OUTCOMES = ("pass", "fail", "skip")
KINDS = ("fault", "gap", "n/a")
_NONE = "-"
_WHY = "  # "
_UNTIL = "until "


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a test that ran; if it did not pass, its message."""

    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The expected outcome of a test; kind and reason are empty if it passes."""

    outcome: str
    kind: str = ""
    why: str = ""


Table = Mapping[str, Row]


def path_of(suite: str) -> Path:
    return FOLDER / f"{suite}.txt"


def read(text: str) -> dict[str, Row]:
    """Rows by the ids of tests."""
    rows: dict[str, Row] = {}
    file = ""
    for line in text.splitlines():
        outcome, _, rest = line.partition(" ")
        if not line or line.startswith("#"):
            continue
        if outcome not in OUTCOMES:
            file = line
            continue
        kind, _, told = rest.partition(" ")
        test, _, why = told.lstrip().partition(_WHY)
        name = f"{file}::{test}"
        assert name not in rows, f"twice: {name}"
        rows[name] = Row(outcome, kind.removeprefix(_NONE), why)
    return rows


def written(table: Table) -> str:
    """Return the text of a table, in the order of the ids. `read` reads it."""
    lines = [f"# {summary(table)}"]
    last = ""
    for name, row in sorted(table.items()):
        file, _, test = name.partition("::")
        if file != last:
            lines += ["", file]
            last = file
        why = f"{_WHY}{row.why}" if row.why else ""
        lines.append(f"{row.outcome} {row.kind or _NONE:<5} {test}{why}")
    return "\n".join(lines) + "\n"


def summary(table: Table) -> str:
    """Return the number of tests that pass, and for each kind of reason the number that do not."""
    counts = Counter(row.kind or row.outcome for row in table.values())
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("pass", *KINDS))


def differences(table: Table, found: Mapping[str, Found]) -> Iterator[str]:
    """A line for each test that did not do as its row says, or has no row."""
    for name in sorted({*table, *found}):
        row, now = table.get(name), found.get(name)
        if now is None:
            yield f"{name}: did not run"
        elif row is None:
            yield f"{name}: has no row, and its outcome is {now.outcome}: {now.message}"
        elif row.outcome != now.outcome:
            yield f"{name}: {now.outcome}, but its row says {row.outcome}: {now.message or row.why}"


def updated(table: Table, found: Mapping[str, Found]) -> dict[str, Row]:
    """The table with these outcomes. What is new among what does not pass is a fault that says no
    more than its message: no table with such a row is taken.
    """
    return {name: _updated(table.get(name), now) for name, now in found.items()}


def _updated(row: Row | None, now: Found) -> Row:
    if now.outcome == "pass":
        return Row("pass")
    if row is None or not row.kind or _is_unjudged(row):
        return Row(now.outcome, "fault", now.message or "?")
    return replace(row, outcome=now.outcome)


def _is_unjudged(row: Row) -> bool:
    return row.kind == "fault" and not row.why.startswith(_UNTIL)


def mistakes(table: Table) -> Iterator[str]:
    """Yield the mistakes in a table's rows that show without running a test."""
    for name, row in table.items():
        if row.outcome == "pass":
            if row.kind or row.why:
                yield f"{name}: passes, and has a reason"
        elif row.kind not in KINDS:
            yield f"{name}: '{row.kind}' is no kind"
        elif not row.why:
            yield f"{name}: says not why"
        elif _is_unjudged(row):
            yield f"{name}: a fault that does not say until what"
