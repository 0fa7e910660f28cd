"""Which tests may run beside each other, where `make test` has several workers."""

from __future__ import annotations

from pathlib import Path

import pytest

# Tests of whole systems start processes and wait for them: one after the other, so that they have
# to share the machine with one stranger only. They wait more than they compute.
_WHOLE_SYSTEMS = frozenset({"chaos", "clients", "console", "integration"})
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folder, *rest = item.path.relative_to(_TESTS).parts
        # Tests of one file share what it sets up.
        group = "whole systems" if folder in _WHOLE_SYSTEMS else "/".join((folder, *rest))
        item.add_marker(pytest.mark.xdist_group(group))
