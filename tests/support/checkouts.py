"""Trees of this repository's revisions, whose packages processes of their own run.

A test starts a process with a tree's `python_path`, and speaks to it as users do.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
# The last commit with schema revision 1.
REVISION_1 = "5764763b2067f8474a252bf62436fabedd88dcab"
# What tokens and log-probabilities are compared with. Moved forward only by a commit that means to
# change them, which says so in CHANGELOG.md. PENSTOCK_BASELINE names another one for a run, such as
# HEAD~1.
_BASELINE = "32f66ddbb97d427d11aff87178421332d2ba8577"


@dataclass(frozen=True)
class Checkout:
    """A tree of the repository; `name` is what messages call it."""

    name: str
    root: Path

    @property
    def python_path(self) -> str:
        """The paths of the tree's packages, which its own pyproject.toml names."""
        build = tomllib.loads((self.root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
        return os.pathsep.join(str(self.root / name) for name in build["dev-mode-dirs"])


def this_checkout() -> Checkout:
    """The tree that these tests belong to."""
    return Checkout("now", _ROOT)


def baseline(folder: Path) -> Checkout:
    """The tree that this one is compared with, written to `folder`; skips the test without its
    history.
    """
    asked = os.environ.get("PENSTOCK_BASELINE")
    if asked and _archive(asked).returncode:
        pytest.fail(f"PENSTOCK_BASELINE: {asked} is no revision of this repository")
    return at_revision(asked or _BASELINE, folder)


def at_revision(revision: str, folder: Path) -> Checkout:
    """The tree of a revision, written to `folder`; skips the test without its history."""
    archive = _archive(revision)
    if archive.returncode:
        pytest.skip(f"the history of this repository is not here: {revision} is not known")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    found = Checkout(revision, folder)
    _tell_version(found)
    return found


def _tell_version(checkout: Checkout) -> None:
    """Write its name and version as an installation does: it may have another name now."""
    project = tomllib.loads((checkout.root / "pyproject.toml").read_text())["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    first, *_ = checkout.python_path.split(os.pathsep)
    installed = Path(first) / f"{name}-{version}.dist-info"
    installed.mkdir()
    fields = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    (installed / "METADATA").write_text(fields)


def _archive(revision: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(_ROOT), "archive", revision]
    return subprocess.run(command, capture_output=True, check=False)


def copy_of(source: Checkout, folder: Path) -> Checkout:
    """A copy of its packages, to be changed."""
    folder.mkdir(parents=True)
    shutil.copy(source.root / "pyproject.toml", folder)
    for path in source.python_path.split(os.pathsep):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(path, folder / Path(path).name, ignore=ignored)
    return Checkout(f"a copy of {source.name}", folder)
