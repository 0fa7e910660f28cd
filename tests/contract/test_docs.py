"""What the documents say about the tree is true."""

from __future__ import annotations

import re
from pathlib import Path

from contract.sources import imports, product_modules

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
    for package in PACKAGES:
        assert {name for name in _listed(package) if name.endswith(".py")} == _modules(package)


def test_no_page_says_a_name_twice_in_a_row():
    twice = re.compile(r"(`[^`]+`):? \1")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deploy/*.md")]
    assert [page.name for page in pages if twice.search(page.read_text())] == []


def _listed(package: str) -> list[str]:
    text = (ROOT / "docs" / "structure.md").read_text()
    section = text.partition(f"### {package}\n")[2].partition("\n### ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)


def test_the_router_imports_down_its_table_in_structure():
    modules = product_modules()
    names = [
        f"penstock_router.{path.removesuffix('.py').replace('/', '.')}"
        for path in _listed("router/penstock_router")
    ]
    upwards = [
        f"{name} imports {target}"
        for place, name in enumerate(names)
        for target in imports(modules[name], modules)
        if target in names[:place]
    ]
    assert upwards == []


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
