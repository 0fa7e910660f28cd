"""Plants faults in a copy of the tree, and sees whether tests or the simulator notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from faults.planting import PACKAGES, Fault, planted

ROOT = Path(__file__).parents[2]
# Where a history fails with the fault, it does so among these.
SEEDS = 2000
_TEST_S = 300.0
# With the fault a test may wait for what never comes.
_PYTEST = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "40")
_SIMULATOR = [sys.executable, "-m", "simulation"]


def copy_tree(to: Path) -> None:
    """A copy of all that tests need, and of what Python has compiled of it: files keep their
    times, but for those that get a fault.
    """
    for name in (*PACKAGES, "tests", "training"):
        shutil.copytree(ROOT / name, to / name)
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
    """True if the fault's test fails in `tree`, a copy of the repository with the fault."""
    with planted(fault, tree):
        run = _run_tests([named_test(fault)], tree)
    print(f"{fault.title}: {'caught' if run.returncode == 1 else run.stdout[-2000:]}", flush=True)
    return run.returncode == 1


def pass_without(faults: Iterable[Fault], tree: Path) -> bool:
    """True if the tests of the faults pass in `tree`, a copy of the repository without faults."""
    run = _run_tests({named_test(fault) for fault in faults}, tree)
    if run.returncode:
        print(run.stdout[-5000:], run.stderr[-2000:])
    return run.returncode == 0


def _run_tests(names: Iterable[str], tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *_PYTEST]
    return subprocess.run(
        [*command, *names],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        timeout=_TEST_S,
    )


def seeds_until_found(fault: Fault, tree: Path, seeds: int = SEEDS) -> int | None:
    """Return the number of histories that the simulator tries until one fails, with the fault
    planted in `tree`; None if none fails. Raises if that history fails without the fault too.
    """
    with planted(fault, tree):
        found = _first_failing(tree, seeds)
    if found is not None:
        alone = [*_SIMULATOR, "--first", str(found - 1), "--seeds", "1"]
        subprocess.run(alone, cwd=tree, env=_environment(tree), check=True, capture_output=True)
    return found


def _first_failing(tree: Path, seeds: int) -> int | None:
    command = [*_SIMULATOR, "--seeds", str(seeds)]
    with subprocess.Popen(
        command, cwd=tree, env=_environment(tree), stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if found := re.match(r"after (\d+) seeds", line):
                # It would make the history shorter now.
                run.kill()
                return int(found[1])
    assert run.returncode == 0, f"the simulator ended with {run.returncode}"
    return None


def _environment(tree: Path) -> dict[str, str]:
    """The tree's packages before the installed ones, for the processes that a test starts too."""
    paths = os.pathsep.join(str(tree / name) for name in (*PACKAGES, "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PENSTOCK_SOAK", None)
    return environment
