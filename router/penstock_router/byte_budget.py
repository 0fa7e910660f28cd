"""Memory that clients share: what bodies, answers and streams may hold while a client is slow.

A client may hold at most as many bytes as are still free (the dynamic threshold of Choudhury and
Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998): a greedy one gets
half, the next half of the rest, and there is always room left for whoever comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

# What a worker may hold for slow clients: little beside a router's memory.
MAX_BYTES = 256 * 1024 * 1024


class ByteBudget:
    """The bytes that are held in this process, by client. What is counted one by one, such as
    connections, is shared in the same way.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._by_client: dict[str, int] = {}

    def held_by(self, client: str) -> int:
        """The bytes that this client holds."""
        return self._by_client.get(client, 0)

    def hold(self, client: str) -> Holding:
        """A holding of this client's, of no bytes yet."""
        return Holding(self, client)

    def allows(self, client: str, more_bytes: int, own_bytes: int = 0) -> bool:
        """Whether one thing of the client's may grow by this much from `own_bytes`. If it is the
        client's only one, it may take whatever is free, and anything if it is the only one of all.
        """
        if self.held_bytes == own_bytes:
            return True
        held_bytes = self.held_by(client)
        free_bytes = self.max_bytes - self.held_bytes - more_bytes
        return free_bytes >= (0 if held_bytes == own_bytes else held_bytes + more_bytes)

    def change(self, client: str, more_bytes: int) -> None:
        """Count this much more, or less, as held by the client."""
        self.held_bytes += more_bytes
        held_bytes = self.held_by(client) + more_bytes
        if held_bytes:
            self._by_client[client] = held_bytes
        else:
            self._by_client.pop(client, None)


class Holding:
    """What one body, answer or stream holds. Leaving its scope gives all of it back."""

    __slots__ = ("_budget", "_client", "num_bytes")

    def __init__(self, budget: ByteBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self.num_bytes = 0

    def grow(self, more_bytes: int, refusal: Callable[[int, int], Exception]) -> None:
        """Hold this much more.

        Raises `refusal(held_bytes, max_bytes)` where the client's share does not allow it:
        `held_bytes` are those that the client holds already, `max_bytes` are everybody's.
        """
        if not self._budget.allows(self._client, more_bytes, self.num_bytes):
            raise refusal(self._budget.held_by(self._client), self._budget.max_bytes)
        self._budget.change(self._client, more_bytes)
        self.num_bytes += more_bytes

    def add(self, more_bytes: int) -> None:
        """Hold this much more, even if the client's share does not allow it."""
        self._budget.change(self._client, more_bytes)
        self.num_bytes += more_bytes

    @property
    def is_over(self) -> bool:
        """Whether the client holds more than its share by now."""
        return not self._budget.allows(self._client, 0, self.num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Give this much back."""
        self._budget.change(self._client, -num_bytes)
        self.num_bytes -= num_bytes

    def close(self) -> None:
        """Give back all that is held. Idempotent."""
        self.shrink(self.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
