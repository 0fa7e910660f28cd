"""Shows that a change is one of prose: of comments, docstrings and texts alone.

    python tests/contract/prose_changes.py BASE [HEAD]

Compares the files of two commits; without HEAD those of the working tree. Lists each string literal
and each name of a test that differs, to be read, and ends with status 1 if anything else of a
program does. Pages are prose; of other files it says that they changed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PROTO_COMMENT = re.compile(r"//[^\n]*")
# Comments that tools read.
_TOOLS = re.compile(r"#\s*(?:type:|noqa|mypy:|fmt:|ruff:|pragma:)[^#\n]*")
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def main(argv: list[str]) -> int:
    base, head = argv[0], argv[1] if len(argv) > 1 else ""
    is_prose = True
    for name in changed_files(base, head):
        before, after = content(base, name), content(head, name)
        for kind, text in differences(name, before, after):
            is_prose = is_prose and kind != "code"
            print(f"{name}: {kind}: {text}")
    return 0 if is_prose else 1


def changed_files(base: str, head: str) -> list[str]:
    commits = [base, head] if head else [base]
    names = _git("diff", "--name-only", *commits).splitlines()
    return [name for name in names if not name.endswith(_GENERATED)]


def content(commit: str, name: str) -> str:
    """The text of a file; empty if it does not exist there."""
    if not commit:
        path = Path(name)
        return path.read_text() if path.exists() else ""
    found = subprocess.run(["git", "show", f"{commit}:{name}"], capture_output=True, text=True)
    return found.stdout


def differences(name: str, before: str, after: str) -> Iterator[tuple[str, str]]:
    """Yield what differs but for comments and docstrings: its kind ("text", "name", "code" or
    "file"), and a line to read.
    """
    if name.endswith(".md"):
        return
    if name.endswith(".proto"):
        if _PROTO_COMMENT.sub("", before).split() != _PROTO_COMMENT.sub("", after).split():
            yield "code", "messages differ"
    elif not name.endswith(".py"):
        yield "file", "it is neither a page nor a program"
    elif not (before and after):
        yield "code", "the file came or went"
    else:
        if _TOOLS.findall(before) != _TOOLS.findall(after):
            yield "code", "comments for tools differ (type:, noqa, mypy:, fmt:)"
        yield from _differences(_without_docstrings(before), _without_docstrings(after), name)


def _differences(old: ast.AST, new: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    is_test = name.rpartition("/")[2].startswith("test_")
    if type(old) is not type(new):
        yield "code", f"line {_line(new)}: {type(old).__name__} is {type(new).__name__} now"
        return
    for field in old._fields:
        was, now = getattr(old, field, None), getattr(new, field, None)
        if isinstance(was, list) and isinstance(now, list):
            if len(was) != len(now):
                yield "code", f"line {_line(new)}: {len(was)} parts are {len(now)} now"
                return
            for each, other in zip_longest(was, now):
                yield from _differences_of_values(each, other, new, field, name, is_test=is_test)
        else:
            yield from _differences_of_values(was, now, new, field, name, is_test=is_test)


def _differences_of_values(
    was: object, now: object, of: ast.AST, field: str, name: str, *, is_test: bool
) -> Iterator[tuple[str, str]]:
    if isinstance(was, ast.AST) and isinstance(now, ast.AST):
        yield from _differences(was, now, name)
    elif was == now:
        return
    elif isinstance(of, ast.Constant) and isinstance(was, str) and isinstance(now, str):
        yield "text", f"line {_line(of)}: {was!r} -> {now!r}"
    elif is_test and field == "name" and str(was).startswith("test_"):
        yield "name", f"{was} -> {now}"
    else:
        yield "code", f"line {_line(of)}: {was!r} -> {now!r}"


def _without_docstrings(source: str) -> ast.AST:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
