"""Compiles cpu.c for one of this machine's instruction set levels, and caches the library.

    python -m penstock_shard.kernels.build_cpu

builds every level that the compiler supports, for container images. A cached library needs no
compiler.

Environment: CC (compiler), PENSTOCK_CPU_LEVEL (used instead of the best level), PENSTOCK_CACHE (see
`device/cache_directory.py`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock_common.child_environment import child_environment
from penstock_shard.device.cache_directory import (
    cache_directory,
    ensure_safe,
    replace_file,
    temporary_directory,
)

# The first file is compiled and includes the others.
_FILES = (
    "cpu.c",
    "attention.h",
    "instructions.h",
    "linear.h",
    "products.h",
    "recorded.h",
    "recurrent.h",
    "rows.h",
    "threads.h",
    "tiles.h",
    "vectors.h",
    "weights.h",
)
SOURCES = tuple(Path(__file__).with_name(name) for name in _FILES)
# Levels, best first. A machine that runs one level also runs those after it.
TILES = "avx512_amx"
LEVELS = (TILES, "avx512_bf16", "avx512", "avx2", "portable")
# The best level, with its tile instructions emulated, for tests on any processor.
MODEL_OF_TILES = "avx512_amx_model"
# CPU features, named as in /proc/cpuinfo.
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}
_NEEDED_FEATURES = {
    TILES: {*_AVX512, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    "avx512_bf16": {*_AVX512, "avx512_bf16"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
# Results depend on these flags and on the source. Compilers differ in the last flag's default.
_ARITHMETIC_FLAGS = ("-O3", "-ffp-contract=off", "-fno-fast-math")
_COMMON_FLAGS = (
    *_ARITHMETIC_FLAGS,
    "-fno-math-errno",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-pthread",
)
_AVX512_FLAGS = (
    "-DPENSTOCK_LEVEL=2",
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni"),
)
_LEVEL_FLAGS = {
    TILES: (
        *(*_AVX512_FLAGS, "-mavx512bf16", "-DPENSTOCK_TILES=1"),
        *("-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    ),
    MODEL_OF_TILES: (*_AVX512_FLAGS, "-DPENSTOCK_TILES=2"),
    "avx512_bf16": (*_AVX512_FLAGS, "-mavx512bf16"),
    "avx512": _AVX512_FLAGS,
    "avx2": ("-DPENSTOCK_LEVEL=1", "-mavx2", "-mfma", "-mf16c"),
    "portable": ("-DPENSTOCK_LEVEL=0",),
}
_COMPILE_LIMIT_S = 120


class KernelBuildError(Exception):
    """The kernels cannot be built or loaded here. The message is one line."""


def kernel_hash() -> str:
    """Return a hash of the sources and arithmetic flags, which determine results."""
    return _digest(*_sources(), " ".join(_ARITHMETIC_FLAGS).encode())


def supported_levels() -> tuple[str, ...]:
    """Return the levels that this machine can run, best first."""
    features = _features()
    return tuple(level for level in LEVELS if _NEEDED_FEATURES[level] <= features)


def wanted_levels() -> tuple[str, ...]:
    """Return the levels to try in turn: all that this machine can run, or only PENSTOCK_CPU_LEVEL.
    Raises KernelBuildError if that does not run here.
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


def libraries(level: str, progress: Callable[[str], None]) -> Iterator[Path]:
    """Yield libraries to try until one loads: the cached one; if that is damaged, one compiled into
    the cache; if the cache is unusable or mounted noexec, one in a temporary directory.

    `progress` gets a line that says why the cache is not used. Raises KernelBuildError if compiling
    fails.
    """
    name = _library_name(level)
    try:
        library = cache_directory() / name
        if ensure_safe(library):
            yield library
        yield _compile(level, library)
    except OSError as error:
        # Reported, because every start will compile again.
        progress(f"the cache of compiled kernels is not used: {error}")
    try:
        yield _compile(level, temporary_directory() / name)
    except OSError as error:
        raise KernelBuildError(f"nowhere to put compiled kernels: {error}") from error


def _library_name(level: str) -> str:
    """Return a file name with a hash of all that the library depends on, except the compiler, which
    may be gone.
    """
    flags = " ".join(_flags(level))
    digest = _digest(*_sources(), flags.encode(), platform.machine().encode())
    return f"cpu-{level}-{digest}.so"


def _flags(level: str) -> tuple[str, ...]:
    return (*_COMMON_FLAGS, *_LEVEL_FLAGS[level])


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
    """Return an Intel Mac's CPU features in lower case. The features that levels need have the same
    names on Linux.
    """
    if sys.platform != "darwin":
        return set()
    names = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
    found = subprocess.run(
        ["sysctl", "-n", *names], capture_output=True, text=True, env=child_environment()
    )
    return set(found.stdout.lower().split())


def _compiler() -> list[str]:
    named = os.environ.get("CC", "").strip()
    if named:
        try:
            command = shlex.split(named)
        except ValueError as error:
            raise KernelBuildError(f"no C compiler: CC is {named!r}: {error}") from error
        if shutil.which(command[0]) is None:
            raise KernelBuildError(f"no C compiler: CC is {named!r}, which is not there")
        return command
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise KernelBuildError("no C compiler: neither cc, gcc nor clang is on the PATH")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILE_LIMIT_S,
            env=child_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"the C compiler {command[0]} does not run: {error}") from error


def _compile(level: str, library: Path) -> Path:
    """Compile to a temporary name, then rename it, so that several processes may build at once."""
    command = [*_compiler(), *_flags(level), str(SOURCES[0])]
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        result = _run([*command, "-o", name, "-lm"])
        if result.returncode != 0:
            reason = _first_error(result.stderr or result.stdout)
            raise KernelBuildError(f"{command[0]} could not compile {SOURCES[0].name}: {reason}")
        # Readable by others, because an image may run as any user.
        Path(name).chmod(0o755)
        replace_file(Path(name), library)
    finally:
        Path(name).unlink(missing_ok=True)
    return library


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if "error" in line), lines[0])


def main() -> int:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    built = 0
    for level in LEVELS if x86 else ("portable",):
        library = cache_directory() / _library_name(level)
        try:
            if not ensure_safe(library):
                _compile(level, library)
        except (KernelBuildError, OSError) as error:
            print(f"{level}: {error}", file=sys.stderr)
            continue
        print(f"{level}: {library}")
        built += 1
    return 0 if built else 1


if __name__ == "__main__":
    raise SystemExit(main())
