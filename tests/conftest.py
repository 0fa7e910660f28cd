"""Which tests run in the soak only."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `soak`, a test or one of its parameters, outside of the soak."""
    if os.environ.get("PENSTOCK_SOAK"):
        return
    at_size = [item for item in items if item.get_closest_marker("soak")]
    items[:] = [item for item in items if not item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=at_size)
