"""Keeps one engine process alive and routes its outputs to callers.

Runs on the server's event loop. If the engine dies or hangs, its requests end as retryable, and the
engine is restarted with back-off. Imports neither torch nor gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable

import msgspec

from penstock_common.back_off import BackOff
from penstock_common.child_process.framing import encode_frame
from penstock_common.child_process.process_group import ProcessesRemain
from penstock_common.child_process.start import ChildProcess
from penstock_common.clock import Clock
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.limits import MAX_ID_CHARACTERS, TRIAL_TOKENS
from penstock_proto.types import CONSTRAINT_KINDS, Constraint, Error, FinishReason, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages
from penstock_shard.server.adapter_changes import Loaded, ServerAdapters
from penstock_shard.server.adapter_list import AdapterList
from penstock_shard.server.early_aborts import EarlyAborts
from penstock_shard.server.engine_process import manner_of_end, start_engine
from penstock_shard.server.images import EngineImages
from penstock_shard.server.kv.held_pieces import HeldPieces
from penstock_shard.server.kv.transfers import BlockTransfers
from penstock_shard.server.live_requests import ClassLoads, Deliver, Route
from penstock_shard.server.observe.metrics import ShardMetrics
from penstock_shard.server.validation import Refusal, check_adapter
from penstock_shard.structured_output.checker import CheckFailed, ConstraintChecker, NotChecked

logger = logging.getLogger(__name__)


_FIRST_BACK_OFF_S = 0.25
_MAX_BACK_OFF_S = 10.0
_WATCHDOG_S = 0.1
# If a sleep ends later than this, our process was stopped or suspended.
_STOPPED_S = 0.5
# A step hangs if it takes this many times its expected duration.
_HUNG_STEPS = 10


class EngineFailed(Exception):
    """The engine does not keep running. The text is one line for a person."""


class ModelRefused(EngineFailed):
    """The engine cannot load the model; another try would not help."""


class EngineSupervisor:
    """Owns the engine process and the routes of its live requests."""

    def __init__(
        self,
        config: ShardConfig,
        start_process: Callable[[], Awaitable[ChildProcess]] = start_engine,
        clock: Clock = time.monotonic,
        checker: ConstraintChecker | None = None,
        transfers: BlockTransfers | None = None,
        kept_adapters: AdapterList | None = None,
    ) -> None:
        """Without `transfers`, no KV blocks are exchanged with other shards. Without
        `kept_adapters`, the next process does not load the adapters again.
        """
        self._config = config
        self._start_process = start_process
        self._clock = clock
        self.metrics = ShardMetrics()
        self._checker = checker or ConstraintChecker(config.constraint_limits)
        self._ready: messages.Ready | None = None
        self._process: ChildProcess | None = None
        self._routes: dict[str, Route] = {}
        self._live_tokens = 0
        self.classes = ClassLoads()
        self._early_aborts = EarlyAborts(clock)
        # Messages to send at the end of this turn of the event loop.
        self._inbox = messages.Inbox([], [])
        self._transfers = transfers
        self.pieces = HeldPieces()
        self.adapters = ServerAdapters(config, self.tell, self._adapters_changed, kept_adapters)
        self.images = EngineImages(config.image_cache_bytes, self.tell)
        self._flush_scheduled = False
        # An ordered set.
        self._listeners: dict[asyncio.Event, None] = {}
        self._beat = messages.Beat(0.0, 0.0)
        self._beat_at_s = self._clock()
        # True if the engine gave any output; then its death is no failed start.
        self._worked = False
        self._refusal = ""
        # Id of the last engine that became ready; "" before the first.
        self.instance_id = ""
        self.load = messages.Load()
        self.draining = False
        # True if clients should move their requests to other shards.
        self.handing_over = False

    @property
    def ready(self) -> messages.Ready | None:
        """The Ready message; None while the engine is not ready."""
        return self._ready

    @property
    def beat_age_s(self) -> float:
        return self._clock() - self._beat_at_s

    @property
    def step_running_s(self) -> float:
        return self._beat.step_running_s + self.beat_age_s if self._beat.step_running_s else 0.0

    @property
    def hangs(self) -> bool:
        """True if no message arrives, or a step takes far longer than expected."""
        limit_s = self._config.stall_timeout_s
        if self.beat_age_s >= limit_s:
            return True
        expected_s = self._beat.step_expected_s
        return expected_s > 0 and self.step_running_s >= max(limit_s, _HUNG_STEPS * expected_s)

    @property
    def serving(self) -> bool:
        return self._ready is not None and not self.hangs

    @property
    def num_live(self) -> int:
        return len(self._routes)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run; some have not reached the engine yet."""
        return max(self.load.waiting, self.num_live - self.load.running)

    @property
    def queued_tokens(self) -> int:
        """Tokens of requests that do not run. An estimate between the engine's load reports."""
        return max(self.load.queued_tokens, self._live_tokens - self.load.running_tokens)

    def listen(self) -> asyncio.Event:
        """Return an event that is set at each change of load or state. Call `unlisten` later."""
        event = asyncio.Event()
        self._listeners[event] = None
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        self._listeners.pop(event, None)

    def submit(
        self,
        request: EngineRequest,
        deliver: Deliver,
        *,
        deadline_s: float | None = None,
        suspect: bool = False,
        caller: Hashable = None,
    ) -> None:
        """Hand a request to the engine. `deliver` gets its outputs; exactly one is last.

        A suspect request may have killed engines; only one is accepted at a time. Constraint checks
        take turns by `caller`.
        """
        key = (request.request_id, request.attempt)
        if self._early_aborts.include(*key):
            deliver(_ending(*key, finish_reason=FinishReason.ABORTED))
            return
        refusal = self._refusal_of(request, suspect)
        if refusal is not None:
            self.metrics.on_refusal(refusal)
            deliver(_ending(*key, error=refusal))
            return
        present = self._routes.get(request.request_id)
        if present is not None:
            self._supersede(present, request)
        route = Route(*key, deliver, request.num_tokens, request.priority, self._clock(), suspect)
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            route.deadline = loop.call_later(deadline_s, self._overdue, route)
        self._routes[request.request_id] = route
        self._live_tokens += route.num_tokens
        self.classes.add(route)
        if request.constraint is None:
            self._hand_over(request)
        else:
            self._check(route, request, request.constraint, caller)

    def _hand_over(self, request: EngineRequest) -> None:
        self._inbox.requests.append(request)
        self._schedule_flush()

    def _supersede(self, present: Route, request: EngineRequest) -> None:
        if present.checking is None and request.constraint is not None:
            # The engine gets the new attempt only after its constraint is checked, and would
            # continue the old one until then.
            self._abort_in_engine(present)
        self._end_route(present, finish=FinishReason.ABORTED)

    def _check(
        self, route: Route, request: EngineRequest, constraint: Constraint, caller: Hashable
    ) -> None:
        verdict = self._checker.known(constraint)
        if verdict is None:
            waiting = self._await_verdict(route, request, constraint, caller)
            route.checking = asyncio.create_task(waiting)
        else:
            self._judge(route, request, constraint, verdict)

    async def _await_verdict(
        self, route: Route, request: EngineRequest, constraint: Constraint, caller: Hashable
    ) -> None:
        try:
            verdict = await self._checker.check(constraint, caller)
        except NotChecked as error:
            route.checking = None
            full = Error(Code.RESOURCE_EXHAUSTED, str(error), field=constraint.kind)
            self._end_route(route, error=full)
        except CheckFailed as error:
            route.checking = None
            self._end_route(route, error=Error(Code.INTERNAL, str(error)))
        else:
            route.checking = None
            self._judge(route, request, constraint, verdict)

    def _judge(
        self, route: Route, request: EngineRequest, constraint: Constraint, verdict: str
    ) -> None:
        if verdict:
            error = Error(Code.INVALID_ARGUMENT, verdict, field=constraint.kind)
            self._end_route(route, error=error)
            return
        try:
            # The adapter may have been unloaded meanwhile.
            check_adapter(request.adapter, request.adapter_hash, self.adapters.loaded)
        except Refusal as refusal:
            self._end_route(route, error=refusal.error)
        else:
            self._hand_over(request)

    def _refusal_of(self, request: EngineRequest, suspect: bool) -> Error | None:
        if self.draining:
            return Error(Code.UNAVAILABLE, "the shard is draining")
        # A hung engine reads no messages; they would pile up here.
        if not self.serving:
            return Error(Code.UNAVAILABLE, "the shard's engine is not serving")
        routes = self._routes.values()
        others = (route for route in routes if route.request_id != request.request_id)
        if suspect and any(route.suspect for route in others):
            reason = "another request that engines died of is being tried"
            return Error(Code.RESOURCE_EXHAUSTED, reason)
        config = self._config
        # A higher attempt replaces a lower one.
        num_others = self.num_live - (request.request_id in self._routes)
        if num_others >= config.max_num_seqs + config.max_queued_requests:
            return Error(
                Code.RESOURCE_EXHAUSTED,
                f"{num_others} requests run or wait; --max-num-seqs is {config.max_num_seqs}, "
                f"--max-queued-requests {config.max_queued_requests}",
            )
        # If no request waits, accept one: the context length bounds its tokens.
        if self.num_waiting and self.queued_tokens + request.num_tokens > config.max_queued_tokens:
            return Error(
                Code.RESOURCE_EXHAUSTED,
                f"{self.queued_tokens} prompt tokens wait; --max-queued-tokens is "
                f"{config.max_queued_tokens}",
            )
        return None

    def live_attempt(self, request_id: str) -> int | None:
        route = self._routes.get(request_id)
        return None if route is None else route.attempt

    def abort(self, request_id: str, attempt: int) -> None:
        """End a request before the next step, if this attempt or a lower one is live. An abort that
        arrives before its attempt is remembered.
        """
        route = self._routes.get(request_id)
        if (route is None or route.attempt < attempt) and len(request_id) <= MAX_ID_CHARACTERS:
            self._early_aborts.remember(request_id, attempt)
        if route is None or route.attempt > attempt:
            return
        if route.checking is not None:
            self._end_route(route, finish=FinishReason.ABORTED)
        else:
            self._abort_in_engine(route)

    def end_all(self, reason: str) -> None:
        for route in list(self._routes.values()):
            self._end_route(route, error=Error(Code.UNAVAILABLE, reason))

    def _abort_in_engine(self, route: Route) -> None:
        self._inbox.aborts.append((route.request_id, route.attempt))
        self._schedule_flush()

    def _overdue(self, route: Route) -> None:
        if route.checking is None:
            self._abort_in_engine(route)
        error = Error(Code.DEADLINE_EXCEEDED, "the request's deadline passed")
        self._end_route(route, error=error)

    def _end_route(
        self,
        route: Route,
        *,
        finish: FinishReason | None = None,
        error: Error | None = None,
    ) -> None:
        """Give a request its last output. The engine's later outputs for it are dropped."""
        last = _ending(route.request_id, route.attempt, finish_reason=finish, error=error)
        last.queue_s = route.queue_s
        route.queue_s = None
        self._forget(route, last)
        route.deliver(last)

    def _forget(self, route: Route, last: RequestOutput) -> None:
        del self._routes[route.request_id]
        self._live_tokens -= route.num_tokens
        self.classes.remove(route)
        if route.deadline is not None:
            route.deadline.cancel()
        if route.checking is not None:
            route.checking.cancel()
        self.metrics.on_request_end(last, route.num_given, self._clock() - route.arrived_s)

    def _schedule_flush(self) -> None:
        """Send the engine one message with everything that this turn of the event loop queues."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        inbox, self._inbox = self._inbox, messages.Inbox([], [])
        if self._process is not None:
            self._process.writer.write(encode_frame(inbox))

    def drain(self, *, hand_over: bool) -> None:
        """Accept no more requests. With `hand_over`, ask clients to move theirs to other shards."""
        self.draining = True
        self.handing_over = self.handing_over or hand_over
        self._inbox.drains = True
        self._schedule_flush()
        self._notify()

    async def run(self) -> None:
        """Keep an engine running until cancelled.

        Raises:
            ModelRefused: the first engine reported that it cannot load.
            EngineFailed: engines failed to start too often in a row.
        """
        try:
            await self._keep_running()
            # A draining shard gets no requests, and the engine's death ended the others.
            logger.info("the engine is gone while the shard drains; none is needed any more")
            await asyncio.Event().wait()
        finally:
            await self._checker.close()
            await self._stop()

    async def _keep_running(self) -> None:
        """Start one engine after another until one ends while the shard drains."""
        failures = 0
        back_off = BackOff(_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S)
        while not self.draining:
            manner = await self._run_once()
            if self.draining:
                return
            if self._refusal and not self.instance_id:
                raise ModelRefused(self._refusal)
            failures = 0 if self._worked else failures + 1
            if failures >= self._config.max_restarts:
                reason = self._refusal or manner
                raise EngineFailed(f"{failures} engines failed in a row: {reason}")
            wait_s = back_off.wait_s
            back_off.lengthen()
            if self._worked:
                # Callers wait to retry their requests.
                wait_s = 0.0
                back_off.reset()
            logger.warning("starting the engine again in %.2f s", wait_s)
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> str:
        """Run one engine to its end. Return how it ended, in case it left no error message."""
        self._worked = False
        try:
            process = await self._start()
        except OSError as error:
            # Memory or file descriptors are short; a later try may succeed.
            logger.error("the engine cannot be started: %s", error)
            self.metrics.on_engine_death()
            await self._stop()
            return f"it cannot be started: {error}"
        watchdog = asyncio.create_task(self._kill_when_it_hangs())
        try:
            await self._listen_to(process.reader)
        finally:
            watchdog.cancel()
        was_ready, num_live = self._ready is not None, len(self._routes)
        self._died()
        # End the requests first, because the process may take a while to end.
        manner = manner_of_end(await self._stop())
        if was_ready:
            ended = "1 request ends" if num_live == 1 else f"{num_live} requests end"
            logger.error("the engine died: %s; %s as retryable", manner, ended)
        return manner

    async def _kill_when_it_hangs(self) -> None:
        while self._ready is None or not self.hangs:
            slept_at_s = self._clock()
            await asyncio.sleep(_WATCHDOG_S)
            self._excuse(self._clock() - slept_at_s - _WATCHDOG_S)
        logger.error(
            "the engine hangs (no sign of life for %.1f s, its step runs for %.1f s); killing it",
            self.beat_age_s,
            self.step_running_s,
        )
        if self._process is not None:
            self._process.kill()
            # A process stuck in a device driver may survive a kill. Closing the link ends its
            # requests even then, so that callers retry elsewhere.
            self._process.writer.transport.abort()

    def _excuse(self, late_s: float) -> None:
        """Do not count the time for which our own process was stopped as silence of the engine."""
        if late_s > _STOPPED_S:
            self._beat_at_s = min(self._clock(), self._beat_at_s + late_s)

    async def _listen_to(self, reader: asyncio.StreamReader) -> None:
        while (message := await messages.receive_from_engine(reader)) is not None:
            self._beat_at_s = self._clock()
            match message:
                case messages.StepOutputs():
                    self._take_step(message)
                case messages.Beat():
                    self._beat = message
                case messages.Started():
                    self._note_started(message.request_ids)
                case messages.Ready():
                    self._became_ready(message)
                case messages.AdapterChanged():
                    self.adapters.on_answer(message)
                case messages.Progress():
                    logger.info("%s", message.text)
                case messages.LoadFailed():
                    self._refusal = message.message
                case _ if self._transfers is not None:
                    self._transfers.take(message)

    async def _start(self) -> ChildProcess:
        self._process = process = await self._start_process()
        config = dataclasses.replace(self._config, api_key=None, kv_peer_key=None)
        start = messages.Start(config, self.adapters.begin_engine())
        process.writer.write(encode_frame(start))
        self._beat_at_s = self._clock()
        return process

    async def _stop(self) -> int | None:
        """Close our end of the link, so that the engine exits; kill it after a second. Return its
        exit status. Raises EngineFailed if it or a child survives, because the next engine would
        lack device memory.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.writer.close()
        try:
            try:
                # Do not use `wait_for`: before Python 3.12 it may lose a cancellation at the moment
                # of exit.
                async with asyncio.timeout(1.0):
                    return await process.wait()
            except TimeoutError:
                process.kill()
                return await process.wait()
        except ProcessesRemain as error:
            raise EngineFailed(str(error)) from None

    def _became_ready(self, ready: messages.Ready) -> None:
        self._ready = ready
        if self._transfers is not None:
            self._transfers.on_engine_ready(ready.info, self.tell)
        self._refusal = ""
        self.instance_id = uuid.uuid4().hex
        self.pieces.begin(self.instance_id)
        self.adapters.on_engine_ready(ready.info.adapters)
        self.images.begin_engine()
        info, tokenizer = ready.info, ready.tokenizer_files.get("tokenizer.json")
        if tokenizer is not None and info.capabilities & CONSTRAINT_KINDS:
            self._checker.use(tokenizer, info.vocab_size, info.eos_token_ids)
        self._notify()

    def tell(self, message: messages.Told) -> None:
        """Send the engine a message that is not about a live request."""
        self._inbox.add(message)
        self._schedule_flush()

    def _adapters_changed(self, loaded: Loaded) -> None:
        if self._ready is not None:
            info = dataclasses.replace(self._ready.info, adapters=loaded)
            self._ready = msgspec.structs.replace(self._ready, info=info)
            self._notify()

    def _note_started(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            route = self._routes.get(request_id)
            if route is not None:
                self.classes.start(route)
                route.started_s = self._clock()
                route.queue_s = route.started_s - route.arrived_s
                self.metrics.on_request_start(route.num_tokens, route.queue_s)

    def _take_step(self, step: messages.StepOutputs) -> None:
        self._worked = self._worked or bool(step.outputs)
        num_tokens = 0
        for output in step.outputs:
            route = self._routes.get(output.request_id)
            if route is None or route.attempt != output.attempt:
                continue
            if output.token_ids:
                if not route.num_given:
                    self.classes.end_prompt(route)
                if not route.num_given and route.started_s is not None:
                    seconds = self._clock() - route.started_s
                    self.metrics.on_first_token(seconds, output.cached_tokens or 0)
                route.num_given += len(output.token_ids)
                num_tokens += len(output.token_ids)
            if output.is_last:
                self._forget(route, output)
            if route.queue_s is not None:
                output.queue_s, route.queue_s = route.queue_s, None
            if route.suspect:
                route.suspect = route.num_given < TRIAL_TOKENS
            route.deliver(output)
        self.metrics.on_step(self.load, step.load, num_tokens)
        self.pieces.take(step.pieces)
        if step.load != self.load:
            self.load = step.load
            self._notify()

    def _died(self) -> None:
        """End the live requests as retryable; mark those that may have killed the engine."""
        if self._ready is not None or not self.draining:
            self.metrics.on_engine_death()
        self._ready = None
        if self._transfers is not None:
            self._transfers.on_engine_death()
        self.load = messages.Load()
        self._beat = messages.Beat(0.0, 0.0)
        self._inbox = messages.Inbox([], [])
        self.adapters.on_engine_death()
        started = [route for route in self._routes.values() if route.started_s is not None]
        charged = [route for route in started if route.suspect] or started
        for route in charged:
            reason = "the shard's engine died while this request was running"
            self._end_route(route, error=Error(Code.UNAVAILABLE, reason, engine_died=True))
        self.end_all("the shard's engine died")
        self._notify()

    def _notify(self) -> None:
        for event in self._listeners:
            event.set()


def _ending(
    request_id: str,
    attempt: int,
    *,
    finish_reason: FinishReason | None = None,
    error: Error | None = None,
) -> RequestOutput:
    """The last output of an attempt that gave none."""
    output = RequestOutput([], 0, request_id=request_id, attempt=attempt)
    output.finish_reason, output.error = finish_reason, error
    return output
