"""A shard of a fleet: what is known of it, and the task that keeps that up to date.

Owns the shard's client, its circuit breaker and the count of what was sent to it. Does not follow
requests; of other shards it knows only which model a name means.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Collection

from penstock_client.fleet.circuit_breaker import CircuitBreaker
from penstock_client.fleet.outage import Outage
from penstock_client.load_balancing.base import MOST_URGENT, Candidate, work_ahead
from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.load_balancing.prefill_rate import PrefillRate
from penstock_client.rpc.shard_client import ShardClient
from penstock_common.clock import Clock
from penstock_common.tasks import run_lasting
from penstock_proto.errors import (
    IncompatibleShard,
    InvalidRequest,
    PenstockError,
    ShardUnavailable,
)
from penstock_proto.facts import ClassLoad, LoadReport, ShardInfo
from penstock_proto.transport import (
    CLOSES_AT_ONCE,
    CONNECTION_REFUSED,
    HOST_SILENT,
    HOST_UNKNOWN,
    HOST_UNREACHABLE,
    Connector,
    names_cause,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.25
# If a timeout fires this much too late, this process itself was stopped meanwhile.
_STOPPED_S = 0.5
# The schema revision from which on shards tell their load by class.
_TELLS_CLASSES = 15
# Reports come once a second at least.
_NEXT_REPORT_S = 1.5
# The problem of a shard that is gone as it said it would be.
_SHUT_DOWN = "shut down after its drain"
# What is seen then of its port, or of a host that went with it.
_NOTHING_THERE = (CONNECTION_REFUSED, HOST_SILENT, HOST_UNREACHABLE, HOST_UNKNOWN)
# Whoever could connect before has no reason to think of how TLS is set up.
_CLOSES_NOW = (
    "it closes connections at once, which it did not before: another process answers in its place, "
    "or it refuses our certificate"
)


class ShardState:
    """The state of a shard as far as it is known. Only the fleet changes it."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        connector: Connector | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.client = ShardClient(address, api_key=api_key, connector=connector, clock=clock)
        self.info: ShardInfo | None = None
        # The last `info`, kept while the shard is away.
        self.last_info: ShardInfo | None = None
        self.load = LoadReport()
        self.problem = "not connected yet"
        # Whether it reports, even if it does not serve.
        self.connected = False
        self.breaker = CircuitBreaker()
        # What was sent since the last report, by class.
        self.sent: dict[int, ClassLoad] = {}
        # Whether it is leaving the fleet; requests on it may finish.
        self.leaving = False
        # What its engine holds; who follows that keeps it up to date.
        self.pieces = HeldPieces()
        self._clock = clock
        self._rate = PrefillRate()
        self._candidates: dict[int, Candidate] = {}
        self._candidates_made_of: tuple[object, ...] = ()
        # What candidates are made of: loads by class, and which classes these are.
        self._loads: tuple[ClassLoad, ...] = ()
        self._classes: list[int] = []

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def ready(self) -> bool:
        """Tell whether it serves, and takes new requests."""
        load = self.load
        return self.info is not None and load.serving and not load.draining and not self.leaving

    @property
    def handing_over(self) -> bool:
        """Tell whether it wants its requests moved to other shards."""
        return self.leaving or self.load.handing_over

    @property
    def in_flight(self) -> int:
        """The number of this client's requests that run on it."""
        return self.client.in_flight

    @property
    def half_full(self) -> bool:
        """Tell whether most of its KV blocks are in use."""
        return 2 * self.load.referenced_blocks > self.load.num_blocks

    def candidate(self, priority: int = 0) -> Candidate:
        """The shard as a policy sees it for a request of this class; only if its `info` is
        known.
        """
        # Cached until something changes: each request asks for this, of perhaps hundreds of shards.
        made_of = (self.info, self.load, self.pieces)
        if made_of != self._candidates_made_of or not self._candidates:
            self._candidates.clear()
            self._candidates_made_of = made_of
            self._loads = (*self._reported_loads(), *self.sent.values())
            self._classes = sorted({load.priority for load in self._loads})
        # Priorities between two known ones see the same.
        place = bisect_right(self._classes, priority)
        candidate = self._candidates.get(place)
        if candidate is None:
            candidate = self._candidates[place] = self._new_candidate(priority)
        return candidate

    def _reported_loads(self) -> tuple[ClassLoad, ...]:
        """The load by class as the shard last reported it."""
        load, info = self.load, self.info
        # An older shard tells of no classes: its load counts for all.
        tells = info is not None and info.schema_revision >= _TELLS_CLASSES
        priority = 0 if tells else MOST_URGENT
        all_ = ClassLoad(priority, load.running, load.waiting, load.queued_prompt_tokens)
        return load.classes or (all_,)

    def _new_candidate(self, priority: int) -> Candidate:
        info = self.info
        assert info is not None
        tokens, uncached = work_ahead(self._loads, priority)
        return Candidate(
            self.address,
            info.instance_id,
            tokens,
            info.block_size,
            info.weights_hash,
            {name: adapter.content_hash for name, adapter in info.adapters.items()},
            self.pieces,
            uncached,
            self._rate.tokens_per_s,
        )

    async def drain(self) -> None:
        """Ask it to drain: to admit nothing more and hand its requests over to other shards.

        Returns when it has begun; raises `ShardUnavailable` and others.
        """
        progress = self.client.drain(hand_over=True)
        try:
            await anext(progress)
        finally:
            await progress.aclose()

    def record_sent(
        self, num_tokens: int, now_s: float, priority: int = 0, num_requests: int = 1
    ) -> None:
        """Count what was sent and is not in a report yet: requests of a class, and tokens of
        prompts that the shard does not hold.
        """
        self.breaker.record_sent(now_s)
        before = self.sent.get(priority, ClassLoad(priority))
        waiting, tokens = before.waiting + num_requests, before.queued_prompt_tokens + num_tokens
        self.sent[priority] = ClassLoad(priority, 0, waiting, tokens)
        self._candidates.clear()

    def update_info(self, info: ShardInfo) -> set[str]:
        """Take the shard's info; returns the names of adapters that it unloaded."""
        before, self.info, self.last_info = self.last_info, info, info
        self.pieces_of(info.instance_id)
        if before is None or before.instance_id != info.instance_id:
            return set()
        return before.adapters.keys() - info.adapters.keys()

    def pieces_of(self, instance_id: str) -> HeldPieces:
        """Pieces that this engine of it holds: another one begins with nothing."""
        if self.pieces.instance_id != instance_id:
            self.pieces = HeldPieces(instance_id)
        return self.pieces

    def forget_adapter(self, model: str, name: str) -> None:
        """Stop expecting a shard that is away to return with this adapter of the model."""
        last = self.last_info
        if self.info is None and last is not None and last.model == model:
            left = {other: last.adapters[other] for other in last.adapters if other != name}
            self.last_info = dataclasses.replace(last, adapters=left)

    def update_load(self, load: LoadReport) -> None:
        """Take a report. It counts all that the shard's server has received; so count from 0."""
        self.load = load
        self._rate.note(load.computed_tokens_total, load.steps_seconds_total, self._clock())
        self.sent.clear()
        self._candidates.clear()


def serving(
    shards: Collection[ShardState], model: str, tokenizer_hash: str = ""
) -> list[ShardState]:
    """The ready shards that serve the model of this name with this tokenizer ("" is any)."""
    own_name = _own_name(shards, model) if model else ""
    return [
        shard
        for shard in shards
        if shard.ready
        and shard.info is not None
        and own_name in ("", shard.info.model)
        and tokenizer_hash in ("", shard.info.tokenizer_hash)
    ]


def check_served(shards: Collection[ShardState], model: str) -> None:
    """Raises `InvalidRequest` if shards are ready and none serves the model of this name."""
    served = {shard.info.model for shard in shards if shard.ready and shard.info is not None}
    if served and not serving(shards, model):
        raise InvalidRequest(
            f"model {model!r} is not served; served: {', '.join(sorted(served))}",
            field="model",
            value=model,
        )


def known_infos(shards: Collection[ShardState], model: str) -> list[ShardInfo]:
    """The last infos of the shards that serve the model of this name, or may when they return."""
    own_name = _own_name(shards, model) if model else ""
    infos = (shard.last_info for shard in shards if not shard.leaving)
    return [info for info in infos if info is not None and own_name in ("", info.model)]


def _own_name(shards: Collection[ShardState], name: str) -> str:
    """The own name of the model that `name` means: own names take precedence over aliases, and an
    alias that models share means the first one.
    """
    if any(shard.info is not None and shard.info.model == name for shard in shards):
        return name
    for shard in shards:
        if shard.ready and shard.info is not None and name in shard.info.model_aliases:
            return shard.info.model
    return name


class ShardWatch:
    """Follows one shard for as long as it belongs to the fleet."""

    def __init__(
        self,
        shard: ShardState,
        stall_timeout_s: float,
        learned: Callable[[ShardState, ShardInfo], None],
        changed: Callable[[ShardState], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """`learned` is called with each new info of the shard, `changed` when anything changed that
        matters to requests.
        """
        self.shard = shard
        self._stall_timeout_s = stall_timeout_s
        self._learned = learned
        self._changed = changed
        self._clock = clock
        self._outage = Outage()
        # The revision of adapters that `info` shows, and whether `changed` is still to be called.
        self._adapters_revision = 0
        self._has_new_adapters = False
        watching = run_lasting(self._watch, f"the watch of shard {shard.address}")
        self._task = asyncio.get_running_loop().create_task(watching)

    async def close(self) -> None:
        """Stop watching and end every stream and the connection."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self.shard.client.close()

    async def _watch(self) -> None:
        while True:
            started_s = self._clock()
            problem: PenstockError | TimeoutError
            problem = ShardUnavailable("watching it failed, as the log says")
            try:
                await self._follow()
            except (PenstockError, TimeoutError) as error:
                problem = error
            except asyncio.CancelledError:
                if self._task.cancelling():
                    raise
                # gRPC cancels a call whose channel was closed.
                problem = ShardUnavailable("the connection was closed")
            finally:
                # Whatever went wrong: a shard that nobody watches counts as down.
                if not self._task.cancelling():
                    self._lost(problem)
            # Retry a shard that refuses at once a few times a second, not thousands.
            await asyncio.sleep(max(0.0, _RETRY_S - (self._clock() - started_s)))

    async def _follow(self) -> None:
        """Take load reports until they end; get the info whenever the engine is new."""
        shard = self.shard
        reports = shard.client.watch_load()
        try:
            while True:
                load = await self._next_report(reports)
                known = shard.info.instance_id if shard.info is not None else ""
                is_new = load.serving and load.instance_id != known
                changed = load.serving and load.adapters_revision != self._adapters_revision
                if is_new or changed:
                    self._learned(shard, await shard.client.info(timeout_s=self._stall_timeout_s))
                    self._adapters_revision = load.adapters_revision
                    self._has_new_adapters = True
                if is_new:
                    shard.breaker.reset()
                self._note(load)
        except StopAsyncIteration:
            raise ShardUnavailable(f"shard {shard.address} ended its load reports") from None
        finally:
            await reports.aclose()

    async def _next_report(self, reports: AsyncGenerator[LoadReport, None]) -> LoadReport:
        """Raises `TimeoutError` when the shard says nothing for too long."""
        report = asyncio.ensure_future(anext(reports))
        timeout_s = self._stall_timeout_s
        try:
            while True:
                asked_at_s = self._clock()
                if (await asyncio.wait({report}, timeout=timeout_s))[0]:
                    return report.result()
                # If this process was stopped itself, the shard may have reported all the time: the
                # next report tells.
                if self._clock() - asked_at_s - timeout_s < _STOPPED_S:
                    raise TimeoutError
                timeout_s = min(self._stall_timeout_s, _NEXT_REPORT_S)
        finally:
            if report.cancel():
                await asyncio.wait({report})

    def _note(self, load: LoadReport) -> None:
        shard = self.shard
        before = (shard.ready, shard.handing_over)
        shard.update_load(load)
        if not shard.connected:
            shard.connected = True
            self._outage = Outage()
        if shard.ready:
            shard.problem = ""
        else:
            shard.problem = "draining" if load.draining else "its engine is not serving"
        is_news = (shard.ready, shard.handing_over) != before
        if is_news:
            logger.info("shard %s: %s", shard.address, shard.problem or "ready")
        if is_news or self._has_new_adapters:
            self._has_new_adapters = False
            self._changed(shard)

    def _problem_of(self, error: PenstockError | TimeoutError) -> str:
        shard = self.shard
        problem = str(error) or f"no load report for {self._stall_timeout_s:g} s"
        problem = problem.removeprefix(f"shard {shard.address}: ")
        # Whatever gRPC says of it; once the process has ended, its port refuses connections.
        ended = shard.load.draining and isinstance(error, ShardUnavailable)
        if ended or (self._outage.problem == _SHUT_DOWN and problem in _NOTHING_THERE):
            return _SHUT_DOWN
        if problem == CLOSES_AT_ONCE and shard.last_info is not None:
            return _CLOSES_NOW
        return problem

    def _lost(self, error: PenstockError | TimeoutError) -> None:
        """The shard is gone, or does not report: fail its requests, so they go on elsewhere."""
        shard = self.shard
        problem = self._problem_of(error)
        is_cause = names_cause(problem) or not isinstance(error, ShardUnavailable | TimeoutError)
        if self._outage.take(problem, self._clock(), names_cause=is_cause):
            level = logging.ERROR if isinstance(error, IncompatibleShard) else logging.WARNING
            level = logging.INFO if problem == _SHUT_DOWN else level
            logger.log(level, "shard %s: %s", shard.address, problem)
        was_connected, shard.connected = shard.connected, False
        shard.problem = self._outage.problem
        shard.info = None
        shard.load = LoadReport()
        shard.client.give_up_call(problem)
        # One that is still away is no news: a fleet may have hundreds, each tried again and again.
        if was_connected:
            self._changed(shard)
