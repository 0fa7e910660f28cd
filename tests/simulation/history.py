"""One history: a fleet, its shards, requests and troubles on virtual time, and what must hold.

Every output must be what the fake runner's hash says, whatever happened on the way. Every request
must end, and those of the fleet once. Nothing of a request may be left anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock_client import Fleet, Patience, ShardClient
from penstock_client.audit_log import AuditRecord
from penstock_client.fleet.discovery import DnsSource
from penstock_client.fleet.poison_requests import POISON_DEATHS, SUSPECT_DEATHS
from penstock_client.rpc.generation_stream import GenerationStream
from penstock_proto.errors import (
    DeadlineExceeded,
    NoShardAvailable,
    Overloaded,
    PenstockError,
    PoisonousRequest,
    ShardUnavailable,
)
from penstock_proto.types import (
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    Logprobs,
    Output,
)
from penstock_shard.config import ShardConfig
from penstock_shard.server.kv.transfers import BlockTransfers
from simulation import virtual_time
from simulation.channel import MemoryConnector
from simulation.engine import POISON_ID, EngineKind
from simulation.expected import expected, expected_vectors
from simulation.network import LATENCY_S, Network, Way
from simulation.plan import Arrival, Plan, Trouble
from simulation.scenes import Scenes
from simulation.shard import SimulatedShard
from simulation.virtual_time import Process, VirtualLoop

# After all is calm, how long a request may take: it waits, backs off, and is computed.
_PATIENCE_S = 60.0
_ATTEMPTS = 32
_GRACE_S = 60.0
# Until a client knows that a shard says nothing any more, or cannot be reached.
_NOTICE_S = 10.0
# Until nothing of an ended request is left anywhere: an engine whose machine stood still in one of
# its first steps, for seconds, is not taken to hang in the next before ten times as long.
_SETTLE_S = 90.0


@dataclass
class Outcome:
    """The output of one request, as its reader got it."""

    arrival: Arrival
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    left: bool = False
    vectors: list[list[float]] | None = None
    # True if some output came from other numerics than the output before.
    is_approximate: bool = False
    request_id: str = ""
    over_at_s: float = 0.0

    @property
    def is_over(self) -> bool:
        found = (self.finish_reason, self.error, self.vectors)
        return self.left or any(each is not None for each in found)

    def take(self, output: Output) -> None:
        assert output.first_position == len(self.token_ids), "positions do not follow each other"
        self.token_ids += output.token_ids
        self.logprobs = _joined(self.logprobs, output.logprobs)
        self.prompt_logprobs = _joined(self.prompt_logprobs, output.prompt_logprobs)
        self.finish_reason = output.finish_reason


def _joined(first: Logprobs | None, later: Logprobs | None) -> Logprobs | None:
    if first is None or later is None:
        return first or later
    first.extend(later)
    return first


@dataclass(frozen=True)
class Report:
    """The result of a history: faults, one line each, and some counts."""

    plan: Plan
    faults: tuple[str, ...]
    seconds: float = 0.0
    finished: int = 0
    continued: int = 0


class _Audit:
    """Keeps how often each request ended, and with what seed it was sent."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.seeds: dict[str, int | None] = {}

    def record(self, record: AuditRecord) -> None:
        self.ended[record.request_id] += 1
        self.seeds[record.request_id] = record.request.sampling.seed


class History:
    """A plan as it happens."""

    def __init__(self, loop: VirtualLoop, plan: Plan, tell: Callable[[str], None]) -> None:
        self.plan = plan
        self._loop = loop
        self._tell = tell
        rng = random.Random(f"{plan.seed} network")
        self._network = Network(loop, rng, window_bytes=plan.window_bytes)
        self._router = Process(loop, "router")
        self._audit = _Audit()
        self._events: Counter[str] = Counter()
        self._drains: dict[Trouble, asyncio.Task[None]] = {}
        # Where each trouble is: its shard may move meanwhile.
        self._addresses: dict[Trouble, str] = {}
        self._last_host = 0
        self._shards = [
            SimulatedShard(
                loop,
                self._network,
                self._new_address(),
                plan.config,
                plan.kind,
                self._transfers_at,
            )
            for _ in range(plan.num_shards)
        ]
        # Of callbacks and tasks, where nobody would see them.
        self._exceptions: list[str] = []
        loop.set_exception_handler(self._note_exception)
        # Whether the name of the shards can be looked up.
        self._has_names = True
        self.outcomes = [Outcome(arrival) for arrival in plan.arrivals]
        self._fleet: Fleet = self._router.context.run(self._make_fleet)

    def _transfers_at(self, address: str) -> BlockTransfers | None:
        found = [shard.transfers for shard in self._shards if shard.address == address]
        return found[0] if found else None

    def _note_exception(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None:
            self._exceptions.append(f"{type(error).__name__}: {error}")

    def _new_address(self) -> str:
        """Return a new address. Nothing is ever sent to it: the network is in memory."""
        self._last_host += 1
        return f"127.0.0.{self._last_host}:1"

    async def _resolve(self, name: str, port: int) -> list[Any]:
        if not self._has_names:
            raise OSError("the resolver is down")
        return [(0, 0, 0, "", (shard.address.partition(":")[0], port)) for shard in self._shards]

    def _make_fleet(self) -> Fleet:
        resolve, clock = self._resolve, self._loop.time
        source = DnsSource("shards", 1, 0.5, settle_s=1.0, resolve=resolve, clock=clock)
        return Fleet(
            source,
            connector=MemoryConnector(self._network),
            policy=self.plan.policy,
            patience=Patience(wait_s=_PATIENCE_S, attempts=_ATTEMPTS),
            observe=lambda event, reason: self._events.update([event]),
            audit=self._audit,  # type: ignore[arg-type]
            clock=clock,
        )

    # ---- what happens ----

    async def run(self) -> Report:
        for shard in self._shards:
            shard.start()
        for trouble in self.plan.troubles:
            self._network.at(trouble.at_s, self._begin, trouble)
        readers = [self._router.run(self._read(outcome)) for outcome in self.outcomes]
        limit_s = self.plan.calm_at_s + _PATIENCE_S + _GRACE_S
        await asyncio.wait(readers, timeout=limit_s)
        # So that all troubles are over; a shard may still drain, or start.
        await asyncio.sleep(max(0.0, self.plan.calm_at_s + 0.1 - self._loop.time()))
        await self._settle()
        faults = [*self._failed_readers(readers), *self._wrong_outcomes(), *self._leftovers()]
        if not faults:
            scenes = Scenes(self._network, self._router, self._fleet, self._shards)
            faults = await scenes.play(self.plan.scenes, self._tell)
        closing = self._router.run(self._fleet.close())
        await asyncio.wait([closing], timeout=10.0)
        if not closing.done():
            faults.append("the fleet does not close")
        faults += self._exceptions
        finished = sum(outcome.error is None and not outcome.left for outcome in self.outcomes)
        continued = self._events["continued"] + self._events["moved"]
        return Report(self.plan, tuple(faults), self._loop.time(), finished, continued)

    async def _read(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        await asyncio.sleep(arrival.at_s)
        try:
            if isinstance(arrival.request, EmbeddingRequest):
                outcome.vectors = await self._fleet.embed(arrival.request)
            elif arrival.direct is None:
                stream: GenerationStream = self._fleet.submit(arrival.request)
                await self._read_stream(outcome, stream)
            else:
                address = self._shards[arrival.direct].address
                connector = MemoryConnector(self._network)
                async with ShardClient(
                    address, connector=connector, clock=self._loop.time
                ) as client:
                    await self._read_stream(outcome, client.submit(arrival.request))
        except PenstockError as error:
            outcome.error = error
        outcome.over_at_s = self._loop.time()
        self._tell(f"request {arrival.number} is over: {_ending(outcome)}")

    async def _read_stream(self, outcome: Outcome, stream: GenerationStream) -> None:
        arrival, outcome.request_id = outcome.arrival, stream.request_id
        self._tell(f"request {arrival.number} is {stream.request_id}")
        async with stream:
            await self._take(outcome, stream)
        outcome.is_approximate = stream.approximate

    async def _take(self, outcome: Outcome, stream: GenerationStream) -> None:
        arrival = outcome.arrival
        if arrival.leaves_at == 0:
            outcome.left = True
            return
        async for output in stream:
            outcome.take(output)
            if arrival.leaves_at is not None and len(outcome.token_ids) >= arrival.leaves_at:
                outcome.left = True
                return
            if arrival.pause_s and output.finish_reason is None:
                await asyncio.sleep(arrival.pause_s)

    # ---- troubles ----

    def _begin(self, trouble: Trouble) -> None:
        shard, network = self._shards[trouble.shard], self._network
        address = self._addresses[trouble] = shard.address
        path = network.path(address)
        self._tell(f"{trouble.what} {address} for {trouble.lasts_s:.2f} s")
        match trouble.what:
            case "crash engine":
                if trouble.amount > 0.7:
                    # Somebody has put other files where the model is.
                    shard.kind = self.plan.next_kind
                shard.crash_engine()
            case "hang engine":
                shard.hang_engine(before_step=trouble.amount > 0.7)
            case "kill":
                shard.kill()
            case "stop":
                shard.stop()
            case "stop engine":
                shard.stop_engine()
            case "stop router":
                self._router.stop()
            case "upgrade":
                shard.terminate()
            case "drain":
                self._drains[trouble] = self._router.run(self._drain(trouble))
            case "leave":
                self._router.context.run(self._remove, address)
            case "move":
                shard.kill()
                shard.move(self._new_address())
            case "no names":
                self._has_names = False
            case "cut":
                network.cut(address)
            case "slow":
                path.delay_s = trouble.amount
            case "late":
                path.jitter_s = trouble.amount
            case "double":
                path.doubled = 200
            case "half open":
                network.close_ways(address, {Way.OUT, Way.BACK})
            case "deaf":
                network.close_ways(address, {Way.OUT})
            case "mute":
                network.close_ways(address, {Way.BACK})
            case "refuse":
                path.is_refused = True
                network.cut(address)
            case _:
                raise AssertionError(trouble.what)
        network.at(trouble.at_s + trouble.lasts_s, self._end, trouble)

    def _end_drain(self, trouble: Trouble) -> None:
        """End the call that asked for the drain: it must not reach the shard after this."""
        drain = self._drains.pop(trouble, None)
        if drain is not None:
            drain.cancel()

    def _end(self, trouble: Trouble) -> None:
        shard, network = self._shards[trouble.shard], self._network
        address = self._addresses[trouble]
        path = network.path(address)
        self._tell(f"{trouble.what} {address} is over")
        match trouble.what:
            case "kill" | "move":
                shard.start()
            case "no names":
                self._has_names = True
            case "stop" | "stop engine":
                shard.resume()
            case "stop router":
                self._router.resume()
            case "upgrade" | "drain":
                # A replacement comes when the old one is gone.
                self._end_drain(trouble)
                if trouble.what == "upgrade":
                    shard.kind = self.plan.next_kind
                shard.terminate()
                self._restart(shard)
            case "leave":
                self._router.context.run(self._fleet.add, address)
            case "slow":
                path.delay_s = LATENCY_S
            case "late":
                path.jitter_s = 0.0
            case "double":
                path.doubled = 0
            case "half open" | "deaf" | "mute":
                network.open_ways(address)
            case "refuse":
                path.is_refused = False
            case "crash engine" | "hang engine" | "cut":
                pass
            case _:
                raise AssertionError(trouble.what)

    def _restart(self, shard: SimulatedShard) -> None:
        if shard.is_ending:
            self._network.at(self._loop.time() + 0.1, self._restart, shard)
        else:
            shard.start()

    async def _drain(self, trouble: Trouble) -> None:
        address = self._shards[trouble.shard].address
        for state in self._fleet.shards:
            if state.address == address:
                try:
                    await state.drain()
                except PenstockError as error:
                    self._tell(f"{address} does not drain: {error}")

    def _remove(self, address: str) -> None:
        if any(state.address == address for state in self._fleet.shards):
            self._fleet.remove(address)

    # ---- what must hold ----

    async def _settle(self) -> None:
        ends_s = self._loop.time() + _SETTLE_S
        while self._loop.time() < ends_s and self._leftovers():
            await asyncio.sleep(0.25)

    def _leftovers(self) -> list[str]:
        found = [text for shard in self._shards for text in shard.leftovers()]
        found += [
            f"{state.in_flight} streams are in flight to {state.address}"
            for state in self._fleet.shards
            if state.in_flight
        ]
        return found

    def _failed_readers(self, readers: list[asyncio.Task[None]]) -> list[str]:
        faults = []
        for outcome, reader in zip(self.outcomes, readers, strict=True):
            if not reader.done():
                faults.append(f"{_name(outcome)} never ended")
            elif (error := reader.exception()) is not None:
                faults.append(f"{_name(outcome)}: {type(error).__name__}: {error}")
        return faults

    def _wrong_outcomes(self) -> list[str]:
        faults = []
        for outcome in self.outcomes:
            faults += [f"{_name(outcome)}: {text}" for text in self._wrong_answer(outcome)]
            if outcome.error is not None and not self._may_fail(outcome, outcome.error):
                error = outcome.error
                faults.append(f"{_name(outcome)} failed: {type(error).__name__}: {error}")
            request = outcome.arrival.request
            is_exact = isinstance(request, GenerationRequest) and request.exact
            if is_exact and outcome.is_approximate:
                faults.append(f"{_name(outcome)} went on with other numerics")
            if not outcome.is_over:
                faults.append(f"{_name(outcome)} has no end")
            if not self._is_in_time(outcome):
                faults.append(f"{_name(outcome)} was over at {outcome.over_at_s:.1f} s")
            ends = self._audit.ended[outcome.request_id]
            if outcome.request_id and outcome.arrival.direct is None and ends != 1:
                faults.append(f"{_name(outcome)} ended {ends} times")
        return faults

    def _wrong_answer(self, outcome: Outcome) -> list[str]:
        """Return what is wrong with an answer; nothing if it is right for one of the kinds."""
        found: list[str] = []
        request = self._seeded(outcome)
        for kind in self._kinds:
            found = _differences(outcome, request, kind, self.plan.config)
            if not found:
                break
        return found

    def _seeded(self, outcome: Outcome) -> GenerationRequest | EmbeddingRequest:
        """The request, with the seed that the fleet gave it if it came without."""
        request = outcome.arrival.request
        if isinstance(request, EmbeddingRequest) or request.sampling.seed is not None:
            return request
        sampling = dataclasses.replace(
            request.sampling, seed=self._audit.seeds.get(outcome.request_id)
        )
        return dataclasses.replace(request, sampling=sampling)

    @property
    def _kinds(self) -> list[EngineKind]:
        """The kinds of engines that serve at some time. A whole answer comes from one of them."""
        upgraded = any(
            trouble.what == "upgrade" or (trouble.what == "crash engine" and trouble.amount > 0.7)
            for trouble in self.plan.troubles
        )
        return [self.plan.kind, self.plan.next_kind] if upgraded else [self.plan.kind]

    def _is_in_time(self, outcome: Outcome) -> bool:
        """True if the deadline did not end the request too early, and the request outlived its
        deadline by no more than it takes to notice that a shard is gone.
        """
        request = outcome.arrival.request
        if isinstance(request, EmbeddingRequest) or request.objective.deadline_s is None:
            return True
        if any(trouble.what == "stop router" for trouble in self.plan.troubles):
            return True
        ends_s = outcome.arrival.at_s + request.objective.deadline_s
        is_early = isinstance(outcome.error, DeadlineExceeded) and outcome.over_at_s < ends_s - 0.01
        return not is_early and outcome.over_at_s <= ends_s + _NOTICE_S

    def _may_fail(self, outcome: Outcome, error: BaseException) -> bool:
        """True if the plan may end a request with this error."""
        arrival, request = outcome.arrival, outcome.arrival.request
        if isinstance(request, EmbeddingRequest):
            # An embedding waits for no shard, and three shards are enough.
            return isinstance(error, ShardUnavailable | Overloaded)
        # True if the request may go on only with numerics that not all engines have.
        needs_others = request.exact and not all(kind.is_exact for kind in self._kinds)
        match error:
            case DeadlineExceeded():
                return request.objective.deadline_s is not None
            case PoisonousRequest():
                return self._is_poisoned(request) or self._num_deaths() >= POISON_DEATHS
            case NoShardAvailable():
                # The answer began with weights that no shard has any more.
                return len({kind.weights for kind in self._kinds}) > 1 or needs_others
            case Overloaded() if not outcome.token_ids:
                return self.plan.config.max_queued_requests < self._num_sequences()
            case ShardUnavailable():
                # No client takes the request elsewhere, or none may.
                return arrival.direct is not None or needs_others
            case _:
                return False

    def _num_sequences(self) -> int:
        """An embedding has one for each of its inputs."""
        requests = [arrival.request for arrival in self.plan.arrivals]
        return sum(len(r.inputs) if isinstance(r, EmbeddingRequest) else 1 for r in requests)

    def _num_deaths(self) -> int:
        """Return the number of engines that may die with a request that is not at fault: those that
        troubles end, and those that each poison ends while it is tried with others.
        """
        deaths = ("crash engine", "hang engine", "stop", "stop engine")
        by_trouble = sum(trouble.what in deaths for trouble in self.plan.troubles)
        poisons = sum(self._is_poisoned(arrival.request) for arrival in self.plan.arrivals)
        return by_trouble + SUSPECT_DEATHS * poisons

    def _is_poisoned(self, request: GenerationRequest | EmbeddingRequest) -> bool:
        return isinstance(request, GenerationRequest) and POISON_ID in request.prompt_token_ids


def _differences(
    outcome: Outcome,
    request: GenerationRequest | EmbeddingRequest,
    kind: EngineKind,
    config: ShardConfig,
) -> list[str]:
    """Return the differences between the output and the expected answer. If the output ended early,
    compare it with the beginning of the answer.
    """
    if isinstance(request, EmbeddingRequest):
        equal = outcome.vectors in (None, expected_vectors(request, kind, config))
        return [] if equal else ["its vectors are others"]
    answer = expected(request, kind, config)
    count = len(outcome.token_ids)
    found = []
    if outcome.token_ids != answer.token_ids[:count]:
        found.append(f"tokens {outcome.token_ids} are not {answer.token_ids[:count]}")
    scores = None if answer.logprobs is None else answer.logprobs.first(count)
    if count and outcome.logprobs != scores:
        found.append("its log-probabilities are others")
    if outcome.finish_reason is not None:
        if outcome.finish_reason is not answer.finish_reason or count != len(answer.token_ids):
            found.append(f"it finished with {outcome.finish_reason} after {count} tokens")
        if outcome.prompt_logprobs != answer.prompt_logprobs:
            found.append("the log-probabilities of its prompt are others")
    return found


def _name(outcome: Outcome) -> str:
    return f"request {outcome.arrival.number}"


def _ending(outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"
    reason = "left" if outcome.left else outcome.finish_reason
    return f"{reason} after {len(outcome.token_ids)} tokens"


def run(plan: Plan, tell: Callable[[str, float], None] = lambda text, now_s: None) -> Report:
    """Let a plan happen. `tell` gets what does, and when."""

    async def main(loop: VirtualLoop) -> Report:
        return await History(loop, plan, lambda text: tell(text, loop.time())).run()

    try:
        return virtual_time.run(main, ends_s=plan.calm_at_s + 1000.0)
    except Exception as error:  # noqa: BLE001 - whatever fails, the seed is to be known
        return Report(plan, (f"{type(error).__name__}: {error}",))
