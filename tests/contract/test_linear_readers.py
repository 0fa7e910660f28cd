"""Every reader of text in the router is among those whose time is measured.

`tests/unit/router/linear_readers.py` is the list.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from contract.sources import Modules, doctored, product_modules
from unit.router.linear_readers import FIELDS, OTHER_PATTERNS, PATTERNS, TEXTS

from penstock_router.offload.body_kinds import KINDS

_PACKAGES = ("penstock_router", "penstock_common")


def patterns(modules: Modules) -> set[str]:
    """Return where patterns are made: the module, and in it the constant or the function."""
    return {
        f"{module.name}:{place}"
        for module in modules.values()
        if module.package in _PACKAGES
        for place in _made_in(module.tree(), "")
    }


def _made_in(node: ast.AST, place: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{place}.{child.name}".strip(".")
        elif isinstance(child, ast.Assign | ast.AnnAssign) and not place:
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inside = ast.unparse(target)
        if isinstance(child, ast.Call) and _is_pattern(child.func):
            yield place
        yield from _made_in(child, inside)


def _is_pattern(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "re"
        and function.attr != "escape"
    )


def test_every_pattern_is_listed_with_texts_that_are_hard_for_it() -> None:
    assert patterns(product_modules()) == PATTERNS.keys() | OTHER_PATTERNS.keys()


def test_a_pattern_that_is_new_is_found_wherever_it_is_made() -> None:
    source = (
        "import re\n_A = re.compile('a')\nclass B:\n    def c(self):\n        re.match('a', 'b')"
    )
    found = patterns(doctored(penstock_router__new=source))
    assert found == {"penstock_router.new:_A", "penstock_router.new:B.c"}


def test_every_kind_of_body_is_listed_with_its_fields() -> None:
    assert KINDS.keys() == TEXTS.keys()
    lacking = {name for name, kind in KINDS.items() if not hasattr(kind, "fields")}
    assert {name for name in lacking if not hasattr(KINDS[name], "choose")} == FIELDS.keys()
