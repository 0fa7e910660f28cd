"""Which constraint is checked next: callers take turns, and slow ones wait apart, so that neither a
caller with many constraints nor those that take long hold up the others. Bounded.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from penstock_shard.ipc.request import Constraint
from penstock_shard.structured_output.check_messages import Verdict

# Most different constraints that wait for their check or are checked. A caller may have as many of
# these as are still free: half of them if it is alone.
MAX_PENDING = 512


class QueueFull(Exception):
    """No more constraints may wait."""


@dataclass(eq=False, slots=True)
class Pending:
    """A constraint that waits for its verdict, and how many requests wait for it."""

    key: bytes
    constraint: Constraint
    # None: the check failed.
    verdict: asyncio.Future[Verdict | None]
    # Who asked first: it is this caller's turn that the check takes.
    caller: Hashable
    num_waiting: int = 0
    is_running: bool = False
    # It needed more than the short time that each gets first.
    is_slow: bool = False


class CheckQueue:
    """Constraints that wait for a check, or are in one, by content."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Pending] = {}
        self._counts: dict[Hashable, int] = {}
        self._quick, self._slow = _Line(), _Line()

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def join(self, key: bytes, constraint: Constraint, caller: Hashable) -> Pending:
        """The entry of this constraint, new unless an equal one waits. Raises `QueueFull`."""
        pending = self._pending.get(key)
        if pending is None:
            self._check_room(caller)
            verdict = asyncio.get_running_loop().create_future()
            pending = self._pending[key] = Pending(key, constraint, verdict, caller)
            self._counts[caller] = self._counts.get(caller, 0) + 1
            self._quick.add(pending)
        return pending

    def _check_room(self, caller: Hashable) -> None:
        total, own = len(self._pending), self._counts.get(caller, 0)
        if own >= MAX_PENDING - total:
            raise QueueFull(
                f"{total} constraints wait to be checked, {own} of them of this caller; "
                f"at most {MAX_PENDING}, and of one caller as many as are free; try again shortly"
            )

    def take(self, *, slow: bool) -> Pending | None:
        """The next to be checked: with `slow` one that takes long, if there is any."""
        pending = (self._slow.take() if slow else None) or self._quick.take()
        if pending is not None:
            pending.is_running = True
        return pending

    def put_back(self, pending: Pending) -> None:
        """It needs more time than it had: it waits with those that do."""
        pending.is_running, pending.is_slow = False, True
        self._slow.add(pending)

    def remove(self, pending: Pending) -> None:
        """Forget it: it has a verdict, or nobody waits for one."""
        if self._pending.pop(pending.key, None) is None:
            return
        (self._slow if pending.is_slow else self._quick).discard(pending)
        self._counts[pending.caller] -= 1
        if not self._counts[pending.caller]:
            del self._counts[pending.caller]


@dataclass(slots=True)
class _Line:
    """Callers in the order of their turns, each with what it has waiting, the oldest first."""

    _callers: OrderedDict[Hashable, dict[Pending, None]] = field(default_factory=OrderedDict)

    def add(self, pending: Pending) -> None:
        self._callers.setdefault(pending.caller, {})[pending] = None

    def take(self) -> Pending | None:
        if not self._callers:
            return None
        caller, waiting = next(iter(self._callers.items()))
        pending = next(iter(waiting))
        self._callers.move_to_end(caller)
        self.discard(pending)
        return pending

    def discard(self, pending: Pending) -> None:
        waiting = self._callers.get(pending.caller, {})
        waiting.pop(pending, None)
        if not waiting:
            self._callers.pop(pending.caller, None)
