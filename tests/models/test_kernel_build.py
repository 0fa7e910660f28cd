"""Building and loading the kernels' library: the cache, its failures, the choice of a level."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock_shard.models.kernels import build, cpu
from penstock_shard.models.kernels.cpu import load_kernels


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch) -> None:
    """A source that takes no time to compile."""
    source = tmp_path / "small.c"
    source.write_text("int penstock_level = PENSTOCK_LEVEL;")
    monkeypatch.setattr(build, "SOURCES", (source,))


@pytest.mark.usefixtures("small_source")
def test_a_library_is_built_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "made" / "here"))
    library = build.build_library("portable")
    first = library.stat()
    assert build.build_library("portable") == library
    assert library.stat().st_mtime_ns == first.st_mtime_ns
    assert [path.name for path in library.parent.iterdir()] == [library.name]
    build.SOURCES[0].write_text("int changed;")
    assert build.build_library("portable") != library


@pytest.mark.usefixtures("small_source")
def test_shards_that_start_at_once_build_side_by_side(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(4) as shards:
        libraries = list(shards.map(build.build_library, ["portable"] * 4))
    assert [*(tmp_path / "cache").iterdir()] == [libraries[0]]
    assert set(libraries) == {libraries[0]}


@pytest.mark.usefixtures("small_source")
def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    library = build.build_library("portable")
    assert library.exists()
    assert tmp_path not in library.parents


@pytest.mark.usefixtures("small_source")
def test_an_image_gets_every_level_the_compiler_can_build(
    tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert build.main() == 0
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert set(lines) >= set(build.supported_levels())
    assert sorted(lines.values()) == sorted(str(path) for path in (tmp_path / "cache").iterdir())


def test_no_compiler_is_said_in_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(build.KernelBuildError, match=r"^no C compiler: CC is '/nonexistent/cc'"):
        build.build_library("portable")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.KernelBuildError, match=r"^no C compiler: neither cc, gcc nor clang"):
        build.build_library("portable")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] || { echo 'error: no disk' >&2; exit 1; }\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(build.KernelBuildError, match=r"could not compile cpu\.c: error: no disk$"):
        build.build_library("portable")
    assert [path.name for path in tmp_path.iterdir()] == ["broken-cc"]


def test_a_library_that_does_not_load_is_named(tmp_path: Path, monkeypatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    monkeypatch.setattr(cpu, "build_library", lambda level: broken)
    with pytest.raises(build.KernelBuildError, match=r"broken\.so cannot be loaded: "):
        load_kernels("a level of its own")


def test_a_compiler_that_lacks_the_best_level_serves_the_next(monkeypatch) -> None:
    known = build.build_library

    def build_known(level: str) -> Path:
        if level == "avx1024":
            raise build.KernelBuildError("-mavx1024 is not known")
        return known(level)

    monkeypatch.setattr(cpu, "build_library", build_known)
    monkeypatch.setattr(cpu, "wanted_levels", lambda: ("avx1024", "portable"))
    assert load_kernels().level == "portable"
    monkeypatch.setattr(cpu, "wanted_levels", lambda: ("avx1024",))
    with pytest.raises(build.KernelBuildError, match="-mavx1024 is not known"):
        load_kernels()


def test_a_lower_level_can_be_asked_for(monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CPU_LEVEL", "portable")
    assert load_kernels().level == "portable"
    monkeypatch.setenv("PENSTOCK_CPU_LEVEL", "avx1024")
    with pytest.raises(build.KernelBuildError, match=r"'avx1024'; this machine runs .*portable"):
        load_kernels()
    monkeypatch.delenv("PENSTOCK_CPU_LEVEL")
    assert load_kernels().level == build.supported_levels()[0]


def test_the_kernel_hash_names_the_arithmetic() -> None:
    assert len(build.kernel_hash()) == 16
    assert build.kernel_hash() == build.kernel_hash()
