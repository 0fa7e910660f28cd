"""Mutants: mutmut changes a module in every small way it knows, and its unit tests have to notice.

mutmut wants packages in a folder `src`, so it works in a tree that is laid out for it. It runs the
tests of a mutant in a process forked from one that has imported them: several a second. It leaves
out no statements: `planting.py` has faults for those.
"""

from __future__ import annotations

import ast
import copy
import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from faults.planting import PACKAGES, files_of

ROOT = Path(__file__).parents[2]
# More than there are cores: tests of what waits wait.
_CHILDREN = 4
_LIMIT_S = 3000.0
# How mutants end; all else is no end.
_STATUSES = {"killed", "survived", "no tests"}
_CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {modules}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-p", "no:cacheprovider", "--timeout", "60", "--timeout-method", "thread"]
# Its own timeouts signal ids of processes that may be long gone, and by then another's: none is to
# come. The timeout of each test ends the process of a mutant that hangs.
timeout_constant = 1_000_000.0
"""


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Target:
    """The modules that define these names, and the files of unit tests that have to notice."""

    definitions: tuple[str, ...]
    tests: tuple[str, ...]
    # Beginnings of the functions' names; other functions are shown by tests of whole systems.
    functions: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Mutant:
    """A change of a line of a function, both as `ast.unparse` writes them."""

    function: str
    old: str
    new: str


def survivors(target: Target, scratch: Path) -> list[Mutant]:
    """Run the target's mutants; those that no test noticed, without those of texts alone."""
    _lay_out(target, scratch)
    mutmut = [sys.executable, "-m", "mutmut"]
    # The same tests for all: each mutant is to meet the same random numbers.
    environment = {**os.environ, "PENSTOCK_SEED": os.environ.get("PENSTOCK_SEED", "1")}
    environment.pop("PENSTOCK_SOAK", None)
    run = [*mutmut, "run", "--max-children", str(_CHILDREN)]
    subprocess.run(
        run, cwd=scratch, env=environment, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL
    )
    results = subprocess.run(
        [*mutmut, "results", "--all", "true"],
        cwd=scratch,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    statuses = dict(re.findall(r"^\s*(\S+): (.+)$", results.stdout, re.MULTILINE))
    unknown = {name: status for name, status in statuses.items() if status not in _STATUSES}
    assert not unknown, unknown
    assert "killed" in statuses.values(), "no mutant was tried"
    names = [name for name, status in statuses.items() if status != "killed"]
    found = _mutants(scratch / "mutants" / "src", names)
    return [mutant for mutant in found if mutant.function.startswith(target.functions)]


def _lay_out(target: Target, scratch: Path) -> None:
    for name in PACKAGES:
        for package in (ROOT / name).glob("penstock_*/"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(package, scratch / "src" / package.name, ignore=ignored)
    shutil.copytree(ROOT / "tests", scratch / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    # Without the folder that holds the package.
    modules = ["/".join(("src", *path.relative_to(ROOT).parts[1:])) for path in modules_of(target)]
    tests = [str(path.relative_to(ROOT)) for path in unit_tests_of(target)]
    config = (ROOT / "pyproject.toml").read_text() + _CONFIG.format(modules=modules, tests=tests)
    (scratch / "pyproject.toml").write_text(config)


def modules_of(target: Target) -> list[Path]:
    """The files that are mutated."""
    return [path for name in target.definitions for path in files_of(name, ROOT)]


def unit_tests_of(target: Target) -> list[Path]:
    return [path for name in target.tests for path in (ROOT / "tests" / "unit").rglob(f"{name}.py")]


def _mutants(sources: Path, names: Iterable[str]) -> Iterator[Mutant]:
    """Yield the mutants that differ from the original in more than texts for people, guards against
    defects and defaults of parameters.

    A mutant has a name like `package.module.xǁClassǁfunction__mutmut_7`. A function of that name
    stands in the module that mutmut wrote, beside the original, `...__mutmut_orig`.
    """
    for name in names:
        module, _, mutated = name.rpartition(".")
        base = mutated.rpartition("__mutmut_")[0]
        functions = _functions(sources / f"{module.replace('.', '/')}.py")
        original, mutant = functions[f"{base}__mutmut_orig"], functions[mutated]
        alike = (differ_in_texts, differ_in_strictness, _differ_in_defaults)
        if not any(differ(original, mutant) for differ in alike):
            readable = base.removeprefix("xǁ").removeprefix("x_").replace("ǁ", ".")
            yield Mutant(readable, *changed_lines(original, mutant))


@cache
def _functions(path: Path) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, Function):
            found[node.name] = node
            node.name = "function"
    return found


def changed_lines(original: ast.AST, mutant: ast.AST) -> tuple[str, str]:
    before, after = (ast.unparse(node).splitlines() for node in (original, mutant))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    old, new = ("\n".join(line[2:].strip() for line in changed if line[0] == sign) for sign in "-+")
    return old, new


def differ_in_texts(first: object, second: object) -> bool:
    """True if both are alike, but for strings and calls of the logger in `first`: anything may
    stand in their places.
    """
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(differ_in_texts, first, second))
    if not isinstance(first, ast.AST):
        return first == second
    if isinstance(first, ast.JoinedStr) or _is_string(first) or _is_log(first):
        return True
    return type(first) is type(second) and all(
        differ_in_texts(getattr(first, name, None), getattr(second, name, None))
        for name in first._fields
    )


def differ_in_strictness(original: ast.AST, mutant: ast.AST) -> bool:
    """True if the mutant is the original, or differs only in a `zip` that is no longer strict.

    Strictness shows where another defect is. With columns of one length it changes nothing.
    """
    original, mutant = copy.deepcopy(original), copy.deepcopy(mutant)
    for strict, loose in zip(_zips(original), _zips(mutant), strict=False):
        if any(ast.unparse(each) == "strict=True" for each in strict.keywords):
            for call in (strict, loose):
                call.keywords = [each for each in call.keywords if each.arg != "strict"]
    return ast.dump(original) == ast.dump(mutant)


def _zips(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "zip"]


def _differ_in_defaults(first: Function, second: Function) -> bool:
    """True if a parameter or a default differs. A changed default has no effect: mutmut calls a
    mutant with the defaults of the original.
    """
    return ast.dump(first.args) != ast.dump(second.args)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
