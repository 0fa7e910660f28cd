"""/v1/embeddings: what reaches the fleet, and the form of the answer."""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_proto.facts import EmbeddingDefaults
from penstock_proto.types import Pooling
from penstock_router.apis.vector_bytes import encode

SIZE = 8


@pytest.fixture
def fleet(byte_level: Tokenizer) -> FakeFleet:
    info = replace(
        INFO, embedding=EmbeddingDefaults(pooling=Pooling.LAST, normalize=True, size=SIZE)
    )
    return FakeFleet(model_files(byte_level), members=[FakeShard(info)])


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


def as_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of 16 bits, each the upper half of a float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("endianness", ["little", "big", "native", None])
@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(None, 0.0), ("float32", 0.0), ("float16", 2**-11), ("bfloat16", 2**-8)],
)
async def test_base64_is_of_the_numbers_and_the_bytes_order_that_are_asked_for(
    router: MemoryRouter, dtype: str | None, rounding: float, endianness: str | None
) -> None:
    [entry] = (await embed(router, dimensions=7)).json()["data"]
    asked = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    answer = await embed(router, dimensions=7, **asked)
    assert "x-penstock-warnings" not in answer.headers
    data = base64.b64decode(answer.json()["data"][0]["embedding"])
    order = {"little": "<", "big": ">", "native": "=", None: "<"}[endianness]
    kinds = {"float16": "f2", "bfloat16": "u2"}
    found = np.frombuffer(data, order + kinds.get(dtype or "", "f4"))
    found = as_bfloat16(found) if dtype == "bfloat16" else found
    np.testing.assert_allclose(found, entry["embedding"], rtol=rounding or 1e-7, atol=0)


async def test_the_bytes_of_numbers_do_not_count_where_there_are_none(
    router: MemoryRouter,
) -> None:
    answer = await embed(router, embed_dtype="float16", endianness="big")
    assert answer.json() == (await embed(router)).json()
    warnings = answer.headers["x-penstock-warnings"]
    assert "embed_dtype: taken without effect" in warnings
    assert "endianness: taken without effect" in warnings


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_small_numbers_are_those_of_torch_to_the_bit(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    kind = kinds.get(dtype) or getattr(torch, dtype)
    rng, largest = seeded(f"numbers of {dtype}"), torch.finfo(kind).max
    values = [
        math.ldexp(rng.uniform(-1, 1), rng.randint(-30, 8)) for _ in range(budget(2000, 100_000))
    ]
    # All that it has, and what lies halfway between two.
    codes = torch.arange(256 if dtype.startswith("fp8") else 65536)
    view = codes.to(torch.uint8 if dtype.startswith("fp8") else torch.uint16).view(kind).float()
    own = sorted(value for value in view.tolist() if math.isfinite(value))
    values += own
    values += [(low + high) / 2 for low, high in pairwise(own)]
    values = torch.tensor(values).clamp(-largest, largest)
    expected = values.to(kind).view(torch.uint8).numpy().tobytes()
    assert encode(values.tolist(), dtype, sys.byteorder) == expected


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


@pytest.mark.parametrize("dimensions", [None, 3])
@pytest.mark.parametrize("models_own", [True, False])
async def test_vectors_have_length_1_whatever_the_models_files_say(
    fleet: FakeFleet, models_own: bool, dimensions: int | None
) -> None:
    own = EmbeddingDefaults(pooling=Pooling.LAST, normalize=models_own, size=SIZE)
    fleet.shards[0].info = replace(INFO, embedding=own)
    async with memory_router(fleet) as router:

        async def length(**fields: Any) -> float:
            [entry] = (await embed(router, dimensions=dimensions, **fields)).json()["data"]
            return math.hypot(*entry["embedding"])

        for fields in ({}, {"normalize": None}, {"normalize": True}, {"use_activation": True}):
            assert await length(**fields) == pytest.approx(1.0, abs=1e-6)
        for fields in ({"normalize": False}, {"use_activation": False}):
            assert abs(await length(**fields) - 1.0) > 0.01
        assert [request.normalize for request in fleet.embedded] == [True] * 4 + [False] * 2


async def test_two_names_of_normalize_may_not_differ(router: MemoryRouter) -> None:
    refused = await embed(router, normalize=True, use_activation=False)
    assert (refused.status, refused.error["param"]) == (400, "use_activation")


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
        ({"encoding_format": "bytes"}, "encoding_format", "float, base64"),
        ({"encoding_format": "bytes_only"}, "encoding_format", "float, base64"),
        ({"embed_dtype": "int8"}, "embed_dtype", "float32, float16, bfloat16, fp8_e4m3, fp8_e5m2"),
        ({"endianness": "middle"}, "endianness", "little, big, native"),
        ({"normalize": 1}, "normalize", "true or false"),
        ({"use_activation": "yes"}, "use_activation", "true or false"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", "not served"),
        ({"input_type": "query"}, "input_type", "not served"),
        ({"prompt_name": "query"}, "prompt_name", "not served"),
        ({"task": "retrieval.query"}, "task", "not served"),
        ({"padding": "max_length"}, "padding", "not served"),
        ({"truncate": "END"}, "truncate", "not served"),
        ({"late_chunking": True}, "late_chunking", "not served"),
        ({"output_dtype": "ubinary"}, "output_dtype", "not served"),
        ({"embedding_type": "binary"}, "embedding_type", "not served"),
        ({"mm_processor_kwargs": {}}, "mm_processor_kwargs", "not served"),
        ({"cache_salt": "s"}, "cache_salt", "not served"),
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
    async with memory_router(FakeFleet(model_files(byte_level), members=[shard])) as router:
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


async def test_numbers_that_are_too_large_for_their_dtype_are_refused_by_its_name(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def vectors(request: object) -> list[list[float]]:
        return [[0.0, -449.0]]

    monkeypatch.setattr(fleet, "embed", vectors)
    for dtype, bound in (("fp8_e4m3", "448"), ("fp8_e5m2", None), ("float16", None)):
        answer = await embed(router, encoding_format="base64", embed_dtype=dtype, normalize=False)
        assert answer.status == (200 if bound is None else 400)
        if bound is not None:
            assert answer.error["param"] == "embed_dtype"
            assert f"up to {bound}, and a vector has 449" in answer.error["message"]


async def test_fields_that_ask_for_nothing_are_taken_and_those_of_other_places_named(
    router: MemoryRouter,
) -> None:
    nothing = {
        "padding": "do_not_pad",
        "truncate": False,
        "late_chunking": False,
        "output_dtype": "float",
        "messages": None,
        "user": "me",
    }
    answer = await embed(router, **nothing)
    assert (answer.status, answer.headers.get("x-penstock-warnings")) == (200, None)
    answer = await embed(router, priority=3, request_id="mine")
    assert answer.status == 200
    warnings = answer.headers["x-penstock-warnings"]
    assert "priority: taken without effect" in warnings
    assert "request_id: taken without effect" in warnings
