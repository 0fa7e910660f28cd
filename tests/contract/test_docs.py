"""What the documents say about the tree is true."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "router/penstock_router",
    "client/penstock_client",
    "shard/penstock_shard",
    "proto/penstock_proto",
)
_GENERATED = re.compile(r"shard_pb2.*\.py")


def _modules(package: str) -> set[str]:
    root = ROOT / package
    return {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.name != "__init__.py" and not _GENERATED.fullmatch(path.name)
    }


def test_structure_has_a_line_for_each_module_and_for_nothing_else():
    text = (ROOT / "docs" / "structure.md").read_text()
    for package in PACKAGES:
        section = text.partition(f"### {package}\n")[2].partition("\n### ")[0]
        listed = set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))
        assert {name for name in listed if name.endswith(".py")} == _modules(package)


def test_every_dependency_has_its_reason():
    text = (ROOT / "docs" / "dependencies.md").read_text()
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    names = set(re.findall(r'"([a-z0-9-]+)[>=<]', project.partition("optional-dependencies]")[2]))
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert missing == []


def test_links_between_documents_lead_somewhere():
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
