"""A model that no shard serves has its name in metrics and in the log, and only a known one has."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.router_doubles import (
    INFO,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_proto.facts import Adapter

OTHER = replace(INFO, model="other", model_aliases=("others",))
ADAPTED = replace(INFO, adapters={"sql": Adapter("sql", "0" * 64, "sql", 8)})


@pytest.fixture
def fleet(byte_level: Tokenizer) -> FakeFleet:
    """Two models, of which the first has an adapter."""
    shards = [FakeShard(ADAPTED), FakeShard(OTHER, address="other:1")]
    return FakeFleet(model_files(byte_level), members=shards)


def lose(shard: FakeShard) -> None:
    """Let it be gone, as the fleet sees a shard whose process has ended."""
    shard.last_info, shard.info = shard.info, None
    shard.ready = shard.connected = False


async def metrics_of(router: MemoryRouter, name: str) -> dict[str, float]:
    """The value of each series of this name, by its labels as they are written."""
    lines = (await router.get("/metrics")).body.decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, _, value in samples}


def failures(counted: dict[str, float]) -> dict[str, float]:
    """Requests that ended with 503, by model."""
    return {
        labels.partition('model="')[2].partition('"')[0]: value
        for labels, value in counted.items()
        if 'status="503"' in labels and 'outcome="error"' in labels
    }


async def test_a_shard_that_is_gone_still_has_the_model_that_it_served(fleet: FakeFleet) -> None:
    async with memory_router(fleet, admin_key="operator") as router:
        lose(fleet.shards[1])
        answer = await router.get("/admin/shards", Authorization="Bearer operator")
        told = [(shard["state"], shard["model"]) for shard in answer.json()["shards"]]
        assert told == [("serving", INFO.model), ("gone", "other")]
        states = await metrics_of(router, "penstock_router_shard_state")
        assert '{model="other",shard="other:1",state="gone"}' in states


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "penstock.requests"):
        yield caplog


@pytest.mark.parametrize(
    ("asked", "model"),
    [("fake-model", "fake-model"), ("fake-alias", "fake-model"), ("sql", "fake-model"),
     ("fast", "fake-model"), ("third", "third")],
)  # fmt: skip
async def test_a_503_is_counted_and_logged_under_the_model_that_was_asked_for(
    fleet: FakeFleet, logged: pytest.LogCaptureFixture, asked: str, model: str
) -> None:
    settings = {"expected_models": ("third",), "model_aliases": (("fast", "fake-alias"),)}
    async with memory_router(fleet, **settings) as router:
        assert (await router.complete(model="fake-model", max_tokens=1)).status == 200
        lose(fleet.shards[0])
        assert (await router.complete(model=asked)).status == 503
        assert (await router.complete(model="other", max_tokens=1)).status == 200
        counted = await metrics_of(router, "penstock_router_requests_total")
    assert failures(counted) == {model: 1}
    (line,) = (record for record in logged.records if record.__dict__.get("status") == 503)
    assert line.__dict__["model"] == model


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
async def test_every_route_that_needs_a_model_names_it(fleet: FakeFleet, path: str) -> None:
    async with memory_router(fleet) as router:
        assert (await router.complete(model="other", max_tokens=1)).status == 200
        lose(fleet.shards[1])
        turns = {"messages": [{"role": "user", "content": "Hello"}]}
        body = {"input": "Hello"} if path.endswith("embeddings") else turns
        assert (await router.post(path, {"model": "others", **body})).status == 503
        assert failures(await metrics_of(router, "penstock_router_requests_total")) == {"other": 1}


async def test_a_name_that_only_a_client_knows_makes_no_label(
    fleet: FakeFleet, logged: pytest.LogCaptureFixture
) -> None:
    async with memory_router(fleet) as router:
        assert (await router.complete(model="other", max_tokens=1)).status == 200
        for shard in fleet.shards:
            lose(shard)
        for number in range(20):
            assert (await router.complete(model=f"made-up-{number}")).status == 503
        # Of two it might be either.
        assert (await router.complete()).status == 503
        counted = await metrics_of(router, "penstock_router_requests_total")
    assert failures(counted) == {"": 21}
    assert not any("made-up" in record.__dict__.get("model", "") for record in logged.records)


async def test_a_request_that_names_no_model_means_the_only_one(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level))
    async with memory_router(fleet) as router:
        assert (await router.complete(max_tokens=1)).status == 200
        lose(fleet.shards[0])
        assert (await router.complete()).status == 503
        assert (await router.complete(model="tgi")).status == 503
        assert (await router.complete(model="made-up")).status == 503
        counted = failures(await metrics_of(router, "penstock_router_requests_total"))
    assert counted == {"fake-model": 2, "": 1}


async def test_a_model_whose_tokenizer_does_not_load_is_named_too() -> None:
    fleet = FakeFleet({"tokenizer.json": b'{"model": {"type": "Nonsense"}}'})
    async with memory_router(fleet) as router:
        assert (await router.complete()).status == 503
        counted = failures(await metrics_of(router, "penstock_router_requests_total"))
    assert counted == {"fake-model": 1}


async def test_a_model_stays_in_the_gauge_at_0_when_all_of_its_shards_have_left(
    fleet: FakeFleet,
) -> None:
    fleet.shards.append(FakeShard(OTHER, address="other:2"))
    async with memory_router(fleet, expected_models=("third",)) as router:

        async def serving() -> dict[str, float]:
            return await metrics_of(router, "penstock_router_model_shards_serving")

        models = ('{model="fake-model"}', '{model="other"}', '{model="third"}')
        assert await serving() == dict(zip(models, (1, 2, 0), strict=True))
        lose(fleet.shards[2])
        fleet.shards[1].ready = False
        assert await serving() == dict(zip(models, (1, 0, 0), strict=True))
        del fleet.shards[1:]
        assert await serving() == dict(zip(models, (1, 0, 0), strict=True))
        fleet.shards.append(FakeShard(OTHER))
        assert await serving() == dict(zip(models, (1, 1, 0), strict=True))


async def test_a_name_that_is_expected_and_turns_out_to_be_an_alias_is_no_model_that_is_down(
    fleet: FakeFleet,
) -> None:
    async with memory_router(fleet, expected_models=("others",)) as router:
        serving = await metrics_of(router, "penstock_router_model_shards_serving")
    assert serving == {'{model="fake-model"}': 1, '{model="other"}': 1}
