"""The rooms of the packages: what docs/structure.md says of them, and that imports keep to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from contract.sources import PACKAGES, ROOT, Module, Modules, doctored, imports, product_modules

# More than these and a reader looks for a file instead of seeing it.
MAX_MODULES = 16
# Their files are few and their order is nobody's question.
WITHOUT_A_TABLE = ("penstock_common", "penstock_proto")
DIVIDED = [package for package in PACKAGES if package not in WITHOUT_A_TABLE]


@pytest.mark.parametrize("package", DIVIDED)
def test_every_room_has_its_line_in_structure(package: str) -> None:
    rooms = {_room(module) for module in _modules_of(package, product_modules())}
    assert sorted(_listed(package)) == sorted(rooms)


@pytest.mark.parametrize("package", DIVIDED)
def test_imports_point_down_the_table_of_rooms(package: str) -> None:
    assert list(upward_imports(package, _listed(package), product_modules())) == []


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    folders = Counter(
        path.parent
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert {str(path): count for path, count in folders.items() if count > MAX_MODULES} == {}


def test_an_import_that_points_up_is_found() -> None:
    modules = doctored(
        penstock_router__text__prompts="from penstock_router.routes import table",
        penstock_router__routes__table="from penstock_router.text import prompts",
        penstock_router__errors="import penstock_router.errors",
    )
    found = list(upward_imports("penstock_router", ["routes/", "text/", "errors.py"], modules))
    assert found == ["penstock_router.text.prompts imports penstock_router.routes.table"]


def upward_imports(package: str, rooms: Sequence[str], modules: Modules) -> Iterator[str]:
    place = {room: index for index, room in enumerate(rooms)}
    for module in _modules_of(package, modules):
        for target in imports(module, modules):
            below = modules.get(target)
            if below is None or below.package != package or below.name == package:
                continue
            if place[_room(below)] < place[_room(module)]:
                yield f"{module.name} imports {target}"


def _modules_of(package: str, modules: Modules) -> list[Module]:
    """Return the modules of a package, except its own `__init__`, which may name anything of it."""
    return [each for each in modules.values() if each.package == package and each.name != package]


def _room(module: Module) -> str:
    """The folder of a package in which a module is, or the module's file beside the folders."""
    name = module.name.split(".")[1]
    in_folder = module.name.count(".") > 1 or module.is_package
    return f"{name}/" if in_folder else f"{name}.py"


def _listed(package: str) -> list[str]:
    text = (ROOT / "docs" / "structure.md").read_text()
    section = re.split(rf"^### \w+/{package}$", text, flags=re.MULTILINE)[1].partition("\n### ")[0]
    return re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)
