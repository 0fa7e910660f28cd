"""anthropic's client as it is released: messages, their streams, counts and errors."""

from __future__ import annotations

from typing import Any

import pytest
from clients.asked import MAX_TOKENS, NO_MODEL
from clients.direct import post
from clients.environments import observe


@pytest.fixture(scope="module")
def seen(fake) -> Any:
    return observe("anthropic", "with_anthropic", fake.url, fake.secured_url)


@pytest.fixture(scope="module")
def chat(fake) -> Any:
    """The same chat by OpenAI's protocol; greedy, as messages know no seed."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]
    url = f"{fake.url}/v1/chat/completions"
    return post(url, messages=messages, max_tokens=MAX_TOKENS, temperature=0)


def test_a_message_is_the_text_and_usage_of_the_same_chat(seen, chat) -> None:
    (block,) = seen["whole"]["content"]
    assert block["text"] == chat["choices"][0]["message"]["content"]
    assert seen["whole"]["stop_reason"] == _reason(chat)
    usage = seen["whole"]["usage"]
    read = usage["cache_read_input_tokens"] or 0
    assert usage["input_tokens"] + read == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_texts_in_blocks_and_an_awaited_message_are_the_same(seen) -> None:
    text = seen["whole"]["content"][0]["text"]
    assert (seen["blocks"], seen["asynchronous"]) == (text, text)


def test_a_limit_is_the_reason_to_stop(seen) -> None:
    assert seen["short"]["stop_reason"] == "max_tokens"
    assert seen["short"]["usage"]["output_tokens"] == 3


def test_a_stop_sequence_is_named_and_cut_off(seen) -> None:
    answer = seen["stopped"]["answer"]
    stop = seen["stopped"]["stop"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == seen["whole"]["content"][0]["text"].partition(stop)[0]


def test_a_stream_is_the_same_message_in_many_pieces(seen) -> None:
    streamed = seen["streamed"]
    assert "".join(streamed["pieces"]) == seen["whole"]["content"][0]["text"]
    # On a busy machine several tokens come at once.
    assert len(streamed["pieces"]) > 1
    final = streamed["final"]
    assert final["content"] == seen["whole"]["content"]
    assert final["stop_reason"] == seen["whole"]["stop_reason"]
    assert final["usage"]["output_tokens"] == seen["whole"]["usage"]["output_tokens"]


def test_events_come_in_their_order(seen) -> None:
    events = [event for event in seen["streamed"]["events"] if event != "ping"]
    opening, closing = events[:2], events[-3:]
    assert opening == ["message_start", "content_block_start"]
    assert closing == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_tokens_are_counted_as_they_are_charged(seen, chat) -> None:
    assert seen["tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("bad value", "BadRequestError", "temperature"),
        ("unknown model", "NotFoundError", NO_MODEL),
        ("too long", "BadRequestError", "2048"),
        ("wrong key", "AuthenticationError", ""),
    ],
)
def test_an_error_is_of_the_clients_own_class_and_says_why(seen, case, kind, words) -> None:
    error = seen["errors"][case]
    assert kind in error["kinds"]
    assert words in error["text"]


def test_the_right_key_opens(seen) -> None:
    assert seen["errors"]["right key"]["kinds"] == []


def _reason(chat: Any) -> str:
    return {"stop": "end_turn", "length": "max_tokens"}[chat["choices"][0]["finish_reason"]]
