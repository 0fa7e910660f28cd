"""Packages by their hashes: what `make pins` writes of an index, and what pip makes of that.

The index is a folder that the test makes; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.pins import PINS, SCRIPT, pins_of

# Files of two releases: what hashes are written of is one of them.
_WHEELS = (
    "sluice-1.0-py3-none-any.whl",
    "sluice-1.0-cp312-cp312-win_amd64.whl",
    "sluice-1.0-cp313-cp313-manylinux_2_28_aarch64.whl",
    "sluice-1.1-py3-none-any.whl",
)
_SOURCE = "sluice-1.0.tar.gz"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index with one project, whose pages say the sha256 of each file."""
    project = tmp_path / "index" / "sluice"
    project.mkdir(parents=True)
    for name in _WHEELS:
        wheel(project / name)
    (project / _SOURCE).write_bytes(b"a source")
    list_files(project)
    return project.parent


def wheel(path: Path, *requirements: str) -> None:
    name, version, *_, tag = path.stem.split("-", 2)
    asks = "".join(f"Requires-Dist: {each}\n" for each in requirements)
    with zipfile.ZipFile(path, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}"
        )
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def list_files(project: Path, fragment: str = "#sha256={}") -> None:
    files = [path for path in project.iterdir() if path.suffix != ".html"]
    links = [f'<a href="{f.name}{fragment.format(sha256(f))}">{f.name}</a>' for f in files]
    (project / "index.html").write_text("<!DOCTYPE html>\n<html>" + "\n".join(links) + "</html>")


def run(*words: str, index: Path) -> subprocess.CompletedProcess[str]:
    """A command whose pip knows this index, and nothing of this machine's configuration."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.as_uri()}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CACHE_DIR": str(index.parent / "cache")}
    return subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, check=False
    )


def written(version: str, index: Path) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import pins\n"
        f"pinned = {{'sluice': {version!r}}}\n"
        "try: print(pins.text(pinned, pins.hashes(pinned)))\n"
        "except pins.NotPinned as error: sys.exit(str(error))\n"
    )
    return run("-c", script, index=index)


def installed(text: str, index: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Install a file of requirements by pip, from the files of the index alone."""
    file, target = index.parent / "requirements.txt", index.parent / "target"
    file.write_text(text)
    links = (str(path) for path in index.iterdir())
    found = [word for link in links for word in ("--find-links", link)]
    words = ["--no-index", *found, "--target", str(target), *options]
    return run("-m", "pip", "install", "--require-hashes", *words, "-r", str(file), index=index)


# ---- what is written ---------------------------------------------------------------------------


def test_the_hashes_of_all_files_of_that_release_and_no_other_are_written(index: Path) -> None:
    done = written("1.0", index)
    assert done.returncode == 0, done.stderr
    project = index / "sluice"
    of_it = [path for path in project.iterdir() if path.name.startswith("sluice-1.0")]
    assert len(of_it) == 4
    assert pins_of(done.stdout) == [("sluice", "1.0", sorted(map(sha256, of_it)))]


def test_a_release_that_the_index_has_not_is_named(index: Path) -> None:
    done = written("2.0", index)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "sluice==2.0: pip's index has no file of it"


@pytest.mark.parametrize("fragment", ["", "#md5={:.32}"])
def test_a_file_whose_sha256_the_index_does_not_tell_is_named(index: Path, fragment: str) -> None:
    list_files(index / "sluice", fragment)
    done = written("1.0", index)
    assert done.returncode == 1
    assert "pip's index tells no sha256 of it" in done.stderr.splitlines()[-1]


def test_an_error_leaves_all_files_as_they_were(index: Path) -> None:
    before = {path.name: path.read_text() for path in PINS.FOLDER.iterdir()}
    done = run(str(SCRIPT), index=index)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("pins: ")
    assert {path.name: path.read_text() for path in PINS.FOLDER.iterdir()} == before


# ---- what pip makes of it ----------------------------------------------------------------------


def test_pip_installs_what_has_the_hash_that_was_written(index: Path) -> None:
    done = installed(written("1.0", index).stdout, index)
    assert done.returncode == 0, done.stderr
    assert (index.parent / "target" / "sluice.py").read_text() == "VERSION = '1.0'\n"


def test_pip_refuses_a_file_that_was_changed_after_its_hash_was_written(index: Path) -> None:
    text = written("1.0", index).stdout
    wheel(index / "sluice" / _WHEELS[0], "something")
    done = installed(text, index)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (index.parent / "target").exists()


def test_pip_refuses_a_package_that_is_asked_for_and_has_no_hash(index: Path) -> None:
    weir = index / "weir"
    weir.mkdir()
    wheel(weir / "weir-1.0-py3-none-any.whl", "sluice")
    list_files(weir)
    hashed = sha256(weir / "weir-1.0-py3-none-any.whl")
    done = installed(PINS.text({"weir": "1.0"}, {"weir": [hashed]}), index)
    assert done.returncode != 0
    assert "sluice" in done.stderr
    assert not (index.parent / "target").exists()


def test_penstocks_own_line_downloads_neither_a_backend_nor_a_package(index: Path) -> None:
    """pip gets the options of deploy/Dockerfile, and a project that is set up as penstock is."""
    project = index.parent / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "gate"\nversion = "1.0"\n'
        '[project.optional-dependencies]\nfed = ["sluice"]\n'
        "[tool.hatch.build.targets.wheel]\nbypass-selection = true\n"
    )
    target = ("--target", str(index.parent / "target"))
    options = ("--no-index", "--no-build-isolation")
    install = ("-m", "pip", "install", *target, *options)
    alone = run(*install, str(project), index=index)
    assert alone.returncode == 0, alone.stderr
    fed = run(*install, f"{project}[fed]", index=index)
    assert fed.returncode != 0
    assert "No matching distribution found for sluice" in fed.stderr
