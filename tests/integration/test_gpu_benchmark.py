"""The GPU benchmark, tried on a processor: its parts run, and one that fails does not end it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.budget import budget

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
# The rest needs servers, and longer.
_PARTS = ["--parts", "machine", "decode-8b", "exact-8b"] if budget(1, 0) else []


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_parts_write_their_figures_and_a_table(tmp_path: Path) -> None:
    done = _run("--device", "cpu", "--tiny", "--out", str(tmp_path), *_PARTS)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("gpu-*.json")
    rows = json.loads(file.read_text())
    facts, exact = rows[0], next(row for row in rows if row["what"] == "exact")
    assert {"device", "torch", "commit"} <= set(facts)
    # The processor's kernels are exact.
    assert exact["batch_invariant"]
    assert exact["differing"] == []
    assert "| equal bits | equal bits | yes |" in done.stdout


def test_a_part_that_fails_is_a_line_and_an_exit_status(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = _run("--parts", "decode-8b")
    assert done.returncode == 1
    assert "| decode-8b | exit status 1 |  | no |" in done.stdout


def test_shapes_for_a_gpu_are_refused_on_a_processor() -> None:
    done = _run("--device", "cpu")
    assert done.returncode == 2
    assert "--device cpu: the shapes are for a GPU; give --tiny" in done.stderr
