"""Which tests run in the soak only, and which may run beside each other where there are workers."""

from __future__ import annotations

import os

import pytest

# Tests of whole systems start processes and wait for them: one after the other, so that they have
# to share the machine with one stranger only. They wait more than they compute.
_WHOLE_SYSTEMS = frozenset({"chaos", "clients", "comparison", "console", "hosts", "integration"})

# Among them, but start no service.
_ONLY_COMPUTE = frozenset(
    {
        "test_answer_constraints",
        "test_constraint_checker",
        "test_differences",
        "test_dockerfile",
        "test_gpu_benchmark",
        "test_helm_chart",
        "test_helm_scaling",
        "test_helm_values",
        "test_hub_models",
        "test_memory_channel",
    }
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `soak`, a test or one of its parameters, outside of the soak."""
    if os.environ.get("PENSTOCK_SOAK"):
        return
    at_size = [item for item in items if item.get_closest_marker("soak")]
    items[:] = [item for item in items if not item.get_closest_marker("soak")]
    config.hook.pytest_deselected(items=at_size)


# There are workers only where pytest-xdist is installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _scope_of
    return scheduler


def _scope_of(node_id: str) -> str:
    """Tests of one scope run in one worker: whole systems, or a file, as its tests share what it
    sets up.
    """
    path = node_id.partition("::")[0]
    folder, name = path.split("/")[1], path.rpartition("/")[2].removesuffix(".py")
    is_system = folder in _WHOLE_SYSTEMS and name not in _ONLY_COMPUTE
    return "whole systems" if is_system else path
