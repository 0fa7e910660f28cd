"""Writes the images' requirements, with the hashes of all files of each version: `make pins`.

Each environment has a file in deploy/requirements, with the versions that are installed here and
tested. Hashes come from pip's package index. torch and its dependencies for CUDA are left out,
because operators choose the index and build of torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FOLDER = Path(__file__).parent / "requirements"
# The packages of each file, to which their dependencies are added.
FILES = {
    "router": ("penstock-llm[router,otlp]",),
    "shard": ("penstock-llm[shard,otlp]", "torch"),
    # A shard's server without engine, for vLLM's.
    "server": ("penstock-llm[fake,otlp]",),
    "build": ("hatchling",),
    # flash-attn, and packages to compile it in the image's build, beside torch and CUDA.
    "flash": ("flash-attn", "einops"),
    "flash-build": ("torch", "ninja", "packaging", "psutil", "setuptools", "wheel"),
}
LEFT_OUT = re.compile(r"penstock-llm|torch|triton|(nvidia|cuda)-.+")
# Versions of packages that tests do not need.
_NOT_INSTALLED = {"einops": "0.8.2", "flash-attn": "2.8.3", "ninja": "1.13.2"}
# The images' Python, on which dependencies depend.
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}
_HEADER = """\
# What deploy/Dockerfile installs, written by `make pins`; hashes are of all files of a release.
"""


class NotPinned(Exception):
    """A package's version or hashes are unknown."""


def pins(roots: Iterable[str]) -> dict[str, str]:
    """Name -> version of the packages to pin."""
    return {n: version for n, version in packages(roots).items() if not LEFT_OUT.fullmatch(n)}


def packages(roots: Iterable[str]) -> dict[str, str]:
    """Name -> version of these requirements and their dependencies on the images' Python."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = list(_named(map(Requirement, roots)))
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name], requirements = _installed(name)
        todo += _named(each for each in requirements if _is_asked_for(each, extra))
    return found


def _installed(name: str) -> tuple[str, list[Requirement]]:
    """Return the version and requirements of a package."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        if name not in _NOT_INSTALLED:
            raise NotPinned(f"{name}: is not installed here, and no version is given") from None
        return _NOT_INSTALLED[name], []
    return package.version, [Requirement(each) for each in package.requires or []]


def _is_asked_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra, **PYTHON})


def _named(requirements: Iterable[Requirement]) -> Iterator[tuple[str, str]]:
    """Yield names and extras; the extra '' is the package itself."""
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        yield name, ""
        yield from ((name, extra) for extra in requirement.extras)


def hashes(versions: Mapping[str, str]) -> dict[str, list[str]]:
    """Name -> sha256 of each file of the version in pip's index, for any platform."""
    # These import pip's own modules, which warn.
    from piptools.locations import CACHE_DIR
    from piptools.repositories import PyPIRepository

    index = PyPIRepository([], cache_dir=CACHE_DIR)
    found = {}
    with index.allow_all_wheels():
        for name, version in versions.items():
            files = [
                file.link
                for file in index.find_all_candidates(name)
                if str(file.version) == str(Version(version))
            ]
            if not files:
                raise NotPinned(f"{name}=={version}: pip's index has no file of it")
            for file in files:
                if file.hash_name != "sha256":
                    raise NotPinned(f"{file.filename}: pip's index tells no sha256 of it")
            found[name] = sorted({str(file.hash) for file in files})
    return found


def text(versions: Mapping[str, str], known: Mapping[str, Iterable[str]]) -> str:
    """Return a file for `pip install --require-hashes -r`."""
    lines = [
        " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{each}" for each in known[name])])
        for name, version in sorted(versions.items())
    ]
    return _HEADER + "\n".join(lines) + "\n"


def main() -> None:
    files = {name: pins(roots) for name, roots in FILES.items()}
    known = hashes({name: version for each in files.values() for name, version in each.items()})
    # Write only when all is known, so that an error changes no file.
    for name, versions in files.items():
        (FOLDER / f"{name}.txt").write_text(text(versions, known))


if __name__ == "__main__":
    try:
        main()
    except NotPinned as error:
        sys.exit(f"pins: {error}")
