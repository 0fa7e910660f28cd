"""A fleet of simulated shards on one clock, in which real policies choose.

Each shard is a real engine, scheduler and block manager over a simulated device; a policy sees of
them what reports say, as seldom and as late as they come. Requests come by routers in turn, each
with a policy of its own. No sockets, no time of this machine.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import NamedTuple

from support.engines import make_request

from penstock_client.load_balancing.base import (
    MOST_URGENT,
    Candidate,
    Policy,
    Reason,
    work_ahead,
)
from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.load_balancing.prefill_rate import PrefillRate
from penstock_proto.engine_request import EngineRequest
from penstock_proto.facts import ClassLoad
from penstock_proto.types import GenerationRequest, Objective, RequestOutput
from penstock_shard.ipc.messages import Inbox, Retention
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence as EngineSequence
from penstock_shard.server.live_requests import ClassLoads, Route
from simulation.scheduling import Cost, Simulation, linear_cost

# As shards send them, and what a network adds.
_BETWEEN_REPORTS_S = 0.1
_REPORT_DELAY_S = 0.001
_SAMPLE_S = 1.0
# What a simulated device answers.
TOKEN = 7
# What the clock of a run starts at.
_START_S = 1.0

_COST = linear_cost(step_s=0.01, decode_s=0.0001, prompt_token_s=0.0001, key_s=1e-8)
_LIMITS = SchedulerLimits(64, 2048, 1024)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the new tokens of its prompt, and the seconds after the turn before it."""

    new_ids: Sequence[int]
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one user; the prompt of each is all that was said before and what is new."""

    name: str
    start_s: float
    turns: Sequence[Turn]


@dataclass(slots=True)
class Answer:
    """The progress of one request, with times in seconds of the simulated clock."""

    shard: str
    reason: Reason
    arrived_s: float
    prompt_tokens: int
    request_id: str = ""
    cached_tokens: int = 0
    # The time when it first had a place in a step, from when `cached_tokens` is known; None while
    # it is queued.
    started_s: float | None = None
    is_ended: bool = False
    token_times_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """The seconds from arrival to the first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Device:
    """The device of every shard of the fleet. By default it computes 10,000 prompt tokens a second,
    decodes 60 streams at 60 tokens a second each, and caches 160,000 tokens.
    """

    cost: Cost = _COST
    limits: SchedulerLimits = _LIMITS
    num_blocks: int = 10_000
    block_size: int = 16
    retained_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a run."""

    requests: int
    output_tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    inter_token_p99_s: float
    cached_share: float
    imbalance: float
    reasons: dict[Reason, int]


class _Load(NamedTuple):
    """A report of a shard's; tokens and seconds are sums over all steps."""

    classes: Sequence[ClassLoad] = ()
    computed_tokens: int = 0
    seconds: float = 0.0


class _View:
    """A router's knowledge of a shard: the last report, and the requests sent there since."""

    def __init__(self, shard: _Shard) -> None:
        self._shard = shard
        self.load = _Load()
        self.sent: list[ClassLoad] = []
        self.pieces = HeldPieces()
        self.rate = PrefillRate()

    def take(self, load: _Load, changes: Mapping[int, int]) -> None:
        self.load = load
        self.rate.note(load.computed_tokens, load.seconds, self._shard.runner.now_s)
        self.sent.clear()
        for name, tier in changes.items():
            self.pieces.take({tier: [name]})

    def candidate(self, priority: int = 0) -> Candidate:
        tokens, uncached = work_ahead((*self.load.classes, *self.sent), priority)
        address, block_size = self._shard.address, self._shard.block_size
        return Candidate(
            address,
            address,
            tokens,
            block_size,
            pieces=self.pieces,
            uncached_tokens=uncached,
            prefill_tokens_per_s=self.rate.tokens_per_s,
        )


class _Shard:
    """A simulated shard, and what its server holds."""

    def __init__(
        self, address: str, device: Device, started: Callable[[_Shard, Sequence[str]], None]
    ) -> None:
        self.address = address
        simulation = Simulation(
            device.limits,
            device.cost,
            num_blocks=device.num_blocks,
            block_size=device.block_size,
            retained_share=device.retained_share,
            tell_started=partial(started, self),
        )
        self.engine, self.runner = simulation.engine, simulation.runner
        self.scheduler = simulation.scheduler
        self.blocks = simulation.blocks
        self.block_size = simulation.blocks.block_size
        # Tokens whose blocks it was given at the start.
        self.held_tokens = 0
        # Waits for the step in progress, whose outputs come when it is over.
        self.inbox: list[EngineRequest] = []
        self.outputs: list[RequestOutput] = []
        self.routes: dict[str, Route] = {}
        self.classes = ClassLoads()
        self.stepping = False
        self.reported_s = 0.0
        self.report_is_due = False
        # Where pieces are; and what of that was not told yet.
        self.pieces: dict[int, int] = {}
        self.changes: dict[int, int] = {}

    @property
    def num_requests(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self.inbox)

    def load(self) -> _Load:
        """The engine's, and what its server holds for it."""
        load = self.engine.load()
        inbox_tokens = sum(request.num_tokens for request in self.inbox)
        queued_tokens = load.queued_tokens + load.prefill_tokens_left + inbox_tokens
        waiting = load.waiting + len(self.inbox)
        of_all = ClassLoad(MOST_URGENT, load.running, waiting, queued_tokens)
        loads = [
            ClassLoad(each.priority, each.running, each.waiting, each.queued_prompt_tokens)
            for each in self.classes.report(queued_tokens)
        ]
        return _Load(loads or [of_all], load.computed_tokens_total, load.steps_seconds_total)

    def receive(self, request: EngineRequest, now_s: float) -> None:
        """Take a request as a server does."""
        name, tokens = request.request_id, request.num_tokens
        route = Route(name, 1, lambda output: None, tokens, request.priority, now_s)
        self.routes[name] = route
        self.classes.add(route)
        self.inbox.append(request)

    def start(self, name: str, now_s: float) -> None:
        """Count a request as running."""
        route = self.routes[name]
        self.classes.start(route)
        route.started_s = now_s

    def count(self, output: RequestOutput) -> None:
        """Count what a request gave, and its end."""
        route = self.routes[output.request_id]
        if output.token_ids and not route.num_given:
            self.classes.end_prompt(route)
        route.num_given += len(output.token_ids)
        if output.is_last:
            self.classes.remove(self.routes.pop(output.request_id))

    def hold(self, sequence: EngineSequence) -> None:
        """Have it cached, as if it had been computed."""
        num_found = self.blocks.acquire_prefix(sequence)
        assert self.blocks.grow(sequence, max(num_found, sequence.num_tokens)), "too long"
        sequence.num_computed = sequence.num_tokens
        self.blocks.cache_full_blocks([sequence])
        self.blocks.forget(sequence)

    def take_changes(self) -> dict[int, int]:
        changes, self.changes = self.changes, {}
        self.pieces |= changes
        return changes


class _Talk:
    """A conversation in progress."""

    def __init__(self, conversation: Conversation) -> None:
        self.name = conversation.name
        self.turns = iter(conversation.turns)
        self.history: list[int] = []


def _filled(candidate: Candidate, tokens: int) -> Candidate:
    """A shard as if what it holds were what it has to do."""
    return dataclasses.replace(candidate, load_tokens=tokens, uncached_tokens=tokens)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest that is no less than this share of the values; `values` is not empty."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class SimulatedFleet:
    """Runs conversations over shards that a policy chooses among, at each of several routers."""

    def __init__(
        self,
        num_shards: int,
        policy: Callable[[], Policy],
        device: Device | None = None,
        *,
        routers: int = 1,
        tells_pieces: bool = True,
    ) -> None:
        """`tells_pieces`: shards tell which pieces of prefixes they hold; older releases do not."""
        device = device or Device()
        self._shards = {f"s{i}": _Shard(f"s{i}", device, self._started) for i in range(num_shards)}
        self._new_policy = policy
        self._tells_pieces = tells_pieces
        self._policies: list[Policy] = []
        self._views: list[dict[str, _View]] = []
        for number in range(routers):
            self._policies.append(policy())
            self._views.append({})
            self.start_router(number)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = itertools.count()
        self._requests: dict[str, tuple[Answer, Callable[[Answer], None]]] = {}
        self.started_s = self.now_s = _START_S
        self.answers: list[Answer] = []
        # Samples, one a second: the requests on the busiest shard, and on all shards.
        self.samples: list[tuple[int, int]] = []

    def start_router(self, number: int) -> None:
        """Start a router anew. It knows nothing but what the shards tell."""
        self._policies[number] = self._new_policy()
        views = self._views[number] = {a: _View(shard) for a, shard in self._shards.items()}
        for view, shard in zip(views.values(), self._shards.values(), strict=True):
            view.take(shard.load(), shard.pieces)

    def restart_router(self, number: int, at_s: float) -> None:
        """Have it start anew after so many seconds."""
        self._at(_START_S + at_s, partial(self.start_router, number))

    def run(
        self, conversations: Iterable[Conversation], progress: Callable[[float], None] | None = None
    ) -> list[Answer]:
        """Run the conversations until all have ended, and return the answers. `progress` gets the
        simulated time in seconds, once a second.
        """
        for conversation in conversations:
            talk = _Talk(conversation)
            self._at(_START_S + conversation.start_s, partial(self._next_turn, talk))
        self.run_until(math.inf, progress)
        return self.answers

    def run_until(self, ends_s: float, progress: Callable[[float], None] | None = None) -> None:
        """Run until all conversations have ended, or until `ends_s` simulated seconds are over."""
        self._at(_START_S, partial(self._sample, progress))
        while self._events and self._events[0][0] <= _START_S + ends_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done so much later."""
        self._at(self.now_s + seconds, action)

    def summary(self, seconds: float) -> Summary:
        """Return the summary of all answers. The rate of tokens is taken over the first `seconds`,
        in which requests came.
        """
        answers = self.answers
        firsts = [answer.first_token_s for answer in answers]
        times_s = [time_s for answer in answers for time_s in answer.token_times_s]
        return Summary(
            requests=len(answers),
            output_tokens_per_s=sum(t <= _START_S + seconds for t in times_s) / seconds,
            first_token_p50_s=percentile(firsts, 0.5),
            first_token_p99_s=percentile(firsts, 0.99),
            inter_token_p99_s=percentile([gap for a in answers for gap in a.gaps_s], 0.99),
            cached_share=sum(a.cached_tokens for a in answers)
            / sum(a.prompt_tokens for a in answers),
            imbalance=self.imbalance(),
            reasons=dict(Counter(answer.reason for answer in answers)),
        )

    def imbalance(self, from_s: float = 0.0) -> float:
        """Return the busiest shard's requests over the mean shard's, averaged from `from_s` on over
        the seconds with at least as many requests as shards.
        """
        count, samples = len(self._shards), self.samples[math.ceil(from_s / _SAMPLE_S) :]
        busy = [most * count / total for most, total in samples if total >= count]
        return mean(busy) if busy else 1.0

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._num_events), action))

    def _sample(self, progress: Callable[[float], None] | None) -> None:
        counts = [shard.num_requests for shard in self._shards.values()]
        self.samples.append((max(counts), sum(counts)))
        if progress is not None:
            progress(self.now_s - _START_S)
        if self._events:
            self._at(self.now_s + _SAMPLE_S, partial(self._sample, progress))

    # ---- requests ----

    def _next_turn(self, talk: _Talk) -> None:
        turn = next(talk.turns, None)
        if turn is not None:
            self.after(turn.think_s, partial(self._ask, talk, turn))

    def _ask(self, talk: _Talk, turn: Turn) -> None:
        prompt = [*talk.history, *turn.new_ids]
        talk.history = [*prompt, *([TOKEN] * turn.output_tokens)]
        self.submit(prompt, turn.output_tokens, talk.name, lambda answer: self._next_turn(talk))

    def submit(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        session: str,
        ended: Callable[[Answer], None],
        priority: int = 0,
    ) -> Answer:
        """Send a request to the shard that the policy chooses; `ended` is called when it has all
        its tokens, which are `TOKEN`.
        """
        request = GenerationRequest(prompt, max_tokens=output_tokens, session=session)
        number = len(self.answers) % len(self._policies)
        views = self._views[number]
        candidates = [view.candidate(priority) for view in views.values()]
        decision = self._policies[number].choose(candidates, request, session)
        shard, view = self._shards[decision.address], views[decision.address]
        view.sent.append(ClassLoad(priority, 0, 1, len(prompt) - decision.held_tokens))
        name = str(len(self.answers))
        answer = Answer(shard.address, decision.reason, self.now_s, len(prompt), name)
        self.answers.append(answer)
        self._requests[name] = (answer, ended)
        objective = Objective(priority) if priority else None
        shard.receive(
            make_request(name, prompt, max_tokens=output_tokens, objective=objective), self.now_s
        )
        self._changed(shard)
        if not shard.stepping:
            self._step(shard)
        return answer

    @property
    def preemptions(self) -> int:
        """The number of times that a sequence was put down, at all shards."""
        return sum(shard.scheduler.preemptions_total for shard in self._shards.values())

    def retain(self, answer: Answer, seconds: float) -> None:
        """Have a shard retain the blocks of a request that has ended there."""
        retention = Retention(answer.request_id, seconds)
        self._shards[answer.shard].engine.take_blocks(Inbox([], [], retentions=[retention]))

    def hold(self, tokens: Sequence[int], session: str) -> None:
        """Have a shard hold these tokens' blocks from the start, as if it had computed them: that
        which the policy chooses where the load is what was placed so. Routers are told by reports.
        """
        request = GenerationRequest(tokens, session=session)
        policy, views = self._policies[0], self._views[0]
        candidates = [
            _filled(view.candidate(), self._shards[address].held_tokens)
            for address, view in views.items()
        ]
        shard = self._shards[policy.choose(candidates, request, session).address]
        shard.held_tokens += len(tokens)
        shard.hold(EngineSequence.of(make_request("held", tokens)))

    def _started(self, shard: _Shard, names: Sequence[str]) -> None:
        for name in names:
            answer, sequence = self._requests[name][0], shard.engine.find(name)
            assert sequence is not None
            answer.started_s, answer.cached_tokens = self.now_s, sequence.cached_tokens or 0
            shard.start(name, self.now_s)

    def _take(self, output: RequestOutput) -> None:
        answer, ended = self._requests[output.request_id]
        answer.token_times_s += [self.now_s] * len(output.token_ids)
        self._shards[answer.shard].count(output)
        if output.is_last:
            assert output.error is None, output.error
            answer.is_ended = True
            del self._requests[output.request_id]
            ended(answer)

    # ---- shards ----

    def _step(self, shard: _Shard) -> None:
        """A step is over, or a request has come to an idle shard: the next one begins."""
        outputs, shard.outputs = shard.outputs, []
        for output in outputs:
            self._take(output)
        if self._tells_pieces:
            shard.changes |= shard.engine.take_changed_pieces()
        shard.runner.now_s = self.now_s
        for request in shard.inbox:
            shard.engine.submit(request)
        shard.inbox.clear()
        shard.stepping = shard.engine.has_work
        if shard.stepping:
            shard.outputs = shard.engine.step()
            self._at(shard.runner.now_s, partial(self._step, shard))
        self._changed(shard)

    def _changed(self, shard: _Shard) -> None:
        if not shard.report_is_due:
            shard.report_is_due = True
            due_s = max(self.now_s, shard.reported_s + _BETWEEN_REPORTS_S)
            self._at(due_s, partial(self._report, shard))

    def _report(self, shard: _Shard) -> None:
        shard.report_is_due = False
        shard.reported_s = self.now_s
        report = partial(self._reported, shard.address, shard.load(), shard.take_changes())
        self._at(self.now_s + _REPORT_DELAY_S, report)

    def _reported(self, address: str, load: _Load, changes: Mapping[int, int]) -> None:
        for views in self._views:
            views[address].take(load, changes)
