"""Agents at simulated shards: real engines, caches and policies, on a virtual clock.

The device is an estimate of an H200 with Llama-3.3-70B, with weights, keys and values in 8 bits.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from simulation.policies import TOKEN, Answer, Device, SimulatedFleet
from simulation.scheduling import Cost

from benchmarks.agents_bench.figures import Figures, Request, figures_of
from benchmarks.agents_bench.found import found_by_all, known_after, steps_of
from benchmarks.agents_bench.trace import Habits, Session, Text, Turn, samples, token_ids
from penstock_client.load_balancing.base import Candidate, Decision, Policy
from penstock_client.load_balancing.policies import make_policy
from penstock_proto.types import GenerationRequest
from penstock_router.generation.tool_pauses import ToolPauses
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.base import Batch

# A rule beside the client package's policies.
ONE_SHARD = "one-shard"
# For requests that do not come from agents.
_OTHERS_ID = 2**31
_OTHERS_TOKENS = 4000
_OTHERS_ANSWER_TOKENS = 50
# Sessions in the estimate of the capacity.
_SAMPLED = 400


@dataclass(frozen=True, slots=True)
class Gpu:
    """The device of each shard. A step reads 70 GB at 4.8 TB/s (15 ms), and takes 5 ms more. A
    prompt token takes 141 GFLOP at 890 TFLOP/s. A token's keys and values have 163,840 bytes. Each
    later decode reads them (34 ns); each later token of the prompt attends to them (2.6 MFLOP, 2.9
    ns). 320,000 tokens fit beside the weights.
    """

    step_s: float = 0.020
    decode_s: float = 0.0002
    prompt_token_s: float = 0.00016
    decode_key_s: float = 34e-9
    prompt_key_s: float = 2.9e-9
    kv_tokens: int = 320_000
    # Larger than usual, to save time; policies see pieces of 128 tokens anyway.
    block_size: int = 128
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    retained_share: float = 0.5

    def device(self) -> Device:
        """Make the simulated device. Its scheduler has the shard's default limits."""
        most = self.max_num_batched_tokens
        limits = SchedulerLimits(self.max_num_seqs, most, most // 2)
        num_blocks = self.kv_tokens // self.block_size
        return Device(self._cost(), limits, num_blocks, self.block_size, self.retained_share)

    def _cost(self) -> Cost:
        def cost(batch: Batch) -> float:
            seconds = self.step_s
            for start, count in zip(batch.starts, batch.counts, strict=True):
                if count == 1:
                    seconds += self.decode_s + self.decode_key_s * start
                else:
                    seconds += self.prompt_s(start, count)
            return seconds

        return cost

    def prompt_s(self, start: int, count: int) -> float:
        """Compute the seconds that `count` prompt tokens from `start` on add to a step."""
        return count * (self.prompt_token_s + self.prompt_key_s * (start + count / 2))


# ---- Capacity ------------------------------------------------------------------------------------


def capacity(habits: Habits, gpu: Gpu, shards: int, seed: int = 0) -> float:
    """Return the sessions a second that keep shards busy, if each shard finds all that any has
    computed, work is spread evenly, and as many streams decode together as KV memory holds.
    """
    steps = [step for each in samples(habits, _SAMPLED, seed) for step in steps_of(each)]
    answered = sum(step.turn.answer_tokens for step in steps)
    lengths = sum(step.turn.answer_tokens * step.mean_tokens for step in steps)
    together = min(gpu.max_num_seqs, gpu.kv_tokens * answered / lengths)
    seconds = answered * (gpu.step_s / together + gpu.decode_s) + lengths * gpu.decode_key_s
    for step in steps:
        found = found_by_all(step.known_tokens, step.prompt_tokens, gpu.block_size)
        seconds += gpu.prompt_s(found, step.prompt_tokens - found)
    return shards * _SAMPLED / seconds


# ---- Agents --------------------------------------------------------------------------------------


class Agents:
    """A fleet that gets sessions, and the results of their requests."""

    def __init__(
        self,
        fleet: SimulatedFleet,
        trace: Sequence[Session],
        block_size: int,
        unnamed: bool = False,
        tool_pause_s: float | None = None,
    ) -> None:
        self.fleet = fleet
        self.pauses = ToolPauses(tool_pause_s, clock=lambda: fleet.now_s)
        self._unnamed = unnamed
        self.sent: list[tuple[Answer, int]] = []
        # Ended sessions.
        self.num_ended = 0
        self._block_size = block_size
        self._systems: dict[str, array[int]] = {}
        for session in trace:
            said = array("I")
            for text in session.said:
                said += self.ids_of(text)
            if said:
                # The last token of an answer was never computed.
                fleet.hold(said[:-1], self._name_of(session))
            fleet.after(session.start_s, partial(self._begin, session, said))

    def _begin(self, session: Session, said: array[int]) -> None:
        known = session.system.num_tokens if session.system.key in self._systems else 0
        known = len(said) - 1 if said else known
        _Agent(self, self._name_of(session), session.turns, said, known, self._end).go_on()

    def _name_of(self, session: Session) -> str:
        """Return the session's name in requests; "" if they do not name it."""
        return "" if self._unnamed else session.name

    def _end(self) -> None:
        self.num_ended += 1

    def ids_of(self, text: Text) -> array[int]:
        """Return the text's token ids; keep those of system prompts, which come often."""
        if " system " not in text.key:
            return token_ids(text)
        if text.key not in self._systems:
            self._systems[text.key] = token_ids(text)
        return self._systems[text.key]

    def send(
        self,
        session: str,
        prompt: array[int],
        turn: Turn,
        known: int,
        ended: Callable[[Answer], None],
    ) -> None:
        """Send a request; `known` tokens of its prompt were computed before."""
        self.pauses.on_request(_named(session), len(prompt), self.fleet.now_s)
        found = found_by_all(known, len(prompt), self._block_size)
        answer = self.fleet.submit(prompt, turn.answer_tokens, session, ended)
        self.sent.append((answer, found))

    def requests(self, from_s: float) -> list[Request]:
        """List requests sent since `from_s`, with their results."""
        now_s = self.fleet.now_s
        return [
            _request(answer, found, now_s)
            for answer, found in self.sent
            if answer.arrived_s - self.fleet.started_s >= from_s
        ]


def _request(answer: Answer, found: int, now_s: float) -> Request:
    """Describe a request. If it waits for the first token, that counts as if it came now."""
    first_s = answer.token_times_s[0] if answer.token_times_s else now_s
    started_s = now_s if answer.started_s is None else answer.started_s
    return Request(
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=None if answer.started_s is None else answer.cached_tokens,
        found_by_all=found,
        first_token_s=first_s - answer.arrived_s,
        queue_s=started_s - answer.arrived_s,
        is_ended=answer.is_ended,
    )


def _named(session: str) -> tuple[str, str] | None:
    return ("", session) if session else None


class _Agent:
    """A session in progress, or one of its subagents."""

    def __init__(
        self,
        agents: Agents,
        session: str,
        turns: Sequence[Turn],
        said: array[int],
        known: int,
        ended: Callable[[], None],
    ) -> None:
        self._agents = agents
        self._session = session
        self._turns = deque(turns)
        self._said = said
        self._known = known
        self._ended = ended
        self._num_awaited = 0

    def go_on(self) -> None:
        """Begin the next turn, or end the session."""
        if not self._turns:
            self._ended()
        else:
            turn = self._turns.popleft()
            self._agents.fleet.after(turn.pause_s, partial(self._ask, turn))

    def _ask(self, turn: Turn) -> None:
        prompt = self._said[:]
        for text in turn.added:
            prompt += self._agents.ids_of(text)
        self._said = prompt + array("I", [TOKEN]) * turn.answer_tokens
        known, self._known = self._known, known_after(turn, len(self._said))
        self._agents.send(self._session, prompt, turn, known, partial(self._answered, turn))

    def _answered(self, turn: Turn, answer: Answer) -> None:
        if self._turns:
            # The answer ends with tool calls; the results come with the next turn.
            retain = self._agents.pauses.on_tool_calls(_named(self._session), answer.prompt_tokens)
            if retain.seconds:
                self._agents.fleet.retain(answer, retain.seconds)
        self._num_awaited = len(turn.subagents)
        for turns in turn.subagents:
            agent = (self._session, turns, self._said, self._known, self._subagent_ended)
            _Agent(self._agents, *agent).go_on()
        if not turn.subagents:
            self.go_on()

    def _subagent_ended(self) -> None:
        self._num_awaited -= 1
        if not self._num_awaited:
            self.go_on()


class OneShard(Policy):
    """Sends all requests of a session and its subagents to the shard that had the fewest sessions
    at its begin, whatever the load. This is a reference for policies.
    """

    name = ONE_SHARD

    def __init__(self) -> None:
        self._shard_of: dict[str, str] = {}

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        if session not in self._shard_of:
            counts = Counter(self._shard_of.values())
            fewest = min(candidates, key=lambda candidate: counts[candidate.address])
            self._shard_of[session] = fewest.address
        return Decision(self._shard_of[session], "session")


def _policy(rule: str) -> Policy:
    return OneShard() if rule == ONE_SHARD else make_policy(rule)


def _send_other(fleet: SimulatedFleet, prompt: array[int]) -> None:
    fleet.submit(prompt, _OTHERS_ANSWER_TOKENS, "", lambda answer: None)


def _add_others(fleet: SimulatedFleet, per_s: float, to_s: float) -> None:
    """Send requests with prompts that share nothing. Figures leave them out."""
    chance, at_s, number = Random("others"), 0.0, 0
    while per_s and (at_s := at_s + chance.expovariate(per_s)) < to_s:
        number += 1
        # Agents' texts have lower ids.
        first = _OTHERS_ID + number
        prompt = array("I", [first]) + array("I", [TOKEN]) * (_OTHERS_TOKENS - 1)
        fleet.after(at_s, partial(_send_other, fleet, prompt))


def run(
    rule: str,
    trace: Sequence[Session],
    gpu: Gpu,
    shards: int,
    *,
    from_s: float,
    to_s: float,
    unnamed: bool = False,
    tool_pause_s: float | None = None,
    others_per_s: float = 0.0,
) -> Figures:
    """Let a policy choose shards; return figures of requests of [from_s, to_s)."""
    fleet = SimulatedFleet(shards, partial(_policy, rule), gpu.device())
    agents = Agents(fleet, trace, gpu.block_size, unnamed, tool_pause_s)
    _add_others(fleet, others_per_s, to_s)
    fleet.run_until(to_s)
    return figures_of(agents.requests(from_s), fleet.imbalance(from_s))
