"""Prints what the images install, pinned to what is installed here: `make constraints`.

The packages that penstock's extras ask for, and what those ask for in turn. torch and what only it
needs on CUDA are left out: they are installed before, from an index and of a build of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("router", "shard", "otlp")
LEFT_OUT = {"penstock", "torch", "triton"}
_HEADER = """\
# What the images install, made by `make constraints` from the environment that the tests run in.
# pyproject.toml has the ranges that penstock works with; this makes builds repeatable.
"""


def pins() -> dict[str, str]:
    """Name -> version of all packages that the extras come to."""
    return {n: version for n, version in packages(EXTRAS).items() if n not in LEFT_OUT}


def packages(extras: Iterable[str]) -> dict[str, str]:
    """Name -> version of penstock, all that these extras of it ask for, and what that asks for."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [("penstock", extra) for extra in extras]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            # Asked for on other platforms only, such as CUDA's libraries.
            continue
        found[name] = package.version
        if name != "torch":
            todo += _asked_for(package.requires or [], extra)
    return found


def _asked_for(requirements: list[str], extra: str) -> Iterator[tuple[str, str]]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            yield name, ""
            yield from ((name, of_its) for of_its in requirement.extras)


if __name__ == "__main__":
    print(_HEADER + "\n".join(f"{name}=={version}" for name, version in sorted(pins().items())))
