"""The version, read once because reading takes milliseconds; and advice for missing packages."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

# The name in `pyproject.toml`.
DISTRIBUTION = "penstock-llm"
_LONGEST_REASON = 300


def _version() -> str:
    """Read the version of the installed package, or of this file's checkout."""
    here = Path(__file__).resolve().parents[1]
    found = next(iter(distributions(name=DISTRIBUTION, path=[str(here), *sys.path])), None)
    if found is not None:
        return found.version
    import tomllib

    return str(
        tomllib.loads((here.parent / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    )


VERSION = _version()


def how_to_install(extra: str) -> str:
    """Say how to install an extra. No package index has penstock."""
    return (
        f"install penstock with the extra {extra}: pip install '.[{extra}]' in a checkout, or "
        f"pip install '{DISTRIBUTION}[{extra}] @ file:///PATH' with the path of a wheel"
    )


def why_not_imported(error: ImportError, extra: str) -> str:
    """Say which package is missing or unusable, and how to install the extra that brings it."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; {how_to_install(extra)}"
    reason = " ".join(str(error).split())[:_LONGEST_REASON]
    return f"{error.name or 'a package'} cannot be imported: {reason}; {how_to_install(extra)}"
