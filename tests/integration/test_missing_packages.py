"""Commands where a package is missing or broken: one line says which, and how it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import free_port

from penstock_common.version import how_to_install

TOY = Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
# Python imports a module of this name when it starts, each child too.
_HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r} or name.startswith({package!r} + "."):
            raise {error}

sys.meta_path.insert(0, Hidden())
"""
_MISSING = "ModuleNotFoundError(f'No module named {name!r}', name=name)"
_LIBRARY = "libsome.so.1: cannot open shared object file\\nno such file"
_BROKEN = (f"ImportError('{_LIBRARY}', name=name)", f"OSError('{_LIBRARY}')")
# A shard gave up after five tries and 54 s; the slowest one here imports torch and transformers.
_AT_ONCE_S = 45.0


def _run(
    folder: Path, package: str, *command: str, error: str = _MISSING
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(_HIDING.format(package=package, error=error))
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "penstock_cli.main", *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        timeout=_AT_ONCE_S,
        check=False,
    )


def _is_said(run: subprocess.CompletedProcess[str], command: str, package: str, extra: str) -> bool:
    """Tell whether the last line says it, and nothing but lines of the log stands above."""
    *log, last = run.stderr.splitlines()
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert [line for line in log if not line.startswith("{")] == []
    start, _, installing = last.partition(" is not installed; ")
    name = start.removeprefix(f"penstock {command}: ")
    return name.split(".")[0] == package and installing == how_to_install(extra)


@pytest.mark.parametrize(
    "package",
    [
        *("PIL", "aiohttp", "google", "grpc", "jinja2", "msgspec", "prometheus_client"),
        *("tokenizers", "uvloop", "yarl"),
    ],
)
def test_a_router_says_what_is_missing(tmp_path: Path, package: str) -> None:
    run = _run(tmp_path, package, "router", "--shards", "127.0.0.1:1", "--port", str(free_port()))
    assert _is_said(run, "router", package, "router"), run.stderr


def test_a_router_of_several_workers_says_it_too_and_ends(tmp_path: Path) -> None:
    port = str(free_port())
    flags = ("--shards", "127.0.0.1:1", "--port", port, "--workers", "2")
    run = _run(tmp_path, "aiohttp", "router", *flags)
    assert run.returncode == 2
    said = f"penstock router: aiohttp is not installed; {how_to_install('router')}"
    assert run.stderr.splitlines()[-1] == said
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    "package",
    ["grpc", "grpc_health", "grpc_reflection", "google", "msgspec", "numpy", "prometheus_client"],
)
def test_the_server_of_a_shard_says_what_is_missing(tmp_path: Path, package: str) -> None:
    run = _run(tmp_path, package, "shard", "--runner", "fake", "--port", str(free_port()))
    assert _is_said(run, "shard", package, "fake"), run.stderr


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("llguidance", "fake"),
        ("llguidance", "shard"),
        ("torch", "shard"),
        ("transformers", "shard"),
        ("safetensors", "shard"),
        ("huggingface_hub", "shard"),
        ("tokenizers", "shard"),
    ],
)
def test_an_engine_that_cannot_import_is_tried_once_and_its_reason_is_the_last_line(
    tmp_path: Path, package: str, extra: str
) -> None:
    flags = ["--runner", "fake"] if extra == "fake" else ["--device", "cpu"]
    run = _run(tmp_path, package, "shard", *flags, "--port", str(free_port()))
    assert _is_said(run, "shard", package, extra), run.stderr
    # Not a line of another try.
    assert "again" not in run.stderr


@pytest.mark.parametrize("error", _BROKEN)
def test_a_package_that_is_broken_is_named_with_its_reason_in_one_line(
    error: str, tmp_path: Path
) -> None:
    flags = ("--device", "cpu", "--port", str(free_port()))
    run = _run(tmp_path, "torch", "shard", *flags, error=error)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == (
        "penstock shard: torch cannot be imported: libsome.so.1: cannot open shared object file "
        f"no such file; {how_to_install('shard')}"
    )
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("grpc", ["info", "127.0.0.1:1"]),
        ("grpc", ["health", "127.0.0.1:1"]),
        ("grpc", ["replay", "none.jsonl", "--shards", "127.0.0.1:1"]),
        ("aiohttp", ["bench"]),
        ("google", ["info", "127.0.0.1:1"]),
    ],
)
def test_the_tools_say_what_is_missing(tmp_path: Path, package: str, command: list[str]) -> None:
    run = _run(tmp_path, package, *command)
    [line] = run.stderr.splitlines()
    name, _, installing = line.removeprefix("penstock: ").partition(" is not installed; ")
    assert (name.split(".")[0], installing) == (package, how_to_install("client"))
    assert run.returncode == 2


@pytest.mark.parametrize("package", ["grpc", "aiohttp", "torch", "tokenizers", "msgspec"])
def test_what_needs_no_package_goes_without(tmp_path: Path, package: str) -> None:
    # Nobody listens there.
    run = _run(tmp_path, package, "chat", "--url", "http://127.0.0.1:1")
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    for command in (["keys", "--help"], ["translate", "--help"], ["serve", "--help"], ["--help"]):
        assert _run(tmp_path, package, *command).returncode == 0


@pytest.mark.parametrize(
    ("package", "extra"),
    [("tokenizers", "router"), ("aiohttp", "router"), ("grpc_health", "fake"), ("numpy", "fake")],
)
def test_serve_says_what_its_children_lack_and_ends(
    tmp_path: Path, package: str, extra: str
) -> None:
    ports = ("--port", str(free_port()), "--shard-port", str(free_port()))
    run = _run(tmp_path, package, "serve", "--runner", "fake", *ports)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    lines = run.stderr.splitlines()
    said = f"{package} is not installed; {how_to_install(extra)}"
    assert [line for line in lines if said in line]
    assert lines[-1].startswith("penstock serve: ")


def test_lines_of_an_engine_name_its_shard(tmp_path: Path) -> None:
    port = free_port()
    run = _run(tmp_path, "torch", "shard", "--device", "cpu", "--port", str(port))
    lines = [json.loads(line) for line in run.stderr.splitlines()[:-1]]
    assert lines
    assert {line["shard"] for line in lines} == {f"127.0.0.1:{port}"}
