"""The released `openai` package, unmodified, against the router (over memory, not sockets)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from support.router_doubles import (
    INFO,
    Connection,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    hashed_tokens,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_proto.errors import ShardUnavailable


class _Body(httpx2.AsyncByteStream):
    def __init__(self, connection: Connection, headers: dict[str, str]) -> None:
        self._connection = connection
        self._headers = headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._connection.chunks(self._headers):
            yield part

    async def aclose(self) -> None:
        self._connection.close()


class MemoryHttp(httpx2.AsyncBaseTransport):
    """Carries httpx requests to the router in this process."""

    def __init__(self, router: MemoryRouter) -> None:
        self._router = router

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        connection = self._router.connect()
        skipped = ("host", "content-length", "connection")
        headers = {name: value for name, value in request.headers.items() if name not in skipped}
        body = await request.aread()
        connection.send(request.method, request.url.raw_path.decode(), body, headers)
        status, answered = await connection.read_head()
        return httpx2.Response(status, headers=answered, stream=_Body(connection, answered))


@pytest.fixture
async def client(router: MemoryRouter) -> AsyncIterator[AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=MemoryHttp(router))
    async with AsyncOpenAI(
        base_url="http://memory/v1", api_key="none", http_client=http, max_retries=0
    ) as made:
        yield made


MODEL = INFO.model


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL, "fake-alias"]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_completions_stream_what_they_answer(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model=MODEL, prompt="Hello", seed=1, logprobs=2)
    stream = await client.completions.create(
        model=MODEL,
        prompt="Hello",
        seed=1,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or []) == 16


async def test_chats_stream_what_they_answer(client: AsyncOpenAI, fleet: FakeFleet) -> None:
    # The package's helper takes an answer cut at its length for an error.
    fleet.script = lambda request: [*hashed_tokens(request), 0]
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    whole = await client.chat.completions.create(
        model=MODEL, messages=messages, seed=1, max_completion_tokens=9, n=2
    )
    async with client.chat.completions.stream(
        model=MODEL, messages=messages, seed=1, max_completion_tokens=9, n=2
    ) as stream:
        final = await stream.get_final_completion()
    for index in range(2):
        assert final.choices[index].message.content == whole.choices[index].message.content
        assert final.choices[index].message.role == "assistant"
        assert final.choices[index].finish_reason == "stop"


async def test_thirty_two_at_once_each_get_their_own(client: AsyncOpenAI, fleet: FakeFleet) -> None:
    async def one(number: int) -> tuple[str, str]:
        prompt = f"Number {number}"
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, seed=number, stream=True, max_tokens=30
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        whole = await client.completions.create(
            model=MODEL, prompt=prompt, seed=number, max_tokens=30
        )
        return text, whole.choices[0].text

    pairs = await asyncio.gather(*(one(number) for number in range(32)))
    assert all(streamed == whole for streamed, whole in pairs)
    assert len({whole for _, whole in pairs}) == 32


async def test_errors_are_the_packages_own(
    client: AsyncOpenAI, fleet: FakeFleet, router: MemoryRouter
) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    fleet.shards[:] = [FakeShard(ready=False, info=None)]
    with pytest.raises(openai.InternalServerError) as down:
        await client.completions.create(model=MODEL, prompt="x")
    assert down.value.status_code == 503


async def test_an_error_in_a_stream_raises(client: AsyncOpenAI, fleet: FakeFleet) -> None:
    fleet.script = lambda request: [5, 6, ShardUnavailable("the shard went away")]
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
    )
    with pytest.raises(openai.APIError, match="went away"):
        [chunk async for chunk in stream]


async def test_a_stream_that_is_closed_early_is_aborted(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.002)
    async with memory_router(fleet) as router:
        http = httpx2.AsyncClient(transport=MemoryHttp(router))
        async with AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http) as client:
            stream = await client.completions.create(
                model=MODEL, prompt="x", stream=True, max_tokens=400
            )
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(30):
                while fleet.running:
                    await asyncio.sleep(0.001)
            assert fleet.cancelled == ["r1"]
