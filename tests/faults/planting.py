"""Plants a fault in a tree: a small change within a function or class that is found by its name.

The change is matched on the syntax tree, wherever in the product the function is: neither a file
that moves nor the format of the code matters to it. Knows no tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("proto", "client", "router", "shard")

_DEFINITION = re.compile(r"\b(?:def|class) (\w+)")

# What definitions may stand in: no expression.
_HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class DoesNotFit(Exception):
    """A fault has no place in the tree, or several; the text says which."""


@dataclass(frozen=True)
class Becomes:
    """A fault that replaces an expression, statement or keyword argument, or leaves it out."""

    old: str
    new: str | None

    def apply(self, definition: Definition) -> int:
        """Make the change in the definition. Return the number of places that changed."""
        replacement = _Replacement(self.old, self.new)
        replacement.generic_visit(definition)
        return replacement.count


@dataclass(frozen=True)
class Returns:
    """The function returns this value before it does anything."""

    value: str

    def apply(self, definition: Definition) -> int:
        definition.body[:0] = ast.parse(f"return {self.value}").body
        return 1


Change = Becomes | Returns


def becomes(old: str, new: str) -> Change:
    return Becomes(old, new)


def never(condition: str) -> Change:
    """The condition never holds."""
    return Becomes(condition, "False")


def always(condition: str) -> Change:
    """The condition always holds."""
    return Becomes(condition, "True")


def left_out(old: str) -> Change:
    """A statement, an argument, an element of a list, or a part of an `and` or `or`."""
    return Becomes(old, None)


def returns(value: str) -> Change:
    return Returns(value)


@dataclass(frozen=True)
class Fault:
    """A plausible mistake, and what catches it."""

    title: str
    # Its name, after that of its class where another function has the name too.
    function: str
    changes: Change | tuple[Change, ...]
    # The name of a test, in whatever file it is.
    caught_by: str = ""
    # Some histories of `tests/simulation` fail with it.
    simulated: bool = False


def files_with(fault: Fault, root: Path) -> dict[Path, str]:
    """The files of a tree that the fault changes, as it leaves them. Raises `DoesNotFit`."""
    changes = fault.changes if isinstance(fault.changes, tuple) else (fault.changes,)
    name = fault.function.rpartition(".")[2]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files_of(name, root)}
    places = [
        (path, definition)
        for path, tree in trees.items()
        for name, definition in _definitions(tree)
        if f".{name}".endswith(f".{fault.function}")
    ]
    if not places:
        raise DoesNotFit(f"{fault.title}: there is no {fault.function}")
    touched = []
    for change in changes:
        found = [path for path, definition in places for _ in range(change.apply(definition))]
        if len(found) != 1:
            raise DoesNotFit(f"{fault.title}: {change} fits {len(found)} places")
        touched += found
    return {path: _source(trees[path], path, fault) for path in touched}


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """The fault is in the tree until the block ends."""
    changed = files_with(fault, root)
    sound = {path: path.read_bytes() for path in changed}
    try:
        for path, text in changed.items():
            path.write_text(text, "utf-8")
        yield
    finally:
        for path, data in sound.items():
            path.write_bytes(data)


def files_of(name: str, root: Path) -> list[Path]:
    """The product's files that define a function or class of this name."""
    return _definitions_of(root).get(name, [])


@cache
def _definitions_of(root: Path) -> dict[str, list[Path]]:
    """The files that define a name. No fault changes where anything is defined."""
    found: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for name in dict.fromkeys(_DEFINITION.findall(path.read_text("utf-8"))):
                found.setdefault(name, []).append(path)
    return found


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Functions and classes with their names, each after those that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, _HOLDERS):
            yield from _definitions(node, prefix)


def _source(tree: ast.Module, path: Path, fault: Fault) -> str:
    text = ast.unparse(tree)
    try:
        compile(text, path, "exec")
    except SyntaxError as error:
        raise DoesNotFit(f"{fault.title}: {path.name} does not compile then: {error}") from None
    return text


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: str, new: str | None) -> None:
        forms = _forms(old)
        self._old = {ast.dump(form) for form in forms}
        # A dump of each node would take long: most nodes differ by their kind.
        self._kinds = {type(form) for form in forms}
        self._new = None if new is None else _forms(new)
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST | None:
        if type(node) not in self._kinds or ast.dump(node) not in self._old:
            return self.generic_visit(node)
        self.count += 1
        if self._new is not None:
            return next(form for form in self._new if isinstance(form, _kind(node)))
        return ast.Pass() if isinstance(node, ast.stmt) else None


def _forms(text: str) -> list[ast.AST]:
    """Return the nodes that the text can mean: `f(x)` is a statement and an expression, `x=1` a
    statement and a keyword argument.
    """
    (statement,) = ast.parse(text).body
    if isinstance(statement, ast.Expr):
        return [statement, statement.value]
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return [statement, ast.keyword(statement.targets[0].id, statement.value)]
    return [statement]


def _kind(node: ast.AST) -> type[ast.AST]:
    return next(kind for kind in (ast.stmt, ast.expr, ast.keyword) if isinstance(node, kind))
