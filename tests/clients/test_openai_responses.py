"""The openai package's responses API as it is released: whole, streamed, gone on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from clients.asked import MAX_TOKENS, MODEL, NO_MODEL, TOO_LONG
from clients.direct import post

INSTRUCTIONS = "Be brief."
ASKED: dict[str, Any] = {
    "model": MODEL,
    "instructions": INSTRUCTIONS,
    "input": "Who are you?",
    "max_output_tokens": MAX_TOKENS,
    "temperature": 0.0,
}
# An answer that comes to its end.
SHORT: dict[str, Any] = {
    **ASKED,
    "text": {"format": {"type": "json_schema", "name": "t", "schema": {"enum": ["so it is"]}}},
}


@pytest.fixture
def client(fake) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(fake: Any, *said: str) -> Any:
    """The same by chat completions: what was said, by user and assistant in turn."""
    messages = [{"role": "system", "content": INSTRUCTIONS}]
    for index, content in enumerate(said):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    url = f"{fake.url}/v1/chat/completions"
    return post(url, messages=messages, max_tokens=MAX_TOKENS, temperature=0)


def test_a_response_is_the_text_and_usage_of_the_same_chat(client, fake) -> None:
    response = client.responses.create(**ASKED)
    same = chat(fake, "Who are you?")
    assert response.output_text == same["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == same["usage"]["completion_tokens"]
    assert response.error is None


def test_a_response_says_whether_it_came_to_its_end(client) -> None:
    whole = client.responses.create(**SHORT)
    cut = client.responses.create(**{**ASKED, "max_output_tokens": 3})
    assert (whole.status, whole.incomplete_details) == ("completed", None)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.usage.output_tokens == 3


def test_a_stream_is_the_same_response_in_many_pieces(client) -> None:
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    assert len(pieces) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


def test_the_sdks_own_stream_helper_ends_with_the_response(client) -> None:
    with client.responses.stream(**SHORT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == '"so it is"'


def test_a_response_is_retrieved_and_gone_on_from(client, fake) -> None:
    first = client.responses.create(**ASKED)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    asked = {**ASKED, "input": "And what is the opposite of high?"}
    second = client.responses.create(**asked, previous_response_id=first.id)
    same = chat(fake, "Who are you?", first.output_text, asked["input"])
    assert second.output_text == same["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert second.previous_response_id == first.id


def test_a_response_that_is_not_stored_is_not_found(client) -> None:
    response = client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (openai.NotFoundError, {"model": NO_MODEL}, NO_MODEL),
        (openai.BadRequestError, {"previous_response_id": "resp_none"}, "resp_none"),
        (openai.BadRequestError, {"temperature": 3.0}, "temperature"),
        (openai.BadRequestError, {"max_output_tokens": -1}, "max_output_tokens"),
        (openai.BadRequestError, {"input": TOO_LONG}, "maximum context length is 2048"),
    ],
)
def test_a_bad_request_is_the_sdks_own_error_and_says_why(client, error, options, words) -> None:
    with pytest.raises(error) as caught:
        client.responses.create(**{**ASKED, **options})
    assert words in caught.value.message
