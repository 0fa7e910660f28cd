"""text-generation as it is released: the client of TGI's own routes.

Its streamed chats are left out: it does not know their end, `[DONE]`, and wants a role in every
piece, which the clients of OpenAI's protocol would join.
"""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import MAX_TOKENS, PROMPT, SEED
from clients.direct import post
from clients.environments import OF_ANY_LENGTH, observe

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("sdks", "with_text_generation", fake.url)


@pytest.fixture(scope="module")
def direct(fake) -> Any:
    parameters = {"do_sample": True, "seed": SEED, "max_new_tokens": MAX_TOKENS, "details": True}
    return post(f"{fake.url}/generate", inputs=PROMPT, parameters=parameters)


def test_a_text_and_its_details_are_those_of_a_plain_request(seen, direct) -> None:
    whole = seen["generated"]["whole"]
    assert whole["generated_text"] == direct["generated_text"]
    details = whole["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", MAX_TOKENS)
    assert details["seed"] == SEED
    ids = [token["id"] for token in direct["details"]["tokens"]]
    assert [token["id"] for token in details["tokens"]] == ids
    assert len(ids) == MAX_TOKENS


def test_details_tell_of_the_prompt_and_of_the_likeliest_tokens(seen) -> None:
    details = seen["generated"]["whole"]["details"]
    first, *others = details["prefill"]
    assert first["logprob"] is None
    assert all(token["logprob"] <= 0 for token in others)
    assert [len(likeliest) for likeliest in details["top_tokens"]] == [2] * MAX_TOKENS


def test_a_stop_sequence_ends_the_text_and_stays_in_it(seen) -> None:
    generated = seen["generated"]
    stopped = generated["stopped"]
    assert stopped["generated_text"].endswith(generated["stop"])
    assert generated["whole"]["generated_text"].startswith(stopped["generated_text"])
    assert stopped["details"]["finish_reason"] == "stop_sequence"


def test_the_full_text_begins_with_the_prompt(seen, direct) -> None:
    assert seen["generated"]["with its prompt"] == PROMPT + direct["generated_text"]


def test_the_best_of_two_comes_with_the_other(seen) -> None:
    best = seen["generated"]["best of two"]["details"]
    (other,) = best["best_of_sequences"]

    def mean(sequence: Any) -> float:
        return sum(token["logprob"] for token in sequence["tokens"]) / sequence["generated_tokens"]

    assert mean(best) >= mean(other)


@OF_ANY_LENGTH
def test_the_clients_defaults_are_taken(seen) -> None:
    default = seen["generated"]["default"]["details"]
    assert (default["generated_tokens"], default["seed"]) == (20, None)


def test_a_stream_has_an_event_for_each_token_and_the_whole_text_in_the_last(seen, direct) -> None:
    *events, last = seen["streamed"]
    assert len(events) == MAX_TOKENS - 1
    assert {event["generated_text"] for event in events} == {None}
    assert last["generated_text"] == direct["generated_text"]
    assert last["details"]["finish_reason"] == "length"
    pieces = [event["token"]["text"] for event in (*events, last) if not event["token"]["special"]]
    assert "".join(pieces) == direct["generated_text"]


def test_four_at_once_and_a_stream_get_the_same_text(seen, direct) -> None:
    assert seen["asynchronous"]["texts"] == [direct["generated_text"]] * 4
    assert seen["asynchronous"]["streamed"] == direct["generated_text"]


@OF_ANY_LENGTH
def test_a_chat_with_the_model_that_the_client_names_is_answered(fake, seen) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    url = f"{fake.url}/v1/chat/completions"
    chat = post(url, messages=messages, seed=SEED, max_tokens=MAX_TOKENS)
    (choice,) = seen["chat"]["choices"]
    assert choice["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert seen["chat"]["usage"]["completion_tokens"] == MAX_TOKENS


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("too many stops", "`stop` supports up to 4 stop sequences. Given: 5"),
        ("too much to generate", "`inputs` tokens + `max_new_tokens` must be <= 2048"),
        ("too long", "must have less than"),
        ("too long to stream", "must have less than"),
    ],
)
def test_a_bad_request_is_the_clients_validation_error_and_says_why(seen, case, words) -> None:
    error = seen["errors"][case]
    assert "ValidationError" in error["kinds"]
    assert words in error["text"]
