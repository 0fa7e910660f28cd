"""Which event loop a unit test runs on: asyncio's, or one whose time passes while all wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
from simulation.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `virtual_time` take as long as they compute, whatever they wait for."""
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}
