"""The version that is installed, read once as that takes milliseconds, and how to install more."""

from __future__ import annotations

from importlib.metadata import version

# The name in `pyproject.toml`.
DISTRIBUTION = "penstock-llm"
VERSION = version(DISTRIBUTION)


def how_to_install(extra: str) -> str:
    """Say in one line how an extra of penstock is installed, which no package index has."""
    return (
        f"install penstock with the extra {extra}: pip install '.[{extra}]' in a checkout, or "
        f"pip install '{DISTRIBUTION}[{extra}] @ file:///PATH' with the path of a wheel"
    )
