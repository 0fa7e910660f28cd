"""Bounds the time for which a client may leave an answer unread.

A client has the timeout's seconds to spend. It spends them while bytes are unsent. It regains a
second for each `_BYTES_A_SECOND` that it reads, and time without unsent bytes. When no time is
left, the connection is cut. So a client that reads over 1 kB/s has no limit, and one that reads a
byte a minute gains nothing.

Reading is visible only when the systems at both ends move their buffers, in steps of 100 kB
(`connections.py` bounds our buffer). With a timeout of a minute, a reader of a long answer is safe
at about 5 kB/s.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from penstock_router.errors import SlowClient

_BYTES_A_SECOND = 1024
# The number of checks within one timeout.
_LOOKS = 4


class WriteTimeout:
    __slots__ = (
        *("_at_s", "_is_cut", "_left_s", "_loop", "_nothing_left", "_timeout_s", "_timer"),
        *("_transport", "_unsent_bytes"),
    )

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = self._left_s = timeout_s
        self._loop = asyncio.get_running_loop()
        # The time when `_left_s` and `_unsent_bytes` were noted.
        self._at_s = self._loop.time()
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._nothing_left = asyncio.Event()
        self._nothing_left.set()
        self._is_cut = False

    @property
    def has_unsent(self) -> bool:
        """True if the socket has not accepted all written bytes."""
        return not self._nothing_left.is_set()

    async def wait_sent(self) -> None:
        """Wait until the socket has accepted everything. Raise `SlowClient` if the client is cut
        off first, and `ConnectionError` if it disconnected.
        """
        await self._nothing_left.wait()
        if self._is_cut:
            raise SlowClient("the client reads nothing, or next to nothing")
        if self._transport.is_closing():
            raise ConnectionResetError("the client left")

    # ---- called by the connection ----

    def begin(self) -> None:
        """Watch from now on; may call the connection's `pause_writing` at once."""
        # Pause as soon as a byte is unsent, so that no answer is too short to be watched. The limit
        # is not 0, because asyncio's TLS transport resumes only below the limit.
        self._transport.set_write_buffer_limits(high=1)

    def pause(self) -> None:
        self._note(-1)
        self._nothing_left.clear()
        self._look_later()

    def resume(self) -> None:
        self._note(1)
        self.end()

    def end(self) -> None:
        """Stop watching: everything is sent, or the connection is closed."""
        self._nothing_left.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        self._note(1)
        if self._left_s > 0:
            self._look_later()
            return
        self._is_cut = True
        # Waiting tasks must learn the reason before the connection is lost.
        self.end()
        self._transport.abort()

    def _note(self, sign: int) -> None:
        """Update `_left_s`. `sign` is 1 if there were unsent bytes since the last update, and -1 if
        there were none.
        """
        now_s, unsent_bytes = self._loop.time(), self._transport.get_write_buffer_size()
        taken_bytes = max(0, self._unsent_bytes - unsent_bytes)
        left_s = self._left_s + taken_bytes / _BYTES_A_SECOND - sign * (now_s - self._at_s)
        self._left_s = min(left_s, self._timeout_s)
        self._at_s, self._unsent_bytes = now_s, unsent_bytes


class _Watched(Protocol):
    write_timeout: WriteTimeout | None


def write_timeout_of(transport: asyncio.Transport | None) -> WriteTimeout:
    """Return the write timeout. Raise `ConnectionError` if the connection is closed."""
    watched = None if transport is None else cast(_Watched, transport.get_protocol())
    if watched is None or watched.write_timeout is None:
        raise ConnectionResetError("the client left")
    return watched.write_timeout
