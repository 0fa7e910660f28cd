"""The files of tests/suites/foreign, which run beside tests of other projects, tell the outcomes of
those tests and keep them on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import suites.tables

FOREIGN = Path(suites.tables.__file__).parent / "foreign"
TESTS = """\
import pytest

@pytest.fixture
def server():
    return Server

@pytest.fixture
def broken():
    yield
    raise OSError("still there")

def test_passes(server):
    pass

def test_fails(server):
    assert 1 == 2

@pytest.mark.skip(reason="no time")
def test_is_skipped(server):
    pass

def test_ends_badly(server, broken):
    pass

def test_names_the_server():
    Server

def test_of_the_inside():
    raise AssertionError

class Server:
    pass
"""


def _python(*arguments: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(FOREIGN), **variables}
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout + ended.stderr


def test_outcomes_are_told_of_what_uses_the_server_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_odd.py").write_text("import none_such")
    said = _python(
        *("-m", "pytest", "-c", str(FOREIGN / "pytest.ini"), "--rootdir", str(tmp_path)),
        *("-p", "outcomes", "test_it.py", "test_odd.py"),
        folder=tmp_path,
        SUITE_OUTCOMES=str(tmp_path / "lines"),
        SUITE_NEEDS="Server",
    )
    lines = (tmp_path / "lines").read_text().splitlines()
    assert lines, said
    told = {line["test"]: (line["outcome"], line["message"]) for line in map(json.loads, lines)}
    assert told == {
        "test_odd.py": ("fail", "E ModuleNotFoundError: No module named 'none_such'"),
        "test_it.py::test_passes": ("pass", ""),
        "test_it.py::test_fails": ("fail", "AssertionError: assert 1 == 2"),
        "test_it.py::test_is_skipped": ("skip", "Skipped: no time"),
        "test_it.py::test_ends_badly": ("fail", "OSError: still there"),
        "test_it.py::test_names_the_server": ("pass", ""),
    }


def test_nothing_but_this_machine_is_reached(tmp_path: Path) -> None:
    ask = "import socket; socket.create_connection(({!r}, 9), 1)"
    for elsewhere in ("192.0.2.1", "a.host.invalid"):
        said = _python("-c", ask.format(elsewhere), folder=tmp_path)
        assert f"OSError: not on this machine: {elsewhere}" in said
    said = _python("-c", ask.format("127.0.0.1"), folder=tmp_path)
    assert "not on this machine" not in said
