"""Answers tell in a header how busy the shards of their model are, where a request asks for it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

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

from penstock_proto.facts import LoadReport
from penstock_router.observe.endpoint_load import endpoint_load

ANSWERED = "endpoint-load-metrics"
TURNS = [{"role": "user", "content": "The fox"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/messages": {"model": INFO.model, "max_tokens": 4, "messages": TURNS},
    "/v1/responses": {"input": "a"},
    "/generate": {"inputs": "a", "parameters": {"max_new_tokens": 4}},
    "/invocations": {"prompt": "a"},
}


def shard(used: int, waiting: int, **fields: Any) -> FakeShard:
    load = LoadReport(referenced_blocks=used, num_blocks=100, waiting=waiting)
    return dataclasses.replace(FakeShard(load=load), **fields)


def of_shards(form: str, *shards: FakeShard, queued: int = 0) -> str | None:
    return endpoint_load(form, shards, INFO.model, queued)


def test_the_two_forms_are_those_of_gateways() -> None:
    shards = [shard(50, 2), shard(0, 1)]
    assert of_shards("TEXT", *shards, queued=4) == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=7.0"
    )
    form, _, data = (of_shards("json", *shards) or "").partition(" ")
    found = {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0}}
    assert (form, json.loads(data)) == ("JSON", found)


@pytest.mark.parametrize("form", ["", "BIN", "TEXT, JSON", "protobuf"])
def test_another_form_gives_nothing(form: str) -> None:
    assert of_shards(form, shard(50, 2)) is None


def test_only_shards_that_serve_the_model_count() -> None:
    other = dataclasses.replace(INFO, model="other")
    shards = [shard(50, 2), shard(9, 9, ready=False), shard(9, 9, info=other)]
    shards.append(shard(9, 9, info=None))
    assert of_shards("TEXT", *shards) == of_shards("TEXT", shards[0])
    none = "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
    assert of_shards("TEXT") == none


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_of_any_route_that_generates_has_the_header(
    router: MemoryRouter, path: str
) -> None:
    router.fleet.shards[:] = [shard(25, 3)]
    answer = await router.post(path, BODIES[path], **{"endpoint-load-metrics-format": "TEXT"})
    assert answer.status == 200, answer.body
    assert answer.headers[ANSWERED] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"
    )
    assert ANSWERED not in (await router.post(path, BODIES[path])).headers
    odd = await router.post(path, BODIES[path], **{"endpoint-load-metrics-format": "odd"})
    assert (odd.status, ANSWERED in odd.headers) == (200, False)


async def test_what_waits_in_the_router_counts(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.02)
    async with memory_router(fleet, max_concurrent_requests=1) as router:
        asked = {"endpoint-load-metrics-format": "TEXT"}
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True}
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(router.post("/v1/completions", body, **asked)) for _ in range(3)
            ]
        waiting = [task.result().headers[ANSWERED].rpartition("=")[2] for task in tasks]
        assert waiting == ["2.0", "1.0", "0.0"]
