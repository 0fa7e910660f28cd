"""Compiles constraints in threads, so that no step waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from penstock_proto.types import Error
from penstock_shard.sequence import Sequence
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.following import error_of, state_after_output
from penstock_shard.structured_output.matcher_state import ConstraintState


@dataclass(frozen=True, slots=True)
class _Making:
    """A matcher in the making, and the event that stops the work."""

    state: Future[ConstraintState]
    is_discarded: threading.Event


class PendingMatchers:
    """Sequences that wait for their matchers. Threads make the matchers, and advance them past the
    delivered output.
    """

    def __init__(self, compiler: Compiler, on_done: Callable[[], None], threads: Executor) -> None:
        """A thread calls `on_done` whenever `take` has something new."""
        self._compiler = compiler
        self.on_done = on_done
        self._threads = threads
        self._waiting: dict[Sequence, _Making] = {}
        # A queue, so that a step need not look at all waiting sequences.
        self._done: SimpleQueue[Sequence] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        is_discarded = threading.Event()
        state = self._threads.submit(
            state_after_output, self._compiler, sequence.request, is_discarded
        )
        self._waiting[sequence] = _Making(state, is_discarded)
        state.add_done_callback(lambda _: self._tell_done(sequence))

    def discard(self, sequence: Sequence) -> bool:
        """Forget a sequence that ended; true if it was waiting."""
        making = self._waiting.pop(sequence, None)
        if making is None:
            return False
        # Tell the thread to stop: advancing past a long output would keep others waiting.
        making.is_discarded.set()
        making.state.cancel()
        return True

    def take(self) -> list[tuple[Sequence, Error | None]]:
        """Take the sequences that need not wait any more: with None if they have a matcher, else
        with the error.
        """
        taken: list[tuple[Sequence, Error | None]] = []
        while (sequence := self._next_done()) is not None:
            making = self._waiting.pop(sequence, None)
            if making is None:
                continue
            # Any exception, even a panic of the library, ends only this sequence.
            reason = making.state.exception()
            if reason is None:
                sequence.constraint = making.state.result()
            error = None if reason is None else error_of(sequence.request, reason)
            taken.append((sequence, error))
        return taken

    def _next_done(self) -> Sequence | None:
        try:
            return self._done.get_nowait()
        except Empty:
            return None

    def _tell_done(self, sequence: Sequence) -> None:
        self._done.put(sequence)
        self.on_done()
