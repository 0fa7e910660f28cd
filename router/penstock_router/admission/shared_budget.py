"""Budgets that clients share: bytes of memory for slow clients, connections, places in a queue.

A client may hold at most as much as is still free (the dynamic threshold of Choudhury and Hahne,
"Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998). A greedy client gets
half of the budget, and the next one half of the rest, so there is always room for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

# The memory that a worker may hold for slow clients; the router itself needs far more.
MEMORY_BYTES = 192 * 1024 * 1024


class _Gauge(Protocol):
    def inc(self, amount: float) -> None: ...


class SharedBudget:
    """A budget in this process, and each client's share of it."""

    def __init__(self, total: int, gauge: _Gauge | None = None) -> None:
        """Make a budget; `gauge` shows the held amount."""
        self.total = total
        self.held = 0
        self._by_client: dict[str, int] = {}
        self._gauge = gauge

    def held_by(self, client: str) -> int:
        return self._by_client.get(client, 0)

    def hold(self, client: str) -> Holding:
        return Holding(self, client)

    def allows(self, client: str, more: int, own: int = 0) -> bool:
        """Tell whether a holding may grow by `more` from `own`. A client's only holding may take
        all that is free. If no other holding exists, it may take any amount.
        """
        if self.held == own:
            return True
        by_client = self.held_by(client)
        free = self.total - self.held - more
        return free >= (0 if by_client == own else by_client + more)

    def change(self, client: str, more: int) -> None:
        """Add `more`, which may be negative, to the amount that the client holds."""
        self.held += more
        by_client = self.held_by(client) + more
        if by_client:
            self._by_client[client] = by_client
        else:
            self._by_client.pop(client, None)
        if self._gauge is not None and more:
            self._gauge.inc(more)


class Holding:
    """The amount held for one body, answer or stream. Leaving the scope gives it back."""

    __slots__ = ("_budget", "_client", "amount")

    def __init__(self, budget: SharedBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.amount = 0

    def grow(self, more: int, refusal: Callable[[int, int], Exception]) -> None:
        """Hold `more` in addition.

        Raises `refusal(held, total)` if the client's share does not allow it: `held` is what the
        client already holds, `total` is the whole budget.
        """
        if not self._budget.allows(self._client, more, self.amount):
            raise refusal(self._budget.held_by(self._client), self._budget.total)
        self.add(more)

    def add(self, more: int) -> None:
        """Hold `more` in addition, even beyond the client's share."""
        self._budget.change(self._client, more)
        self.amount += more

    @property
    def is_over(self) -> bool:
        """True if the client now holds more than its share."""
        return not self._budget.allows(self._client, 0, self.amount)

    def shrink(self, amount: int) -> None:
        self.add(-amount)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self.shrink(self.amount)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
