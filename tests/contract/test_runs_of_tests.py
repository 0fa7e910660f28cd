"""Tests of whole systems do not run beside each other, a file's tests run in one worker, and what
is marked `soak` runs in the soak only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
import os
import time

def test_{name}_{number}():
    time.sleep(0.05)
    print("ran", "{name}", os.environ["PYTEST_XDIST_WORKER"])
"""

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


@pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="pytest-xdist is not installed")
def test_whole_systems_and_files_have_one_worker_each(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    files = {"chaos/test_a": "whole", "integration/test_b": "whole", "unit/test_c": "c"}
    for path, name in files.items():
        (tests / path).parent.mkdir(parents=True)
        written = "".join(TEST.format(name=name, number=number) for number in range(4))
        (tests / path).with_suffix(".py").write_text(written)
    said = _said_by_a_run_in(tmp_path, "-p", "xdist", "-n", "2")
    ran = [line.split()[1:] for line in said.splitlines() if line.startswith("ran ")]
    assert len(ran) == 12
    workers = {name: {worker for each, worker in ran if each == name} for name in ("whole", "c")}
    assert all(len(of_name) == 1 for of_name in workers.values()), workers
    assert workers["whole"] != workers["c"]


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
