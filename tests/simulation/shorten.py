"""Makes a failing history shorter: leaves out what its fault does not need."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Iterator
from typing import TypeVar

from simulation.history import Report, run
from simulation.plan import Plan

_Part = TypeVar("_Part")


def shorten(report: Report) -> Report:
    """The report of the shortest plan found that fails so, one left-out part after another."""
    changed = True
    while changed:
        changed = False
        gc.collect()
        for plan in _shorter(report.plan):
            shorter = run(plan)
            if _kind_of_fault(shorter) == _kind_of_fault(report):
                report, changed = shorter, True
                break
    return report


def _kind_of_fault(report: Report) -> list[str]:
    """Return the first four words of the first fault, without numbers."""
    return re.findall("[A-Za-z]+", report.faults[0])[:4] if report.faults else []


def _shorter(plan: Plan) -> Iterator[Plan]:
    """Yield shorter plans: with either half of the requests, then without any one of them; then the
    same for troubles and for scenes.
    """
    for arrivals in _parts(plan.arrivals, least=1):
        yield dataclasses.replace(plan, arrivals=arrivals)
    for troubles in _parts(plan.troubles, least=0):
        yield dataclasses.replace(plan, troubles=troubles)
    for scenes in _parts(plan.scenes, least=0):
        yield dataclasses.replace(plan, scenes=scenes)


def _parts(whole: tuple[_Part, ...], *, least: int) -> Iterator[tuple[_Part, ...]]:
    half = len(whole) // 2
    if half > 1:
        yield from (whole[:half], whole[half:])
    if len(whole) > least:
        yield from (tuple(p for p in whole if p is not part) for part in whole)
