"""The engine against a model of it: whatever is submitted, aborted and preempted, in any order.

What must hold: a request's tokens are those it would get alone; each has one ending, and nothing
comes after it; blocks are accounted for exactly, and hold what their readers think they hold. That
also where tokens are drafted, well or badly, where memory does not hold every step, and where host
memory has copies of blocks, made by an engine that was killed perhaps.
"""

from __future__ import annotations

import random
from array import array
from functools import partial

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.budget import budget, seeded
from support.drafters import FickleOracle
from support.engines import CACHE_GROUPS, EOS_ID, make_request, runner_info
from support.shadow import Fails, ShadowRunner

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import FinishReason, Objective
from penstock_shard.engine.create_engine import create_moves, create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.arena import Arena
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.fake_runner import FakeRunner

_EOS_RATE = 0.05
_MAX_MODEL_LEN = 96


def _have_states(groups: tuple[CacheGroup, ...]) -> bool:
    """True if layers have a state; such models verify no drafts."""
    return any(group.has_state for group in groups)


def _failing(rng: random.Random, rate: float) -> Fails:
    return lambda plan: rng.random() < rate


class ModelledEngine:
    """An engine with a small cache, and what it may say."""

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_batched: int,
        max_steps_ahead: int,
        drafter: Drafter | None = None,
        fails: Fails = lambda step: False,
        cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        host_memory: memoryview | None = None,
    ) -> None:
        self.now_s = 1.0
        info = runner_info(
            num_blocks=num_blocks,
            max_model_len=_MAX_MODEL_LEN,
            max_steps_ahead=max_steps_ahead,
            cache_groups=cache_groups,
        )
        fake = FakeRunner(info, range(EOS_ID), step_s=0.0, eos_rate=_EOS_RATE, kv=FakeKv(info))
        self.runner = ShadowRunner(fake, fails)
        arena = None if host_memory is None else Arena(host_memory, info)
        host_slots = () if arena is None else arena.num_slots
        self.blocks = BlockManager.of(info, max_batched, host_slots=host_slots)
        limits = SchedulerLimits(max_num_seqs, max_batched, max(1, max_batched // 2))
        self.most_slots = max_num_seqs * (1 + max_steps_ahead)
        self.drafter = drafter
        self.scheduler = create_scheduler(limits, self.blocks, drafter, aging_s=5.0)
        self.moves = None
        if arena is not None:
            self.moves = create_moves(arena, self.runner, self.scheduler, self.blocks)
        self.engine = Engine(
            self.runner,
            self.scheduler,
            self.blocks,
            clock=lambda: self.now_s,
            moves=self.moves,
        )
        self.live: dict[str, EngineRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], FinishReason | None] = {}
        self.may_fail = False
        self.submitted: dict[tuple[str, int], EngineRequest] = {}

    def submit(self, request: EngineRequest) -> None:
        key = (request.request_id, request.attempt)
        self.submitted[key] = request
        self.tokens[key] = []
        self.live[request.request_id] = request
        self.engine.submit(request)

    def abort(self, name: str) -> None:
        self.engine.abort(name, self.live[name].attempt)

    def step(self) -> None:
        self.now_s += 0.1
        for output in self.engine.step():
            key = (output.request_id, output.attempt)
            assert key not in self.endings, f"{key} said something after its end"
            request = self.submitted[key]
            first = len(request.output) // 4 + len(self.tokens[key])
            assert not output.token_ids or output.first_position == first
            self.tokens[key] += output.token_ids
            if output.is_last:
                if output.error is not None:
                    assert self.may_fail
                    assert output.error.code is Code.RESOURCE_EXHAUSTED
                self.endings[key] = output.finish_reason
                if self.live.get(request.request_id) is request:
                    del self.live[request.request_id]
        self.engine.check_integrity()

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step()
        self.step()
        assert not self.engine.has_work
        assert set(self.endings) == set(self.submitted)
        assert self.blocks.num_referenced == 0
        assert self.scheduler.num_queued_tokens == 0
        assert self.drafter is None or not self.drafter._histories
        assert not self.runner.held
        assert self.runner.num_slots <= self.most_slots
        for key, tokens in self.tokens.items():
            expected = _alone(self.submitted[key])
            whole = self.endings[key] in (FinishReason.STOP, FinishReason.LENGTH)
            assert tokens == (expected if whole else expected[: len(tokens)]), key


def _alone(request: EngineRequest) -> list[int]:
    """Return the tokens that the request gets on an engine of its own."""
    copy = msgspec.structs.replace(request, request_id="alone", attempt=0)
    alone = ModelledEngine(16, 1, 256, 0)
    tokens: list[int] = []
    alone.engine.submit(copy)
    while alone.engine.has_work:
        for output in alone.engine.step():
            tokens += output.token_ids
    return tokens


class Foresight:
    """The whole output that each request will have, from an engine of its own."""

    def __init__(self) -> None:
        self._outputs: dict[EngineRequest, list[int]] = {}

    def __call__(self, request: EngineRequest) -> list[int]:
        if request not in self._outputs:
            delivered = array("I", request.output).tolist()
            self._outputs[request] = delivered + _alone(request)
        return self._outputs[request]


_OBJECTIVES = st.one_of(
    st.none(),
    st.builds(
        Objective,
        priority=st.integers(-1, 1),
        deadline_s=st.none() | st.floats(0.1, 10),
        time_to_first_token_s=st.none() | st.floats(0.1, 3),
        seconds_between_tokens=st.none() | st.floats(1e-4, 1),
        latency_sensitive=st.booleans(),
    ),
)


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and shrinks what goes wrong."""

    @initialize(
        num_blocks=st.integers(6, 14),
        max_num_seqs=st.integers(1, 6),
        max_batched=st.sampled_from((8, 16, 64)),
        max_steps_ahead=st.integers(0, 2),
        most_drafts=st.sampled_from((0, 0, 1, 3, 8)),
        by_oracle=st.booleans(),
        fail_rate=st.sampled_from((0.0, 0.0, 0.05, 0.3)),
        cache_groups=st.sampled_from(CACHE_GROUPS),
        host_bytes=st.sampled_from((0, 0, 8192, 65536)),
        seed=st.integers(0, 2**16),
    )
    def build(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_batched: int,
        max_steps_ahead: int,
        most_drafts: int,
        by_oracle: bool,
        fail_rate: float,
        cache_groups: tuple[CacheGroup, ...],
        host_bytes: int,
        seed: int,
    ) -> None:
        rng = random.Random(seed)
        drafter = Drafter(most_drafts)
        if by_oracle:
            drafter = FickleOracle(most_drafts, Foresight(), rng)
        self.start = partial(
            ModelledEngine,
            num_blocks,
            max_num_seqs,
            max_batched,
            max_steps_ahead,
            drafter if most_drafts and not _have_states(cache_groups) else None,
            _failing(rng, fail_rate),
            cache_groups,
            memoryview(bytearray(host_bytes)) if host_bytes else None,
        )
        self.modelled = self.start()
        self.may_fail = self.modelled.may_fail = fail_rate > 0
        self.count = 0

    @rule(
        start=st.integers(0, 1),
        num_prompt_tokens=st.integers(1, 60),
        max_tokens=st.integers(1, 30),
        salt=st.sampled_from(("", "", "other")),
        objective=_OBJECTIVES,
        scored=st.booleans(),
        allowed=st.sampled_from(((), (7, 8), (7, 8, EOS_ID))),
    )
    def submit(
        self,
        start: int,
        num_prompt_tokens: int,
        max_tokens: int,
        salt: str,
        objective: Objective | None,
        scored: bool,
        allowed: tuple[int, ...],
    ) -> None:
        self.count += 1
        prompt = range(start, start + num_prompt_tokens)
        request = make_request(
            str(self.count),
            prompt,
            max_tokens=max_tokens,
            seed=self.count % 3,
            cache_salt=salt,
            prompt_logprobs=1 if scored else None,
            allowed_token_ids=allowed,
            objective=objective,
        )
        self.modelled.submit(request)

    @precondition(lambda self: self.modelled.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.modelled.abort(data.draw(st.sampled_from(sorted(self.modelled.live))))

    @precondition(lambda self: self.modelled.live)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        """A higher attempt goes on where the lower one was."""
        name = data.draw(st.sampled_from(sorted(self.modelled.live)))
        lower = self.modelled.live[name]
        tokens = self.modelled.tokens[name, lower.attempt]
        self.modelled.submit(
            make_request(
                name,
                array("I", lower.prompt),
                output=[*array("I", lower.output), *tokens],
                attempt=lower.attempt + 1,
                max_tokens=lower.max_tokens,
                seed=lower.sampling.seed,
                allowed_token_ids=lower.sampling.allowed_token_ids,
            )
        )

    @precondition(lambda self: self.modelled.moves and not self.modelled.drafter)
    @rule()
    def die(self) -> None:
        """Another engine finds the copies in host memory, and none of the requests."""
        self.modelled = self.start()
        self.modelled.may_fail = self.may_fail

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.modelled.step()

    @invariant()
    def the_accounts_are_exact(self) -> None:
        if hasattr(self, "modelled"):
            self.modelled.engine.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "modelled"):
            self.modelled.finish()


TestEngineAgainstItsModel = EngineMachine.TestCase
TestEngineAgainstItsModel.settings = settings(
    max_examples=budget(15, 2000),
    stateful_step_count=budget(40, 100),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


def test_random_traffic_under_a_small_cache_keeps_every_account() -> None:
    rng = seeded("engine soak")
    preemptions = accepted = failed = loaded = 0
    least = budget(len(CACHE_GROUPS), 800)
    # A few runs may load nothing by chance.
    for number in range(4 * least):
        if number >= least and min(preemptions, accepted, loaded):
            break
        fail_rate = rng.choice((0.0, 0.0, 0.05))
        drafter = (FickleOracle(4, Foresight(), rng), None, Drafter(4))[number % 3]
        groups = CACHE_GROUPS[number % len(CACHE_GROUPS)]
        modelled = ModelledEngine(
            rng.randint(7, 16),
            rng.randint(1, 8),
            rng.choice((8, 32, 128)),
            rng.randint(0, 1),
            None if _have_states(groups) else drafter,
            _failing(rng, fail_rate),
            groups,
            memoryview(bytearray(rng.choice((8192, 65536)))) if number % 2 else None,
        )
        modelled.may_fail = fail_rate > 0
        _random_traffic(modelled, rng)
        modelled.finish()
        preemptions += modelled.scheduler.preemptions_total
        accepted += modelled.scheduler.num_accepted_tokens
        failed += modelled.runner.num_failed
        loaded += 0 if modelled.moves is None else modelled.moves.tier.loaded_total
    print(f"{preemptions} preemptions, {accepted} drafts right, {failed} failed, {loaded} loaded")
    assert preemptions > 0
    assert loaded > 0
    assert accepted > 0


def _random_traffic(modelled: ModelledEngine, rng: random.Random) -> None:
    for number in range(60):
        request = make_request(
            str(number),
            [rng.randrange(2) for _ in range(rng.randint(1, 60))],
            max_tokens=rng.randint(1, 36),
            seed=rng.randrange(4),
            cache_salt=rng.choice(("", "a")),
            allowed_token_ids=rng.choice(((), (7, 8))),
        )
        if rng.random() < 0.3:
            objective = Objective(
                priority=rng.randint(-1, 1),
                deadline_s=rng.choice((None, 0.5, 3.0)),
                seconds_between_tokens=rng.choice((None, 0.01, 0.5)),
            )
            request = msgspec.structs.replace(request, objective=objective)
        modelled.submit(request)
        if modelled.live and rng.random() < 0.3:
            modelled.abort(rng.choice(sorted(modelled.live)))
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            modelled.step()
