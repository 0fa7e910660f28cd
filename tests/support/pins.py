"""The script that writes what the images install, and a reader of the files that it writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from packaging.utils import canonicalize_name

SCRIPT = Path(__file__).parents[2] / "deploy" / "pins.py"


def load_pins() -> ModuleType:
    """deploy/pins.py is a script and belongs to no package."""
    spec = importlib.util.spec_from_file_location("pins", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS = load_pins()


def pins_of(text: str) -> list[tuple[str, str, list[str]]]:
    """Name, version and hashes of each requirement of a file; all else fails."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for requirement in "\n".join(lines).replace(" \\\n    ", " ").splitlines():
        pin, *options = requirement.split(" ")
        name, _, version = pin.partition("==")
        assert canonicalize_name(name) == name, f"{pin}: is no name of a package"
        assert re.fullmatch(r"[0-9][a-z0-9.+!]*", version), f"{pin}: pins no version"
        hashes = [re.fullmatch(r"--hash=sha256:([0-9a-f]{64})", option) for option in options]
        assert hashes, f"{pin}: has no hashes"
        assert all(hashes), f"{pin}: has what is no hash"
        found.append((name, version, [each[1] for each in hashes if each]))
    return found
