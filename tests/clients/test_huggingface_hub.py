"""huggingface_hub's InferenceClient as it is released, below version 1.0 and above."""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import MAX_TOKENS, MESSAGES, PROMPT, SEED
from clients.direct import post
from clients.environments import observe


@pytest.fixture(scope="module", params=[pytest.param("sdks", marks=pytest.mark.soak), "dev"])
def seen(request, fake) -> Any:
    """`sdks` has a version below 1.0, `dev` one above."""
    return observe(request.param, "with_huggingface_hub", fake.url, fake.secured_url)


@pytest.fixture(scope="module")
def direct(fake) -> Any:
    parameters = {"do_sample": True, "seed": SEED, "max_new_tokens": MAX_TOKENS, "details": True}
    return post(f"{fake.url}/generate", inputs=PROMPT, parameters=parameters)


@pytest.fixture(scope="module")
def chat(fake) -> Any:
    url = f"{fake.url}/v1/chat/completions"
    return post(url, messages=MESSAGES, seed=SEED, max_tokens=MAX_TOKENS)


def test_a_text_is_that_of_a_plain_request_in_every_form(seen, direct) -> None:
    generated = seen["generated"]
    text = direct["generated_text"]
    assert generated["text"] == text
    assert generated["detailed"]["generated_text"] == text
    assert "".join(generated["streamed"]) == text
    assert len(generated["streamed"]) == MAX_TOKENS
    assert seen["asynchronous"]["generated"] == text
    assert generated["default"] == PROMPT + text


def test_details_are_those_of_a_plain_request(seen, direct) -> None:
    details = seen["generated"]["detailed"]["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", MAX_TOKENS)
    assert details["seed"] == SEED
    ids = [token["id"] for token in direct["details"]["tokens"]]
    assert [token["id"] for token in details["tokens"]] == ids


def test_events_count_from_one_and_the_last_has_details(seen, direct) -> None:
    events = seen["generated"]["events"]
    assert [event["index"] for event in events] == list(range(1, MAX_TOKENS + 1))
    assert events[-1]["generated_text"] == direct["generated_text"]
    assert events[-1]["details"]["generated_tokens"] == MAX_TOKENS


def test_a_chat_is_that_of_a_plain_request_with_and_without_a_models_name(seen, chat) -> None:
    text = chat["choices"][0]["message"]["content"]
    assert seen["chat"]["text"] == text
    assert seen["chat"]["named"] == text
    assert seen["asynchronous"]["chat"] == text
    assert (seen["chat"]["finish_reason"], seen["chat"]["completion_tokens"]) == (
        "length",
        MAX_TOKENS,
    )


def test_a_streamed_chat_is_the_same_text_and_usage(seen) -> None:
    assert "".join(seen["chat"]["streamed"]) == seen["chat"]["text"]
    assert seen["chat"]["streamed_tokens"] == [MAX_TOKENS]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("bad value", "ValidationError", "`temperature` must be strictly positive"),
        ("too long", "ValidationError", "must have less than"),
        ("too long to stream", "ValidationError", "must have less than"),
        ("a chat that is too long", "BadRequestError", "maximum context length"),
    ],
)
def test_an_error_is_of_the_clients_own_class_and_says_why(seen, case, kind, words) -> None:
    error = seen["errors"][case]
    assert kind in error["kinds"]
    assert words in error["text"]


def test_the_right_key_opens_and_a_wrong_one_does_not(seen, direct) -> None:
    keys = seen["keys"]
    assert "Unauthorized" in keys["wrong"]["text"]
    assert "401" in keys["wrong of a chat"]["text"]
    assert keys["right"] == direct["generated_text"]
