"""Which tests run in the soak only, and what the garbage collector looks at."""

from __future__ import annotations

import gc
import os

import pytest

# What is imported and collected stays: not looked through while it is made, nor in each collection
# after that, which would take half a second.
gc.disable()


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
