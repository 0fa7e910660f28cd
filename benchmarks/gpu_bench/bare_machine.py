"""A machine that may be bare: looks at it; gives it wheels in their own folder, compiled kernels of
an earlier run, and an environment in which parts find both.

Imports torch only where a part tries it.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_bench.attempts import Attempts
from benchmarks.gpu_bench.goals import Row

ROOT = Path(__file__).parents[2]
_PACKAGES = ("proto", "client", "router", "shard")
_ARCHIVE = "triton-cache.tar.gz"
_EXTRAS = ("router", "shard", "fake", "client")
_MODULES = (
    *("torch", "triton", "transformers", "penstock_proto.shard_pb2_grpc"),
    *("penstock_shard.server.app", "penstock_shard.engine.main"),
    *("penstock_router.app", "penstock_cli.main"),
)
# Large libraries that a shard uses little, and the number of others to read.
_UNUSED = ("cudnn", "nvshmem", "cufft", "nccl")
_MOST_LIBRARIES = 24
_READERS = 8
_PIECE_BYTES = 2**24
_SMI = "name,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,driver_version"


def allow_many_files() -> None:
    """Raise the limit of open files for thousands of connections. Forbid core files, which parts
    would leave when they are made to write their stacks.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def install_wheels(wheels: Path, site: Path, within_s: float) -> str:
    """Install all wheels of a folder into another, without an index; return an error or ''."""
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
    """Unpack an archive with a folder of compiled kernels; return the path of that folder, which is
    new without an archive.
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
    """Pack compiled kernels into an archive in `out`; return an error or ''."""
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
    """Return the environment of parts, with this checkout's packages and those of the wheels."""
    path = [str(site), *(str(ROOT / package) for package in _PACKAGES)]
    return {
        "PENSTOCK_CACHE": str(scratch / "cache"),
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        # At SIGABRT, Python writes the stacks of all threads, also in servers and engines.
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")])),
        "TRITON_CACHE_DIR": str(kernels),
        "TRITON_STORE_BINARY_ONLY": "1",
        # torch's profiler crashes when it begins again beside CUDA graphs, unless CUPTI is kept.
        # torch keeps it only for graphs of its own compiler.
        "TEARDOWN_CUPTI": "0",
        "DISABLE_CUPTI_LAZY_REINIT": "1",
    }


def attempts(device: str) -> Attempts:
    """Return a look at everything, with the most expensive first."""
    on_gpu = device == "cuda"
    return {
        **({"libraries read": _libraries_read} if on_gpu else {}),
        "packages": _packages,
        "machine": _machine,
        **{f"import {name}": partial(_imported, name) for name in _MODULES},
        **({"first product on the device": _product} if on_gpu else {}),
    }


def _libraries_read() -> Row:
    """Read the files that torch loads, in parallel, because a new machine's disk may be slow at
    first.
    """
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        gb = 1e-9 * sum(readers.map(_read, _libraries()))
    return {"gb": round(gb, 2), "gb_per_s": round(gb / (time.perf_counter() - begun_s), 2)}


def _libraries() -> list[Path]:
    """List the largest libraries of torch and its dependencies."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    site = Path(spec.origin).parents[1]
    places = ("torch/lib/*.so*", "nvidia/*/lib/*.so*", "triton/_C/*.so")
    found = [path for place in places for path in site.glob(place) if path.is_file()]
    used = [path for path in found if not any(name in path.name for name in _UNUSED)]
    return sorted(used, key=lambda path: path.stat().st_size, reverse=True)[:_MOST_LIBRARIES]


def _read(path: Path) -> int:
    with path.open("rb", buffering=0) as file:
        return sum(len(piece) for piece in iter(lambda: file.read(_PIECE_BYTES), b""))


def _packages() -> Row:
    """Compare installed packages with those that routers and shards need."""
    from packaging.requirements import Requirement

    found, wrong = {}, []
    for requirement in map(Requirement, _required()):
        try:
            found[requirement.name] = here = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(here, prereleases=True):
            wrong.append(f"{requirement.name} {here} is not {requirement.specifier}")
    found["python"] = platform.python_version()
    return {**found, **({"failed": ", ".join(dict.fromkeys(wrong))} if wrong else {})}


def _required() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in _EXTRAS:
        for line in project["optional-dependencies"][extra]:
            if not line.startswith(project["name"]):
                yield line


def _machine() -> Row:
    """Look at the device, the compiler and the kernel."""
    print(_said("nvidia-smi"), file=sys.stderr)
    return {
        "gpu": _said("nvidia-smi", f"--query-gpu={_SMI}", "--format=csv,noheader"),
        "gcc": _said("gcc", "--version").partition("\n")[0],
        # For Triton's launchers.
        "python_h": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
        "sanitizer": shutil.which("compute-sanitizer") is not None,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not here"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip()


def _imported(name: str) -> Row:
    importlib.import_module(name)
    return {"found": "imported"}


def _product() -> Row:
    import torch

    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    total = float((ones @ ones).sum())
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    row: Row = {"capability": capability, "sum": total}
    return row if total == 64**3 else {**row, "failed": f"the sum is {total:.0f}, not {64**3}"}
