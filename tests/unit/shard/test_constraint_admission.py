"""A request whose constraint is tried out, from its arrival to the engine or to its end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
from support.budget import budget, seeded
from support.engines import make_request, runner_info

from penstock_proto import shard_pb2 as pb
from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_proto.types import Constraint, Error, FinishReason, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages as link
from penstock_shard.server.servicer import ShardServicer
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.structured_output.checker import CheckFailed, ConstraintChecker, NotChecked

GOOD, BAD = Constraint("regex", "good"), Constraint("regex", "bad")


class _Checker(ConstraintChecker):
    """Says what it is told to, when it is told to."""

    def __init__(self) -> None:
        super().__init__(ShardConfig().constraint_limits)
        self.verdicts: dict[Constraint, str] = {}
        self.answers: dict[Constraint, asyncio.Future[str]] = {}
        self.callers: list[Hashable] = []

    def known(self, constraint: Constraint) -> str | None:
        return self.verdicts.get(constraint)

    async def check(self, constraint: Constraint, caller: Hashable = None) -> str:
        self.callers.append(caller)
        if constraint not in self.answers:
            self.answers[constraint] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self.answers[constraint])


class _Supervisor(EngineSupervisor):
    """Says that its engine is up, and keeps what would be sent to it."""

    def __init__(self, **settings: int) -> None:
        super().__init__(ShardConfig(**settings))  # type: ignore[arg-type]
        self.checker = self._checker = _Checker()
        self.submitted: list[tuple[str, int]] = []
        self.aborted: list[tuple[str, int]] = []
        self.outputs: list[RequestOutput] = []
        self._became_ready(link.Ready(runner_info(), {}, "", ""))

    def _flush(self) -> None:
        self._flush_scheduled = False
        inbox, self._inbox = self._inbox, link.Inbox([], [])
        self.submitted += [(request.request_id, request.attempt) for request in inbox.requests]
        self.aborted += inbox.aborts

    def take(
        self,
        request_id: str,
        constraint: Constraint | None,
        attempt: int = 0,
        *,
        deadline_s: float | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        fields: dict[str, Any] = {}
        if adapter is not None:
            fields = {"adapter": adapter.name, "adapter_hash": adapter.content_hash}
        request = make_request(request_id, attempt=attempt, constraint=constraint, **fields)
        self.submit(request, self.outputs.append, deadline_s=deadline_s)


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_waits_for_its_verdict_and_others_do_not_wait_for_it() -> None:
    supervisor = _Supervisor()
    supervisor.take("constrained", GOOD)
    supervisor.take("plain", None)
    await _settled()
    assert supervisor.submitted == [("plain", 0)]
    assert (supervisor.num_live, supervisor.num_waiting) == (2, 2)
    supervisor.checker.answers[GOOD].set_result("")
    await _settled()
    assert supervisor.submitted == [("plain", 0), ("constrained", 0)]
    assert supervisor.outputs == []


async def test_the_engine_never_gets_one_whose_adapter_went_meanwhile() -> None:
    supervisor = _Supervisor()
    adapters = supervisor.adapters
    kept, gone, replaced = (Adapter(name, name, "", 4) for name in ("kept", "gone", "replaced"))
    adapters.on_engine_ready((kept, gone, replaced))
    for adapter in adapters.loaded:
        supervisor.take(adapter.name, GOOD, adapter=adapter)
    await _settled()
    adapters.on_engine_ready((kept, Adapter("replaced", "other", "", 4)))
    supervisor.checker.answers[GOOD].set_result("")
    await _settled()
    assert supervisor.submitted == [("kept", 0)]
    errors = {output.request_id: output.error for output in supervisor.outputs}
    assert sorted(errors) == ["gone", "replaced"]
    for error in errors.values():
        assert error is not None
        assert (error.code, error.field) == (5, "adapter")
    assert supervisor.num_live == 1


async def test_a_refusal_is_an_invalid_argument_that_names_the_language() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", BAD)
    await _settled()
    supervisor.checker.answers[BAD].set_result("regex: is bad")
    await _settled()
    [output] = supervisor.outputs
    assert output.error == Error(Code.INVALID_ARGUMENT, "regex: is bad", field="regex")
    assert (supervisor.submitted, supervisor.num_live) == ([], 0)
    counted = supervisor.metrics.registry.get_sample_value(
        "penstock_shard_requests_total", {"outcome": "invalid_argument"}
    )
    assert counted == 1


async def test_a_verdict_that_is_known_takes_no_turn_of_the_event_loop() -> None:
    supervisor = _Supervisor()
    supervisor.checker.verdicts = {GOOD: "", BAD: "regex: is bad"}
    supervisor.take("good", GOOD)
    supervisor.take("bad", BAD)
    assert [output.request_id for output in supervisor.outputs] == ["bad"]
    await asyncio.sleep(0)
    assert supervisor.submitted == [("good", 0)]
    assert supervisor.checker.answers == {}


async def test_what_cannot_be_checked_for_want_of_room_may_be_tried_again() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD)
    await _settled()
    supervisor.checker.answers[GOOD].set_exception(NotChecked("too many wait"))
    await _settled()
    [output] = supervisor.outputs
    assert output.error == Error(Code.RESOURCE_EXHAUSTED, "too many wait", field=GOOD.kind)


async def test_a_check_that_fails_is_an_internal_error() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD)
    await _settled()
    supervisor.checker.answers[GOOD].set_exception(CheckFailed("the shard failed"))
    await _settled()
    [output] = supervisor.outputs
    assert output.error == Error(Code.INTERNAL, "the shard failed")
    assert supervisor.num_live == 0


async def test_an_abort_ends_a_request_that_the_engine_has_not_heard_of() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD, attempt=1)
    supervisor.abort("x", 0)
    assert supervisor.outputs == []
    supervisor.abort("x", 1)
    assert [output.finish_reason for output in supervisor.outputs] == [FinishReason.ABORTED]
    await _settled()
    supervisor.checker.answers.get(GOOD, asyncio.Future()).cancel()
    assert (supervisor.submitted, supervisor.aborted, supervisor.num_live) == ([], [], 0)


async def test_a_deadline_passes_while_a_constraint_is_checked() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD, deadline_s=0.02)
    await asyncio.sleep(0.1)
    [output] = supervisor.outputs
    assert output.error is not None
    assert output.error.code == 4
    supervisor.checker.answers[GOOD].set_result("")
    await _settled()
    assert (supervisor.submitted, supervisor.aborted) == ([], [])


async def test_a_higher_attempt_takes_over_while_the_lower_is_checked() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD)
    supervisor.take("x", GOOD, attempt=1)
    await _settled()
    supervisor.checker.answers[GOOD].set_result("")
    await _settled()
    assert [(o.attempt, o.finish_reason) for o in supervisor.outputs] == [(0, FinishReason.ABORTED)]
    assert supervisor.submitted == [("x", 1)]


async def test_the_engine_drops_an_attempt_whose_successor_is_being_checked() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", None)
    await _settled()
    supervisor.take("x", BAD, attempt=1)
    await _settled()
    assert (supervisor.submitted, supervisor.aborted) == ([("x", 0)], [("x", 0)])


async def test_requests_that_are_checked_count_in_the_bounds() -> None:
    supervisor = _Supervisor(max_num_seqs=1, max_queued_requests=1)
    for number in range(3):
        supervisor.take(str(number), GOOD)
    [output] = supervisor.outputs
    assert output.request_id == "2"
    assert output.error is not None
    assert "--max-queued-requests" in output.error.message


async def test_an_engine_that_dies_ends_what_is_checked_as_retryable() -> None:
    supervisor = _Supervisor()
    supervisor.take("x", GOOD)
    await _settled()
    supervisor._died()
    supervisor.checker.answers[GOOD].set_result("")
    await _settled()
    [output] = supervisor.outputs
    assert output.error is not None
    assert (output.error.code, output.error.engine_died) == (14, False)
    assert supervisor.submitted == []


async def test_each_request_ends_once_or_is_handed_over_once() -> None:
    rng = seeded("admission of constraints")
    for _ in range(budget(20, 1000)):
        supervisor = _Supervisor()
        taken: list[tuple[str, int]] = []
        for _ in range(60):
            taken += await _act(supervisor, rng, len(taken))
        await _settled()
        for answer in supervisor.checker.answers.values():
            _settle(answer, "")
        await asyncio.sleep(0.005)
        _check_what_became(supervisor, set(taken))


async def _act(
    supervisor: _Supervisor, rng: random.Random, num_taken: int
) -> list[tuple[str, int]]:
    """Do something at random. Returns the request that was taken, if any."""
    request_id = rng.choice("abcdef")
    answers = list(supervisor.checker.answers.values())
    match rng.randrange(5):
        case 0 | 1:
            constraint = rng.choice([None, *(Constraint("regex", name) for name in "abcd")])
            deadline_s = rng.choice([None, None, 0.0])
            supervisor.take(request_id, constraint, num_taken, deadline_s=deadline_s)
            return [(request_id, num_taken)]
        case 2 if supervisor.live_attempt(request_id) is not None:
            supervisor.abort(request_id, rng.randrange(100))
        case 3 if answers:
            _settle(rng.choice(answers), rng.choice(["", "regex: is bad"]))
        case 4:
            await _settled()
    return []


def _settle(answer: asyncio.Future[str], verdict: str) -> None:
    if not answer.done():
        answer.set_result(verdict)


def _check_what_became(supervisor: _Supervisor, taken: set[tuple[str, int]]) -> None:
    ended = Counter((output.request_id, output.attempt) for output in supervisor.outputs)
    submitted = Counter(supervisor.submitted)
    live = {(name, supervisor.live_attempt(name)) for name in "abcdef"} & taken
    assert max([*ended.values(), *submitted.values()], default=1) == 1
    assert set(ended) | live == taken
    assert not set(ended) & live
    assert live <= set(submitted)
    # The engine was told to drop what nobody waits for, or got a higher attempt in its place.
    orphans = set(submitted) - live - set(supervisor.aborted)
    highest = {name: max(a for n, a in submitted if n == name) for name, _ in submitted}
    assert all(attempt < highest[name] for name, attempt in orphans)


async def test_a_call_that_ends_takes_requests_with_it_whose_constraints_are_tried_out() -> None:
    supervisor = _Supervisor()
    servicer = ShardServicer(supervisor, ShardConfig())

    async def messages() -> AsyncIterator[pb.GenerateRequest]:
        for number in range(3):
            constraint = pb.Constraint(regex=GOOD.value) if number != 1 else None
            yield pb.GenerateRequest(
                request_id=str(number), prompt_token_ids=[7], constraint=constraint
            )
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(auth_context=dict)
    reading = asyncio.ensure_future(anext(servicer.Generate(messages(), context)))
    await _settled()
    assert supervisor.num_live == 3
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await _settled()
    # The engine says when it has ended the one that it has.
    assert supervisor.aborted == [("1", 0)]
    assert supervisor.num_live == 1


async def test_each_name_on_each_call_is_a_caller_of_its_own_that_takes_turns_with_others() -> None:
    supervisor = _Supervisor()
    servicer = ShardServicer(supervisor, ShardConfig())

    async def messages(call: str) -> AsyncIterator[pb.GenerateRequest]:
        for number in range(6):
            constraint, name = pb.Constraint(regex=f"{call}{number}"), ("", "x", "y")[number % 3]
            yield pb.GenerateRequest(
                request_id=f"{call}{number}",
                prompt_token_ids=[7],
                constraint=constraint,
                caller=name,
            )
        await asyncio.Event().wait()

    context: Any = SimpleNamespace(auth_context=dict)
    reading = [
        asyncio.ensure_future(anext(servicer.Generate(messages(call), context))) for call in "ab"
    ]
    await _settled()
    assert sorted(Counter(supervisor.checker.callers).values()) == [2] * 6
    for task in reading:
        task.cancel()
    await asyncio.wait(reading)
