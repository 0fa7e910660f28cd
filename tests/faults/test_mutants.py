"""Unit tests notice every small change of the code that matters most, but for changes that nobody
can see: tests/faults/mutated.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from faults.mutated import EQUIVALENT, TARGETS
from faults.mutation import (
    Mutant,
    changed_lines,
    differ_in_strictness,
    differ_in_texts,
    modules_of,
    survivors,
    unit_tests_of,
)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_every_mutant_is_noticed_or_known_to_change_nothing(name: str, tmp_path: Path) -> None:
    survived = survivors(TARGETS[name], tmp_path)
    assert [mutant for mutant in survived if mutant not in EQUIVALENT] == []


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_mutated_and_its_tests_are_there(name: str) -> None:
    target = TARGETS[name]
    assert len(modules_of(target)) == len(target.definitions)
    assert len(unit_tests_of(target)) == len(target.tests)


def test_mutants_that_change_nothing_are_of_lines_that_are_there() -> None:
    known = {
        (name, line.strip())
        for target in TARGETS.values()
        for path in modules_of(target)
        for name, function in _functions(ast.parse(path.read_text("utf-8")))
        for line in ast.unparse(function).splitlines()
    }
    gone = [each for each in EQUIVALENT if (each.function, each.old.split("\n")[0]) not in known]
    assert gone == []


def _functions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [
                (f"{node.name}.{each.name}", each)
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node))
    return found


@pytest.mark.parametrize(
    ("original", "mutant", "in_texts"),
    [
        ("f('a', x)", "f(None, x)", True),
        ("raise E(f'{a} is {b}')", "raise E(None)", True),
        ("logger.info('%s', a)", "logger.info('%s', None)", True),
        ("f('a', x)", "f('a', None)", False),
        ("f('a', x)", "f(x)", False),
        ("x = 1", "x = 2", False),
        ("a or b", "a and b", False),
    ],
)
def test_texts_for_people_may_be_others(original: str, mutant: str, in_texts: bool) -> None:
    assert differ_in_texts(ast.parse(original), ast.parse(mutant)) == in_texts


@pytest.mark.parametrize(
    ("original", "mutant", "in_strictness"),
    [
        ("zip(a, b, strict=True)", "zip(a, b)", True),
        ("zip(a, b, strict=True)", "zip(a, b, strict=False)", True),
        ("zip(a, zip(b, c, strict=True), strict=True)", "zip(a, zip(b, c), strict=True)", True),
        ("zip(a, b, strict=True)", "zip(a, strict=True)", False),
        ("zip(a, b, strict=True)", "zip(a, None, strict=True)", False),
        ("zip(a, b, strict=False)", "zip(a, b, strict=True)", False),
        ("f(a, strict=True)", "f(a)", False),
    ],
)
def test_guards_against_unlike_columns_may_be_missing(
    original: str, mutant: str, in_strictness: bool
) -> None:
    assert differ_in_strictness(ast.parse(original), ast.parse(mutant)) == in_strictness


def test_a_mutant_is_known_by_the_line_that_it_changes() -> None:
    original, changed = (ast.parse(f"if a:\n    b\nreturn {value}") for value in (1, 2))
    assert Mutant("f", *changed_lines(original, changed)) == Mutant("f", "return 1", "return 2")
