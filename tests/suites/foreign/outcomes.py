"""A plugin of pytest where tests of another project run: what became of each, as a JSON line.

Tests that use none of the names in SUITE_NEEDS, by themselves or by a fixture, are left out: they
speak to no server.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_LINES = Path(os.environ["SUITE_OUTCOMES"])
_NEEDS = set(os.environ["SUITE_NEEDS"].split())
_MESSAGE_CHARS = 200
_NO_CODE = (lambda: None).__code__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = {item for item in items if _NEEDS and not _NEEDS & set(_used(item))}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def _used(item: pytest.Item) -> Iterator[str]:
    """Names of fixtures, and what they and the test itself name."""
    info = item._fixtureinfo  # type: ignore[attr-defined]
    fixtures = [each.func for defined in info.name2fixturedefs.values() for each in defined]
    for function in (item.function, *fixtures):  # type: ignore[attr-defined]
        yield from getattr(inspect.unwrap(function), "__code__", _NO_CODE).co_names
    yield from info.name2fixturedefs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # What failed before, or was skipped, stays so.
    if report.when == "setup" or not report.passed:
        message = call.excinfo.exconly() if call.excinfo else ""
        item.stash[_OUTCOME] = (_WORD[report.outcome], message)
    if report.when == "teardown":
        _tell(item.nodeid, *item.stash[_OUTCOME])
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _tell(report.nodeid, "fail", str(report.longrepr).strip().splitlines()[-1])


_OUTCOME = pytest.StashKey[tuple[str, str]]()
_WORD = {"passed": "pass", "failed": "fail", "skipped": "skip"}


def _tell(test: str, outcome: str, message: str) -> None:
    words = " ".join(message.split())[:_MESSAGE_CHARS]
    with _LINES.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"test": test, "outcome": outcome, "message": words}) + "\n")
