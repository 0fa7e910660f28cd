"""The version that is installed, read once: it takes milliseconds."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("penstock")
