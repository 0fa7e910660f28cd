"""The GPU benchmark, tried on a processor: its parts run, and one that fails does not end it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import is_alive

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import gpu

_SCRIPT = Path(gpu.__file__)


def _run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_SCRIPT), *flags]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.soak
def test_parts_write_their_figures_and_a_table(tmp_path: Path) -> None:
    done = _run(
        "--device", "cpu", "--tiny", "--out", str(tmp_path), "--commit", "abc", "--minutes", "30"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("gpu-*.json")
    rows = json.loads(file.read_text())
    run, facts, *_ = rows
    assert run["commit"] == "abc"
    assert {"device", "torch", "triton", "python"} <= set(facts)
    assert [row["what"] for row in rows].count("facts") == 1
    assert {row["part"] for row in rows if row["what"] == "took"} >= {"machine", "8b", "8b-exact"}
    exact = next(row for row in rows if row["what"] == "exact")
    # The processor's kernels are exact.
    assert exact["batch_invariant"]
    assert exact["differing"] == []
    assert "| equal bits | equal bits | yes |" in done.stdout


def test_a_part_that_fails_is_a_line_with_its_last_words_and_an_exit_status(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a torch that is broken')")
    done = _run("--parts", "8b", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "| 8b | exit status 1: ImportError: a torch that is broken |" in done.stdout


def test_figures_from_before_a_failure_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")

    def part(*_: object) -> Iterator[dict[str, Any]]:
        yield {"what": "decode"}
        raise RuntimeError("too little memory")

    monkeypatch.setitem(gpu.PARTS, "8b", (1.0, part))
    args = argparse.Namespace(run="8b", folder=tmp_path, tiny=True, device="cpu")
    with pytest.raises(RuntimeError, match="too little memory"):
        gpu._run_part(args)
    assert [row["what"] for row in gpu._read_rows(tmp_path)] == ["facts", "decode"]


def test_the_servers_of_a_part_end_with_it() -> None:
    sleeps = "import time; time.sleep(600)"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleeps!r}], "
    starts += f"start_new_session=True); print('started', flush=True); {sleeps}"
    command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        (server,) = psutil.Process(process.pid).children()
        gpu._end(process)
        assert process.poll() is not None
        assert not is_alive(server)


def test_shapes_for_a_gpu_are_refused_on_a_processor() -> None:
    done = _run("--device", "cpu")
    assert done.returncode == 2
    assert "--device cpu: the shapes are for a GPU; give --tiny" in done.stderr
