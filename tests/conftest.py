"""The rules of a test run: which tests run in the soak only, which share a process, when shared
fixtures end, what the garbage collector sees, and where compiled kernels are.
"""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# What is imported and collected stays: not looked through while it is made, nor in each collection
# after that, which would take half a second.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Kernels are compiled once for a checkout; what loads make is kept for one run."""
    cache = config.rootpath / "build" / "test-cache"
    os.environ.setdefault("PENSTOCK_CACHE", str(cache))
    # No test finds what a shard of whoever runs it remembers, or what one of another run did.
    state = config.rootpath / "build" / "test-state"
    os.environ.setdefault("PENSTOCK_STATE", str(state))
    # What imports numpy would start a thread for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Two threads of torch that wait for each other would do so at the processor's cost; engines
    # are started with the same.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not hasattr(config, "workerinput"):
        shutil.rmtree(cache / "loads", ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `soak`, a test or one of its parameters, outside of the soak."""
    if os.environ.get("PENSTOCK_SOAK"):
        return
    at_size = [item for item in items if item.get_closest_marker("soak")]
    items[:] = [item for item in items if not item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=at_size)


# What takes seconds to start, or to parse, is shared by the files of these folders, and by these
# files.
_TOGETHER = tuple(
    f"tests/{name}" for name in ("clients", "comparison", "console", "contract", "seeing")
)
# Side by side each would compile the kernels of every level, half a minute of a processor.
_OF_ALL_KERNELS = {
    f"tests/models/test_{name}.py"
    for name in ("cpu_kernels", "invariance", "kernel_build", "tiles")
}
_OF_THE_PAIR = {
    f"tests/integration/test_{name}.py"
    for name in (
        *("cli", "examples", "http", "openai_client", "openai_responses", "readme"),
        *("odd_constraints", "reflection", "tool_round_trip"),
    )
}
_OF_THE_TOY = {
    f"tests/integration/test_{name}.py"
    for name in ("form_pages", "launch_command", "model_serving", "parallel_shard")
}


class _Folder(pytest.Package):
    """A folder without an `__init__.py` whose fixtures of the scope `package` end with its tests.
    Otherwise they would last until the session ends: a server that nobody asks still takes a second
    of each minute.
    """

    def setup(self) -> None:
        """Do nothing: there is no module to set up."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if (path / "conftest.py").exists() and not (path / "__init__.py").exists():
        folder: _Folder = _Folder.from_parent(parent, path=path)
        return folder
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return a scheduler that runs the tests of a file in one process. Files with the same fixtures
    share a process. Return None if tests are not distributed by file.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFixtures(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in _OF_THE_PAIR:
                return "pair"
            if file in _OF_THE_TOY:
                return "toy"
            if file in _OF_ALL_KERNELS:
                return "kernels"
            folder = file.rpartition("/")[0]
            return folder if folder in _TOGETHER else file

    return ByFixtures(config, log)
