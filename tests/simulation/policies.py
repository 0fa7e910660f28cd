"""A fleet of simulated shards on one clock, in which real policies choose.

Each shard is a real engine, scheduler and block manager over a simulated device; a policy sees of
them what reports say, as seldom and as late as they come. Requests come by routers in turn, each
with a policy of its own. No sockets, no time of this machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

from support.engines import make_request

from penstock_client.load_balancing.base import Candidate, Policy, Reason, load_tokens
from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.types import GenerationRequest
from penstock_shard.ipc.messages import Output
from penstock_shard.ipc.request import Request
from penstock_shard.scheduler.step_budget import SchedulerLimits
from simulation.scheduling import Cost, Simulation, linear_cost

# As shards send them, and what a network adds.
_BETWEEN_REPORTS_S = 0.1
_REPORT_DELAY_S = 0.001
_SAMPLE_S = 1.0
# What a simulated device answers, and what its clock starts at.
_TOKEN = 7
_START_S = 1.0

_COST = linear_cost(step_s=0.01, decode_s=0.0001, prompt_token_s=0.0001, key_s=1e-8)
_LIMITS = SchedulerLimits(64, 2048, 1024)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: what is new in its prompt, and how long after the turn before it comes."""

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
    """What became of one request, in seconds of the simulated clock."""

    shard: str
    reason: Reason
    arrived_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    token_times_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """How long it waited for its first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Device:
    """What every shard of the fleet is: by default one that computes 10,000 prompt tokens a second,
    decodes 60 streams at 60 tokens a second each, and caches 160,000 tokens.
    """

    cost: Cost = _COST
    limits: SchedulerLimits = _LIMITS
    num_blocks: int = 10_000


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to. `imbalance` is how many requests the busiest shard had for each that the
    mean shard had, over the seconds in which there was one for each shard at least.
    """

    requests: int
    output_tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    inter_token_p99_s: float
    cached_share: float
    imbalance: float
    reasons: dict[Reason, int]


class _View:
    """What a router knows of a shard: what it was told, and what it sent there since."""

    def __init__(self, shard: _Shard) -> None:
        self._shard = shard
        self.load = (0, 0, 0)
        self.sent_requests = 0
        self.sent_prompt_tokens = 0
        self.pieces = HeldPieces()

    def take(self, load: tuple[int, int, int], changes: Mapping[int, int]) -> None:
        self.load = load
        self.sent_requests = self.sent_prompt_tokens = 0
        for name, tier in changes.items():
            self.pieces.take({tier: [name]})

    def candidate(self) -> Candidate:
        running, waiting, queued = self.load
        num_requests = running + waiting + self.sent_requests
        tokens = load_tokens(num_requests, queued + self.sent_prompt_tokens)
        address, block_size = self._shard.address, self._shard.block_size
        return Candidate(address, address, tokens, block_size, pieces=self.pieces)


class _Shard:
    """A simulated shard, and what its server holds."""

    def __init__(self, address: str, device: Device) -> None:
        self.address = address
        simulation = Simulation(device.limits, device.cost, num_blocks=device.num_blocks)
        self.engine, self.runner = simulation.engine, simulation.runner
        self.scheduler = simulation.scheduler
        self.block_size = simulation.blocks.block_size
        # Waits for the step in progress, whose outputs come when it is over.
        self.inbox: list[Request] = []
        self.outputs: list[Output] = []
        self.stepping = False
        self.reported_s = 0.0
        self.report_is_due = False
        # Where pieces are; and what of that was not told yet.
        self.pieces: dict[int, int] = {}
        self.changes: dict[int, int] = {}

    @property
    def num_requests(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self.inbox)

    def load(self) -> tuple[int, int, int]:
        """Running, waiting, queued tokens: the engine's, and what its server holds for it."""
        load = self.engine.load()
        inbox_tokens = sum(request.num_tokens for request in self.inbox)
        queued_tokens = load.queued_tokens + load.prefill_tokens_left + inbox_tokens
        return load.running, load.waiting + len(self.inbox), queued_tokens

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
        """Without `tells_pieces` shards are of an older release, which does not."""
        device = device or Device()
        self._shards = {f"s{i}": _Shard(f"s{i}", device) for i in range(num_shards)}
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
        self._requests: dict[str, tuple[_Talk, Answer]] = {}
        self.now_s = _START_S
        self.answers: list[Answer] = []
        # Once a second: requests on the busiest shard, and on all of them.
        self.samples: list[tuple[int, int]] = []

    def start_router(self, number: int) -> None:
        """It knows nothing but what shards tell."""
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
        """Until all have ended. `progress` is told the simulated time in seconds, once a second."""
        for conversation in conversations:
            talk = _Talk(conversation)
            self._at(_START_S + conversation.start_s, partial(self._next_turn, talk))
        self._at(_START_S, partial(self._sample, progress))
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        return self.answers

    def summary(self, seconds: float) -> Summary:
        """Of all answers; the rate of tokens is that of the first `seconds`, when requests came."""
        answers, num_shards = self.answers, len(self._shards)
        firsts = [answer.first_token_s for answer in answers]
        times_s = [time_s for answer in answers for time_s in answer.token_times_s]
        busy = [most * num_shards / total for most, total in self.samples if total >= num_shards]
        return Summary(
            requests=len(answers),
            output_tokens_per_s=sum(t <= _START_S + seconds for t in times_s) / seconds,
            first_token_p50_s=percentile(firsts, 0.5),
            first_token_p99_s=percentile(firsts, 0.99),
            inter_token_p99_s=percentile([gap for a in answers for gap in a.gaps_s], 0.99),
            cached_share=sum(a.cached_tokens for a in answers)
            / sum(a.prompt_tokens for a in answers),
            imbalance=mean(busy) if busy else 1.0,
            reasons=dict(Counter(answer.reason for answer in answers)),
        )

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
            self._at(self.now_s + turn.think_s, partial(self._submit, talk, turn))

    def _submit(self, talk: _Talk, turn: Turn) -> None:
        prompt = [*talk.history, *turn.new_ids]
        talk.history = [*prompt, *([_TOKEN] * turn.output_tokens)]
        request = GenerationRequest(prompt, max_tokens=turn.output_tokens)
        number = len(self.answers) % len(self._policies)
        views = self._views[number]
        candidates = [view.candidate() for view in views.values()]
        decision = self._policies[number].choose(candidates, request, talk.name)
        shard, view = self._shards[decision.address], views[decision.address]
        view.sent_requests += 1
        view.sent_prompt_tokens += len(prompt)
        answer = Answer(shard.address, decision.reason, self.now_s, len(prompt))
        name = str(len(self.answers))
        self.answers.append(answer)
        self._requests[name] = (talk, answer)
        shard.inbox.append(make_request(name, prompt, max_tokens=turn.output_tokens))
        self._changed(shard)
        if not shard.stepping:
            self._step(shard)

    def _take(self, output: Output) -> None:
        talk, answer = self._requests[output.request_id]
        answer.token_times_s += [self.now_s] * len(output.token_ids)
        if output.cached_tokens is not None:
            answer.cached_tokens = output.cached_tokens
        if output.is_last:
            del self._requests[output.request_id]
            self._next_turn(talk)

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

    def _reported(
        self, address: str, load: tuple[int, int, int], changes: Mapping[int, int]
    ) -> None:
        for views in self._views:
            views[address].take(load, changes)
