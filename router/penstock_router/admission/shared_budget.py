"""Budgets that clients share: bytes of memory that slow ones hold, connections, places in a queue.

A client may hold at most as much as is still free (the dynamic threshold of Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998): a greedy one gets half,
the next half of the rest, and there is always room left for whoever comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

# What a worker may hold in memory for slow clients: little beside a router's own.
MEMORY_BYTES = 192 * 1024 * 1024


class _Gauge(Protocol):
    def inc(self, amount: float) -> None: ...


class SharedBudget:
    """A budget of something in this process, and what of it each client holds."""

    def __init__(self, total: int, gauge: _Gauge | None = None) -> None:
        """`gauge` shows how much is held."""
        self.total = total
        self.held = 0
        self._by_client: dict[str, int] = {}
        self._gauge = gauge

    def held_by(self, client: str) -> int:
        """The amount that this client holds."""
        return self._by_client.get(client, 0)

    def hold(self, client: str) -> Holding:
        """A holding of this client's, of nothing yet."""
        return Holding(self, client)

    def allows(self, client: str, more: int, own: int = 0) -> bool:
        """Tell whether a holding of the client's may grow by this much from `own`. If it is the
        client's only one, it may take whatever is free, and anything if it is the only one of all.
        """
        if self.held == own:
            return True
        by_client = self.held_by(client)
        free = self.total - self.held - more
        return free >= (0 if by_client == own else by_client + more)

    def change(self, client: str, more: int) -> None:
        """Count this much more, or less, as held by the client."""
        self.held += more
        by_client = self.held_by(client) + more
        if by_client:
            self._by_client[client] = by_client
        else:
            self._by_client.pop(client, None)
        if self._gauge is not None and more:
            self._gauge.inc(more)


class Holding:
    """A holding of one body, answer or stream. Leaving its scope gives all of it back."""

    __slots__ = ("_budget", "_client", "amount")

    def __init__(self, budget: SharedBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.amount = 0

    def grow(self, more: int, refusal: Callable[[int, int], Exception]) -> None:
        """Hold this much more.

        Raises `refusal(held, total)` where the client's share does not allow it: `held` is what the
        client holds already, `total` is everybody's.
        """
        if not self._budget.allows(self._client, more, self.amount):
            raise refusal(self._budget.held_by(self._client), self._budget.total)
        self.add(more)

    def add(self, more: int) -> None:
        """Hold this much more, even if the client's share does not allow it."""
        self._budget.change(self._client, more)
        self.amount += more

    @property
    def is_over(self) -> bool:
        """Tell whether the client holds more than its share by now."""
        return not self._budget.allows(self._client, 0, self.amount)

    def shrink(self, amount: int) -> None:
        """Give this much back."""
        self.add(-amount)

    def close(self) -> None:
        """Give back all that is held. Idempotent."""
        self.shrink(self.amount)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
