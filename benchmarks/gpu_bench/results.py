"""Files of a run: `rows.json` has each row at once; `summary.txt` and `logs.txt` are made of rows
and logs. Files are replaced as a whole, so that they are complete whenever a run ends. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_bench import goals
from benchmarks.gpu_bench.goals import Row

# Bytes of a log's end, and of all logs together, that are kept.
_LOG_BYTES = 1_500_000
_LOGS_BYTES = 12_000_000
_TRACEBACK = "Traceback (most recent call last):"
# The starts of an error, and of stacks after a crash or timeout.
_STARTS = (_TRACEBACK, "Fatal Python error: ", "Timeout (")
_LONGEST_WORDS = 300


def read_rows(out: Path) -> list[Row]:
    """Read the rows so far."""
    path = out / "rows.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows


def add_rows(out: Path, *rows: Row) -> None:
    """Add rows. Parts that run side by side take turns."""
    with _alone(out):
        _replace(out / "rows.json", json.dumps([*read_rows(out), *rows], indent=1) + "\n")


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def write_report(out: Path, folders: Sequence[Path]) -> None:
    """Write summary and logs: how each part ended, the table of figures, and the logs in the parts'
    folders.
    """
    rows = read_rows(out)
    _replace(out / "summary.txt", "\n".join([*_endings(rows), "", _table(rows)]) + "\n")
    logs = [log for folder in folders for log in _logs_of(folder)]
    text = "".join(f"==== {log.parent.name}: {log.name}\n{tail(log, _LOG_BYTES)}\n" for log in logs)
    _replace(out / "logs.txt", text[-_LOGS_BYTES:])


def _table(rows: Sequence[Row]) -> str:
    """Make the table. A row that lacks a figure prevents the table, but does not end the run."""
    try:
        return goals.table(list(goals.lines(rows)))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        return f"There is no table, as of {type(error).__name__}: {error}; rows.json has the rows."


def _endings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each part that began or had no time."""
    took = {row["part"]: row["seconds"] for row in rows if row.get("what") == "took"}
    failed = {row["part"]: row["failed"] for row in rows if row.get("what") == "part failed"}
    begun = [row["part"] for row in rows if row.get("what") == "begun"]
    for part in dict.fromkeys([*begun, *failed]):
        time = f" ({took[part]:.0f} s)" if part in took else ""
        yield f"{part}: {failed.get(part, 'done' if part in took else 'not over yet')}{time}"


def _logs_of(folder: Path) -> list[Path]:
    """List the logs of a part and its servers."""
    return [path for path in (folder / "log", *sorted(folder.glob("*.log"))) if path.exists()]


def tail(log: Path, num_bytes: int) -> str:
    """Read the end of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - num_bytes))
        return file.read().decode(errors="replace")


def last_words(text: str) -> str:
    """Find the last error in a log, with its place if stacks were written; else the last line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith(_STARTS)]
    told = lines[starts[-1] :] if starts else lines[-1:]
    if told[:1] == [_TRACEBACK]:
        told = [line for line in told[1:] if not line.startswith(" ")][:1] or lines[-1:]
    places = [line for line in told if line.startswith("  File ")]
    return " ".join([*told[:1], *places[:1]])[:_LONGEST_WORDS].strip() or "it said nothing"


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
