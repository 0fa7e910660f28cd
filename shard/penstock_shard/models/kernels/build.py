"""Compiles cpu.c for a level of this machine and keeps the library in a cache.

    python -m penstock_shard.models.kernels.build

builds every level that the compiler can, as container images want it. Knows compilers, levels and
the cache directory. Knows nothing of what is in the library.

Environment: CC (compiler), PENSTOCK_CACHE (directory, default $XDG_CACHE_HOME/penstock or
~/.cache/penstock), PENSTOCK_CPU_LEVEL (a level below the best).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# The first is compiled, the others are part of it.
SOURCES = tuple(Path(__file__).with_name(name) for name in ("cpu.c", "threads.h", "vectors.h"))
# Best first. A machine that runs one runs those after it.
LEVELS = ("avx512", "avx2", "portable")
# As /proc/cpuinfo names them.
_NEEDED_FEATURES = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
# These two decide about bits, as the source does.
_ARITHMETIC_FLAGS = ("-O3", "-ffp-contract=off")
_COMMON_FLAGS = (
    *_ARITHMETIC_FLAGS,
    "-fno-math-errno",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
)
_LEVEL_FLAGS = {
    "avx512": (
        "-DPENSTOCK_LEVEL=2",
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
    ),
    "avx2": ("-DPENSTOCK_LEVEL=1", "-mavx2", "-mfma", "-mf16c"),
    "portable": ("-DPENSTOCK_LEVEL=0",),
}
_COMPILE_LIMIT_S = 120


class KernelBuildError(Exception):
    """The kernels cannot be had here; one line that says why."""


def kernel_hash() -> str:
    """Names the arithmetic of the kernels: what their results depend on, on any machine."""
    return _digest(*_sources(), " ".join(_ARITHMETIC_FLAGS).encode())


def supported_levels() -> tuple[str, ...]:
    """The levels this machine can run, best first."""
    features = _features()
    return tuple(level for level in LEVELS if _NEEDED_FEATURES[level] <= features)


def wanted_levels() -> tuple[str, ...]:
    """The levels to try in turn: what this machine can run, or what PENSTOCK_CPU_LEVEL names.
    Raises KernelBuildError for one that does not run here.
    """
    supported = supported_levels()
    level = os.environ.get("PENSTOCK_CPU_LEVEL")
    if not level:
        return supported
    if level not in supported:
        raise KernelBuildError(
            f"PENSTOCK_CPU_LEVEL is {level!r}; this machine runs {', '.join(supported)}"
        )
    return (level,)


def build_library(level: str) -> Path:
    """The library of this level, compiled unless the cache has it. Raises KernelBuildError."""
    compiler = _compiler()
    flags = (*_COMMON_FLAGS, *_LEVEL_FLAGS[level])
    version = _compiler_version(compiler)
    digest = _digest(*_sources(), " ".join(flags).encode(), version.encode())
    directory = _cache_directory()
    library = directory / f"cpu-{level}-{digest}.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return _compile(compiler, flags, library)
    except OSError:
        # A cache that cannot be written to costs a compilation at each start.
        return _compile(compiler, flags, _temporary_directory() / library.name)


def _sources() -> list[bytes]:
    return [source.read_bytes() for source in SOURCES]


def _digest(*parts: bytes) -> str:
    joined = hashlib.sha256()
    for part in parts:
        joined.update(hashlib.sha256(part).digest())
    return joined.hexdigest()[:16]


def _features() -> set[str]:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return set()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _macos_features()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _macos_features() -> set[str]:
    """Of an Intel Mac, under the names of Linux where we ask for them."""
    if sys.platform != "darwin":
        return set()
    names = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
    found = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True)
    return set(found.stdout.lower().split())


def _cache_directory() -> Path:
    if chosen := os.environ.get("PENSTOCK_CACHE"):
        return Path(chosen)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:
        # A user without a home, as containers may have.
        return _temporary_directory()


@functools.cache
def _temporary_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="penstock-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _compiler() -> list[str]:
    if named := os.environ.get("CC"):
        command = shlex.split(named)
        if shutil.which(command[0]) is None:
            raise KernelBuildError(f"no C compiler: CC is {named!r}, which is not there")
        return command
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise KernelBuildError("no C compiler: neither cc, gcc nor clang is on the PATH")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the C compiler {command[0]} does not run: {error}") from error


def _compiler_version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"]).stdout


def _compile(compiler: list[str], flags: tuple[str, ...], library: Path) -> Path:
    """Under a name of its own first: whoever else builds it at the same time does no harm."""
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        result = _run([*compiler, *flags, str(SOURCES[0]), "-o", name, "-lm"])
        if result.returncode != 0:
            lines = (result.stderr or result.stdout).strip().splitlines()
            reason = next(
                (line for line in lines if "error" in line), *(lines[:1] or ["no output"])
            )
            raise KernelBuildError(f"{compiler[0]} could not compile {SOURCES[0].name}: {reason}")
        # Readable by others, as a file of an image is.
        Path(name).chmod(0o755)
        Path(name).replace(library)
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def main() -> int:
    """Builds all levels; 0 if at least one could be built."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    built = 0
    for level in LEVELS if x86 else ("portable",):
        try:
            print(f"{level}: {build_library(level)}")
            built += 1
        except KernelBuildError as error:
            print(f"{level}: {error}", file=sys.stderr)
    return 0 if built else 1


if __name__ == "__main__":
    raise SystemExit(main())
