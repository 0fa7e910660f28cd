"""Calls of docs/gpu.md, as it tells them, on a bare machine with the versions of one with a GPU:
Python 3.12, torch 2.11, Triton 3.6, transformers 5.17. On its processor.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_bench.parts import PARTS

ROOT = Path(__file__).parents[2]
_CALL = re.compile(r"^    python3 (benchmarks/gpu\.py .*)$", re.MULTILINE)
_DOWNLOAD = re.compile(r"^    python3\.12 -m (pip download .*)$", re.MULTILINE)
_INSTALLED = ("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0")
# As on a processor that others use too; what bounds a part stays.
_SECONDS = "900"
# A CUDA build takes minutes to fetch.
_INSTALL_S = 1800

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def _runs(python: Path) -> bool:
    try:
        done = subprocess.run([python, "-V"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _python() -> Path:
    """Find the one on the path, or one that was installed beside the Python that runs this."""
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    beside = sorted(base.parents[2].glob("3.12.*/bin/python3.12"))
    found = next((python for python in (Path("python3.12"), *beside) if _runs(python)), None)
    if found is None:
        pytest.skip("there is no Python 3.12")
    return found


@pytest.fixture(scope="module")
def machine() -> Path:
    """The Python of an environment with what a machine has, kept for the next run."""
    folder = ROOT / ".venv-clients" / "gpu-machine"
    python, done = folder / "bin" / "python", folder / ".done"
    if not done.exists():
        subprocess.run([_python(), "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *_INSTALLED]
        found = subprocess.run(
            install, capture_output=True, text=True, timeout=_INSTALL_S, check=False
        )
        if found.returncode:
            pytest.skip(f"torch 2.11 is not installed: {found.stderr.strip()[-300:]}")
        done.touch()
    return python


def test_the_calls_of_the_page_run_on_a_bare_machine(machine: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    (download,) = _DOWNLOAD.findall(page)
    calls = _CALL.findall(page)
    assert len(calls) == 2
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PENSTOCK_CACHE", "PENSTOCK_STATE")
    }
    # What a call writes goes beside the checkout's other things.
    for name in ("benchmarks", "tests", "proto", "client", "router", "shard", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    fetch = [str(machine), "-m", *shlex.split(download)]
    subprocess.run(fetch, cwd=tmp_path, env=environment, check=True)
    for number, call in enumerate(calls, 1):
        words = shlex.split(call)
        words[words.index("--seconds") + 1] = _SECONDS
        command = [str(machine), *words, "--device", "cpu", "--tiny"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        out = tmp_path / f"found-{number}"
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        rows = json.loads((out / "rows.json").read_text())
        # Parts are named last.
        parts = {part for word in words[-7:] for part in word.split("+")}
        took = {row["part"] for row in rows if row["what"] == "took"}
        assert took == parts & set(PARTS)
        assert len(took) == 7
        facts = next(row for row in rows if row["what"] == "facts")
        for name, _, version in (each.partition("==") for each in _INSTALLED):
            assert facts[name].partition("+")[0] == version
