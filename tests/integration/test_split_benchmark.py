"""benchmarks/split.py runs: both ways serve, give the same tokens, and say where steps went."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "split.py"


@pytest.mark.soak
def test_both_ways_are_measured(tmp_path: Path) -> None:
    file, chart = tmp_path / "split.json", tmp_path / "split.png"
    flags = ["--models", "fake", "--streams", "4", "--step-ms", "5", "--rounds", "1"]
    flags += ["--loads", "saturation", "--seconds", "0.5", "--warmup", "0.3", "--json", str(file)]
    flags += ["--plot", str(chart)]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert chart.read_bytes().startswith(b"\x89PNG")
    rows = {row["way"]: row for row in json.loads(file.read_text())["medians"]}
    assert set(rows) == {"one process", "pair", "tokens only"}
    for row in rows.values():
        # A token a step each, of 5 ms or more.
        assert 0 < row["tokens_per_s"] <= 4 / 0.005 * 1.1
        parts_ms = row["device_ms"] + row["engine_ms"] + row["wait_ms"]
        assert parts_ms == pytest.approx(row["period_ms"], abs=0.1)
    assert "fake, 4 streams, saturation, pair / one process: tokens/s" in done.stdout


def test_a_chart_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    flags = ["--plot", str(tmp_path / "no folder" / "split.png")]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "must be a file in a folder that exists" in done.stderr
