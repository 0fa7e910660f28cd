"""The built wheel serves outside of a clone of the repository, installed by pip or run by uvx."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from support.processes import ask, free_port, is_alive, wait_until
from support.wheels import build_wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def _make_environment(folder: Path, *flags: str) -> Path:
    """Make a virtual environment, with pip unless flags say otherwise, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", *flags, str(folder)], check=True, timeout=110)
    return folder / "bin" / "python"


def _serve_and_ask(command: Sequence[str], folder: Path) -> str:
    """Start a server in a folder, ask it something and end it; the text of its answer."""
    port, shard_port = free_port(), free_port()
    ports = ["--port", str(port), "--shard-port", str(shard_port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        serving = subprocess.Popen(
            [*command, "serve", "--runner", "fake", *ports, "--step-ms", "1"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_until(lambda: _is_up(serving, port), timeout_s=110, what="a server")
        body = {"prompt": "Hello", "max_tokens": 5, "seed": 1}
        status, text = ask(f"http://127.0.0.1:{port}/v1/completions", body)
        assert status == 200, text
        everyone = [psutil.Process(serving.pid), *psutil.Process(serving.pid).children(True)]
        serving.send_signal(signal.SIGTERM)
        serving.wait(30)
        wait_until(lambda: not any(map(is_alive, everyone)), timeout_s=30, what="all have ended")
        answer: str = json.loads(text)["choices"][0]["text"]
        return answer
    except AssertionError as error:
        raise AssertionError(f"{error}; it said:\n{(folder / 'log').read_text()}") from None
    finally:
        serving.kill()
        serving.wait()


def _is_up(serving: subprocess.Popen[bytes], port: int) -> bool:
    assert serving.poll() is None, f"it ended with {serving.returncode}"
    try:
        return ask(f"http://127.0.0.1:{port}/health")[0] == 200
    except OSError:
        return False


def test_what_is_installed_from_the_wheel_serves_outside_of_a_clone(
    wheel: Path, tmp_path: Path
) -> None:
    python = _make_environment(tmp_path / "venv", "--without-pip")
    # What the wheel needs is this environment's; penstock itself is not: its .pth counts only here.
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, str(wheel)], check=True, timeout=110)
    where = "import penstock_router as r, penstock_shard as s; print(r.__file__, s.__file__)"
    found = subprocess.run(
        [str(python), "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(str(tmp_path) in path for path in found.stdout.split())
    assert _serve_and_ask([str(python.with_name("penstock"))], tmp_path)


@pytest.mark.soak
def test_pip_installs_all_that_the_wheel_needs(wheel: Path, tmp_path: Path) -> None:
    python = _make_environment(tmp_path / "venv")
    wanted = f"penstock-llm[router,fake] @ {wheel.as_uri()}"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", wanted], check=True)
    assert _serve_and_ask([str(python.with_name("penstock"))], tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("uvx") is None, reason="uv is not installed")
def test_uvx_runs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    wanted = f"penstock-llm[router,fake] @ {wheel.as_uri()}"
    assert _serve_and_ask(["uvx", "--from", wanted, "penstock"], tmp_path)
