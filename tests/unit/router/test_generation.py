"""Seeds, arrivals of several choices, and what is left of a generation that ends early."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
from support.router_doubles import INFO, FakeFleet, FakeShard, hashed_tokens, model_files
from tokenizers import Tokenizer

from penstock_client import FleetStream
from penstock_proto.errors import InvalidRequest, NoShardAvailable, ShardFailed
from penstock_proto.facts import Adapter
from penstock_proto.types import FinishReason, GenerationRequest, Output, SamplingParams
from penstock_router.apis.openai.requests import parse_completion
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, NotFound, TimedOut, Unavailable
from penstock_router.generation.choice import Delta
from penstock_router.generation.deltas import Deltas, collect, for_each
from penstock_router.generation.generation import Generation, _num_ids
from penstock_router.generation.job import Job, choice_seed, make_job, sequence_seed
from penstock_router.observe.exposition import Exposition
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import RequestRecord
from penstock_router.served_models import Models
from penstock_router.text.detokenizer import ByteDetokenizer
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import prepare_prompts
from penstock_router.thread_pool import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(1) as executor:
        yield Threads(executor, 8)


@pytest.fixture
def models(fleet: FakeFleet, threads: Threads) -> Models:
    return Models(fleet, threads, RouterConfig(shards="fake:1"))


def record() -> RequestRecord:
    return RequestRecord(request_id="r", method="POST", route="/v1/completions", arrived_s=0.0)


async def job_of(models: Models, **fields: object) -> Job:
    request, model = parse_completion({"prompt": "fox", **fields}), await models.get("")
    return await make_job(request, model, prepare_prompts(request, model.text), drawn_seed=3)


class _Ready(Deltas):
    """A source of `count` deltas that are all there at once."""

    def __init__(self, count: int) -> None:
        self.left = count

    @property
    def ended(self) -> bool:
        return not self.left

    def take(self) -> Delta | None:
        if not self.left:
            return None
        self.left -= 1
        return Delta(self.left, "x", [5])

    def listen(self, on_output: Callable[[], None]) -> None:
        pass


async def test_of_many_deltas_a_few_are_taken_in_one_turn_of_the_loop() -> None:
    taken: list[int] = []
    turns = []
    taking = asyncio.create_task(for_each(_Ready(1000), lambda delta: taken.append(delta.index)))
    while not taking.done():
        await asyncio.sleep(0)
        turns.append(len(taken))
    assert taken == list(reversed(range(1000)))
    assert max(b - a for a, b in pairwise([0, *turns])) <= 64


async def test_of_a_job_of_many_sequences_a_few_are_made_in_one_turn_of_the_loop(
    models: Models,
) -> None:
    # The model is loaded once.
    await job_of(models)
    making = asyncio.create_task(job_of(models, n=1000))
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    assert len((await making).requests) == 1000


def test_the_seeds_of_choices_never_change() -> None:
    """Published: clients repeat answers by them."""
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 0xCDA7975F1322F3E0
    assert choice_seed(7, 2) == 0x3E839419DA5EB9E3
    assert choice_seed(-1, 0) == 2**64 - 1
    assert len({choice_seed(seed, choice) for seed in range(50) for choice in range(50)}) == 2500


def test_a_seed_that_is_given_is_every_prompt_s_and_one_that_is_drawn_none_s_but_the_first() -> (
    None
):
    for choice in range(3):
        assert sequence_seed(7, 9, 0, choice) == sequence_seed(7, 9, 1, choice)
        assert sequence_seed(7, 9, 1, choice) == choice_seed(7, choice)
        assert sequence_seed(None, 9, 0, choice) == choice_seed(9, choice)
    places = [(prompt, choice) for prompt in range(50) for choice in range(50)]
    assert len({sequence_seed(None, 9, *place) for place in places}) == 2500


async def test_leaving_early_aborts_exactly_what_is_unfinished(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=3, seed=1)
    fleet.script = lambda request: [5] if request.sampling.seed == 1 else [5] * 100
    async with Generation(job, fleet, Metrics(), record()) as generation:
        async for delta in generation:
            if delta.finish_reason is not None:
                break
    assert sorted(fleet.cancelled) == ["r2", "r3"]
    await asyncio.sleep(0.01)
    assert not fleet.running


async def test_a_slow_reader_of_several_choices_gets_each_ones_tokens_merged(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=2, seed=1, max_tokens=50)
    async with Generation(job, fleet, Metrics(), record()) as generation:
        await asyncio.sleep(0.05)
        deltas = [delta async for delta in generation]
    assert [len(delta.token_ids) for delta in deltas] == [50, 50]
    assert [delta.index for delta in deltas] == [0, 1]


async def test_a_stream_that_ends_without_a_reason_is_an_error(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models)
    async with Generation(job, fleet, Metrics(), record()) as generation:
        fleet.running["r1"].cancel()
        generation._choices[0].stream.cancel()
        with pytest.raises(ShardFailed, match="without saying why"):
            await collect(generation, generation.job, 2**28, lambda num_bytes: None)


async def test_an_aborted_sequence_is_an_error_not_a_short_answer(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models)
    async with Generation(job, fleet, Metrics(), record()) as generation:
        with pytest.raises(ShardFailed, match="before it was finished"):
            generation._choices[0].take(Output([], 0, finish_reason=FinishReason.ABORTED))


# ---- models ------------------------------------------------------------------------------------


async def test_a_new_tokenizer_under_the_same_name_is_loaded(
    fleet: FakeFleet, models: Models, sentencepiece: Tokenizer
) -> None:
    before = await models.get("")
    assert (await models.get(INFO.model)).tokenizer is before.tokenizer
    fleet.files = model_files(sentencepiece)
    fleet.shards[:] = [FakeShard(info=replace(INFO, tokenizer_hash="new"))]
    after = await models.get("")
    assert after.tokenizer is not before.tokenizer


async def test_a_request_that_is_cancelled_does_not_stop_the_loading_of_others(
    models: Models,
) -> None:
    first = asyncio.create_task(models.get(""))
    second = asyncio.create_task(models.get(""))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).info is INFO
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_loading_that_failed_is_tried_again(
    fleet: FakeFleet, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    async def gone(model: str, tokenizer_hash: str) -> dict[str, bytes]:
        nonlocal calls
        calls += 1
        raise NoShardAvailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(fleet, "tokenizer_files", gone)
        for _ in range(3):
            with pytest.raises(NoShardAvailable):
                await models.get("")
        # The failure stands for a while: files are not fetched for every request.
        assert calls == 1
    monkeypatch.setattr("penstock_router.served_models._RETRY_S", 0)
    assert (await models.get("")).info is INFO


async def test_one_bad_model_does_not_keep_the_others_from_being_ready(
    fleet: FakeFleet, models: Models, byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = model_files(byte_level), model_files(byte_level)
    bad["tokenizer_config.json"] = b'{"chat_template": [{"name": "default"}]}'

    async def files(model: str, tokenizer_hash: str) -> dict[str, bytes]:
        return bad if model == "bad" else good

    fleet.tokenizer_files = files  # type: ignore[method-assign, assignment]
    fleet.shards.insert(0, FakeShard(info=replace(INFO, model="bad", model_aliases=())))
    loading = asyncio.create_task(models.keep_loading())
    async with asyncio.timeout(10):
        # Either may be the first to be through with.
        while models.not_ready_because is not None or "bad" not in caplog.text:
            await asyncio.sleep(0.005)
    assert not loading.done()
    loading.cancel()
    with pytest.raises(Unavailable, match="no list of names and templates"):
        await models.get("bad")
    assert (await models.get(INFO.model)).info is INFO
    # What is known of their formats.
    bad_info, good_info = models.infos()
    assert models.formats(bad_info) == (Conventions(), ())
    assert models.formats(good_info)[0].names == ("plain_json", "")
    assert len([record for record in caplog.records if "bad" in record.getMessage()]) == 1


async def test_what_nobody_foresaw_in_a_models_files_is_that_models_trouble(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("name")

    monkeypatch.setattr("penstock_router.served_models.load_chat_template", broken)
    with pytest.raises(Unavailable, match="do not load: KeyError"):
        await models.get("")


async def test_a_model_that_is_away_is_503_and_an_unknown_one_404(
    fleet: FakeFleet, models: Models
) -> None:
    second = FakeShard(info=replace(INFO, model="second", model_aliases=("2",)))
    fleet.shards.append(second)
    assert models.info("2").model == "second"
    # The fleet forgets what a lost shard said of itself.
    second.ready, second.info = False, None
    for name in ("second", "2"):
        with pytest.raises(Unavailable, match="at present"):
            models.info(name)
    with pytest.raises(NotFound):
        models.info("third")


async def test_a_model_that_nobody_asked_for_is_away_once_it_was_there(
    fleet: FakeFleet, models: Models
) -> None:
    second = FakeShard(info=replace(INFO, model="second"))
    fleet.shards.append(second)
    # A list is a look, and nothing is noted for it.
    assert [info.model for info in models.infos()] == [INFO.model, "second"]
    assert "second" not in models._names
    loading = asyncio.create_task(models.keep_loading())
    async with asyncio.timeout(10):
        while "second" not in models._names:
            await asyncio.sleep(0.01)
    loading.cancel()
    fleet.shards.remove(second)
    with pytest.raises(Unavailable, match="at present"):
        models.info("second")


async def test_an_adapter_whose_shard_is_away_is_503_and_one_that_was_unloaded_404(
    fleet: FakeFleet, models: Models
) -> None:
    adapted = replace(INFO, adapters={"sql": Adapter("sql", "hash", "", 4)})
    holder = FakeShard(ready=False, info=None, last_info=adapted)
    fleet.shards.append(holder)
    with pytest.raises(Unavailable, match="no shard serves sql at present"):
        models.info("sql")
    holder.last_info = INFO
    with pytest.raises(NotFound):
        models.info("sql")
    # Of the bare model there is a shard, and nothing else is meant by no name.
    assert models.info("") is INFO


async def test_an_adapter_that_is_unloaded_while_a_request_runs_is_an_unknown_model(
    fleet: FakeFleet, models: Models
) -> None:
    fleet.shards[0].info = replace(INFO, adapters={"sql": Adapter("sql", "hash", "", 4)})
    gone = InvalidRequest("adapter 'sql' is not loaded; loaded: none", field="adapter")
    job = replace(await job_of(models), model=await models.get("sql"))

    async def answered() -> None:
        async with Generation(job, fleet, Metrics(), record()) as generation:
            async for _ in generation:
                pass

    fleet.script = lambda request: [gone]
    with pytest.raises(NotFound, match="The model `sql` does not exist") as caught:
        await answered()
    assert caught.value.param == "model"
    fleet.refusal, fleet.accepts = gone, 0
    with pytest.raises(NotFound, match="The model `sql` does not exist"):
        await answered()


async def test_a_model_whose_last_shard_leaves_before_its_request_is_submitted_is_away(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models)
    fleet.refusal = InvalidRequest("model 'x' is not served; served: y", field="model")
    fleet.accepts = 0
    with pytest.raises(Unavailable, match="no shard serves fake-model at present"):
        await Generation(job, fleet, Metrics(), record()).__aenter__()


async def test_texts_of_a_replaced_tokenizer_are_dropped(fleet: FakeFleet, models: Models) -> None:
    await models.get("")
    fleet.shards[0].info = replace(INFO, tokenizer_hash="new")
    loading = asyncio.create_task(models.keep_loading())
    async with asyncio.timeout(10):
        while models.not_ready_because is not None:
            await asyncio.sleep(0.005)
    loading.cancel()
    assert [key[1] for key in models._texts] == ["new"]


# ---- submitting --------------------------------------------------------------------------------


async def test_submitting_many_long_prompts_lets_others_run(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=200)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    generation = Generation(job, fleet, Metrics(), record())
    await generation.__aenter__()
    counting.cancel()
    assert turns >= 5
    generation.abandon(None)
    await generation.__aexit__(None, None, None)
    assert len(fleet.cancelled) == 200


async def test_a_client_that_leaves_while_its_choices_are_submitted_aborts_them(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=200)
    fleet.step_s = 10
    entering = asyncio.create_task(Generation(job, fleet, Metrics(), record()).__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
    assert 0 < len(fleet.requests) < 200
    assert len(fleet.cancelled) == len(fleet.requests)


async def test_a_choice_that_cannot_be_made_leaves_nothing_submitted(
    fleet: FakeFleet, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await job_of(models)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("penstock_router.generation.generation.Choice", broken)
    with pytest.raises(ZeroDivisionError):
        await Generation(job, fleet, Metrics(), record()).__aenter__()
    await asyncio.sleep(0)
    assert not fleet.running


async def shown(metrics: Metrics) -> str:
    return (await Exposition(metrics).text()).decode()


async def test_a_merged_output_is_one_gap_between_tokens(fleet: FakeFleet, models: Models) -> None:
    metrics = Metrics()
    job = await job_of(models, max_tokens=101, stream=True)
    bundles = iter([1, 50, 50])
    fleet.bundle = lambda: next(bundles)
    async with Generation(job, fleet, metrics, record()) as generation:
        await collect(generation, generation.job, 2**28, lambda num_bytes: None)
    name = f'{{model="{job.model.info.model}"}}'
    assert f"penstock_router_output_tokens_total{name} 101.0" in await shown(metrics)
    assert f"penstock_router_between_tokens_seconds_count{name} 2.0" in await shown(metrics)


async def test_an_answer_that_is_shown_whole_is_made_of_many_tokens_at_a_time(
    fleet: FakeFleet, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    feed = ByteDetokenizer.feed

    def counted(self: ByteDetokenizer, token_ids: Sequence[int]) -> str:
        sizes.append(len(token_ids))
        return feed(self, token_ids)

    monkeypatch.setattr(ByteDetokenizer, "feed", counted)
    for stream, expected in ((False, [1, 64, 35]), (True, [1] * 100)):
        job = await job_of(models, max_tokens=100, stream=stream)
        async with Generation(job, fleet, Metrics(), record()) as generation:
            [whole] = await collect(generation, job, 2**28, lambda num_bytes: None)
        assert sizes == expected
        assert whole.token_ids == hashed_tokens(job.requests[0])
        sizes.clear()


async def test_an_error_comes_after_the_tokens_before_it(fleet: FakeFleet, models: Models) -> None:
    fleet.script = lambda request: [5, 6, ShardFailed("broken")]
    for options in ({}, {"stream": True}, {"n": 2, "stream": True}):
        job = await job_of(models, max_tokens=9, **options)
        seen: list[Delta] = []
        async with Generation(job, fleet, Metrics(), record()) as generation:
            await asyncio.sleep(0.05)
            with pytest.raises(ShardFailed, match="broken"):
                await for_each(generation, seen.append)
        assert [delta.token_ids for delta in seen] == [[5, 6]] * len(job.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_an_answer_that_is_over_waits_for_the_garbage_collector(
    fleet: FakeFleet, models: Models, stream: bool
) -> None:
    async def made() -> weakref.ref[Generation]:
        job = await job_of(models, max_tokens=5, n=2, stream=stream)
        async with Generation(job, fleet, Metrics(), record()) as generation:
            await for_each(generation, lambda delta: None)
            return weakref.ref(generation)

    gc.disable()
    try:
        left = await made()
        await until_over(fleet)
        assert left() is None
    finally:
        gc.enable()


async def until_over(fleet: FakeFleet) -> None:
    while fleet.running:
        await asyncio.sleep(0.001)


async def test_who_is_told_of_deltas_needs_no_task_for_each(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, max_tokens=50, stream=True)
    callers = set()
    async with Generation(job, fleet, Metrics(), record()) as generation:
        feeder = fleet.running["r1"]
        await for_each(generation, lambda delta: callers.add(asyncio.current_task()))
    assert callers == {feeder}


async def test_deltas_gather_while_the_use_of_one_is_waited_for(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, max_tokens=30, stream=True)
    begun: list[int] = []
    done: list[int] = []

    def use(delta: Delta) -> Callable[[], Awaitable[None]]:
        begun.append(len(delta.token_ids))
        return wait

    async def wait() -> None:
        await until_over(fleet)
        done.append(begun[-1])
        assert done == begun

    async with Generation(job, fleet, Metrics(), record()) as generation:
        await for_each(generation, use)
    assert done == [1, 29]


async def test_what_fails_while_a_delta_s_use_is_waited_for_ends_the_taking(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, max_tokens=30, stream=True)

    async def fail() -> None:
        raise RuntimeError("cannot send it")

    async with Generation(job, fleet, Metrics(), record()) as generation:
        with pytest.raises(RuntimeError, match="cannot send it"):
            await for_each(generation, lambda delta: fail)


async def test_what_fails_where_deltas_are_used_ends_nobody_elses(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, max_tokens=50, stream=True)

    def fail(delta: Delta) -> None:
        raise RuntimeError("cannot show it")

    async with Generation(job, fleet, Metrics(), record()) as generation:
        feeder = fleet.running["r1"]
        with pytest.raises(RuntimeError, match="cannot show it"):
            await for_each(generation, fail)
        assert not feeder.done()


async def test_a_choice_of_which_nothing_is_heard_fails_in_time_and_is_aborted(
    fleet: FakeFleet, models: Models
) -> None:
    def stuck(request: GenerationRequest) -> list[int]:
        return [5, 6, 7] if request.sampling.seed == 1 else [5]

    fleet.script, hang = stuck, asyncio.Event()
    feed = fleet._feed

    async def feed_and_hang(request: GenerationRequest, stream: FleetStream) -> None:
        if request.sampling.seed == 1:
            stream.feed(Output([5], 0))
            await hang.wait()
        await feed(request, stream)

    fleet._feed = feed_and_hang  # type: ignore[method-assign]
    job, metrics = await job_of(models, n=2, seed=1, stream=True), Metrics()
    begun = asyncio.get_running_loop().time()
    with pytest.raises(TimedOut, match="nothing came from the shard for 0"):
        async with Generation(job, fleet, metrics, record(), silence_timeout_s=0.2) as generation:
            await for_each(generation, lambda delta: None)
    assert 0.2 <= asyncio.get_running_loop().time() - begun < 2.0
    assert fleet.cancelled == ["r1"]
    assert 'penstock_router_aborts_total{cause="timeout"} 1.0' in await shown(metrics)
    assert 'penstock_router_wasted_tokens_total{cause="timeout"} 1.0' in await shown(metrics)


async def test_tokens_that_came_and_that_nobody_took_are_counted_and_wasted(
    fleet: FakeFleet, models: Models
) -> None:
    job, metrics = await job_of(models, max_tokens=9), Metrics()
    fleet.step_s = 0.005
    generation = await Generation(job, fleet, metrics, record()).__aenter__()
    await asyncio.sleep(0.02)
    # The prompt's first counts in it.
    arrived = generation._choices[0].stream.progress - 1
    generation.abandon(asyncio.CancelledError())
    assert 0 < arrived < 9
    text = await shown(metrics)
    name = f'{{model="{job.model.info.model}"}}'
    assert f"penstock_router_output_tokens_total{name} {arrived}.0" in text
    assert f'penstock_router_wasted_tokens_total{{cause="disconnect"}} {arrived}.0' in text


async def test_a_choice_that_goes_on_is_not_silent_nor_is_one_whose_reader_is_slow(
    fleet: FakeFleet, models: Models
) -> None:
    fleet.step_s = 0.05
    job = await job_of(models, max_tokens=8, stream=True)
    async with Generation(job, fleet, Metrics(), record(), silence_timeout_s=0.2) as generation:
        await for_each(generation, lambda delta: None)
    async with Generation(job, fleet, Metrics(), record(), silence_timeout_s=0.2) as generation:
        # All of it has come by then.
        await asyncio.sleep(0.7)
        await for_each(generation, lambda delta: None)


async def test_models_are_found_by_name_and_alias_over_all_shards(
    fleet: FakeFleet, models: Models
) -> None:
    fleet.shards.append(FakeShard(info=replace(INFO, model="second", model_aliases=("2",))))
    assert [info.model for info in models.infos()] == ["fake-model", "second"]
    assert models.info("2").model == "second"
    with pytest.raises(NotFound, match="third"):
        models.info("third")


async def test_a_model_has_the_tokenizer_that_its_shard_has(
    fleet: FakeFleet, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    async def files(model: str, tokenizer_hash: str) -> dict[str, bytes]:
        asked.append((model, tokenizer_hash))
        return dict(fleet.files)

    monkeypatch.setattr(fleet, "tokenizer_files", files)
    await models.get("")
    assert asked == [(INFO.model, INFO.tokenizer_hash)]


def test_all_ids_that_a_submission_copies_count_for_a_turn_of_the_loop() -> None:
    sampling = SamplingParams(
        allowed_token_ids=(1,) * 5, bad_words=((1, 2), (3,)), logit_bias={1: 1.0}
    )
    request = GenerationRequest(
        [1] * 100, sampling=sampling, stop_token_ids=[1] * 7, logprob_token_ids=[1] * 11
    )
    assert _num_ids(request) == 100 + 5 + 3 + 10 + 7 + 11


async def test_a_request_without_a_model_is_served_where_there_is_no_choice_or_an_alias_says_which(
    byte_level: Tokenizer, threads: Threads
) -> None:
    fleet = FakeFleet(model_files(byte_level))
    config = RouterConfig(shards="fake:1")
    assert Models(fleet, threads, config).info("").model == INFO.model
    other = replace(INFO, model="other", model_aliases=())
    fleet.shards.append(FakeShard(other, address="fake:2"))
    for name in ("", "tgi", "dummy"):
        with pytest.raises(BadRequest, match="model: needed"):
            Models(fleet, threads, config).info(name)
    config = replace(config, model_aliases=(("default", "other"), ("tgi", "other")))
    for name in ("", "tgi", "default"):
        assert Models(fleet, threads, config).info(name).model == "other"


async def test_tokens_that_are_counted_in_batches_are_what_one_at_a_time_would_be() -> None:
    batched, plain = Metrics(), Metrics()
    gaps = [0.0001, 0.002, 0.0021, 0.03, 0.03, 4.9, 5.0, 77.0]
    for gap_s in gaps:
        batched.tokens_of("m").observe(2, gap_s, now_s=0.0)
        plain.tokens_of("m").add(2)
        plain.between_tokens_seconds.labels("m").observe(gap_s)

    assert await shown(batched) == await shown(plain)
