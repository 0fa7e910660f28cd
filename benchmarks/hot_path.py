"""Count the files, functions and code lines that one plain streamed chat runs, by room.

    python benchmarks/hot_path.py
    python benchmarks/hot_path.py --revision HEAD~20
    python benchmarks/hot_path.py --list

A shard with a small model and a router run as processes of their own, as a user starts them, with a
profiler hook in each. After two chats that load what is loaded late, an idle span is recorded, and
then a chat of 16 tokens. A function is counted if it ran in the chat and not in the idle span; its
code lines are those that hold code, without docstrings and without functions inside it that did not
run. With `--revision` an earlier tree is counted beside this one.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import shutil
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.checkouts import Checkout, at_revision, this_checkout
from support.processes import Router, Shard, running, wait_until

_HOOK = Path(__file__).with_name("hot_path_hook.py")
_MODEL = (
    *("--runner", "model", "--device", "cpu", "--threads", "1", "--kv-memory", "64M"),
    *("--max-model-len", "512", "--served-model-name", "small"),
)
_IDLE_S = 3.0
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}


def main() -> None:
    """Count one tree, or two, and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--revision", help="a revision to count as well")
    parser.add_argument("--list", action="store_true", help="print each function that ran")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = [this_checkout()]
        if args.revision:
            trees.insert(0, at_revision(args.revision, Path(scratch) / "before"))
        for number, tree in enumerate(trees):
            print(f"{tree.name}: a shard and a router start", file=sys.stderr)
            _print(measure(tree, Path(scratch) / str(number)), is_listed=args.list)


# ---- what ran ----------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Function:
    """A function of the tree: its file's path within the tree, and the line it begins at."""

    path: str
    line: int


def measure(tree: Checkout, folder: Path) -> dict[Function, tuple[str, set[int]]]:
    """Return each function that ran in the chat alone, with its name and the lines of its code."""
    recorder = Recorder(folder)
    path = f"{recorder.hook}{os.pathsep}{tree.python_path}"
    shard = Shard(folder / "shard.log", *_MODEL, python_path=path)
    router = Router(folder / "router.log", [shard.address], python_path=path)
    with running(shard, router):
        # A router is healthy once it has started, and may look for its shard still.
        wait_until(lambda: _is_served(router), timeout_s=60, what="the model is served")
        for word in ("first", "second"):
            _chat(router, word)
        with recorder.window("idle"):
            time.sleep(_IDLE_S)
        with recorder.window("chat"):
            _chat(router, "third")
        ran = recorder.functions("chat", tree) - recorder.functions("idle", tree)
    return _with_lines(tree.root, ran)


def _is_served(router: Router) -> bool:
    return "small" in router.ask("/v1/models")[1]


def _chat(router: Router, word: str) -> None:
    messages = [{"role": "user", "content": f"{word}: tell me of rivers"}]
    body = {"model": "small", "messages": messages, "stream": True, "max_tokens": 16}
    status, text = router.ask("/v1/chat/completions", {**body, "ignore_eos": True})
    if status != 200 or "[DONE]" not in text:
        sys.exit(f"the chat failed with {status}: {text[:500]}")


class Recorder:
    """A folder in which each process with the hook writes what it ran in each window."""

    def __init__(self, folder: Path) -> None:
        self.hook = folder / "hook"
        self.hook.mkdir(parents=True)
        # Python imports a module of this name at the start of every process.
        shutil.copy(_HOOK, self.hook / "sitecustomize.py")

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record what all processes run until the block ends."""
        self._switch(name)
        yield
        self._switch("")

    def functions(self, window: str, tree: Checkout) -> set[Function]:
        """Return the functions of the tree's packages that ran in a window."""
        packages = [Path(package) for package in tree.python_path.split(os.pathsep)]
        return {
            Function(str(Path(name).relative_to(tree.root)), line)
            for file in self.hook.glob(f"*.{window}.json")
            for name, line in json.loads(file.read_text())
            if any(Path(name).is_relative_to(package) for package in packages)
        }

    def _switch(self, name: str) -> None:
        """Name the window that begins, and wait until every process that lives has taken note."""
        (self.hook / "next").write_text(name)
        (self.hook / "next").rename(self.hook / "window")
        wait_until(
            lambda: all(file.read_text() == name for file in self._states()),
            timeout_s=20,
            what=f"every process records {name!r}",
        )

    def _states(self) -> list[Path]:
        files = self.hook.glob("*.state")
        return [file for file in files if Path("/proc", file.stem).exists()]


# ---- lines -------------------------------------------------------------------------------------


def _with_lines(root: Path, ran: set[Function]) -> dict[Function, tuple[str, set[int]]]:
    found = {}
    for path in sorted({function.path for function in ran}):
        text = (root / path).read_text()
        nodes = _functions(ast.parse(text))
        lines = _code_lines(text)
        here = {node for node in nodes if Function(path, _first_line(node)) in ran}
        for node in here:
            own = set(range(_first_line(node), _last_line(node) + 1)) & lines
            for other in nodes:
                if other is not node and _first_line(node) < _first_line(other):
                    own -= set(range(_first_line(other), _last_line(other) + 1))
            found[Function(path, _first_line(node))] = (node.name, own)
    return found


_Def = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST) -> list[_Def]:
    return [node for node in ast.walk(tree) if isinstance(node, _Def)]


def _first_line(node: _Def) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _last_line(node: _Def) -> int:
    return node.end_lineno or node.lineno


def _code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no blank line, comment or docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | _Def) and ast.get_docstring(node):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


# ---- the table ---------------------------------------------------------------------------------


def _print(ran: dict[Function, tuple[str, set[int]]], *, is_listed: bool) -> None:
    rooms: dict[str, list[Function]] = {}
    for function in sorted(ran):
        rooms.setdefault(str(Path(function.path).parent), []).append(function)
    print(f"{'files':>6} {'functions':>10} {'lines':>6}  room")
    for room, functions in rooms.items():
        _print_row(room, functions, ran)
        for function in functions if is_listed else ():
            name, lines = ran[function]
            place = f"{Path(function.path).name}:{function.line}"
            print(f"{'':>17} {len(lines):>6}    {place} {name}")
    _print_row("all", sorted(ran), ran)


def _print_row(
    room: str, functions: list[Function], ran: dict[Function, tuple[str, set[int]]]
) -> None:
    files = len({function.path for function in functions})
    lines = sum(len(ran[function][1]) for function in functions)
    print(f"{files:>6} {len(functions):>10} {lines:>6}  {room}")


if __name__ == "__main__":
    main()
