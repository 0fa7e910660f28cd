"""benchmarks/agents.py with a router and shards that are processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "agents.py"


def test_agents_at_a_real_router_find_what_was_said_before(tmp_path: Path) -> None:
    file = tmp_path / "agents.json"
    flags = ["--real", "--rules", "session", "--shards", "2", "--rate", "2", "--pause-s", "0.1"]
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), *flags, "--warm-up", "2", "--seconds", "3", "--out", file],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["rule"] == "session"
    assert 0 < row["ended"] <= row["requests"]
    assert 0.3 < row["cached_share"] <= 1.05 * row["infinite_share"] < 1.05
    assert 0 < row["first_token_p50_s"] <= row["first_token_p99_s"]
    assert "| 2/s | session |" in done.stdout
