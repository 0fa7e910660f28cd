"""The loop of an engine process: take messages, step, send the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_common.clock import Clock
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.messages import Beat, FromEngine, Inbox, Load, StepOutputs

if TYPE_CHECKING:
    from penstock_shard.engine.adapter_slots import EngineAdapters

BEAT_S = 0.25
# If a heartbeat is later than this, the operating system had stopped the whole process.
_LATEST_BEAT_S = 1.0


class EngineLoop:
    """Turns of an engine: `take` all messages, then `launch`, then `collect`."""

    def __init__(
        self,
        engine: Engine,
        adapters: EngineAdapters,
        send: Callable[[FromEngine], None],
        *,
        checks: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """With `checks`, check the engine's records whenever the last request has ended."""
        self._engine = engine
        self._adapters = adapters
        self._send = send
        self._checks = checks
        self._clock = clock
        self._load_sent = Load()
        # The clock time at the turn's begin; None while the engine waits for a message.
        self._turn_started_s: float | None = None

    @property
    def is_idle(self) -> bool:
        """True if only a message can bring something to do."""
        return not self._engine.has_work and not self._engine.has_changed_pieces

    @property
    def due_s(self) -> float | None:
        """Seconds until there is something to do even if no message comes; None if never."""
        return self._engine.due_s

    @property
    def running_since_s(self) -> float | None:
        """The clock time at which the running step, or else the turn, began; None if neither
        runs.
        """
        started_s = self._engine.step_started_s
        return self._turn_started_s if started_s is None else started_s

    @property
    def step_expected_s(self) -> float:
        """Upper bound of a step's duration; 0 if unknown."""
        return self._engine.step_expected_s

    def take(self, message: Inbox) -> None:
        self._turn_started_s = self._clock()
        self._engine.take_images(message)
        for request in message.requests:
            self._engine.submit(request, self._adapters.index_of(request.adapter))
        for request_id, attempt in message.aborts:
            self._engine.abort(request_id, attempt)
        for change in message.adapter_changes:
            self._adapters.change(change)
        self._engine.take_blocks(message)

    def launch(self) -> bool:
        """Launch the next step; true if `collect` will wait for a step."""
        self._turn_started_s = self._clock()
        for answer in self._adapters.settle(self._engine.adapter_indices):
            self._send(answer)
        return self._engine.launch()

    def collect(self) -> None:
        """Collect a step if one is due, and send new outputs."""
        outputs = self._engine.collect()
        load, pieces = self._engine.load(), self._engine.take_changed_pieces()
        if outputs or pieces or load != self._load_sent:
            self._send(StepOutputs(outputs, load, pieces))
            self._load_sent = load
        if self._checks and self.is_idle:
            self._engine.check_integrity()
        self._turn_started_s = None


class Heartbeat:
    """Tells how long the running step or turn has run."""

    def __init__(self, loop: EngineLoop, clock: Clock = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._beat_at_s: float | None = None
        self._step_s: float | None = None
        # Seconds for which this process was stopped since the step began.
        self._stopped_s = 0.0

    def beat(self) -> Beat:
        """Make the heartbeat to send every `BEAT_S`. Running time excludes time for which this
        process was stopped.
        """
        now_s, started_s = self._clock(), self._loop.running_since_s
        late_s = 0.0 if self._beat_at_s is None else now_s - self._beat_at_s - _LATEST_BEAT_S
        late_s = max(0.0, late_s)
        self._stopped_s = self._stopped_s + late_s if started_s == self._step_s else late_s
        self._beat_at_s, self._step_s = now_s, started_s
        running_s = 0.0 if started_s is None else now_s - started_s - self._stopped_s
        return Beat(max(0.0, running_s), self._loop.step_expected_s)
