"""Tests of whole systems do not run beside each other, and a file's tests run in one worker."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.skipif(not importlib.util.find_spec("xdist"), reason="pytest-xdist is not installed")
def test_whole_systems_and_files_have_one_worker_each(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    files = {"chaos/test_a": "whole", "integration/test_b": "whole", "unit/test_c": "c"}
    for path, name in files.items():
        (tests / path).parent.mkdir(parents=True)
        written = "".join(TEST.format(name=name, number=number) for number in range(4))
        (tests / path).with_suffix(".py").write_text(written)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tests)
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rP", "-p", "no:cacheprovider", "tests"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    ran = [line.split()[1:] for line in said.splitlines() if line.startswith("ran ")]
    assert len(ran) == 12
    workers = {name: {worker for each, worker in ran if each == name} for name in ("whole", "c")}
    assert all(len(of_name) == 1 for of_name in workers.values()), workers
    assert workers["whole"] != workers["c"]
