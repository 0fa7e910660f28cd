"""Keeps one engine process alive and routes its outputs to the callers.

Runs in the server process, on its event loop. Starts the engine, restarts it with back-off when it
dies, ends its requests as retryable then, and knows whether it hangs. Never imports torch; never
sees gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

import msgspec

from penstock_common.clock import Clock
from penstock_common.request_bounds import TRIAL_TOKENS
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages
from penstock_shard.ipc.child_process import ChildProcess
from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.framing import encode_frame
from penstock_shard.ipc.process_group import ProcessesRemain
from penstock_shard.ipc.request import CONSTRAINT_KINDS, Constraint, FinishReason, Request
from penstock_shard.server.adapter_changes import Loaded, ServerAdapters
from penstock_shard.server.adapter_list import AdapterList
from penstock_shard.server.early_aborts import EarlyAborts
from penstock_shard.server.engine_process import manner_of_end, start_engine
from penstock_shard.server.images import EngineImages
from penstock_shard.server.kv.held_pieces import HeldPieces
from penstock_shard.server.kv.transfers import BlockTransfers
from penstock_shard.server.observe.metrics import ShardMetrics
from penstock_shard.server.validation import MAX_ID_CHARACTERS, Refusal, check_adapter
from penstock_shard.structured_output.checker import CheckFailed, ConstraintChecker, NotChecked

logger = logging.getLogger(__name__)


_FIRST_BACK_OFF_S = 0.25
_MAX_BACK_OFF_S = 10.0
_WATCHDOG_S = 0.1
# If a sleep lasts this much longer than asked for, this process was stopped or suspended.
_STOPPED_S = 0.5
# A step that takes this many times the expected duration hangs.
_HUNG_STEPS = 10

Deliver = Callable[[messages.Output], None]


class EngineFailed(Exception):
    """The engine cannot be kept running; the text is one line for a person."""


class ModelRefused(EngineFailed):
    """The engine reports that it cannot load the model; trying again would not help."""


@dataclass(eq=False, slots=True)
class _Route:
    """A live request: where its outputs go, how many tokens it came with, and its progress."""

    request_id: str
    attempt: int
    deliver: Deliver
    num_tokens: int
    arrived_s: float
    # It was running in engines that died, and has not been cleared yet.
    suspect: bool = False
    num_given: int = 0
    # When the engine began to compute it.
    started_s: float | None = None
    deadline: asyncio.TimerHandle | None = None
    # Runs while its constraint is checked; the engine does not have the request yet.
    checking: asyncio.Task[None] | None = None
    # How long it waited for its first step; None before that step, and once an output carried it.
    queue_s: float | None = None


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
        """Without `transfers` no KV blocks go to other shards, or come from them; without
        `kept_adapters` the next process does not know which were loaded.
        """
        self._config = config
        self._start_process = start_process
        self._clock = clock
        self.metrics = ShardMetrics()
        self._checker = checker or ConstraintChecker(config.constraint_limits)
        self._ready: messages.Ready | None = None
        self._process: ChildProcess | None = None
        self._routes: dict[str, _Route] = {}
        self._live_tokens = 0
        self._early_aborts = EarlyAborts(clock)
        # What this turn of the event loop queues for the engine.
        self._inbox = messages.Inbox([], [])
        self._transfers = transfers
        # What routers follow.
        self.pieces = HeldPieces()
        self.adapters = ServerAdapters(config, self._tell, self._adapters_changed, kept_adapters)
        self.images = EngineImages(config.image_cache_bytes, self._tell)
        self._flush_scheduled = False
        # A set in the order in which they came.
        self._listeners: dict[asyncio.Event, None] = {}
        self._beat = messages.Beat(0.0, 0.0)
        self._beat_at_s = self._clock()
        # Whether the engine gave any output: if so, its death is not a failed start.
        self._worked = False
        # Why the last engine could not load; empty when it could.
        self._refusal = ""
        # Id of the last engine that became ready; empty before the first.
        self.instance_id = ""
        self.load = messages.Load()
        self.draining = False
        # Draining, and clients should move their requests to other shards now.
        self.handing_over = False

    # ---- state ----

    @property
    def ready(self) -> messages.Ready | None:
        """The engine's Ready message; None while no engine is ready."""
        return self._ready

    @property
    def beat_age_s(self) -> float:
        return self._clock() - self._beat_at_s

    @property
    def step_running_s(self) -> float:
        return self._beat.step_running_s + self.beat_age_s if self._beat.step_running_s else 0.0

    @property
    def hangs(self) -> bool:
        """The engine gives no sign of life, or a step takes far longer than such steps do."""
        limit_s = self._config.stall_timeout_s
        if self.beat_age_s >= limit_s:
            return True
        expected_s = self._beat.step_expected_s
        return expected_s > 0 and self.step_running_s >= max(limit_s, _HUNG_STEPS * expected_s)

    @property
    def serving(self) -> bool:
        """The engine is up and does not hang."""
        return self._ready is not None and not self.hangs

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._routes)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, including those the engine has not scheduled or heard of."""
        return max(self.load.waiting, self.num_live - self.load.running)

    @property
    def queued_tokens(self) -> int:
        """Tokens of requests that do not run; an estimate between load reports of the engine."""
        return max(self.load.queued_tokens, self._live_tokens - self.load.running_tokens)

    def listen(self) -> asyncio.Event:
        """An event that is set whenever the load or the state changes; `unlisten` it later."""
        event = asyncio.Event()
        self._listeners[event] = None
        return event

    def unlisten(self, event: asyncio.Event) -> None:
        self._listeners.pop(event, None)

    # ---- requests ----

    def submit(
        self,
        request: Request,
        deliver: Deliver,
        *,
        deadline_s: float | None = None,
        suspect: bool = False,
        caller: Hashable = None,
    ) -> None:
        """Hand a request to the engine. `deliver` gets its outputs, of which exactly one is last.

        A suspect was running in engines that died; only one is accepted at a time. Callers take
        turns with their constraints.
        """
        key = (request.request_id, request.attempt)
        if self._early_aborts.include(*key):
            deliver(messages.Output(*key, 0, [], finish=FinishReason.ABORTED))
            return
        refusal = self._refusal_of(request, suspect)
        if refusal is not None:
            self.metrics.on_refusal(refusal)
            deliver(messages.Output(*key, 0, [], error=refusal))
            return
        present = self._routes.get(request.request_id)
        if present is not None:
            self._supersede(present, request)
        route = _Route(*key, deliver, request.num_tokens, self._clock(), suspect)
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            route.deadline = loop.call_later(deadline_s, self._overdue, route)
        self._routes[request.request_id] = route
        self._live_tokens += route.num_tokens
        if request.constraint is None:
            self._hand_over(request)
        else:
            self._check(route, request, request.constraint, caller)

    def _hand_over(self, request: Request) -> None:
        self._inbox.requests.append(request)
        self._schedule_flush()

    def _supersede(self, present: _Route, request: Request) -> None:
        if present.checking is None and request.constraint is not None:
            # The engine only gets the new attempt once its constraint is checked, if at all: until
            # then it would go on with the old one.
            self._abort_in_engine(present)
        self._end_route(present, finish=FinishReason.ABORTED)

    def _check(
        self, route: _Route, request: Request, constraint: Constraint, caller: Hashable
    ) -> None:
        """Hand the request to the engine once its constraint is known to be valid."""
        verdict = self._checker.known(constraint)
        if verdict is None:
            waiting = self._await_verdict(route, request, constraint, caller)
            route.checking = asyncio.create_task(waiting)
        else:
            self._judge(route, request, constraint, verdict)

    async def _await_verdict(
        self, route: _Route, request: Request, constraint: Constraint, caller: Hashable
    ) -> None:
        try:
            verdict = await self._checker.check(constraint, caller)
        except NotChecked as error:
            route.checking = None
            full = messages.Error(Code.RESOURCE_EXHAUSTED, str(error), field=constraint.kind)
            self._end_route(route, error=full)
        except CheckFailed as error:
            route.checking = None
            self._end_route(route, error=messages.Error(Code.INTERNAL, str(error)))
        else:
            route.checking = None
            self._judge(route, request, constraint, verdict)

    def _judge(self, route: _Route, request: Request, constraint: Constraint, verdict: str) -> None:
        if verdict:
            error = messages.Error(Code.INVALID_ARGUMENT, verdict, field=constraint.kind)
            self._end_route(route, error=error)
            return
        try:
            # If the adapter was unloaded meanwhile, the engine must not get the request.
            check_adapter(request.adapter, request.adapter_hash, self.adapters.loaded)
        except Refusal as refusal:
            self._end_route(route, error=refusal.error)
        else:
            self._hand_over(request)

    def _refusal_of(self, request: Request, suspect: bool) -> messages.Error | None:
        """Say why the request is not accepted; None when it is."""
        if self.draining:
            return messages.Error(Code.UNAVAILABLE, "the shard is draining")
        # A hung engine reads nothing from the socket: what is sent to it would pile up here.
        if not self.serving:
            return messages.Error(Code.UNAVAILABLE, "the shard's engine is not serving")
        routes = self._routes.values()
        others = (route for route in routes if route.request_id != request.request_id)
        if suspect and any(route.suspect for route in others):
            reason = "another request that engines died of is being tried"
            return messages.Error(Code.RESOURCE_EXHAUSTED, reason)
        config = self._config
        # A higher attempt takes the place of the one it ends.
        num_others = self.num_live - (request.request_id in self._routes)
        if num_others >= config.max_num_seqs + config.max_queued_requests:
            return messages.Error(
                Code.RESOURCE_EXHAUSTED,
                f"{num_others} requests run or wait; --max-num-seqs is {config.max_num_seqs}, "
                f"--max-queued-requests {config.max_queued_requests}",
            )
        # A request is always accepted while none waits: the context length bounds its tokens.
        if self.num_waiting and self.queued_tokens + request.num_tokens > config.max_queued_tokens:
            return messages.Error(
                Code.RESOURCE_EXHAUSTED,
                f"{self.queued_tokens} prompt tokens wait; --max-queued-tokens is "
                f"{config.max_queued_tokens}",
            )
        return None

    def live_attempt(self, request_id: str) -> int | None:
        """The live attempt of this request id; None when there is none."""
        route = self._routes.get(request_id)
        return None if route is None else route.attempt

    def abort(self, request_id: str, attempt: int) -> None:
        """End a request before the next step, if this attempt or a lower one is live. An abort of
        an attempt that has not come yet is remembered.
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
        """End every live request as retryable."""
        for route in list(self._routes.values()):
            self._end_route(route, error=messages.Error(Code.UNAVAILABLE, reason))

    def _abort_in_engine(self, route: _Route) -> None:
        self._inbox.aborts.append((route.request_id, route.attempt))
        self._schedule_flush()

    def _overdue(self, route: _Route) -> None:
        if route.checking is None:
            self._abort_in_engine(route)
        error = messages.Error(Code.DEADLINE_EXCEEDED, "the request's deadline passed")
        self._end_route(route, error=error)

    def _end_route(
        self,
        route: _Route,
        *,
        finish: FinishReason | None = None,
        error: messages.Error | None = None,
    ) -> None:
        """Give a request its last output here; later outputs of the engine for it are dropped."""
        key = (route.request_id, route.attempt)
        last = messages.Output(*key, 0, [], finish=finish, error=error, queue_s=route.queue_s)
        route.queue_s = None
        self._forget(route, last)
        route.deliver(last)

    def _forget(self, route: _Route, last: messages.Output) -> None:
        del self._routes[route.request_id]
        self._live_tokens -= route.num_tokens
        if route.deadline is not None:
            route.deadline.cancel()
        if route.checking is not None:
            route.checking.cancel()
        self.metrics.on_request_end(last, route.num_given, self._clock() - route.arrived_s)

    def _schedule_flush(self) -> None:
        """Send one message to the engine for all that this turn of the event loop queues."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        inbox, self._inbox = self._inbox, messages.Inbox([], [])
        if self._process is not None:
            self._process.writer.write(encode_frame(inbox))

    # ---- the process ----

    def drain(self, *, hand_over: bool) -> None:
        """Accept no more requests; with `hand_over` clients are asked to move theirs elsewhere."""
        self.draining = True
        self.handing_over = self.handing_over or hand_over
        self._inbox.drains = True
        self._schedule_flush()
        self._notify()

    async def run(self) -> None:
        """Keep an engine running until cancelled.

        Raises:
            ModelRefused: the first engine said that it cannot load.
            EngineFailed: engines failed to start too often in a row.
        """
        try:
            await self._keep_running()
            # A draining shard admits nothing, and its live requests ended with the engine.
            logger.info("the engine is gone while the shard drains; none is needed any more")
            await asyncio.Event().wait()
        finally:
            await self._checker.close()
            await self._stop()

    async def _keep_running(self) -> None:
        """Start one engine after another, until one ends while the shard drains."""
        failures = 0
        back_off_s = _FIRST_BACK_OFF_S
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
            if self._worked:
                # Whoever lost an output waits for it.
                back_off_s = 0.0
            logger.warning("starting the engine again in %.2f s", back_off_s)
            await asyncio.sleep(back_off_s)
            back_off_s = min(max(2 * back_off_s, _FIRST_BACK_OFF_S), _MAX_BACK_OFF_S)

    async def _run_once(self) -> str:
        """Run one engine to its end. Returns how it ended, for an error without a message of its
        own.
        """
        self._worked = False
        try:
            process = await self._start()
        except OSError as error:
            # No memory for a process or no file descriptor; retrying may succeed.
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
        # The requests have ended by now: the process may take a while.
        manner = manner_of_end(await self._stop())
        if was_ready:
            ended = "1 request ends" if num_live == 1 else f"{num_live} requests end"
            logger.error("the engine died: %s; %s as retryable", manner, ended)
        return manner

    async def _kill_when_it_hangs(self) -> None:
        """Kill the engine when it hangs, so that its requests end and another is started."""
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
            # A process stuck in a device driver may not die when killed. Closing the link ends its
            # requests all the same, so that callers retry them elsewhere.
            self._process.writer.transport.abort()

    def _excuse(self, late_s: float) -> None:
        """Do not count the time that this process was stopped as silence of the engine."""
        if late_s > _STOPPED_S:
            self._beat_at_s = min(self._clock(), self._beat_at_s + late_s)

    async def _listen_to(self, reader: asyncio.StreamReader) -> None:
        """Handle the engine's messages until it closes the link."""
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
        """Start a process. Raises OSError if the system refuses."""
        self._process = process = await self._start_process()
        config = dataclasses.replace(self._config, api_key=None, kv_peer_key=None)
        start = messages.Start(config, self.adapters.begin_engine())
        process.writer.write(encode_frame(start))
        self._beat_at_s = self._clock()
        return process

    async def _stop(self) -> int | None:
        """Close our end, upon which the engine ends itself; kill it if it has not after a second.
        Returns its exit status. Raises EngineFailed if it, or what it started, cannot be ended: the
        next engine would not have the device's memory.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        process.writer.close()
        try:
            try:
                # Not `wait_for`: before Python 3.12 it loses a cancellation in the turn of the end.
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
            self._transfers.on_engine_ready(ready.info, self._tell)
        self._refusal = ""
        self.instance_id = uuid.uuid4().hex
        self.pieces.begin(self.instance_id)
        self.adapters.on_engine_ready(ready.info.adapters)
        self.images.begin_engine()
        info, tokenizer = ready.info, ready.tokenizer_files.get("tokenizer.json")
        if tokenizer is not None and info.capabilities & CONSTRAINT_KINDS:
            self._checker.use(tokenizer, info.vocab_size, info.eos_token_ids)
        self._notify()

    def _tell(self, message: messages.Told) -> None:
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
        """End the live requests as retryable, and mark those that may have killed the engine."""
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
            self._end_route(route, error=messages.Error(Code.UNAVAILABLE, reason, engine_died=True))
        self.end_all("the shard's engine died")
        self._notify()

    def _notify(self) -> None:
        for event in self._listeners:
            event.set()
