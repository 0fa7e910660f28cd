"""The console's JavaScript without a browser: that all of it parses, and what its pure parts do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from contract.sources import ROOT

FILES = ROOT / "router" / "penstock_router" / "static" / "console"
TESTS = Path(__file__).parent / "js" / "parts.test.mjs"
MAX_LINES = 400
# Parses modules and runs none; a process for each would take most of a test's time.
PARSE = """
for (const file of process.argv.slice(1))
    new (require("vm").SourceTextModule)(require("fs").readFileSync(file, "utf8"),
                                         {identifier: file});
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files beside their tests, where node takes them for modules."""
    if shutil.which("node") is None:
        if os.environ.get("CI"):
            pytest.fail("there is no node")
        pytest.skip("there is no node")
    shutil.copytree(FILES, tmp_path / "console")
    shutil.copy(TESTS, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


def node(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["node", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_every_file_parses(folder: Path) -> None:
    files = sorted(str(path) for path in folder.glob("console/*.js"))
    assert len(files) > 10
    result = node("--no-warnings", "--experimental-vm-modules", "-e", PARSE, *files, folder=folder)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_pure_parts_do_what_they_say(folder: Path) -> None:
    result = node("--test", folder=folder)
    assert result.returncode == 0, result.stdout


def test_nothing_is_shown_as_markup_or_run_from_text_and_files_stay_small() -> None:
    for path in FILES.iterdir():
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, path.name
        assert len(text.splitlines()) <= MAX_LINES, path.name
