"""/v1/embeddings: what reaches the fleet, and the form of the answer."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from unit.router.router_doubles import (
    INFO,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    memory_router,
    model_files,
)

from penstock_client.types import EmbeddingDefaults

SIZE = 8


@pytest.fixture
def fleet(byte_level: Tokenizer) -> FakeFleet:
    info = replace(INFO, embedding=EmbeddingDefaults(pooling="last", normalize=True, size=SIZE))
    return FakeFleet(model_files(byte_level), shards=[FakeShard(info)])


@pytest.fixture
async def router(fleet: FakeFleet) -> AsyncIterator[MemoryRouter]:
    async with memory_router(fleet) as served:
        yield served


async def embed(router: MemoryRouter, given: object = "Hello", **fields: Any) -> Any:
    return await router.post("/v1/embeddings", {"input": given, **fields})


async def test_each_input_gets_its_vector_in_order(router: MemoryRouter, fleet: FakeFleet) -> None:
    answer = (await embed(router, ["Hello", "the fox"], model="fake-model")).json()
    assert (answer["object"], answer["model"]) == ("list", "fake-model")
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert all(entry["object"] == "embedding" for entry in answer["data"])
    [request] = fleet.embedded
    alone = [(await embed(router, text)).json()["data"][0] for text in ("Hello", "the fox")]
    assert [entry["embedding"] for entry in answer["data"]] == [
        entry["embedding"] for entry in alone
    ]
    num_tokens = sum(map(len, request.inputs))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_base64_holds_little_endian_floats(router: MemoryRouter) -> None:
    [entry] = (await embed(router)).json()["data"]
    [coded] = (await embed(router, encoding_format="base64")).json()["data"]
    data = base64.b64decode(coded["embedding"])
    assert struct.unpack(f"<{SIZE}f", data) == pytest.approx(entry["embedding"])


async def test_all_four_forms_of_input_are_taken(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode("Hello").ids
    for given in ("Hello", ["Hello"], ids, [ids]):
        assert (await embed(router, given)).status == 200
    assert [list(request.inputs[0]) for request in fleet.embedded] == [ids] * 4


async def test_every_field_reaches_the_fleet(router: MemoryRouter, fleet: FakeFleet) -> None:
    await embed(router, "the quick brown fox", dimensions=4, pooling="mean", normalize=False,
                truncate_prompt_tokens=2, truncation_side="left", user="me",
                add_special_tokens=False, model="fake-alias")  # fmt: skip
    [request] = fleet.embedded
    assert (request.dimensions, request.pooling, request.normalize) == (4, "mean", False)
    assert (request.model, request.tokenizer_hash) == ("fake-model", INFO.tokenizer_hash)
    await embed(router, "the quick brown fox")
    assert list(request.inputs[0]) == list(fleet.embedded[1].inputs[0])[-2:]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": None}, "input", "required"),
        ({"input": {}}, "input", "a string"),
        ({"input": [INFO.vocab_size]}, "input", "out of vocabulary"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"dimensions": 0}, "dimensions", "at least 1"),
        ({"dimensions": SIZE + 1}, "dimensions", f"at most {SIZE}"),
        ({"encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"pooling": "cls"}, "pooling", "last, mean"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
async def test_bad_bodies_are_refused_by_field(
    router: MemoryRouter, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = await router.post("/v1/embeddings", {"input": "Hello", **fields})
    assert answer.status in (400, 404)
    assert words in answer.error["message"]
    assert answer.error["param"] == param


async def test_an_answer_that_would_be_too_long_is_refused(fleet: FakeFleet) -> None:
    async with memory_router(fleet, max_answer_bytes=24 * SIZE * 3) as router:
        assert (await embed(router, ["a"] * 3)).status == 200
        refused = await embed(router, ["a"] * 4)
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert (await embed(router, ["a"] * 4, dimensions=SIZE // 2)).status == 200


async def test_a_model_without_sensible_embeddings_says_so(byte_level: Tokenizer) -> None:
    shard = FakeShard(replace(INFO, embedding=None, capabilities=frozenset()))
    async with memory_router(FakeFleet(model_files(byte_level), shards=[shard])) as router:
        refused = await embed(router)
        assert (refused.status, refused.error["param"]) == (400, "model")
        assert "--embeddings" in refused.error["message"]


async def test_any_shard_of_the_model_may_be_the_one_that_makes_embeddings(
    fleet: FakeFleet,
) -> None:
    fleet.shards.insert(0, FakeShard(replace(INFO, embedding=None), address="fake:2"))
    async with memory_router(fleet) as router:
        assert (await embed(router)).status == 200


async def test_an_input_may_be_cut_to_the_whole_context(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    await embed(router, "the fox " * 5000, truncate_prompt_tokens=-1)
    assert [len(ids) for ids in fleet.embedded[0].inputs] == [INFO.max_model_len]


async def test_an_input_of_no_tokens_is_refused_by_its_field(router: MemoryRouter) -> None:
    refused = await embed(router, "Hello", truncate_prompt_tokens=0)
    assert (refused.status, refused.error["param"]) == (400, "input")
    assert "has no tokens" in refused.error["message"]
