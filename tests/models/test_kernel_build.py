"""Building and loading the kernels' library: the cache, its failures, the choice of a level."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock_shard.kernels import build_cpu, cpu
from penstock_shard.kernels.cpu import load_kernels


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch) -> None:
    """A source that takes no time to compile."""
    source = tmp_path / "small.c"
    source.write_text("int penstock_level = PENSTOCK_LEVEL;")
    monkeypatch.setattr(build_cpu, "SOURCES", (source,))


@pytest.fixture
def none_loaded(monkeypatch) -> None:
    """A process that has loaded no kernels yet."""
    monkeypatch.setattr(cpu, "_loaded", {})


@pytest.fixture
def lines() -> list[str]:
    """The lines of progress."""
    return []


def first_library(level: str) -> Path:
    """Return the library that a shard tries first. Fails if there is anything to report."""
    return next(build_cpu.libraries(level, pytest.fail))


@pytest.mark.usefixtures("small_source")
def test_a_library_is_built_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "made" / "here"))
    library = first_library("portable")
    first = library.stat()
    assert first_library("portable") == library
    assert library.stat().st_mtime_ns == first.st_mtime_ns
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    build_cpu.SOURCES[0].write_text("int changed;")
    assert first_library("portable") != library


@pytest.mark.usefixtures("small_source")
def test_shards_that_start_at_once_build_side_by_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(4) as shards:
        libraries = list(shards.map(first_library, ["portable"] * 4))
    assert [*(tmp_path / "cache").iterdir()] == [libraries[0]]
    assert set(libraries) == {libraries[0]}


@pytest.mark.usefixtures("small_source")
def test_a_library_in_the_cache_needs_no_compiler(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    library = first_library("portable")
    monkeypatch.setenv("PATH", "")
    assert first_library("portable") == library
    monkeypatch.setenv("CC", "/nonexistent/cc")
    assert first_library("portable") == library


@pytest.mark.usefixtures("small_source")
def test_another_kind_of_machine_gets_a_library_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    library = first_library("portable")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert first_library("portable") != library


@pytest.mark.usefixtures("small_source")
def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch, lines: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    library = next(build_cpu.libraries("portable", lines.append))
    assert library.exists()
    assert tmp_path not in library.parents
    (line,) = lines
    assert line.startswith("the cache of compiled kernels is not used: ")


@pytest.mark.usefixtures("small_source")
@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("what", ["directory", "library"])
def test_what_others_can_write_to_is_not_loaded(
    tmp_path: Path, monkeypatch, lines: list[str], what: str, mode: int
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    cached = first_library("portable")
    refused = cached if what == "library" else cached.parent
    refused.chmod(mode)
    library = next(build_cpu.libraries("portable", lines.append))
    assert tmp_path not in library.parents
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert lines == [
        f"the cache of compiled kernels is not used: {refused} has mode {mode:o}; "
        "group and others must not write to it"
    ]


@pytest.mark.usefixtures("small_source")
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("what", ["directory", "library"])
def test_what_belongs_to_another_user_is_not_loaded(
    tmp_path: Path, monkeypatch, lines: list[str], what: str
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    cached = first_library("portable")
    refused = cached if what == "library" else cached.parent
    os.chown(refused, 12345, -1)
    library = next(build_cpu.libraries("portable", lines.append))
    assert tmp_path not in library.parents
    assert lines == [
        f"the cache of compiled kernels is not used: {refused} belongs to user 12345; "
        "it must be root's or ours"
    ]


@pytest.mark.usefixtures("small_source")
def test_an_image_does_not_go_without_its_cache(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    assert build_cpu.main() == 1
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("small_source")
def test_an_image_gets_every_level_the_compiler_can_build(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert build_cpu.main() == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert set(lines) >= set(build_cpu.supported_levels())
    assert sorted(lines.values()) == sorted(str(path) for path in (tmp_path / "cache").iterdir())


def test_no_compiler_is_said_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(
        build_cpu.KernelBuildError, match=r"^no C compiler: CC is '/nonexistent/cc'"
    ):
        first_library("portable")
    monkeypatch.setenv("CC", "'cc")
    with pytest.raises(build_cpu.KernelBuildError, match=r"^no C compiler: .*No closing quotation"):
        first_library("portable")
    monkeypatch.setenv("CC", " ")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        build_cpu.KernelBuildError, match=r"^no C compiler: neither cc, gcc nor clang"
    ):
        first_library("portable")


@pytest.mark.usefixtures("small_source")
def test_a_compiler_that_would_reorder_sums_is_told_not_to(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "cc -ffast-math")
    build_cpu.SOURCES[0].write_text("#ifdef __FAST_MATH__\n#error fast\n#endif\nint level;")
    assert first_library("portable").exists()
    monkeypatch.setattr(build_cpu, "_COMMON_FLAGS", ("-shared", "-fPIC"))
    with pytest.raises(build_cpu.KernelBuildError, match="fast"):
        first_library("portable")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'error: no disk' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(
        build_cpu.KernelBuildError, match=r"could not compile cpu\.c: error: no disk$"
    ):
        first_library("portable")
    assert [path.name for path in tmp_path.iterdir()] == ["broken-cc"]


@pytest.fixture
def sound(tmp_path: Path, monkeypatch) -> Path:
    """The portable library, in a cache of the test."""
    library = first_library("portable")
    copy = tmp_path / "cache" / library.name
    copy.parent.mkdir(mode=0o700)
    shutil.copy(library, copy)
    monkeypatch.setenv("PENSTOCK_CACHE", str(copy.parent))
    return copy


@pytest.mark.usefixtures("none_loaded")
def test_a_damaged_library_is_compiled_anew(
    sound: Path, tmp_path: Path, monkeypatch, lines: list[str]
) -> None:
    monkeypatch.setenv("CC", copying_compiler(tmp_path, sound))
    sound.write_bytes(b"")
    assert load_kernels("portable", lines.append).level == "portable"
    assert sound.stat().st_size > 0
    (line,) = lines
    assert line.startswith(f"cannot load the portable kernels: {sound}: ")


@pytest.mark.usefixtures("none_loaded")
def test_where_nothing_may_be_executed_a_temporary_directory_serves(
    sound: Path, tmp_path: Path, monkeypatch, lines: list[str]
) -> None:
    monkeypatch.setenv("CC", copying_compiler(tmp_path, sound))
    load = ctypes.CDLL

    def load_elsewhere(name: str) -> ctypes.CDLL:
        if sound.parent in Path(name).parents:
            raise OSError("failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", load_elsewhere)
    assert load_kernels("portable", lines.append).level == "portable"
    assert (
        lines == ["cannot load the portable kernels: failed to map segment from shared object"] * 2
    )


def copying_compiler(tmp_path: Path, library: Path) -> str:
    """Return the path of a compiler that takes no time: all that it compiles is this library."""
    kept, compiler = tmp_path / "kept.so", tmp_path / "copying-cc"
    shutil.copy(library, kept)
    compiler.write_text(f"""#!/bin/sh
while [ $1 != -o ]; do shift; done
cp {kept} $2
""")
    compiler.chmod(0o755)
    return str(compiler)


@pytest.mark.usefixtures("none_loaded")
def test_a_library_that_does_not_load_is_named(
    tmp_path: Path, monkeypatch, lines: list[str]
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")

    def no_compiler(level: str, progress: object) -> Iterator[Path]:
        yield broken
        raise build_cpu.KernelBuildError("no C compiler")

    monkeypatch.setattr(cpu, "libraries", no_compiler)
    with pytest.raises(
        build_cpu.KernelBuildError, match=r"^cannot load the .*/broken\.so: .*; no C compiler$"
    ):
        load_kernels("portable", lines.append)


def test_a_compiler_that_lacks_the_best_level_serves_the_next(
    monkeypatch, lines: list[str]
) -> None:
    known = build_cpu.libraries

    def known_libraries(level: str, progress: Callable[[str], None]) -> Iterator[Path]:
        if level == "avx1024":
            raise build_cpu.KernelBuildError("-mavx1024 is not known")
        return known(level, progress)

    monkeypatch.setattr(cpu, "libraries", known_libraries)
    monkeypatch.setattr(cpu, "wanted_levels", lambda: ("avx1024", "portable"))
    assert load_kernels(progress=lines.append).level == "portable"
    assert lines == ["cpu kernels of level portable, not avx1024: -mavx1024 is not known"]
    monkeypatch.setattr(cpu, "wanted_levels", lambda: ("avx1024",))
    with pytest.raises(build_cpu.KernelBuildError, match="-mavx1024 is not known"):
        load_kernels()


def test_the_best_level_needs_no_line(lines: list[str]) -> None:
    load_kernels(progress=lines.append)
    assert lines == []


def test_a_lower_level_can_be_asked_for(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU_LEVEL", "portable")
    assert load_kernels().level == "portable"
    monkeypatch.setenv("PENSTOCK_CPU_LEVEL", "avx1024")
    with pytest.raises(
        build_cpu.KernelBuildError, match=r"'avx1024'; this machine runs .*portable"
    ):
        load_kernels()
    monkeypatch.delenv("PENSTOCK_CPU_LEVEL")
    assert load_kernels().level == build_cpu.supported_levels()[0]


def test_the_kernel_hash_names_the_arithmetic() -> None:
    assert len(build_cpu.kernel_hash()) == 16
    assert build_cpu.kernel_hash() == build_cpu.kernel_hash()
