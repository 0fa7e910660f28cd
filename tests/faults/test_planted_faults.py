"""The tests are tested: each fault of tests/faults.md is caught by the test named beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.budget import budget, seeded

ROOT = Path(__file__).parents[2]
PACKAGES = ("proto", "client", "router", "shard")
_FENCE = re.compile(r"```\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """`changes` are pairs of the text that stands in `file` and what replaces it."""

    title: str
    file: str
    changes: tuple[tuple[str, str], ...]
    test: str


def _parse(section: str) -> Fault:
    title = section.partition("\n")[0]
    file = re.search(r"^file: (.+)$", section, re.MULTILINE)
    test = re.search(r"^caught by: (.+)$", section, re.MULTILINE)
    blocks = _FENCE.findall(section)
    assert file, f"{title}: no file"
    assert test, f"{title}: no test"
    assert blocks, f"{title}: no change"
    assert len(blocks) % 2 == 0, f"{title}: a change without its replacement"
    return Fault(title, file[1], tuple(zip(blocks[::2], blocks[1::2], strict=True)), test[1])


FAULTS = [
    _parse(section) for section in (ROOT / "tests" / "faults.md").read_text().split("\n## ")[1:]
]


def _tried() -> list[Fault]:
    return seeded("planted faults").sample(FAULTS, budget(3, len(FAULTS)))


def test_there_are_twenty_faults_and_each_still_fits_its_file():
    assert len(FAULTS) >= 20
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text()
        for old, _ in fault.changes:
            assert text.count(old) == 1, f"{fault.title}: {text.count(old)} times in {fault.file}"
        test_file, _, name = fault.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / test_file).read_text(), fault.title


@pytest.mark.timeout(1800)
def test_planted_faults_are_caught(tmp_path: Path):
    for name in (*PACKAGES, "tests", "training"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    survivors = [fault.title for fault in _tried() if not _is_caught(fault, tmp_path)]
    assert survivors == []


def _is_caught(fault: Fault, tree: Path) -> bool:
    """Plant it in the copy, run its test there, and take it out again."""
    path = tree / fault.file
    sound = path.read_text()
    broken = sound
    for old, new in fault.changes:
        broken = broken.replace(old, new)
    path.write_text(broken)
    # Before the installed packages, and for the processes that a test starts too.
    paths = os.pathsep.join(str(tree / name) for name in PACKAGES)
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PENSTOCK_SOAK", None)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", fault.test],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        path.write_text(sound)
    print(f"{fault.title}: {'caught' if run.returncode == 1 else run.stdout[-2000:]}")
    return run.returncode == 1
