"""The name under which penstock is installed. On package indexes `penstock` is somebody else's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from penstock_common.version import DISTRIBUTION, how_to_install

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "proto",
    "client",
    "router",
    "shard",
    "benchmarks",
    "examples",
    "docs",
    "deploy",
    "tests",
)
# An installation by name. From a wheel or a checkout it says where that is.
_FROM_AN_INDEX = re.compile(
    r"(?:\bpip3? install|\buv add|\buv pip install|--from|\binstall)\s+(?:-\S+\s+)*"
    r"[\"'`]?penstock(?:-llm)?(?:\[[\w,]*\])?(?![\w\[-])(?!.{0,3}@ file)"
)


def _offences(text: str) -> list[str]:
    lines = " ".join(text.split())
    return [
        found[0]
        for found in _FROM_AN_INDEX.finditer(lines)
        if not lines[found.end() :].lstrip("'\"`").lstrip().startswith(("@ file", "with the extra"))
    ]


def test_the_distribution_is_that_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert how_to_install("shard").count("\n") == 0


def test_no_text_has_penstock_installed_from_an_index() -> None:
    paths = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder in FOLDERS:
        paths += [each for end in (".md", ".py") for each in (ROOT / folder).rglob(f"*{end}")]
    paths.remove(Path(__file__))
    found = {path: _offences(path.read_text()) for path in paths}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install penstock",
        "Needs `pip install 'penstock[client]'`.",
        "uv pip install -q 'penstock-llm[router,shard]'",
        "uvx --from 'penstock[router]' penstock serve",
        "it needs torchao; install penstock[int4]",
    ],
)
def test_an_installation_from_an_index_is_found(text: str) -> None:
    assert _offences(text)
