"""langchain-openai as it is released: chat models, completion models, their streams and errors."""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import MAX_TOKENS, MESSAGES, MODEL, NO_MODEL, PROMPT, PROMPTS, SEED
from clients.direct import post
from clients.environments import OF_ANY_LENGTH, observe

pytestmark = pytest.mark.soak

OPTIONS = {"model": MODEL, "seed": SEED, "temperature": 1.0, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("sdks", "with_langchain", fake.url, fake.secured_url)


@pytest.fixture(scope="module")
def chat(fake) -> Any:
    return post(f"{fake.url}/v1/chat/completions", messages=MESSAGES, **OPTIONS)


@pytest.fixture(scope="module")
def completion(fake) -> Any:
    return post(f"{fake.url}/v1/completions", prompt=PROMPT, **OPTIONS)


def test_a_chat_is_the_text_that_a_plain_request_gets(seen, chat) -> None:
    answer = seen["chat"]
    assert answer["text"] == chat["choices"][0]["message"]["content"]
    assert answer["finish_reason"] == "length"
    assert answer["model"] == MODEL
    assert (answer["asynchronous"], answer["batch"]) == (answer["text"], [answer["text"]] * 3)


def test_a_chats_usage_is_read(seen, chat) -> None:
    usage = seen["chat"]["usage"]
    assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == MAX_TOKENS
    assert usage["total_tokens"] == chat["usage"]["total_tokens"]


def test_a_streamed_chat_is_the_same_text_and_usage_in_many_pieces(seen) -> None:
    answer = seen["chat"]
    assert "".join(answer["streamed"]) == answer["text"]
    assert len([piece for piece in answer["streamed"] if piece]) > 2
    (usage,) = answer["streamed_usage"]
    assert usage == answer["usage"]


def test_logprobs_have_an_entry_for_each_token(seen) -> None:
    entries = seen["chat"]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * MAX_TOKENS
    assert "".join(entry["token"] for entry in entries) == seen["chat"]["text"]


def test_a_completion_and_its_stream_are_the_text_that_a_plain_request_gets(
    seen, completion
) -> None:
    text = completion["choices"][0]["text"]
    assert seen["completion"]["text"] == text
    assert "".join(seen["completion"]["streamed"]) == text
    assert len(seen["completion"]["streamed"]) > 2


@OF_ANY_LENGTH
def test_a_batch_with_n_and_best_of_keeps_its_prompts_apart(fake, seen) -> None:
    for prompt, texts in zip(PROMPTS, seen["completion"]["batch"], strict=True):
        alone = post(f"{fake.url}/v1/completions", prompt=prompt, n=2, best_of=3, **OPTIONS)
        assert texts == [choice["text"] for choice in alone["choices"]]


@OF_ANY_LENGTH
def test_a_batchs_usage_counts_all_that_was_generated(seen) -> None:
    """Three for each of three prompts, of which two are answered."""
    usage = seen["completion"]["batch_usage"]
    assert usage["completion_tokens"] == 3 * 3 * MAX_TOKENS
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("bad value", "BadRequestError", "temperature"),
        ("unknown model", "NotFoundError", NO_MODEL),
        ("too long", "BadRequestError", "This model's maximum context length is 2048"),
        ("wrong key", "AuthenticationError", ""),
    ],
)
def test_an_error_is_of_the_clients_own_class_and_says_why(seen, case, kind, words) -> None:
    error = seen["errors"][case]
    assert kind in error["kinds"]
    assert words in error["text"]


def test_the_right_key_opens(seen) -> None:
    assert seen["errors"]["right key"]["kinds"] == []


def test_a_prompt_that_is_too_long_has_the_code_that_tells(seen) -> None:
    """The client looks for it in the error's text, where openai's since 3 no longer has it."""
    assert seen["errors"]["too long"]["code"] == "context_length_exceeded"
