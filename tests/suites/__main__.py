"""Runs suites and writes their tables anew, which keep their reasons.

PENSTOCK_SOAK=1 PYTHONPATH=tests .venv/bin/python -m suites vllm
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from suites.all import SUITES
from suites.suite import outcomes
from suites.tables import path_of, read, summary, updated, written


def main(names: list[str]) -> None:
    for name in names or SUITES:
        folder = Path(tempfile.mkdtemp(prefix=f"suite-{name}-"))
        print(f"{name}: {folder}")
        path = path_of(name)
        table = read(path.read_text("utf-8")) if path.exists() else {}
        table = updated(table, outcomes(SUITES[name], folder))
        path.write_text(written(table), "utf-8")
        print(f"{name}: {summary(table)}")


if __name__ == "__main__":
    main(sys.argv[1:])
