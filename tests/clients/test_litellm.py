"""litellm as it is released: both of its providers for servers that speak OpenAI's protocol."""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import MAX_TOKENS, MESSAGES, MODEL, NO_MODEL, PROMPT, SEED
from clients.direct import post
from clients.environments import observe

pytestmark = pytest.mark.soak

OPTIONS = {"model": MODEL, "seed": SEED, "temperature": 1.0, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("sdks", "with_litellm", fake.url, fake.secured_url)


@pytest.fixture(scope="module")
def direct(fake) -> dict[str, Any]:
    """The same asked by a plain request: a text and its usage for each provider."""
    chat = post(f"{fake.url}/v1/chat/completions", messages=MESSAGES, **OPTIONS)
    completion = post(f"{fake.url}/v1/completions", prompt=PROMPT, **OPTIONS)
    return {
        "chat": (chat["choices"][0]["message"]["content"], chat["usage"]),
        "completion": (completion["choices"][0]["text"], completion["usage"]),
    }


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_is_the_text_and_usage_that_a_plain_request_gets(seen, direct, kind) -> None:
    text, usage = direct[kind]
    answer = seen[kind]
    assert answer["text"] == text
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {name: usage[name] for name in answer["usage"]}
    assert answer["usage"]["completion_tokens"] == MAX_TOKENS


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_is_the_same_text_in_many_pieces_and_ends_with_the_usage(seen, kind) -> None:
    answer = seen[kind]
    assert "".join(answer["streamed"]) == answer["text"]
    assert len([piece for piece in answer["streamed"] if piece]) > 2
    assert answer["streamed_usage"] == answer["usage"]


def test_a_chat_is_the_same_when_awaited_and_when_rebuilt_from_its_chunks(seen) -> None:
    assert seen["chat"]["asynchronous"] == seen["chat"]["text"]
    assert seen["chat"]["rebuilt"] == seen["chat"]["text"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("bad value", "BadRequestError", "temperature"),
        ("unknown model", "NotFoundError", NO_MODEL),
        ("too long", "ContextWindowExceededError", "2048"),
        ("too long a prompt", "ContextWindowExceededError", "2048"),
        ("too much to generate", "ContextWindowExceededError", "2048"),
        ("wrong key", "AuthenticationError", ""),
    ],
)
def test_an_error_is_of_litellms_own_class_and_says_why(seen, case, kind, words) -> None:
    error = seen["errors"][case]
    assert kind in error["kinds"]
    assert words in error["text"]


def test_the_right_key_opens(seen) -> None:
    assert seen["errors"]["right key"]["kinds"] == []
