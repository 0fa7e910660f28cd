"""Seeds, arrivals of several choices, and what is left of a generation that ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from router_doubles import INFO, FakeFleet, FakeShard, model_files
from tokenizers import Tokenizer

from penstock_client.errors import NoShardAvailable, ShardFailed
from penstock_client.types import FinishReason, Logprobs, Output
from penstock_router.choice import first_rows
from penstock_router.errors import NotFound
from penstock_router.generation import Generation, collect
from penstock_router.job import Job, choice_seed, prepare_completion
from penstock_router.metrics import Metrics
from penstock_router.models import Models
from penstock_router.schema import parse_completion


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def models(fleet: FakeFleet, executor: ThreadPoolExecutor) -> Models:
    return Models(fleet, executor)


async def job_of(models: Models, **fields: object) -> Job:
    return await prepare_completion(parse_completion({"prompt": "fox", **fields}), models)


def test_the_seeds_of_choices_never_change() -> None:
    """Published: clients repeat answers by them."""
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 0xCDA7975F1322F3E0
    assert choice_seed(7, 2) == 0x3E839419DA5EB9E3
    assert choice_seed(-1, 0) == 2**64 - 1
    assert len({choice_seed(seed, choice) for seed in range(50) for choice in range(50)}) == 2500


def test_first_rows_cut_every_column() -> None:
    columns = Logprobs([-1.0, -2.0], [1, 2], 2, [5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4])
    assert first_rows(columns, 1) == Logprobs([-1.0], [1], 2, [5, 6], [-0.1, -0.2])


async def test_leaving_early_aborts_exactly_what_is_unfinished(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=3, seed=1)
    fleet.script = lambda request: [5] if request.sampling.seed == 1 else [5] * 100
    async with Generation(job, fleet, Metrics()) as generation:
        async for delta in generation:
            if delta.finish_reason is not None:
                break
    assert sorted(fleet.cancelled) == ["r2", "r3"]
    await asyncio.sleep(0)
    assert not fleet.running


async def test_a_slow_reader_of_several_choices_gets_each_ones_tokens_merged(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models, n=2, seed=1, max_tokens=50)
    async with Generation(job, fleet, Metrics()) as generation:
        await asyncio.sleep(0.05)
        deltas = [delta async for delta in generation]
    assert [len(delta.token_ids) for delta in deltas] == [50, 50]
    assert [delta.index for delta in deltas] == [0, 1]


async def test_a_stream_that_ends_without_a_reason_is_an_error(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models)
    async with Generation(job, fleet, Metrics()) as generation:
        fleet.running["r1"].cancel()
        generation._choices[0].stream.cancel()
        with pytest.raises(ShardFailed, match="without saying why"):
            await collect(generation)


async def test_an_aborted_sequence_is_an_error_not_a_short_answer(
    fleet: FakeFleet, models: Models
) -> None:
    job = await job_of(models)
    async with Generation(job, fleet, Metrics()) as generation:
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
    async def gone(model: str) -> dict[str, bytes]:
        raise NoShardAvailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(fleet, "tokenizer_files", gone)
        with pytest.raises(NoShardAvailable):
            await models.get("")
    assert (await models.get("")).info is INFO


async def test_models_are_found_by_name_and_alias_over_all_shards(
    fleet: FakeFleet, models: Models
) -> None:
    fleet.shards.append(FakeShard(info=replace(INFO, model="second", model_aliases=("2",))))
    assert [info.model for info in models.infos()] == ["fake-model", "second"]
    assert models.info("2").model == "second"
    assert models.info("").model == "fake-model"
    with pytest.raises(NotFound, match="third"):
        models.info("third")
