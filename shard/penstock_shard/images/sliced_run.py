"""Work of one long call, done in slices between other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class SlicedRun(Generic[_T]):
    """A call in a thread of its own that runs only within `advance`, while its caller waits: so
    the two share what is not made for threads. The call says with `pause` where it may stand still.
    """

    def __init__(self, work: Callable[[Callable[[], None]], _T]) -> None:
        """`work` is called with `pause`."""
        self._work = work
        self._ends_s = 0.0
        # Whose turn it is.
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="sliced", daemon=True)
        self._thread.start()
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def advance(self, seconds: float) -> bool:
        """Go on to the first pause after so long; whether the call is over."""
        if not self._is_over:
            self._ends_s = time.monotonic() + seconds
            self._go.release()
            self._stop.acquire()
        return self._is_over

    def result(self) -> _T:
        """What the call returned, once it is over; raises what it raised."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _pause(self) -> None:
        if time.monotonic() >= self._ends_s:
            self._stop.release()
            self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._result = self._work(self._pause)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._error = error
        self._is_over = True
        self._stop.release()
