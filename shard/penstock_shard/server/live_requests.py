"""The server's live requests: where their outputs go, and counts for each class."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock_proto.facts import ClassLoad
from penstock_proto.types import RequestOutput

# The largest number of classes in a report. The last one includes less urgent classes.
MAX_CLASSES = 8

Deliver = Callable[[RequestOutput], None]


@dataclass(eq=False, slots=True)
class Route:
    """A live request."""

    request_id: str
    attempt: int
    deliver: Deliver
    num_tokens: int
    priority: int
    arrived_s: float
    # True if the request may have killed engines.
    suspect: bool = False
    num_given: int = 0
    started_s: float | None = None
    deadline: asyncio.TimerHandle | None = None
    # Check of the constraint, before the engine gets the request.
    checking: asyncio.Task[None] | None = None
    # Wait until its first step. None before that step, and after an output carried it.
    queue_s: float | None = None


class ClassLoads:
    def __init__(self) -> None:
        self._classes: dict[int, ClassLoad] = {}

    def add(self, route: Route) -> None:
        load = self._classes.setdefault(route.priority, ClassLoad(route.priority))
        load.waiting += 1
        load.queued_prompt_tokens += route.num_tokens

    def start(self, route: Route) -> None:
        """Count a request as running. Call this before `started_s` is set."""
        if route.started_s is None:
            load = self._classes[route.priority]
            load.waiting -= 1
            load.running += 1

    def end_prompt(self, route: Route) -> None:
        """Stop counting the prompt of a request that has its first output."""
        self._classes[route.priority].queued_prompt_tokens -= route.num_tokens

    def remove(self, route: Route) -> None:
        load = self._classes[route.priority]
        if not route.num_given:
            load.queued_prompt_tokens -= route.num_tokens
        if route.started_s is None:
            load.waiting -= 1
        else:
            load.running -= 1
        if not load.running and not load.waiting:
            del self._classes[route.priority]

    def report(self, most_tokens: int) -> list[ClassLoad]:
        """Return the load of each class, the most urgent first; empty if all requests have the
        default priority. The classes' tokens are scaled down to `most_tokens`, the engine's count,
        which leaves out cached and computed prompt tokens.
        """
        if self._classes.keys() <= {0}:
            return []
        *first, last = heapq.nsmallest(MAX_CLASSES, self._classes)
        rest = [load for load in self._classes.values() if load.priority >= last]
        loads = [*(self._classes[priority] for priority in first), _sum_up(last, rest)]
        total = sum(load.queued_prompt_tokens for load in loads)
        share = min(1.0, most_tokens / total) if total else 1.0
        return [
            replace(load, queued_prompt_tokens=int(share * load.queued_prompt_tokens))
            for load in loads
        ]


def _sum_up(priority: int, loads: Iterable[ClassLoad]) -> ClassLoad:
    total = ClassLoad(priority)
    for load in loads:
        total.running += load.running
        total.waiting += load.waiting
        total.queued_prompt_tokens += load.queued_prompt_tokens
    return total
