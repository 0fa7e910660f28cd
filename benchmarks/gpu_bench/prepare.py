"""Prepares a bare machine: wheels in a folder of their own, compiled kernels of an earlier run, and
the environment in which parts find both. Imports no torch.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PACKAGES = ("proto", "client", "router", "shard")
_ARCHIVE = "triton-cache.tar.gz"


def allow_many_files() -> None:
    """Raise the limit of open files, as there are thousands of connections. Allow no core files:
    parts that are made to tell where they hang would leave them.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def install_wheels(wheels: Path, site: Path, within_s: float) -> str:
    """Install all wheels of a folder into another, asking no index. Returns what went wrong."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--target", str(site), *map(str, sorted(wheels.glob("*.whl")))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {within_s:.0f} s"
    return done.stderr.strip()[-2000:] if done.returncode else ""


def unpack_kernels(archive: Path | None, folder: Path) -> Path:
    """Unpack an archive with one folder of compiled kernels. Returns the path of that folder, which
    is new without an archive.
    """
    folder.mkdir()
    if archive is None:
        (folder / "triton").mkdir()
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    (cache,) = folder.iterdir()
    return cache


def pack_kernels(cache: Path, out: Path, within_s: float) -> str:
    """Pack the compiled kernels into an archive in `out`. Returns what went wrong."""
    new = cache.with_name(_ARCHIVE)
    command = [sys.executable, "-m", "tarfile", "--create", str(new), cache.name]
    try:
        subprocess.run(command, cwd=cache.parent, timeout=within_s, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        return str(error)
    beside = out / f"{_ARCHIVE}.new"
    shutil.copyfile(new, beside)
    beside.replace(out / _ARCHIVE)
    return ""


def environment(scratch: Path, site: Path, kernels: Path) -> dict[str, str]:
    """The environment of parts: this checkout's packages, installed or not, and the wheels'."""
    path = [str(site), *(str(ROOT / package) for package in _PACKAGES)]
    return {
        "PENSTOCK_CACHE": str(scratch / "cache"),
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # Upon SIGABRT Python writes the stacks of all threads, in servers and engines too.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_DIR": str(kernels),
        "TRITON_STORE_BINARY_ONLY": "1",
        # torch's profiler crashes when it is begun again beside CUDA graphs, unless CUPTI is kept;
        # torch sees to that only for graphs of its own compiler.
        "TEARDOWN_CUPTI": "0",
        "DISABLE_CUPTI_LAZY_REINIT": "1",
    }
