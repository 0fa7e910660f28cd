"""Tests that are marked `soak` run in the soak only, and tests/soak.md lists them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SIZES = """
import pytest

def test_small():
    print("ran small")

@pytest.mark.soak
def test_full():
    print("ran full")

@pytest.mark.parametrize("size", ["some", pytest.param("all", marks=pytest.mark.soak)])
def test_of(size):
    print("ran", size)
"""


def _said_by_a_run_in(directory: Path, *flags: str, **environment: str) -> str:
    shutil.copy(Path(__file__).parents[1] / "conftest.py", directory / "tests")
    marker = "[pytest]\nmarkers = soak: as in pyproject.toml\n"
    (directory / "pytest.ini").write_text(marker)
    command = [sys.executable, "-m", "pytest", "-rP", "-p", "no:cacheprovider", *flags, "tests"]
    inherited = {name: value for name, value in os.environ.items() if name != "PENSTOCK_SOAK"}
    # Those that are installed take longer to import than the tests to run.
    inherited["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        command,
        cwd=directory,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"ran small", "ran some"}),
        ({"PENSTOCK_SOAK": "1"}, {"ran small", "ran some", "ran full", "ran all"}),
    ],
    ids=["make test", "make soak"],
)
def test_tests_and_parameters_marked_soak_run_in_the_soak_only(
    tmp_path: Path, environment: dict[str, str], expected: set[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sizes.py").write_text(SIZES)
    said = _said_by_a_run_in(tmp_path, **environment)
    assert {line for line in said.splitlines() if line.startswith("ran ")} == expected


def test_whatever_runs_in_the_soak_only_is_listed_with_what_keeps_its_property() -> None:
    tests = Path(__file__).parents[1]
    listed = (tests / "soak.md").read_text("utf-8")
    marked = re.compile(r"mark\.soak\b|\bin_soak\(")
    files = [path for path in tests.rglob("test_*.py") if path != Path(__file__)]
    soaked = [path.name for path in files if marked.search(path.read_text("utf-8"))]
    assert len(soaked) > 20
    assert [name for name in soaked if f"{name}`" not in listed] == []
    named = set(re.findall(r"`(?:\w+/)?(test_\w+\.py)`", listed))
    assert named <= {path.name for path in files}
