"""A stand-in for build backends: it tells pip a source distribution's name and version.

Both stand in its PKG-INFO. To learn them, a build of vllm would install torch, and builds of others
would compile Rust.
"""

import os
import sys
from email import message_from_string
from pathlib import Path
from types import ModuleType
from typing import Any

_ASKED_BY = ("_PYPROJECT_HOOKS_BUILD_BACKEND", "PEP517_BUILD_BACKEND")


class _Backend(ModuleType):
    """A build backend in place of the one that is asked for."""

    @staticmethod
    def prepare_metadata_for_build_wheel(folder: str, settings: Any = None) -> str:
        told = Path("PKG-INFO").read_text("utf-8")
        head = message_from_string(told)
        name = f"{head['Name'].replace('-', '_')}-{head['Version']}.dist-info"
        made = Path(folder, name)
        made.mkdir()
        (made / "METADATA").write_text(told, "utf-8")
        return name


for _variable in _ASKED_BY:
    if _asked := os.environ.get(_variable):
        _name = _asked.partition(":")[0]
        sys.modules[_name] = _Backend(_name)
