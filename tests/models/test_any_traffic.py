"""Requests beside all kinds of others: a request's tokens are those that it gets alone.

The traffic has every kind of sampling, constraints that wear out, budgets of reasoning, drafts
right and wrong, steps launched ahead, too few blocks, memory that does not hold a step or a draw,
aborts, attempts that take over, and outputs that are continued.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from models.runners import make_runner
from models.sampling_reference import KINDS
from support.budget import budget, seeded
from support.compilers import EOS_IDS, LIMITS, VOCAB_SIZE, new_compiler
from support.constrained_engines import ConstrainedEngine
from support.drafters import FickleOracle, Oracle, named
from support.engines import make_request, packed, runner_info
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import (
    Constraint,
    EngineSampling,
    FinishReason,
    RequestOutput,
    ThinkingBudget,
)
from penstock_shard.models.base import ForwardOutput
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.structured_output.matcher_state import MaskFiller
from penstock_shard.worker.sampling import sampler as sampler_module

_ROWS = 509
_PROMPTS = ([*range(5, 17)] * 3, [*range(20, 60)], [*range(8, 48)])
_CONSTRAINTS = (
    Constraint("regex", ".*(a|b).{30}c.*"),
    Constraint("regex", "([a-z]{2,6} ?){5,60}[.]"),
    Constraint("regex", "[a-f]{3,9}-[0-9]{2}"),
    Constraint("choice", options=("left", "right", "neither of both")),
)
# What a caller takes up again: an abort, a give-back, a step that memory did not hold alone.
_AGAIN = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)


@cache
def _table() -> Tensor:
    table = torch.randn(_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 2.5
    # A few ids are likely, so that words repeat, and marks and stops come.
    table[:, :40] += 3.0
    return table


class _Model:
    """A model whose logits depend on the last token and its position. Some steps find no memory."""

    device = torch.device("cpu")
    layers = ()
    hidden_size = 4

    def __init__(self, fails: Callable[[], bool]) -> None:
        self._table = _table()
        self._fails = fails

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: Any, logit_rows: Tensor, *_: Any
    ) -> ForwardOutput:
        _hold(self._fails)
        token, position = (part.index_select(0, logit_rows) for part in (input_ids, positions))
        logits = self._table.index_select(0, (token * 31 + position * 7) % _ROWS)
        return ForwardOutput(logits, logits[:0])


def _hold(fails: Callable[[], bool]) -> None:
    if fails():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")


@dataclass(slots=True)
class _Caller:
    """One request. Its caller takes it up again until it ends by itself."""

    request: EngineRequest
    output: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    attempt: int = -1
    is_live: bool = False
    ending: RequestOutput | None = None

    def next_attempt(self) -> EngineRequest:
        self.attempt += 1
        self.is_live = True
        return msgspec.structs.replace(
            self.request, attempt=self.attempt, output=packed(self.output)
        )

    def take(self, output: RequestOutput) -> None:
        if output.attempt != self.attempt:
            return
        assert self.is_live, "it said something after its end"
        assert not output.token_ids or output.first_position == len(self.output)
        self.output += output.token_ids
        self.scores += output.logprobs.chosen if output.logprobs else []
        if not output.is_last:
            return
        self.is_live = False
        again = output.error is not None and output.error.code in _AGAIN
        if not again and output.finish_reason is not FinishReason.ABORTED:
            self.ending = output

    def came_to(self) -> tuple[object, ...]:
        assert self.ending is not None
        error = self.ending.error and self.ending.error.message
        return self.output, self.scores, self.ending.finish_reason, self.ending.stop_token_id, error

    @property
    def wore_out(self) -> bool:
        """True if the request ended because its text made the constraint's regular expressions take
        too much work.
        """
        error = None if self.ending is None else self.ending.error
        return (
            error is not None
            and error.code == Code.OUT_OF_RANGE
            and "regular expressions" in error.message
        )


def _request(name: str, rng: random.Random) -> EngineRequest:
    kind = dict(rng.choice([*KINDS.values(), {"temperature": 0.0}]))
    min_tokens = kind.pop("min_tokens", 0) or rng.choice([0, 0, 12])
    stop_ids = {*kind.pop("stop_token_ids", ()), *rng.choice([(), (rng.randrange(40),)])}
    constraint = rng.choice([None, None, *_CONSTRAINTS])
    if constraint is not None:
        kind.pop("allowed_token_ids", None)
    max_tokens = rng.randint(1, 50)
    request = make_request(
        name,
        rng.choice(_PROMPTS)[: rng.randint(1, 36)],
        max_tokens=max_tokens,
        stop_token_ids=[*stop_ids, *EOS_IDS],
        logprobs=rng.choice([None, 2]),
        cache_salt=rng.choice(["", "salt"]),
    )
    budgeted = constraint is None and rng.random() < 0.3
    return msgspec.structs.replace(
        request,
        sampling=EngineSampling(**{"seed": rng.getrandbits(64), **kind}),
        min_tokens=min(min_tokens, max_tokens),
        constraint=constraint,
        hand_back=rng.random() < 0.3,
        thinking_budget=ThinkingBudget(rng.randrange(8), 20, 21, rng.random() < 0.5)
        if budgeted
        else None,
    )


def _engine(
    fails: Callable[[], bool] = lambda: False,
    *,
    num_blocks: int = 4000,
    ahead: int = 0,
    most_states: int | None = None,
    drafter: Drafter | None = None,
) -> ConstrainedEngine:
    info = dataclasses.replace(
        runner_info(num_blocks=num_blocks, block_size=4, max_steps_ahead=ahead),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_IDS,
    )
    compiler = None
    if most_states is not None:
        limits = dataclasses.replace(LIMITS, memory_bytes=most_states * 2048)
        compiler = new_compiler(eos_token_ids=EOS_IDS, limits=limits)
    model: Any = _Model(fails)
    runner = make_runner(model, info, masks=MaskFiller(info.vocab_size))
    return ConstrainedEngine(lambda: runner, compiler=compiler, drafter=drafter)


def _step(engine: ConstrainedEngine, callers: dict[str, _Caller]) -> None:
    if not engine.under_test.engine.has_work:
        # Some matchers are being made, or there is nothing to do.
        time.sleep(0.0002)
    for output in engine.under_test.step():
        callers[output.request_id].take(output)


def _alone(request: EngineRequest) -> _Caller:
    caller, engine = _Caller(msgspec.structs.replace(request, hand_back=False)), _engine()
    engine.under_test.engine.submit(caller.next_attempt())
    while caller.is_live:
        _step(engine, {request.request_id: caller})
    return caller


@pytest.mark.parametrize("part", range(budget(1, 100)))
def test_a_request_gets_the_tokens_that_it_gets_alone(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = seeded(f"any traffic, part {part}")
    requests = [_request(f"r{number}", rng) for number in range(10)]
    alone = {request.request_id: _alone(request) for request in requests}
    callers = {request.request_id: _Caller(request) for request in requests}
    fail_rate = rng.choice([0.0, 0.03, 0.1])
    foresee = named({name: caller.output for name, caller in alone.items()})
    engine = _engine(
        lambda: rng.random() < fail_rate,
        num_blocks=rng.choice([30, 60, 200]),
        ahead=rng.choice([0, 1]),
        most_states=rng.choice([700, 4000]),
        drafter=rng.choice([None, Oracle(4, foresee), FickleOracle(5, foresee, rng, 40)]),
    )
    largest = sampler_module._largest

    def short_of_memory(logits: Tensor) -> tuple[Tensor, Tensor]:
        _hold(lambda: rng.random() < fail_rate / 3)
        return largest(logits)

    monkeypatch.setattr(sampler_module, "_largest", short_of_memory)
    for step in range(20_000):
        if step == 1000:
            fail_rate = 0.0
        _disturb(engine, callers, rng)
        _step(engine, callers)
        if all(caller.ending for caller in callers.values()):
            break
    for name, caller in callers.items():
        if caller.wore_out:
            whole = alone[name].output
            assert caller.output == whole[: len(caller.output)], caller.request
        else:
            assert caller.came_to() == alone[name].came_to(), caller.request
    engine.under_test.run()
    assert engine.under_test.blocks.num_referenced == 0


def _disturb(engine: ConstrainedEngine, callers: dict[str, _Caller], rng: random.Random) -> None:
    """Somebody comes or comes back; now and then one leaves, or takes over from itself."""
    caller = rng.choice(list(callers.values()))
    if caller.ending is not None:
        return
    if not caller.is_live:
        if rng.random() < 0.5:
            engine.under_test.engine.submit(caller.next_attempt())
    elif rng.random() < 0.03:
        engine.under_test.engine.abort(caller.request.request_id, caller.attempt)
    elif rng.random() < 0.03:
        engine.under_test.engine.submit(caller.next_attempt())
