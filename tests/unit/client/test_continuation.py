"""Requests whose shard fails, over shards that do as the test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
from support.fleet_doubles import Make, World, info, settled
from support.scores import logprobs_of

from penstock_client import (
    Adapter,
    DeadlineExceeded,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    LoadReport,
    Logprobs,
    NoShardAvailable,
    NotServed,
    Objective,
    Output,
    Overloaded,
    PenstockError,
    PoisonousRequest,
    SamplingParams,
    ShardFailed,
    ShardState,
    ShardUnavailable,
    ThinkingBudget,
    Unauthenticated,
)
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.output_verification import Verification
from penstock_client.load_balancing.base import Candidate, Decision
from penstock_client.rpc import generation_stream
from penstock_common.tracing.spans import SpanContext
from penstock_proto.errors import RequestRefused
from penstock_proto.facts import FieldBound
from penstock_proto.limits import TRIAL_TOKENS


async def test_a_request_goes_on_at_another_shard_with_its_output_and_the_next_attempt(
    make: Make,
) -> None:
    world = make("a", "b")
    stream = world.start(sampling=SamplingParams(seed=7))
    first = world.where(stream)
    stream.feed(Output([10, 11], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) != first
    sent = world.last(stream)
    assert (sent.attempt.number, list(sent.request.output_token_ids)) == (1, [10, 11])
    assert (sent.request.sampling.seed, sent.request.label) == (7, "x")
    stream.feed(Output([12], 2, finish_reason=FinishReason.LENGTH))
    assert [output.token_ids async for output in stream] == [[10, 11, 12]]
    assert not stream.approximate
    assert stream.token_ids == [10, 11, 12]


async def test_every_attempt_has_the_same_seed_also_where_none_was_given(make: Make) -> None:
    world = make("a", "b")
    stream = world.start()
    seed = world.last(stream).request.sampling.seed
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert seed is not None
    assert world.last(stream).request.sampling.seed == seed


async def test_what_the_first_model_s_defaults_said_holds_at_the_next_shard(make: Make) -> None:
    world = make("a")
    stream = world.start(max_tokens=None)
    stream.feed(Output([10], 0))
    world.add("b", default_sampling=SamplingParams(temperature=0.9, top_k=3), max_model_len=50)
    stream.fail(ShardUnavailable("gone"))
    await settled()
    sent = world.last(stream).request
    assert (world.where(stream), sent.max_tokens) == ("b", 97)
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.5, None)
    # And at the one after that.
    stream.feed(Output([11], 1))
    world.add("c", default_sampling=SamplingParams(temperature=0.7))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) == "c"
    assert world.last(stream).request.sampling.temperature == 0.5


async def test_output_of_an_earlier_attempt_is_no_output_of_this_one(make: Make) -> None:
    world = make("a", "b")
    stream = world.start(prompt_logprobs=0)
    row = Logprobs(chosen=[-1.0, -2.0], ranks=[1, 1])
    stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=1))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    again = Logprobs(chosen=[-1.0, -2.0], ranks=[1, 1])
    stream.feed(Output([10], 0, prompt_logprobs=again, prompt_logprobs_start=1))
    stream.feed(Output([11], 1, finish_reason=FinishReason.STOP))
    outputs = [output async for output in stream]
    assert [(o.token_ids, o.prompt_logprobs) for o in outputs] == [
        ([10, 11], Logprobs(chosen=[-1.0, -2.0], ranks=[1, 1]))
    ]


async def test_a_gap_is_an_error_and_not_a_reason_to_go_on(make: Make) -> None:
    world = make("a", "b")
    stream = world.start()
    where = world.where(stream)
    stream.feed(Output([10], 3))
    with pytest.raises(ShardFailed, match="from position 3"):
        await anext(stream)
    assert world.at(where).detached == [0]


@pytest.mark.parametrize("error", [InvalidRequest("no"), ShardFailed("NaN"), DeadlineExceeded("-")])
async def test_what_is_no_trouble_of_the_shard_s_ends_the_request(
    make: Make, error: PenstockError
) -> None:
    world = make("a", "b")
    stream = world.start()
    stream.fail(error)
    with pytest.raises(type(error)):
        await anext(stream)
    assert [len(world.at(name).sent) for name in "ab"] == [1, 0]


@pytest.mark.parametrize("error", [Overloaded("full"), NotServed("no such thing")])
async def test_what_one_shard_refuses_another_may_take_and_if_none_does_that_is_said(
    make: Make, error: PenstockError
) -> None:
    world = make("a", "b")
    stream = world.start()
    stream.fail(error)
    await settled()
    assert [len(world.at(name).sent) for name in "ab"] == [1, 1]
    stream.fail(error)
    with pytest.raises(type(error)):
        await anext(stream)


async def test_a_shard_that_would_not_see_what_a_request_asks_for_does_not_get_it(
    make: Make,
) -> None:
    """A shard of an older revision silently drops what it does not know."""
    world = make("old")
    budget = ThinkingBudget(5, begin_token_id=1, end_token_id=2)
    with pytest.raises(NotServed, match="thinking_budget") as refused:
        world.start(thinking_budget=budget)
    assert refused.value.field == "thinking_budget"
    world.add("new", capabilities=frozenset({"thinking_budget"}))
    stream = world.start(thinking_budget=budget)
    assert world.where(stream) == "new"
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert not world.at("old").sent
    assert not stream.ended


async def test_a_request_with_tokens_waits_for_a_shard_that_is_full(make: Make) -> None:
    world = make("a")
    stream = world.start()
    stream.feed(Output([10], 0))
    stream.fail(Overloaded("full"))
    await asyncio.sleep(0.15)
    assert world.last(stream).attempt.number == 1


async def test_the_shard_that_failed_is_asked_again_when_there_is_no_other(make: Make) -> None:
    world = make("a")
    stream = world.start()
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert stream.shard is None
    await asyncio.sleep(0.15)
    assert world.last(stream).attempt.number == 1


async def test_a_request_waits_for_a_shard_and_is_sent_as_soon_as_one_is_ready(make: Make) -> None:
    world = make()
    stream = world.start()
    shard = world.add("a")
    world.continuations.on_shard_change(shard)
    await settled()
    assert world.where(stream) == "a"


async def test_a_request_that_waits_ends_when_its_model_comes_back_with_another_tokenizer(
    make: Make,
) -> None:
    world = make()
    stream = world.start(model="m", tokenizer_hash="t")
    world.continuations.on_shard_change(world.add("other", model="other", tokenizer_hash="u"))
    await settled()
    assert not stream.ended
    world.continuations.on_shard_change(world.add("new", tokenizer_hash="u"))
    await settled()
    assert stream.ended
    with pytest.raises(NoShardAvailable, match="tokenizer"):
        await anext(stream)


async def test_a_request_that_was_taken_waits_for_its_tokenizer(make: Make) -> None:
    world = make("a")
    stream = world.start(model="m", tokenizer_hash="t")
    world.add("new", tokenizer_hash="u")
    world.shards["a"].info = None
    stream.fail(ShardUnavailable("gone"))
    await settled()
    world.shards["a"].info = info("a")
    world.continuations.on_shard_change(world.shards["a"])
    await settled()
    assert world.where(stream) == "a"
    assert stream.attempt == 1


async def test_a_model_s_own_name_goes_before_another_s_alias(make: Make) -> None:
    world = make()
    world.add("other", model="other", model_aliases=("m", "shared"))
    own = world.add("own", model="m", model_aliases=("shared",))
    assert {world.where(world.start(model="m")) for _ in range(4)} == {"own"}
    own.load = LoadReport(serving=True, draining=True)
    with pytest.raises(InvalidRequest, match="'m' is not served"):
        world.start(model="m")
    own.info = None
    assert world.where(world.start(model="m")) == "other"


async def test_an_alias_that_models_share_is_the_first_one_s(make: Make) -> None:
    world = make()
    world.add("a", model="one", model_aliases=("shared",))
    world.add("b", model="two", model_aliases=("shared",))
    world.add("c", model="one", model_aliases=("shared",))
    assert {world.where(world.start(model="shared")) for _ in range(6)} == {"a", "c"}


async def test_without_a_shard_a_request_ends_when_its_patience_does(make: Make) -> None:
    world = make(wait_s=0.1)
    with pytest.raises(NoShardAvailable, match=r"in 0\.1 s"):
        await anext(world.start())


async def test_without_a_shard_a_request_ends_at_its_deadline(make: Make) -> None:
    world = make()
    with pytest.raises(DeadlineExceeded):
        await anext(world.start(objective=Objective(deadline_s=0.05)))


async def test_each_attempt_has_what_is_left_of_the_deadline(make: Make) -> None:
    world = make("a", "b")
    stream = world.start(objective=Objective(deadline_s=10.0))
    await asyncio.sleep(0.05)
    stream.fail(ShardUnavailable("gone"))
    await settled()
    left_s = world.last(stream).request.objective.deadline_s
    assert left_s is not None
    assert 9.0 < left_s < 9.96


async def test_attempts_that_give_nothing_are_counted_and_one_that_gives_a_token_starts_anew(
    make: Make,
) -> None:
    world = make("a", "b", attempts=3)
    stream = world.start()
    for position in range(10):
        await asyncio.sleep(0.06)
        stream.feed(Output([10], position))
        stream.fail(ShardUnavailable("gone"))
    for _ in range(2):
        await asyncio.sleep(0.2)
        stream.fail(ShardUnavailable("gone for good"))
    assert len((await anext(stream)).token_ids) == 10
    with pytest.raises(ShardUnavailable, match="for good"):
        await anext(stream)


async def test_no_other_weights_give_a_later_token(make: Make) -> None:
    world = make("a", wait_s=0.3)
    stream = world.start()
    stream.feed(Output([10], 0))
    world.add("b", weights_hash="others")
    del world.shards["a"]
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert stream.shard is None
    assert (await anext(stream)).token_ids == [10]
    with pytest.raises(NoShardAvailable):
        await anext(stream)


async def test_before_the_first_token_any_weights_will_do(make: Make) -> None:
    world = make("a")
    stream = world.start()
    world.add("b", weights_hash="others")
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) == "b"
    assert world.last(stream).request.output_token_ids == ()


async def test_other_numerics_are_marked_and_counted(make: Make) -> None:
    world = make("a")
    stream = world.start()
    stream.feed(Output([10], 0))
    world.add("b", numerics_fingerprint="other")
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert not stream.approximate
    stream.feed(Output([11], 1))
    assert stream.approximate
    assert ("approximate", "numerics") in world.events
    assert stream.fingerprints == ["f", "other"]


async def test_a_request_that_asks_for_exactness_never_meets_other_numerics(make: Make) -> None:
    world = make("a", wait_s=0.2)
    stream = world.start(exact=True)
    stream.feed(Output([10], 0))
    world.add("b", numerics_fingerprint="other")
    del world.shards["a"]
    stream.fail(ShardUnavailable("gone"))
    await anext(stream)
    with pytest.raises(NoShardAvailable):
        await anext(stream)
    assert world.at("b").sent == []


async def test_exactness_that_no_shard_promised_ends_with_the_first_failure(make: Make) -> None:
    world = make()
    world.add("a", numerics_fingerprint="")
    stream = world.start(exact=True)
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await anext(stream)
    with pytest.raises(ShardUnavailable, match="gone"):
        await anext(stream)


async def test_a_request_that_three_engines_died_of_is_refused_and_so_is_its_like(
    make: Make,
) -> None:
    world = make("a", "b", "c", "d")
    stream = world.start()
    for death in range(3):
        assert world.last(stream).attempt.suspect == (death == 2)
        error = ShardUnavailable("died")
        error.engine_died = True
        stream.fail(error)
        await settled()
    with pytest.raises(PoisonousRequest, match="3 engines died"):
        await anext(stream)
    with pytest.raises(PoisonousRequest, match="refused for another 600 s"):
        world.start(sampling=SamplingParams(seed=5))
    assert world.where(world.start(prompt_token_ids=[9])) in world.shards


async def test_one_suspect_runs_on_a_shard_at_a_time(make: Make) -> None:
    world = make("a", "b")
    streams = [world.start(prompt_token_ids=[i]) for i in range(3)]
    for stream in streams:
        for _ in range(2):
            stream.engine_deaths += 1
        stream.fail(ShardUnavailable("gone"))
    await asyncio.sleep(0.3)
    suspects = [s for s in streams if s.shard is not None]
    assert {world.where(s) for s in suspects} == {"a", "b"}
    assert len(suspects) == 2
    suspects[0].feed(Output([1], 0, finish_reason=FinishReason.LENGTH))
    await asyncio.sleep(1.2)
    assert all(s.shard is not None or s.ended for s in streams)


async def test_a_shard_that_hands_over_is_left_for_one_that_gives_the_same_tokens(
    make: Make,
) -> None:
    world = make("a")
    stream = world.start()
    stream.feed(Output([10], 0))
    world.add("other", numerics_fingerprint="other")
    shard = world.shards["a"]
    shard.load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(shard)
    await settled()
    assert world.where(stream) == "a"
    world.add("same")
    world.continuations.on_shard_change(shard)
    await settled()
    assert (world.where(stream), world.at("a").detached) == ("same", [0])
    assert list(world.last(stream).request.output_token_ids) == [10]
    # Where its KV blocks are.
    assert world.last(stream).attempt.kv_source == "a"


async def test_a_shard_that_drains_is_sent_nothing_new(make: Make) -> None:
    world = make("a", "b")
    world.shards["a"].load = LoadReport(serving=True, draining=True)
    streams = [world.start() for _ in range(3)]
    assert [world.where(stream) for stream in streams] == ["b"] * 3


async def test_a_shard_that_is_gone_is_not_named_as_a_source_of_kv_blocks(make: Make) -> None:
    world = make("a")
    stream = world.start()
    assert world.last(stream).attempt.kv_source == ""
    stream.feed(Output([10], 0))
    world.shards["a"].load = LoadReport(serving=False)
    stream.fail(ShardUnavailable("gone"))
    world.continuations.on_shard_change(world.add("b"))
    await settled()
    assert world.where(stream) == "b"
    assert world.last(stream).attempt.kv_source == ""


async def test_a_defect_where_requests_are_sent_on_costs_the_one_it_shows_on(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world = make("a")
    first, second = world.start(), world.start()
    world.add("b")
    failing = world.at("b")
    failing.refusal = ZeroDivisionError("nobody foresaw this")
    moving = world.shards["a"]
    moving.load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(moving)
    async with asyncio.timeout(30):
        for stream in (first, second):
            with pytest.raises(ShardFailed, match="ZeroDivisionError"):
                await anext(stream)
    assert "nobody foresaw this" in caplog.text


async def test_a_reader_that_leaves_is_heard_of_by_the_shard_that_has_its_request(
    make: Make,
) -> None:
    world = make("a", "b")
    stream = world.start()
    stream.fail(ShardUnavailable("gone"))
    await settled()
    where = world.where(stream)
    stream.cancel()
    assert world.at(where).detached == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_reader_that_leaves_while_its_request_waits_ends_the_wait(make: Make) -> None:
    world = make()
    stream = world.start()
    stream.cancel()
    world.continuations.on_shard_change(world.add("a"))
    await settled()
    assert world.at("a").sent == []


async def test_a_pinned_request_goes_to_its_shard_or_nowhere(make: Make) -> None:
    world = make("a", "b", wait_s=0.2)
    stream = world.start(shard="b")
    assert world.where(stream) == "b"
    assert world.events == [("sent", "pinned")]
    stream.fail(ShardUnavailable("gone"))
    await asyncio.sleep(0.1)
    assert world.where(stream) == "b"
    del world.shards["b"]
    with pytest.raises(InvalidRequest, match="'b' is not in this fleet"):
        world.start(shard="b")


async def test_a_request_may_be_given_back_only_where_another_shard_has_room(make: Make) -> None:
    world = make("a", "b")
    assert world.last(world.start()).attempt.hand_back
    for shard in world.shards.values():
        shard.load = LoadReport(serving=True, num_blocks=10, referenced_blocks=9)
    assert not world.last(world.start()).attempt.hand_back


async def test_a_shard_without_the_adapter_is_no_room(make: Make) -> None:
    world = make("a", "b")
    shard = world.shards["a"]
    assert shard.info is not None
    shard.info = dataclasses.replace(shard.info, adapters=adapters("hash"))
    stream = world.start(adapter="x")
    assert world.where(stream) == "a"
    assert not world.last(stream).attempt.hand_back


def adapters(content: str) -> dict[str, Adapter]:
    return {"x": Adapter("x", content, "", 4)}


def lose(world: World, name: str) -> None:
    """Have the shard say nothing any more."""
    shard = world.shards[name]
    shard.info, shard.load = None, LoadReport()
    world.continuations.on_shard_change(shard)


def come_back(world: World, name: str, **differences: object) -> None:
    shard = world.shards[name]
    shard.update_info(info(name, **differences))
    shard.load = LoadReport(serving=True, num_blocks=10)
    world.continuations.on_shard_change(shard)


async def test_a_request_ends_at_once_when_its_adapter_is_unloaded_everywhere(make: Make) -> None:
    world = make("bare")
    holder = world.add("holder", adapters=adapters("hash"))
    taken, waiting = world.start(adapter="x"), world.start(adapter="x")
    assert [world.where(stream) for stream in (taken, waiting)] == ["holder", "holder"]
    taken.feed(Output([10], 0))
    for stream in (taken, waiting):
        stream.fail(ShardUnavailable("gone"))
    await settled()
    assert not taken.ended
    assert holder.info is not None
    assert holder.update_info(dataclasses.replace(holder.info, adapters={})) == {"x"}
    world.continuations.on_shard_change(holder)
    await settled()
    for stream in (taken, waiting):
        assert stream.ended
        assert isinstance(stream.final_error, InvalidRequest)
        assert stream.final_error.field == "adapter"
    with pytest.raises(InvalidRequest, match="'x' is not loaded; loaded: none"):
        world.start(adapter="x")


async def test_a_request_waits_while_the_only_shard_with_its_adapter_restarts(make: Make) -> None:
    world = make("bare")
    world.add("holder", adapters=adapters("hash"))
    taken = world.start(adapter="x")
    lose(world, "holder")
    taken.fail(ShardUnavailable("gone"))
    late = world.start(adapter="x")
    world.continuations.on_shard_change(world.shards["bare"])
    await settled()
    assert [taken.ended, late.ended] == [False, False]
    come_back(world, "holder", adapters=adapters("hash"))
    await settled()
    assert [world.where(stream) for stream in (taken, late)] == ["holder", "holder"]


async def test_a_shard_that_comes_back_without_the_adapter_ends_the_wait(make: Make) -> None:
    world = make("bare")
    world.add("holder", adapters=adapters("hash"))
    lose(world, "holder")
    stream = world.start(adapter="x")
    await settled()
    assert not stream.ended
    come_back(world, "holder")
    await settled()
    with pytest.raises(InvalidRequest, match="'x' is not loaded"):
        await anext(stream)


async def test_a_request_with_tokens_ends_when_its_adapter_is_replaced(make: Make) -> None:
    world = make()
    world.add("holder", adapters=adapters("one"))
    begun, fresh = world.start(adapter="x"), world.start(adapter="x")
    begun.feed(Output([10], 0))
    lose(world, "holder")
    for stream in (begun, fresh):
        stream.fail(ShardUnavailable("gone"))
    come_back(world, "holder", adapters=adapters("two"))
    await settled()
    assert world.where(fresh) == "holder"
    assert str(begun.final_error) == "adapter 'x' is another one by now than the request wants"


async def test_a_pinned_request_waits_for_no_adapter_that_its_shard_lacks(make: Make) -> None:
    world = make("bare")
    world.add("holder", adapters=adapters("hash"))
    with pytest.raises(InvalidRequest, match="'x' is not loaded"):
        world.start(adapter="x", shard="bare")
    lose(world, "holder")
    assert not world.start(adapter="x", shard="holder").ended


async def test_every_request_is_told_of_once_when_it_has_ended(make: Make) -> None:
    world = make("a", "b", wait_s=0.1)
    finished, failed, left, broken = (world.start() for _ in range(4))
    finished.feed(Output([10], 0, finish_reason=FinishReason.STOP))
    finished.cancel()
    failed.fail(InvalidRequest("no"))
    left.cancel()
    broken.feed(Output([10], 3))
    world.shards.clear()
    waited = world.start()
    await asyncio.sleep(0.3)
    assert world.ended == [finished, failed, left, broken, waited]
    assert [stream.finish_reason for stream in world.ended] == [FinishReason.STOP, *4 * [None]]
    errors = [type(stream.final_error).__name__ for stream in world.ended]
    assert errors == ["NoneType", "InvalidRequest", "NoneType", "ShardFailed", "NoShardAvailable"]


async def test_who_was_taken_once_waits_while_all_shards_are_full(make: Make) -> None:
    world = make("a", "b", attempts=2)
    stream = world.start()
    stream.fail(ShardUnavailable("gone"))
    await settled()
    for _ in range(4):
        stream.fail(Overloaded("full"))
        await asyncio.sleep(0.5)
    assert stream.shard is not None
    assert world.ended == []


async def test_time_on_a_shard_is_no_waiting(make: Make) -> None:
    world = make("a", wait_s=0.6)
    stream = world.start()
    for _ in range(3):
        stream.fail(ShardUnavailable("gone"))
        async with asyncio.timeout(30):
            while stream.shard is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
    assert world.ended == []


async def test_time_on_a_shard_that_had_no_room_after_all_is_waiting(make: Make) -> None:
    """A shard may lack memory for a request; other requests must not lose steps for it for ever."""
    world = make("a", wait_s=0.3)
    stream = world.start()
    stream.feed(Output([10], 0))
    for _ in range(2):
        async with asyncio.timeout(30):
            while stream.shard is None and not stream.ended:
                await asyncio.sleep(0.01)
        if not stream.ended:
            await asyncio.sleep(0.4)
            stream.fail(Overloaded("too little memory"))
            await settled()
    async with asyncio.timeout(30):
        assert (await anext(stream)).token_ids == [10]
        with pytest.raises(NoShardAvailable, match="too little memory"):
            await anext(stream)
    assert stream.attempt <= 1


async def test_time_without_a_shard_and_time_on_one_without_room_add_up(make: Make) -> None:
    now_s = 0.0
    world = make(wait_s=60.0, clock=lambda: now_s)
    stream = world.start()
    now_s = 3.0
    world.continuations.on_shard_change(world.add("a"))
    await settled()
    assert (world.where(stream), stream.waited_s) == ("a", 3.0)
    now_s = 7.0
    world.add("b")
    stream.fail(Overloaded("full"))
    await settled()
    assert (world.where(stream), stream.waited_s) == ("b", 7.0)


async def test_closing_ends_what_waits_and_nothing_goes_on(make: Make) -> None:
    world = make("a")
    running = world.start()
    running.feed(Output([10], 0))
    world.continuations.close()
    running.fail(ShardUnavailable("closed"))
    await anext(running)
    with pytest.raises(ShardUnavailable):
        await anext(running)


# ---- what a hostile review found ----


def _died() -> ShardUnavailable:
    error = ShardUnavailable("died")
    error.engine_died = True
    return error


async def test_no_other_weights_go_on_after_scores_of_the_prompt(make: Make) -> None:
    world = make("a", wait_s=0.2)
    stream = world.start(prompt_logprobs=0)
    row = Logprobs(chosen=[-1.0], ranks=[1])
    stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=1))
    world.add("b", weights_hash="others")
    del world.shards["a"]
    stream.fail(ShardUnavailable("gone"))
    await anext(stream)
    with pytest.raises(NoShardAvailable):
        await anext(stream)
    assert world.at("b").sent == []


async def test_an_attempt_that_says_what_is_known_is_in_vain(make: Make) -> None:
    world = make("a", "b", attempts=3)
    stream = world.start(prompt_logprobs=0)
    for _ in range(4):
        async with asyncio.timeout(30):
            while stream.shard is None and not stream.ended:
                await asyncio.sleep(0.01)
        row = Logprobs(chosen=[-1.0], ranks=[1])
        stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=1))
        stream.fail(ShardUnavailable("again"))
    assert stream.ended
    assert ("given_up", "attempts") in world.events


async def test_a_gap_in_the_scores_of_the_prompt_is_an_error(make: Make) -> None:
    world = make("a")
    stream = world.start(prompt_logprobs=0)
    row = Logprobs(chosen=[-1.0], ranks=[1])
    stream.feed(Output([], 0, prompt_logprobs=row, prompt_logprobs_start=2))
    with pytest.raises(ShardFailed, match="prompt from index 2 arrived, 1 was next"):
        await anext(stream)


@pytest.mark.parametrize("refusal", [InvalidRequest("max_tokens"), NotServed("logprobs")])
async def test_what_one_shard_took_another_s_refusal_does_not_end(
    make: Make, refusal: PenstockError
) -> None:
    world = make("a", "b", "c")
    stream = world.start()
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    stream.fail(refusal)
    await settled()
    assert [len(world.at(name).sent) for name in "abc"] == [1, 1, 1]


async def test_copies_of_a_poisonous_request_are_tried_one_at_a_time_and_refused_together(
    make: Make,
) -> None:
    world = make("a", "b", "c", "d")
    streams = [world.start(sampling=SamplingParams(seed=seed)) for seed in range(4)]
    other = world.start(prompt_token_ids=[7])
    for _ in range(2):
        for stream in streams:
            stream.fail(_died())
        await asyncio.sleep(0.15)
    running = [stream for stream in streams if stream.shard is not None]
    assert len(running) == 1
    running[0].fail(_died())
    await asyncio.sleep(1.5)
    assert {type(stream.final_error) for stream in streams} == {PoisonousRequest}
    assert not other.ended


async def test_suspects_that_go_on_are_cleared_one_after_the_other(make: Make) -> None:
    world = make("a", "b", wait_s=2.0)
    streams = [world.start(prompt_token_ids=[number]) for number in range(40)]
    for _ in range(2):
        for stream in streams:
            stream.fail(_died())
        for shard in world.shards.values():
            shard.breaker.reset()
        await asyncio.sleep(0.3)
    assert sum(stream.shard is not None for stream in streams) == 2
    for _ in range(20):
        for stream in [s for s in streams if s.is_suspect and s.shard is not None]:
            stream.feed(Output(list(range(7)), 0))
            assert stream.is_suspect
            stream.feed(Output([7], 7))
        await settled()
    # Nobody has ended, all run, and an engine that dies later counts from nothing.
    assert all(stream.shard is not None for stream in streams)
    streams[0].fail(_died())
    assert streams[0].engine_deaths == 1


async def test_what_a_shard_hands_over_waits_for_the_first_that_can_take_it(make: Make) -> None:
    world = make("a")
    stream = world.start()
    shard = world.shards["a"]
    shard.load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(shard)
    await settled()
    world.continuations.on_shard_change(world.add("b"))
    await settled()
    assert world.where(stream) == "b"


async def test_a_fleet_that_is_closed_takes_and_moves_nothing(make: Make) -> None:
    world = make("a")
    stream = world.start()
    world.add("b")
    shard = world.shards["a"]
    shard.load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(shard)
    world.continuations.close()
    await settled()
    assert world.where(stream) == "a"
    with pytest.raises(ShardUnavailable, match="closed"):
        world.start()


async def test_a_stream_that_waits_is_looked_at_once_however_many_shards_come(make: Make) -> None:
    world = make()
    stream = world.start(numerics="none")
    shards = [world.add(f"shard {index}") for index in range(50)]
    looked: list[int] = []
    send = world.continuations._send

    def look(stream: FleetStream) -> bool:
        looked.append(1)
        return send(stream)

    world.continuations._send = look  # type: ignore[method-assign]
    for shard in shards:
        world.continuations.on_shard_change(shard)
    await settled()
    # Once, and perhaps once more as its time had come.
    assert 1 <= len(looked) <= 3
    assert stream.shard is None


async def test_what_is_verified_when_the_fleet_closes_is_still_no_caller_s_request(
    make: Make,
) -> None:
    world = make("a", "b")
    start, owned = world.continuations.start, []
    verification = Verification(1.0, world.shards, start, lambda event, reason: None)
    world.continuations._ended = lambda stream: owned.append(verification.owns(stream))
    stream = world.start()
    stream.feed(Output([10], 0, finish_reason=FinishReason.LENGTH))
    verification.on_stream_end(stream)
    await settled()
    await verification.close()
    assert owned == [False, True]


# ---- whatever happens, in whatever order ----


class Storm:
    """Random events on a world of streams, and what must hold after each."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.streams: list[FleetStream] = []
        # The weights that gave each stream its output.
        self.weights: dict[FleetStream, set[str]] = {}

    def step(self) -> None:
        rng, world = self.rng, self.world
        running = [stream for stream in self.streams if stream.shard is not None]
        shard = rng.choice(list(world.shards.values()))
        match rng.randrange(12):
            case 0 | 1 | 2:
                self.submit()
            case 3 | 4 | 5 | 6 if running:
                self.answer(rng.choice(running))
            case 7 if running:
                rng.choice(running).fail(self.error())
            case 8:
                for stream in list(world.continuations._on(shard)):
                    stream.fail(_died() if rng.random() < 0.1 else ShardUnavailable("gone"))
                self.replace(shard)
            case 9:
                shard.load = LoadReport(serving=True, draining=True, handing_over=True)
                world.continuations.on_shard_change(shard)
            case 10:
                shard.load = LoadReport(serving=True, num_blocks=10)
                world.continuations.on_shard_change(shard)
            case 11 if self.streams:
                rng.choice(self.streams).cancel()
        self.check()

    def submit(self) -> None:
        rng = self.rng
        with contextlib.suppress(PoisonousRequest):
            stream = self.world.start(
                prompt_token_ids=[rng.randrange(1000)],
                exact=rng.random() < 0.3,
                prompt_logprobs=rng.choice([None, 0]),
                objective=Objective(deadline_s=rng.choice([None, 0.05, 5.0])),
            )
            self.streams.append(stream)
            self.weights[stream] = set()

    def answer(self, stream: FleetStream) -> None:
        assert stream.info is not None
        sent = self.world.at(self.world.where(stream)).sent
        mine = next(each for each in reversed(sent) if each.stream is stream)
        assert mine.attempt.number == stream.attempt
        position, given = len(mine.request.output_token_ids), len(stream.token_ids)
        assert given >= position
        self.weights[stream].add(stream.info.weights_hash)
        if stream.request.prompt_logprobs is not None and self.rng.random() < 0.3:
            row = Logprobs(chosen=[-1.0], ranks=[1])
            stream.feed(Output([], given, prompt_logprobs=row))
        elif given == 19:
            stream.feed(Output([given], given, finish_reason=FinishReason.LENGTH))
        else:
            # Some of it may be known.
            first = self.rng.randint(max(0, given - 2), given)
            stream.feed(Output(list(range(first, given + 1)), first))

    def error(self) -> PenstockError:
        kinds = (ShardUnavailable, Overloaded, NotServed, InvalidRequest, ShardFailed)
        return self.rng.choice(kinds)("no")

    def replace(self, shard: ShardState) -> None:
        """Another engine at the same address, perhaps with other weights or numerics."""
        rng = self.rng
        shard.info = info(
            shard.address,
            weights_hash=rng.choice(["w", "w", "v"]),
            numerics_fingerprint=rng.choice(["f", "f", "g"]),
        )
        shard.breaker.reset()
        self.world.continuations.on_shard_change(shard)

    def check(self) -> None:
        parts = self.world.continuations
        on_shards = [stream for streams in parts._running.values() for stream in streams]
        assert all(parts._running.values())
        for stream in self.streams:
            places = (on_shards.count(stream), stream in parts._waiting, stream.ended)
            assert sum(map(int, places)) == 1, places
            assert (stream.shard is not None) == bool(places[0])
            assert (stream.timer is not None) == (stream in parts._waiting)
            assert self.world.ended.count(stream) == stream.ended
            assert stream.token_ids == list(range(len(stream.token_ids)))
            assert len(self.weights[stream]) <= 1, "two weights gave one output"
            assert not (stream.request.exact and stream.approximate)
        assert parts._suspects == {stream for stream in on_shards if stream.is_suspect}


async def test_whatever_happens_each_stream_is_in_one_place_and_ends_once(make: Make) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        world = make("a", "b", "c", wait_s=0.2)
        storm = Storm(world, rng)
        for _ in range(150):
            storm.step()
            if rng.random() < 0.5:
                await asyncio.sleep(rng.choice([0, 0, 0, 0.002]))
                storm.check()
        world.continuations.close()
        for stream in storm.streams:
            if stream.shard is not None:
                stream.fail(ShardUnavailable("closed"))
        storm.check()
        assert all(stream.ended for stream in storm.streams)
        parts = world.continuations
        assert not any((parts._running, parts._waiting, parts._due, parts._suspects))


# ---- what an attempt is told, and what is kept and told of it ----


async def test_an_attempt_names_the_engine_it_is_meant_for_and_may_come_back_twice(
    make: Make,
) -> None:
    world = make("a", "b")
    stream = world.start()
    hand_backs = []
    for _ in range(4):
        async with asyncio.timeout(30):
            while stream.shard is None:
                await asyncio.sleep(0.01)
        attempt = world.last(stream).attempt
        assert stream.info is not None
        assert attempt.instance_id == stream.info.instance_id
        hand_backs.append(attempt.hand_back)
        stream.fail(ShardUnavailable("gone"))
        await settled()
    assert hand_backs == [True, True, False, False]


async def test_a_request_is_sent_with_the_hash_of_the_adapter_it_was_placed_for(
    make: Make,
) -> None:
    world = make()
    world.add("a", adapters=adapters("hash"))
    assert world.last(world.start(adapter="x")).request.adapter_hash == "hash"
    assert world.last(world.start()).request.adapter_hash == ""


class Remembering:
    """A policy that takes the first, and keeps what it is told."""

    name = "remembering"

    def __init__(self) -> None:
        self.chosen: list[tuple[GenerationRequest, str]] = []

    def choose(
        self, candidates: Sequence[Candidate], request: GenerationRequest, session: str
    ) -> Decision:
        self.chosen.append((request, session))
        return Decision(candidates[0].address, "session")


async def test_the_policy_sees_requests_and_sessions(make: Make) -> None:
    policy = Remembering()
    world = make("a", policy=policy)
    stream = world.start(session="s")
    assert policy.chosen == [(stream.request, "s")]
    assert world.events == [("sent", "session")]


TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


async def test_each_attempt_that_is_traced_has_a_span_of_its_own(make: Make) -> None:
    world = make("a", "b", traces_attempts=True)
    stream = world.start(traceparent=TRACEPARENT)
    first = SpanContext.parse(world.last(stream).request.traceparent)
    stream.fail(ShardUnavailable("gone"))
    await settled()
    second = SpanContext.parse(world.last(stream).request.traceparent)
    assert first is not None
    assert second is not None
    assert {first.trace_id, second.trace_id} == {"a" * 32}
    assert [record.span_id for record in stream.attempts] == [first.span_id, second.span_id]
    assert len({first.span_id, second.span_id, "b" * 16}) == 3
    # What cannot be read is nobody's parent.
    assert world.last(world.start(traceparent="-")).request.traceparent == "-"


async def test_where_attempts_are_not_traced_shards_get_the_caller_s_span(make: Make) -> None:
    world = make("a")
    stream = world.start(traceparent=TRACEPARENT)
    assert world.last(stream).request.traceparent == TRACEPARENT
    assert stream.attempts[0].span_id == ""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ShardUnavailable("gone"), "unavailable"),
        (ShardUnavailable("died"), "engine_died"),
        (Overloaded("full"), "overloaded"),
        (NotServed("no such thing"), "not_served"),
        (InvalidRequest("no"), "invalid"),
        (Unauthenticated("who"), "unauthenticated"),
        (DeadlineExceeded("late"), "deadline"),
        (ShardFailed("NaN"), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_why_an_attempt_failed_is_kept_and_counted(
    make: Make, error: PenstockError, cause: str
) -> None:
    if cause == "engine_died":
        error = _died()
    world = make("a", "b")
    stream = world.start()
    where = world.where(stream)
    stream.feed(Output([10], 0))
    stream.fail(error)
    await settled()
    record = stream.attempts[0]
    assert (record.shard, record.reason, record.ended_because) == (where, "least_load", cause)
    assert record.first_output_s is not None
    assert record.ended_s is not None
    assert record.sent_s <= record.first_output_s <= record.ended_s
    goes_on = cause not in ("deadline", "failed")
    assert world.events.count(("continued", cause)) == goes_on
    assert len(stream.attempts) == 1 + goes_on
    assert stream.attempts[-1].first_output_s is None or not goes_on


async def test_what_ends_a_request_or_moves_it_is_counted_by_its_reason(make: Make) -> None:
    world = make("a", wait_s=0.05, attempts=2)
    moved, inexact = world.start(), world.start(exact=True)
    poisonous = world.start(prompt_token_ids=[9])
    for stream in (moved, poisonous, inexact):
        stream.feed(Output([10], 0))
    assert inexact.made_by is not None
    inexact.made_by = dataclasses.replace(inexact.made_by, numerics_fingerprint="")
    inexact.fail(ShardUnavailable("gone"))
    poisonous.engine_deaths = 2
    poisonous.fail(_died())
    world.add("b")
    world.shards["a"].load = LoadReport(serving=True, draining=True, handing_over=True)
    world.continuations.on_shard_change(world.shards["a"])
    await settled()
    assert moved.attempts[0].ended_because == "drain"
    vain = world.start()
    vain.attempts_in_vain = 1
    vain.fail(ShardUnavailable("gone"))
    lose(world, "b")
    moved.fail(ShardUnavailable("gone"))
    async with asyncio.timeout(30):
        while not moved.ended:
            await asyncio.sleep(0.01)
    ends = {event for event in world.events if event[0] not in ("sent", "continued")}
    assert ends == {
        ("moved", "drain"),
        ("refused", "poison"),
        ("given_up", "not_exact"),
        ("given_up", "attempts"),
        ("given_up", "no_shard"),
    }


async def test_what_fails_counts_against_the_shard_and_an_open_breaker_lets_one_try(
    make: Make,
) -> None:
    world = make("a")
    for _ in range(5):
        world.start().fail(ShardUnavailable("gone"))
    assert world.shards["a"].breaker.is_open
    shard = world.add("b")
    for _ in range(5):
        # Long enough ago for one to try.
        shard.breaker.record_failure(-100.0)
    trial, next_one = world.start(shard="b"), world.start(shard="b")
    assert world.where(trial) == "b"
    assert next_one.shard is None


async def test_what_was_sent_to_a_shard_counts_the_output_that_it_computes_again(
    make: Make,
) -> None:
    world = make("a", "b")
    stream = world.start()
    stream.feed(Output([10, 11], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert stream.shard is not None
    assert stream.shard.sent[0].queued_prompt_tokens == 5


async def test_those_that_wait_are_sent_in_the_order_they_came(make: Make) -> None:
    world = make()
    streams = [world.start(prompt_token_ids=[i]) for i in range(10)]
    world.continuations.on_shard_change(world.add("a"))
    await settled()
    assert [sent.stream for sent in world.at("a").sent] == streams


@pytest.mark.parametrize(("step_s", "num_turns"), [(0.0, 1), (0.001, 10)])
async def test_others_get_a_turn_when_sending_takes_long(
    make: Make, step_s: float, num_turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = itertools.count()
    world = make(clock=lambda: next(ticks) * step_s)
    for i in range(10):
        world.start(prompt_token_ids=[i])
    world.continuations.on_shard_change(world.add("a"))
    counts = []
    while len(world.at("a").sent) < 10:
        await asyncio.sleep(0)
        counts.append(len(world.at("a").sent))
    assert len(set(counts) - {0}) == num_turns
    # It was no defect that gave them their turns.
    assert caplog.records == []


async def test_a_deadline_ends_the_wait_long_before_patience_does(make: Make) -> None:
    world = make(wait_s=120.0)
    async with asyncio.timeout(30):
        with pytest.raises(DeadlineExceeded):
            await anext(world.start(objective=Objective(deadline_s=0.05)))


async def test_the_last_attempt_has_the_little_that_is_left_of_the_deadline(make: Make) -> None:
    world = make("a", "b")
    stream = world.start(objective=Objective(deadline_s=0.2))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    left_s = world.last(stream).request.objective.deadline_s
    assert left_s is not None
    assert 0 < left_s <= 0.2


async def test_who_waited_in_vain_learns_what_is_wrong_with_the_shards(make: Make) -> None:
    world = make("a", wait_s=0.05)
    lose(world, "a")
    world.shards["a"].problem = "on fire"
    never_sent = world.start()
    with pytest.raises(NoShardAvailable, match=r"\(a: on fire\)$"):
        await anext(never_sent)


async def test_a_suspect_is_one_until_it_has_new_tokens_of_one_attempt(make: Make) -> None:
    world = make("a", "b", "c")
    stream = world.start(max_tokens=90)
    for attempt in range(2):
        stream.feed(Output([10] * TRIAL_TOKENS, attempt * TRIAL_TOKENS))
        stream.engine_deaths = 1
        stream.fail(_died())
        await settled()
    assert stream.is_suspect
    stream.feed(Output([10], 2 * TRIAL_TOKENS))
    assert stream.is_suspect
    stream.feed(Output([10] * (TRIAL_TOKENS - 1), 2 * TRIAL_TOKENS + 1))
    assert not stream.is_suspect


async def test_a_token_makes_up_for_all_vain_attempts_and_waits(make: Make) -> None:
    world = make("a", "b")
    stream = world.start()
    for _ in range(2):
        async with asyncio.timeout(30):
            while stream.shard is None:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        stream.fail(Overloaded("full"))
        stream.was_dropped = True
        await settled()
    assert stream.waited_s >= 0.04
    stream.attempts_in_vain = 3
    async with asyncio.timeout(30):
        while stream.shard is None:
            await asyncio.sleep(0.01)
    stream.feed(Output([10], 0))
    assert (stream.attempts_in_vain, stream.waited_s) == (0, 0.0)


async def test_who_waits_when_the_fleet_is_closed_is_told(make: Make) -> None:
    world = make()
    stream = world.start()
    world.continuations.close()
    with pytest.raises(ShardUnavailable, match="closed"):
        await anext(stream)


async def test_more_scores_than_may_wait_end_a_request_and_are_no_reason_to_go_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_stream, "MAX_UNREAD_SCORES_BYTES", 20)
    world = make("a", "b")
    stream = world.start(logprobs=2)
    for position in range(2):
        row = logprobs_of([-1.0], [1], 2, [(7, -1.0), (8, -2.0)])
        stream.feed(Output([7], position, logprobs=row))
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(RequestRefused, match="20 bytes of them wait"):
        await anext(stream)
    await settled()
    assert sum(len(world.at(name).sent) for name in "ab") == 1


async def test_a_penalty_window_goes_to_a_shard_that_has_the_field(make: Make) -> None:
    world = make("old")
    windowed = SamplingParams(penalty_window_tokens=64)
    with pytest.raises(NotServed, match="penalty_window_tokens") as refused:
        world.start(sampling=windowed)
    assert refused.value.field == "penalty_window_tokens"
    world.add("new", capabilities=frozenset({"penalty_window_tokens"}))
    assert world.where(world.start(sampling=windowed)) == "new"


async def test_a_request_beyond_a_shards_bounds_goes_to_another(make: Make) -> None:
    world = make()
    world.add("narrow", bounds=(FieldBound("temperature", most=2.0),))
    with pytest.raises(NotServed, match=r"temperature: 3\.0 .*: at most 2") as refused:
        world.start(sampling=SamplingParams(temperature=3.0))
    assert refused.value.field == "temperature"
    world.add("wide")
    assert world.where(world.start(sampling=SamplingParams(temperature=3.0))) == "wide"


async def test_a_request_goes_on_only_where_its_fields_do(make: Make) -> None:
    world = make("a")
    stream = world.start(sampling=SamplingParams(presence_penalty=1.0))
    world.add("b", uncontinued=frozenset({"presence_penalty"}))
    world.add("c")
    world.shards["c"].load = dataclasses.replace(world.shards["c"].load, running=8)
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert world.where(stream) == "c"
    assert not world.at("b").sent


async def test_a_request_that_no_shard_goes_on_with_ends_at_once_by_name(make: Make) -> None:
    world = make(wait_s=60.0)
    for name in "ab":
        world.add(name, uncontinued=frozenset({"presence_penalty"}))
    stream = world.start(sampling=SamplingParams(presence_penalty=1.0))
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    with pytest.raises(NoShardAvailable, match=r"presence_penalty: 1\.0 is not served by any"):
        async for _ in stream:
            pass


async def test_a_request_waits_for_a_shard_that_is_away_and_goes_on_with_it(make: Make) -> None:
    world = make("away", wait_s=60.0)
    world.add("b", uncontinued=frozenset({"presence_penalty"}))
    world.shards["b"].load = dataclasses.replace(world.shards["b"].load, running=8)
    stream = world.start(sampling=SamplingParams(presence_penalty=1.0))
    stream.feed(Output([10], 0))
    world.shards["away"].info = None
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert not stream.ended
    assert not world.at("b").sent


async def test_other_models_shards_do_not_make_up_for_what_a_model_s_own_lack(make: Make) -> None:
    world = make("a")
    world.add(
        "other",
        model="other",
        tokenizer_hash="u",
        capabilities=frozenset({"thinking_budget"}),
        adapters=adapters("hash"),
    )
    with pytest.raises(NoShardAvailable, match="tokenizer"):
        world.start(model="m", tokenizer_hash="u")
    with pytest.raises(NotServed, match="thinking_budget"):
        world.start(model="m", thinking_budget=ThinkingBudget(5, 1, 2))
    with pytest.raises(InvalidRequest, match="'x' is not loaded; loaded: none") as refused:
        world.start(model="m", adapter="x")
    assert (refused.value.field, refused.value.value) == ("adapter", "x")
    with pytest.raises(InvalidRequest, match="not in this fleet") as refused:
        world.start(shard="nowhere")
    assert (refused.value.field, refused.value.value) == ("shard", "nowhere")


@pytest.mark.parametrize(("fingerprint", "approximate"), [("f", False), ("", True)])
async def test_numerics_that_nobody_knows_are_not_the_same(
    make: Make, fingerprint: str, approximate: bool
) -> None:
    world = make()
    for name in "ab":
        world.add(name, numerics_fingerprint=fingerprint)
    stream = world.start()
    stream.feed(Output([10], 0))
    stream.fail(ShardUnavailable("gone"))
    await settled()
    stream.feed(Output([11], 1))
    assert stream.approximate == approximate


async def test_a_request_waits_for_a_shard_with_its_tokenizer_that_takes_nothing_now(
    make: Make,
) -> None:
    world = make("a")
    for _ in range(5):
        world.shards["a"].breaker.record_failure(1e9)
    stream = world.start(tokenizer_hash="t")
    assert stream.shard is None
    assert not stream.ended


async def test_a_request_waits_for_its_model_though_others_are_served(make: Make) -> None:
    world = make()
    shard = world.add("a", adapters=adapters("hash"))
    world.add("other", model="other")
    stream = world.start(model="m", adapter="x")
    assert shard.info is not None
    shard.update_info(dataclasses.replace(shard.info, adapters={}))
    lose(world, "a")
    stream.fail(ShardUnavailable("gone"))
    await settled()
    assert not stream.ended
