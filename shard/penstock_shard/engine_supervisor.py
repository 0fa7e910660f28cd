"""Keeps one engine process alive and routes what it says to whoever asked.

Lives in the server process, on its event loop. Starts the engine, starts it again with back-off
when it dies, ends its requests as retryable meanwhile, and knows whether it is well. Never imports
torch; never sees gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable

from penstock_shard import link
from penstock_shard.config import ShardConfig
from penstock_shard.request import FinishReason

logger = logging.getLogger(__name__)

# google.rpc.Code
UNAVAILABLE = 14

_FIRST_BACK_OFF_S = 0.25
_MAX_BACK_OFF_S = 10.0
# An abort of an unknown id is remembered this long: its submit may still be on the way.
_ABORT_MEMORY_S = 30.0
_ABORT_MEMORY_IDS = 200_000

Deliver = Callable[[link.Output], None]


class EngineFailed(Exception):
    """The engine cannot be kept running; the text is one line for a person."""


class ModelRefused(EngineFailed):
    """The engine says that it cannot load what it was told to; trying again changes nothing."""


class EngineSupervisor:
    """Owns the engine process and the routes of its live requests."""

    def __init__(self, config: ShardConfig) -> None:
        self._config = config
        self._ready: link.Ready | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        # request id -> (attempt, where its outputs go)
        self._routes: dict[str, tuple[int, Deliver]] = {}
        self._early_aborts: OrderedDict[str, float] = OrderedDict()
        self._submits: list[link.Submit] = []
        self._aborts: list[str] = []
        self._flush_scheduled = False
        self._listeners: set[asyncio.Event] = set()
        self._beat = link.Beat(0.0, 0)
        self._beat_at_s = time.monotonic()
        # Why the last engine could not load; empty when it could.
        self._refusal = ""
        # Of the last engine that was ready; empty before the first.
        self.instance_id = ""
        self.load = link.Load()
        self.draining = False

    # ---- state ----

    @property
    def ready(self) -> link.Ready | None:
        """What the engine said when it was ready; None while there is none."""
        return self._ready

    @property
    def beat_age_s(self) -> float:
        return time.monotonic() - self._beat_at_s

    @property
    def step_running_s(self) -> float:
        return self._beat.step_running_s + self.beat_age_s if self._beat.step_running_s else 0.0

    @property
    def serving(self) -> bool:
        """The engine is up and gave a sign of life lately."""
        return self._ready is not None and self.beat_age_s < self._config.stall_timeout_s

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    def listen(self) -> asyncio.Event:
        """An event that is set whenever the load or the state changes; `unlisten` it later."""
        event = asyncio.Event()
        self._listeners.add(event)
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        self._listeners.discard(event)

    # ---- requests ----

    def submit(self, submit: link.Submit, deliver: Deliver) -> None:
        """Hand a request to the engine. `deliver` gets its outputs, exactly one of them last."""
        request_id = submit.request_id
        if self._early_aborts.pop(request_id, 0.0) > time.monotonic():
            deliver(_ending(request_id, submit.attempt, finish=FinishReason.ABORTED))
            return
        # A hung engine takes nothing from the socket: what is sent to it would pile up here.
        if self.draining or not self.serving:
            reason = (
                "the shard is draining" if self.draining else "the shard's engine is not serving"
            )
            deliver(_unavailable(request_id, submit.attempt, reason))
            return
        present = self._routes.get(request_id)
        if present is not None:
            present[1](_ending(request_id, present[0], finish=FinishReason.ABORTED))
        self._routes[request_id] = (submit.attempt, deliver)
        self._submits.append(submit)
        self._schedule_flush()

    def live_attempt(self, request_id: str) -> int | None:
        """The attempt of this id that has not ended; None when there is none."""
        route = self._routes.get(request_id)
        return None if route is None else route[0]

    def abort(self, request_id: str) -> None:
        """End a request before the next step; remember an id that is not known yet."""
        if request_id in self._routes:
            self._aborts.append(request_id)
            self._schedule_flush()
            return
        self._early_aborts[request_id] = time.monotonic() + _ABORT_MEMORY_S
        self._early_aborts.move_to_end(request_id)
        while len(self._early_aborts) > _ABORT_MEMORY_IDS:
            self._early_aborts.popitem(last=False)

    def abandon(self, request_id: str, attempt: int) -> None:
        """The reader of this attempt is gone: abort it, unless another attempt took over."""
        if self.live_attempt(request_id) == attempt:
            self.abort(request_id)

    def _schedule_flush(self) -> None:
        """Send once after everything of this turn of the event loop has been queued."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        inbox = link.Inbox(self._submits, self._aborts)
        self._submits, self._aborts = [], []
        if self._writer is not None:
            self._writer.write(link.encode_frame(inbox))

    # ---- the process ----

    async def run(self) -> None:
        """Keep an engine running until cancelled.

        Raises:
            ModelRefused: the first engine said that it cannot load.
            EngineFailed: engines failed to start too often in a row.
        """
        failures = 0
        back_off_s = _FIRST_BACK_OFF_S
        try:
            while True:
                was_ready = await self._run_once()
                if self._refusal and not self.instance_id:
                    raise ModelRefused(self._refusal)
                failures = 0 if was_ready else failures + 1
                if failures >= self._config.max_restarts:
                    reason = self._refusal or "it exited without a word"
                    raise EngineFailed(f"{failures} engine starts failed in a row: {reason}")
                back_off_s = (
                    _FIRST_BACK_OFF_S if was_ready else min(2 * back_off_s, _MAX_BACK_OFF_S)
                )
                logger.warning("starting the engine again in %.2f s", back_off_s)
                await asyncio.sleep(back_off_s)
        finally:
            await self._stop()

    async def _run_once(self) -> bool:
        """One life of an engine; whether it ever became ready."""
        reader = await self._start()
        was_ready = False
        while (message := await link.receive_from_engine(reader)) is not None:
            self._beat_at_s = time.monotonic()
            match message:
                case link.StepOutputs():
                    self._take_step(message)
                case link.Beat():
                    self._beat = message
                case link.Ready():
                    was_ready = True
                    self._became_ready(message)
                case link.Progress():
                    logger.info("%s", message.text)
                case link.LoadFailed():
                    self._refusal = message.message
        await self._stop()
        self._died()
        return was_ready

    async def _start(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock_shard.engine_main",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=_engine_environment(),
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        # The engine has no use for the key, and must not be able to leak it.
        config = dataclasses.replace(self._config, api_key=None)
        self._writer.write(link.encode_frame(link.Start(config)))
        self._beat_at_s = time.monotonic()
        return reader

    async def _stop(self) -> None:
        """Close our end; the engine ends itself, and is killed if it hangs."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), timeout=1.0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None

    def _became_ready(self, ready: link.Ready) -> None:
        self._ready = ready
        self._refusal = ""
        self.instance_id = uuid.uuid4().hex
        self._notify()

    def _take_step(self, step: link.StepOutputs) -> None:
        for output in step.outputs:
            route = self._routes.get(output.request_id)
            if route is None or route[0] != output.attempt:
                continue
            if output.is_last:
                del self._routes[output.request_id]
            route[1](output)
        if step.load != self.load:
            self.load = step.load
            self._notify()

    def _died(self) -> None:
        """End what was running as retryable."""
        if self._ready is not None:
            logger.error("the engine died; %d requests end as retryable", len(self._routes))
        self._ready = None
        self.load = link.Load()
        self._beat = link.Beat(0.0, 0)
        self._submits, self._aborts = [], []
        routes, self._routes = self._routes, {}
        for request_id, (attempt, deliver) in routes.items():
            deliver(_unavailable(request_id, attempt, "the shard's engine died"))
        self._notify()

    def _notify(self) -> None:
        for event in self._listeners:
            event.set()


def _engine_environment() -> dict[str, str]:
    """OpenMP threads that spin while they wait take the processor from everybody beside them."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def _ending(
    request_id: str,
    attempt: int,
    *,
    finish: FinishReason | None = None,
    error: link.Error | None = None,
) -> link.Output:
    return link.Output(request_id, attempt, 0, [], finish=finish, error=error)


def _unavailable(request_id: str, attempt: int, reason: str) -> link.Output:
    return _ending(request_id, attempt, error=link.Error(UNAVAILABLE, reason))
