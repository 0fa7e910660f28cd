"""The released openai package, unmodified, against a running pair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

MODEL = "penstock-toy"
MESSAGES: Any = [{"role": "user", "content": "Tell me something."}]


@pytest.fixture
def client(pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(pair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=pair.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert model.id == MODEL


def test_a_completion_counts_its_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hello", max_tokens=7, seed=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 40, "seed": 2}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]


def test_a_streamed_chat_is_the_same_text_with_its_role_once(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].delta.role for c in chunks if c.choices and c.choices[0].delta.role] == [
        "assistant"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_sdks_own_stream_helper_accumulates_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, max_tokens=20, seed=3, n=2
    ) as stream:
        text = {0: "", 1: ""}
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    text[choice.index] += choice.delta.content or ""
        snapshot = stream.current_completion_snapshot
    assert [choice.message.content for choice in snapshot.choices] == [text[0], text[1]]
    assert [choice.finish_reason for choice in snapshot.choices] == ["length", "length"]


def test_chat_without_max_tokens_runs_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 1900}]
    answer = client.chat.completions.create(model=MODEL, messages=long)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048


def test_a_completion_of_minus_one_token_runs_to_the_end_of_the_context(
    client: openai.OpenAI,
) -> None:
    answer = client.completions.create(model=MODEL, prompt="word " * 1900, max_tokens=-1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048


def test_choices_of_one_seed_differ_and_repeat(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="x", max_tokens=12, n=3, seed=5, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    alone = client.completions.create(
        model=MODEL, prompt="x", max_tokens=12, seed=5, temperature=1.0
    )
    assert alone.choices[0].text == first[0]


def test_a_seed_of_the_users_is_not_replaced_and_none_is_random(client: openai.OpenAI) -> None:
    def text(**options: Any) -> str:
        return (
            client.completions.create(
                model=MODEL, prompt="x", max_tokens=12, temperature=1.0, **options
            )
            .choices[0]
            .text
        )

    assert text(seed=0) == text(seed=0)
    assert text() != text()


def test_logprobs_have_the_shape_the_sdk_reads(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 5
    text = client.completions.create(model=MODEL, prompt="a", max_tokens=5, logprobs=2)
    columns = text.choices[0].logprobs
    assert columns is not None
    assert columns.token_logprobs is not None
    assert len(columns.token_logprobs) == 5


def test_echo_and_logprobs_cover_the_prompt_as_evaluation_harnesses_read_it(
    client: openai.OpenAI,
) -> None:
    ids = [5, 6, 7, 8, 9]
    answer = client.completions.create(
        model=MODEL, prompt=[ids], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234
    )
    columns = answer.choices[0].logprobs
    assert columns is not None
    assert columns.token_logprobs is not None
    assert columns.top_logprobs is not None
    assert len(columns.token_logprobs) == len(ids) + 1
    assert columns.token_logprobs[0] is None
    assert columns.top_logprobs[0] is None
    for value, top in zip(columns.token_logprobs[1:], columns.top_logprobs[1:], strict=True):
        assert value in top.values()


def test_a_batch_of_prompts_is_answered_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["a", "b"], n=2, max_tokens=6, seed=1, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = client.completions.create(
        model=MODEL, prompt="b", max_tokens=6, seed=1, temperature=1.0
    )
    assert answer.choices[2].text == alone.choices[0].text


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (openai.NotFoundError, {"model": "gpt-4"}, ["gpt-4"]),
        (openai.BadRequestError, {"temperature": 3.0}, ["temperature", "2"]),
        (openai.BadRequestError, {"max_tokens": -2}, ["max_tokens"]),
        (openai.BadRequestError, {"max_tokens": 4000}, ["2048"]),
        (openai.BadRequestError, {"prompt": ""}, ["prompt"]),
        (openai.BadRequestError, {"presence_penalty": 2.5}, ["presence_penalty", "2"]),
        (openai.BadRequestError, {"extra_body": {"top_k": "many"}}, ["top_k"]),
        (
            openai.BadRequestError,
            {"prompt": "word " * 3000},
            ["This model's maximum context length is 2048"],
        ),
    ],
)
def test_a_bad_request_is_the_sdks_own_error_and_says_why(
    client: openai.OpenAI, error: type[openai.APIStatusError], options: Any, words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "Hello", **options})
    assert all(word in caught.value.message for word in words)


async def test_thirty_two_at_once_of_every_kind(async_client: openai.AsyncOpenAI) -> None:
    async def chat(number: int) -> str:
        answer = await async_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=30, seed=number
        )
        return answer.choices[0].message.content or ""

    async def streamed_chat(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=30, seed=number, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def completion(number: int) -> str:
        answer = await async_client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=30, seed=number
        )
        return answer.choices[0].text

    async def streamed_completion(number: int) -> str:
        stream = await async_client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=30, seed=number, stream=True
        )
        return "".join([c.choices[0].text async for c in stream])

    kinds = (chat, streamed_chat, completion, streamed_completion)
    texts = await asyncio.gather(*(kind(number) for number in range(8) for kind in kinds))
    for number in range(8):
        whole_chat, chat_pieces, whole, pieces = texts[4 * number : 4 * number + 4]
        assert whole_chat == chat_pieces
        assert whole == pieces
        assert whole
