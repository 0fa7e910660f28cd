"""The product's source files as syntax trees, and what each imports.

Knows Python's import statements and nothing of the rules that are checked on them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "penstock_proto": ROOT / "proto" / "penstock_proto",
    "penstock_common": ROOT / "proto" / "penstock_common",
    "penstock_client": ROOT / "client" / "penstock_client",
    "penstock_cli": ROOT / "client" / "penstock_cli",
    "penstock_router": ROOT / "router" / "penstock_router",
    "penstock_shard": ROOT / "shard" / "penstock_shard",
}


@dataclass(frozen=True, slots=True)
class Module:
    """One source file. A package's `__init__` has the name of the package."""

    name: str
    source: str
    is_package: bool = False

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_generated(self) -> bool:
        return self.name.rpartition(".")[2] in ("shard_pb2", "shard_pb2_grpc")

    def tree(self) -> ast.Module:
        """The same object each time: not to be changed."""
        return _parsed(self.source)


@functools.cache
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SystemError:
        # CPython 3.11 counts depth over all threads; one that formats a traceback parses too.
        return ast.parse(source)


@functools.cache
def _import_statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    nodes = ast.walk(_parsed(source))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


Modules = Mapping[str, Module]


@functools.cache
def product_modules() -> Modules:
    """Return all modules of the packages, by name."""
    found = [
        _read(package, folder, path)
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
    ]
    return {module.name: module for module in found}


def doctored(**sources: str) -> Modules:
    """Made-up modules: `penstock_router__app="import torch"` is penstock_router.app."""
    names = {key.replace("__", "."): source for key, source in sources.items()}
    return {name: Module(name, source, "." not in name) for name, source in names.items()}


def imports(module: Module, known: Modules) -> Iterator[str]:
    """Yield the modules that a module imports, wherever the import stands, TYPE_CHECKING blocks
    included.

    `from package import name` yields `package.name` if that is a module, else the package.
    """
    for node in _import_statements(module.source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = _absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in known or alias.name.startswith("shard_pb2") else base


def _read(package: str, folder: Path, path: Path) -> Module:
    parts = path.relative_to(folder).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join((package, *(parts[:-1] if is_package else parts)))
    return Module(name, path.read_text(encoding="utf-8"), is_package)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.name.split(".")
    kept = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])
