"""Packages that `make serve` installs where there is no GPU, from an index on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from integration.test_quick_start import ROOT, _environment, commands_that_print

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only there builds differ")

_WARNING = "No NVIDIA device is found here"
_BUILDS = {"main": "2.13.0", "cpu": "2.13.0+cpu"}


def _add_torch(index: Path, version: str) -> None:
    """Put a package of a few bytes into an index, which is a folder for each project."""
    folder = index / "torch"
    folder.mkdir(parents=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of two indexes: `main`, and `cpu`, which alone has the build for processors."""
    folder = tmp_path_factory.mktemp("indexes")
    for name, version in _BUILDS.items():
        _add_torch(folder / name, version)
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def _make(*words: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run make with no GPU in sight, and no settings of pip but these."""
    others = {name: value for name, value in _environment().items() if "PIP_" not in name}
    own = {"PATH": f"{path}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull, **variables}
    return subprocess.run(
        ["make", *words],
        cwd=ROOT,
        env={**others, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("words", "warns"), [([], True), (["CPU=1"], False), (["TORCH=torch==2.13.0+cpu"], False)]
)
def test_gigabytes_that_nothing_here_can_use_are_told_of_before_they_are_fetched(
    words: list[str], warns: bool, tmp_path: Path
) -> None:
    commands_that_print(tmp_path)
    lines = _make("serve", f"VENV={tmp_path}", "UV=", *words).stdout.splitlines()
    build = "torch==2.13.0+cpu" if words else "torch==2.13.0"
    first = next(number for number, line in enumerate(lines) if line.startswith("python -m pip"))
    assert lines[first].endswith(f" install {build}")
    said = " ".join(lines[:first])
    assert (_WARNING in said) == warns
    if warns:
        assert "PIP_EXTRA_INDEX_URL" in said
        assert "make serve CPU=1" in said
        assert "make serve FAKE=1" in said
    assert lines[-1].startswith("penstock serve ")


def test_where_there_is_a_gpu_nobody_is_warned(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    commands_that_print(tmp_path / "venv")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    tool.chmod(0o755)
    made = _make("serve", f"VENV={tmp_path / 'venv'}", "UV=", path=str(tmp_path))
    assert "install torch==2.13.0\n" in made.stdout
    assert _WARNING not in made.stdout


@pytest.mark.parametrize(("words", "build"), [([], "2.13.0"), (["CPU=1"], "2.13.0+cpu")])
def test_the_build_for_processors_comes_from_the_extra_index(
    words: list[str], build: str, tmp_path: Path, indexes: str
) -> None:
    venv = tmp_path / "venv"
    variables = {"PIP_INDEX_URL": f"{indexes}/main", "PIP_EXTRA_INDEX_URL": f"{indexes}/cpu"}
    if not words:
        del variables["PIP_EXTRA_INDEX_URL"]
    target = f"{venv}/.torch"
    made = _make(target, f"VENV={venv}", f"PYTHON={sys.executable}", "UV=", *words, **variables)
    assert (_WARNING in made.stdout.partition("Looking in indexes")[0]) == (not words)
    assert Path(target).read_text() == f"torch=={build}\n"
    shown = [str(venv / "bin" / "python"), "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(shown, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == build


def test_without_the_index_it_is_said_what_is_missing(tmp_path: Path, indexes: str) -> None:
    venv = tmp_path / "venv"
    words = (f"{venv}/.torch", f"VENV={venv}", f"PYTHON={sys.executable}", "UV=", "CPU=1")
    made = _make(*words, PIP_INDEX_URL=f"{indexes}/main")
    assert made.returncode != 0
    assert (
        "torch==2.13.0+cpu was not found, or not installed: set PIP_EXTRA_INDEX_URL" in made.stdout
    )
    assert not Path(words[0]).exists()


def test_uv_gets_the_extra_index_under_its_own_name(tmp_path: Path) -> None:
    commands_that_print(tmp_path)
    tool = tmp_path / "uv"
    tool.write_text('#!/bin/sh\necho "uv from [$UV_EXTRA_INDEX_URL] $@"\n')
    tool.chmod(0o755)
    words = ("serve", f"VENV={tmp_path}", f"UV={tool}", "CPU=1")
    made = _make(*words, PIP_EXTRA_INDEX_URL="http://127.0.0.1:1/cpu")
    assert "uv from [http://127.0.0.1:1/cpu] pip install" in made.stdout
