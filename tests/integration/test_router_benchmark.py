"""benchmarks/router.py runs against a model: costly requests beside honest ones, in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "router.py"


@pytest.mark.soak
def test_costly_requests_are_measured_beside_honest_ones_and_without_them(tmp_path: Path) -> None:
    file = tmp_path / "costly.json"
    flags = ["costly", "--attacks", "long-texts", "--streams", "4", "--seconds", "3"]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *flags, "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "long-texts: " in done.stdout
    alone, attacked = json.loads(file.read_text())["rows"]
    assert (alone["case"], attacked["case"]) == ("long-texts, alone", "long-texts, attacked")
    for row in (alone, attacked):
        assert row["accepted"] > 0
        assert row["errors"] == 0
        assert row["live_p99_ms"] > 0
    assert sum(attacked["attacker"].values()) > 0


def test_an_attack_that_is_not_known_is_refused_before_anything_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), "costly", "--attacks", "brackets,other"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "'other' is none of brackets, grammars," in done.stderr
