"""Plants faults in a copy of the tree, and sees whether tests or the simulator notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from faults.planting import PACKAGES, Fault, planted

ROOT = Path(__file__).parents[2]
# Where a history fails with the fault, it does so among these.
SEEDS = 2000
_TEST_S = 300.0
_SIMULATION_S = 1200.0
_NONE_FAILED, _SOME_FAILED = 0, 1


def copy_tree(to: Path) -> None:
    """A copy of all that tests need."""
    for name in (*PACKAGES, "tests", "training"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)


def named_test(fault: Fault) -> str:
    """The id of the test that catches the fault; "" where none is named or where it is missing.

    `test_name` is found in whatever file it is, `test_file::test_name` in whatever folder.
    """
    file, _, name = fault.caught_by.rpartition("::")
    paths = [path for path in _tests().get(name, ()) if file in ("", path.stem)]
    return f"{paths[0].relative_to(ROOT)}::{name}" if len(paths) == 1 else ""


@cache
def _tests() -> dict[str, list[Path]]:
    """The files that have a test of a name."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text("utf-8"), re.M):
            found.setdefault(name, []).append(path)
    return found


def is_caught(fault: Fault, tree: Path) -> bool:
    """Whether the test fails in a copy of the tree that has the fault."""
    command = ["pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", named_test(fault)]
    status, said = _run_with(fault, tree, command, _TEST_S)
    print(f"{fault.title}: {'caught' if status == 1 else said}", flush=True)
    return status == 1


def is_found(fault: Fault, tree: Path) -> bool:
    """Whether a simulated history fails in a copy of the tree that has the fault."""
    command = ["simulation", "--seeds", str(SEEDS)]
    status, said = _run_with(fault, tree, command, _SIMULATION_S)
    print(f"{fault.title}: {said}", flush=True)
    return status == 1


def _run_with(fault: Fault, tree: Path, command: list[str], limit_s: float) -> tuple[int, str]:
    """Exit status and last words of a module's run with the fault in the tree."""
    # Before the installed packages, and for the processes that a test starts too.
    paths = os.pathsep.join(str(tree / name) for name in (*PACKAGES, "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PENSTOCK_SOAK", None)
    with planted(fault, tree):
        run = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    return run.returncode, (run.stdout + run.stderr)[-2000:].strip()
