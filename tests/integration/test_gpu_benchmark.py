"""The GPU benchmark, tried on a processor: a part that fails, hangs or dies ends nothing but
itself, and leaves nothing running; what was found stays whatever ends the run; a bare machine is
enough.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import Router, Shard, is_alive, running, wait_until

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu_bench import marks
from benchmarks.gpu_bench.results import read_rows

ROOT = Path(__file__).parents[2]
_SCRIPT = ROOT / "benchmarks" / "gpu.py"
# Runs the benchmark with parts that do what no part should, and without importing torch. Each tells
# which process it leaves behind, in a session of its own as engines are.
_ODD_PARTS = f"""
import os, signal, subprocess, sys, time, types
from pathlib import Path

sys.path.insert(0, {str(ROOT)!r})
stub = types.SimpleNamespace(device_of=str, facts=lambda device: {{"device": "none"}})
sys.modules["benchmarks.gpu_bench.machine"] = stub
import benchmarks.gpu_bench
benchmarks.gpu_bench.machine = stub
from benchmarks import gpu
from benchmarks.gpu_bench import attempts, marks
from benchmarks.gpu_bench.parts import PARTS, Part

def left_behind():
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    return {{"what": "note", "left": subprocess.Popen(sleeps, start_new_session=True).pid}}

def raises(size, device, folder):
    yield {{"what": "note", "before": 1}}
    raise RuntimeError("as it should\\n  in two lines")

def hangs(size, device, folder):
    yield left_behind()
    print("about to hang", flush=True)
    sleep_for_long()

def sleep_for_long():
    time.sleep(600)

def dies(size, device, folder):
    yield left_behind()
    os.kill(os.getpid(), signal.SIGKILL)

def looks(size, device, folder):
    yield {{"what": "alone", "running": len(marks.marked(str(folder.parent)))}}

def beside(name, other):
    def part(size, device, folder):
        (folder.parent / name).touch()
        while not (folder.parent / other).exists():
            time.sleep(0.01)
        yield {{"what": "note", "together": name}}
    return part

def finds(size, device, folder):
    import carried_in_a_wheel
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    yield {{"what": "note", "carried": sorted(path.name for path in cache.iterdir())}}
    (cache / "compiled").touch()

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def fault():
    raise RuntimeError("CUDA error: an illegal memory access\\nCompile with more")

attempts._EACH_S = 0.5
def tries(size, device, folder):
    good = lambda: {{"found": "right"}}
    return {{"one": good, "crash": crash, "two": good, "long": sleep_for_long, "fault": fault,
            "wrong": lambda: {{"failed": "differs"}}, "three": good}}

PARTS.update(
    raises=Part(9, raises), hangs=Part(3, hangs), dies=Part(9, dies), looks=Part(9, looks),
    finds=Part(9, finds),
    left=Part(9, beside("left", "right")), right=Part(9, beside("right", "left")),
    forever=Part(600, hangs), tries=Part(30, attempts=tries),
)
sys.exit(gpu.main())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "odd_parts.py"
    path.write_text(_ODD_PARTS)
    return path


def _command(script: Path, out: Path, seconds: float, *arguments: str) -> list[str]:
    begin = [sys.executable, str(script), "--seconds", str(seconds), "--out", str(out)]
    return [*begin, "--device", "cpu", "--tiny", *arguments]


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _rows(out: Path, what: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(out) if row["what"] == what]


def _left_behind(out: Path) -> list[psutil.Process]:
    found = []
    for row in _rows(out, "note"):
        if "left" in row:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(row["left"]))
    return [process for process in found if is_alive(process)]


def test_a_part_that_raises_hangs_or_dies_is_told_of_and_ends_with_what_it_started(
    script: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = _run(_command(script, out, 60, "raises", "hangs", "dies", "looks", "left+right"))
    assert done.returncode == 1, done.stderr
    endings = done.stdout.splitlines()[:6]
    for ending, expected in zip(
        endings,
        (
            "raises: exit status 1: RuntimeError: as it should (",
            "hangs: not within 3 s: about to hang (",
            "dies: exit status -9: ",
            "looks: done (",
            "left: done (",
            "right: done (",
        ),
        strict=True,
    ):
        assert ending.startswith(expected)
    # The next part has the device to itself.
    assert [row["running"] for row in _rows(out, "alone")] == [1]
    parts = [row["part"] for row in _rows(out, "note")]
    assert parts[:3] == ["raises", "hangs", "dies"]
    assert sorted(parts[3:]) == ["left", "right"]
    dumped = (out / "logs.txt").read_text().partition("==== hangs: log")[2]
    assert "Fatal Python error: Aborted" in dumped
    assert "in sleep_for_long" in dumped


def test_of_attempts_one_that_crashes_or_hangs_does_not_end_the_others(
    script: Path, tmp_path: Path
) -> None:
    out, tools = tmp_path / "out", tmp_path / "tools"
    tools.mkdir()
    sanitizer = tools / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\necho "========= Invalid read: $*"\n')
    sanitizer.chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = _run(_command(script, out, 60, "tries"), PATH=path)
    assert done.returncode == 1, done.stderr
    found = {row["name"]: str(row.get("failed", row.get("found"))) for row in _rows(out, "attempt")}
    assert [found[name] for name in ("one", "two", "three", "wrong")] == [*["right"] * 3, "differs"]
    assert found["fault"] == "RuntimeError: CUDA error: an illegal memory access"
    assert found["crash"].startswith("Fatal Python error: Segmentation fault   File ")
    assert found["crash"].endswith(" in crash")
    assert found["long"].startswith("Timeout (0:00:00.5")
    assert found["long"].endswith(" in sleep_for_long")
    assert "Compile with more" in (out / "logs.txt").read_text()
    assert "| tries: three | right (" in done.stdout
    sanitized = found["compute-sanitizer of attempt 4"]
    assert sanitized.startswith("Invalid read: --tool memcheck")
    assert sanitized.endswith("--first 4 --count 1")


def test_a_run_that_is_killed_leaves_its_rows_and_no_process(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _running(_command(script, out, 60, "raises", "forever"), out) as (run, scratch):
        run.kill()
        run.wait()
        wait_until(lambda: not marks.marked(str(scratch)), timeout_s=10, what="all ended")
        wait_until(lambda: not scratch.exists(), timeout_s=10, what="its folder is gone")
    assert _left_behind(out) == []
    assert [row["part"] for row in _rows(out, "note")] == ["raises", "forever"]
    assert "raises: exit status 1" in (out / "summary.txt").read_text()


def test_a_run_that_is_told_to_end_says_so_and_ends_all(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _running(_command(script, out, 60, "forever"), out) as (run, scratch):
        run.terminate()
        assert run.wait(20) == 128 + signal.SIGTERM
        assert not scratch.exists()
    assert _left_behind(out) == []
    assert "forever: the run was ended" in (out / "summary.txt").read_text()
    assert (out / "triton-cache.tar.gz").exists()


@contextlib.contextmanager
def _running(command: list[str], out: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run whose last part has left something behind, and its folder of everything."""
    part = command[-1]
    temporary = out.parent / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as run:
        try:
            wait_until(
                lambda: any(row["part"] == part and "left" in row for row in _rows(out, "note")),
                timeout_s=30,
                what=f"{part} runs",
            )
            (scratch,) = temporary.iterdir()
            yield run, scratch
        finally:
            run.kill()


def test_a_run_ends_by_itself_in_time_and_says_for_what_none_was_left(
    script: Path, tmp_path: Path
) -> None:
    begun_s, out = time.monotonic(), tmp_path / "out"
    done = _run(_command(script, out, 15, "forever", "raises"))
    assert time.monotonic() - begun_s < 15
    forever, raises, *_ = done.stdout.splitlines()
    assert forever.startswith("forever: not within ")
    assert raises == "raises: no time was left"


def test_kernels_and_wheels_are_carried_in_and_kernels_out(script: Path, tmp_path: Path) -> None:
    out, kernels, wheels = tmp_path / "out", tmp_path / "earlier", tmp_path / "wheels"
    for folder in (kernels, wheels):
        folder.mkdir()
    (kernels / "carried").touch()
    with tarfile.open(tmp_path / "earlier.tar.xz", "w:xz") as packed:
        packed.add(kernels, "any-name")
    _make_wheel(wheels)
    flags = ["--wheels", str(wheels), "--triton-cache", str(tmp_path / "earlier.tar.xz")]
    done = _run(_command(script, out, 60, *flags, "finds"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["carried"] for row in _rows(out, "note")] == [["carried"]]
    with tarfile.open(out / "triton-cache.tar.gz") as packed:
        assert {Path(name).name for name in packed.getnames()} >= {"carried", "compiled"}


def _make_wheel(folder: Path) -> None:
    info = "carried_in_a_wheel-1.dist-info"
    with zipfile.ZipFile(folder / "carried_in_a_wheel-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_in_a_wheel.py", "")
        metadata = "Metadata-Version: 2.1\nName: carried-in-a-wheel\nVersion: 1\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seconds", "60"], "--device cpu: the shapes are for a GPU; give --tiny"),
        (["--tiny"], "--seconds is None; at least 15 are needed"),
        (["--tiny", "--seconds", "60", "9b"], "there is no part '9b', only env, machine, "),
        (["--tiny", "--seconds", "60", "8b+8b"], "part 8b is named more than once"),
        (["--tiny", "--seconds", "60", "--wheels", "no"], "--wheels no: there is no such path"),
        (["--tiny", "--seconds", "60", "--triton-cache", "rows.json"], "is no tar archive"),
        (["--tiny", "--seconds", "60"], "has the rows.json of another run"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks import gpu

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").touch()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", ".", *arguments])
    with pytest.raises(SystemExit):
        gpu._parse()
    assert said in capsys.readouterr().err


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a machine on which all is installed that is here, but penstock. Processes are run
    by the interpreter of `.venv`, outside of it.
    """
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "penstock" not in path.name:
            (packages / path.name).symlink_to(path)
    monkeypatch.setattr(sys, "executable", getattr(sys, "_base_executable", sys.executable))
    asks = [sys.executable, "-c", "import importlib.metadata as m; m.version('penstock-llm')"]
    assert "PackageNotFoundError" in _run(asks, PYTHONPATH=str(packages)).stderr
    checkout = [str(ROOT / name) for name in ("proto", "client", "router", "shard")]
    return os.pathsep.join([*checkout, str(packages)])


def test_a_checkout_on_the_path_serves_where_penstock_is_not_installed(
    bare: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "penstock_cli.main"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert _run([*command, "--version"], PYTHONPATH=bare).stdout == f"penstock {version}\n"
    shard = Shard(tmp_path / "shard.log", python_path=bare)
    with running(shard):
        router = Router(tmp_path / "router.log", [shard.address], python_path=bare)
        with running(router):
            assert json.loads(router.ask("/version")[1]) == {"version": version}
            load = [*command, "bench", "--url", router.url, "--requests", "2", "--json"]
            done = _run(load, PYTHONPATH=bare)
    assert json.loads(done.stdout)["requests"] == 2, done.stderr


@pytest.mark.soak
def test_all_parts_write_their_figures_and_a_table(tmp_path: Path) -> None:
    done = _run(_command(_SCRIPT, tmp_path, 900, "--commit", "abc"))
    assert done.returncode == 0, done.stdout[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows[0]["commit"] == "abc"
    assert [row["what"] for row in rows].count("facts") == 1
    (exact,) = _rows(tmp_path, "exact")
    # The processor's kernels are exact.
    assert exact["batch_invariant"]
    assert exact["differing"] == []
    assert "| equal bits | equal bits | yes |" in done.stdout
