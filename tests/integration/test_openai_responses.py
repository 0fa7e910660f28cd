"""The released openai package's Responses, unmodified, against running pairs."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from integration.conftest import Pair
from openai.types.responses import Response
from support.processes import Router, running

MODEL = "penstock-toy"


def connect(router: Router) -> openai.OpenAI:
    """A connection for each request, so that all workers get some."""
    http = httpx2.Client(limits=httpx2.Limits(max_keepalive_connections=0))
    return openai.OpenAI(
        base_url=router.url + "/v1", api_key="none", max_retries=0, http_client=http
    )


@pytest.fixture
def client(pair) -> Iterator[openai.OpenAI]:
    with connect(pair.router) as client:
        yield client


def until(client: openai.OpenAI, response_id: str, reached: Callable[[Response], bool]) -> Response:
    until_s = time.monotonic() + 30
    while not reached(response := client.responses.retrieve(response_id)):
        assert time.monotonic() < until_s, response
        time.sleep(0.05)
    return response


def ended(response: Response) -> bool:
    return response.status not in ("queued", "in_progress")


def test_a_response_is_created_retrieved_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=7, metadata={"k": "v"}, instructions="Go."
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 7
    assert response.output_text
    assert client.responses.retrieve(response.id) == response
    [item] = client.responses.input_items.list(response.id)
    assert item.type == "message"
    assert item.role == "user"
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_answers_and_events_have_every_field_that_the_sdk_declares(client: openai.OpenAI) -> None:
    """The SDK itself takes what comes; its models, asked to check, do not."""
    options: Any = {
        "model": MODEL,
        "input": [{"role": "user", "content": "Hello"}],
        "max_output_tokens": 5,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    response = client.responses.create(**options)
    type(response).model_validate(response.to_dict(mode="json"))
    seen = set()
    for event in client.responses.create(**options, stream=True):
        type(event).model_validate(event.to_dict(mode="json"))
        seen.add(event.type)
    assert len(seen) == 9
    items = client.responses.input_items.list(response.id)
    type(items).model_validate(items.to_dict(mode="json"))


def test_the_sdks_own_stream_helper_accumulates_a_response(client: openai.OpenAI) -> None:
    seeded: Any = {"seed": 3}
    with client.responses.stream(
        model=MODEL, input="Hello", max_output_tokens=30, extra_body=seeded
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    whole = client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=30, extra_body=seeded
    )
    assert text == whole.output_text
    assert text


def test_a_chain_of_responses_is_the_chat_of_all_turns(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello", max_output_tokens=10)
    second = client.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=3
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And?"},
        ],
        max_tokens=3,
    )
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="resp_nobody"):
        client.responses.create(model=MODEL, input="And?", previous_response_id="resp_nobody")


def test_a_background_response_is_made_or_cancelled(client: openai.OpenAI) -> None:
    short = client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=5, background=True
    )
    assert short.status in ("queued", "in_progress")
    finished = until(client, short.id, ended)
    assert finished.output_text
    with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
        client.responses.cancel(short.id)
    long = client.responses.create(model=MODEL, input="Hello", background=True)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"


TOOL: Any = {
    "type": "function",
    "name": "warmth",
    "description": "How warm it is.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


# As Qwen's, in short: the toy model's own takes no outputs of tools.
TEMPLATE = (
    "{% for tool in tools or () %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
)


@pytest.fixture
def calling(pair: Pair, tmp_path: Path) -> Iterator[openai.OpenAI]:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    router = Router(tmp_path / "router", [pair.shard.address], "--chat-template", str(file))
    with running(router), connect(router) as client:
        yield client


def test_a_call_is_made_streamed_and_gone_on_from_with_its_output(calling: openai.OpenAI) -> None:
    client = calling
    asked: Any = {
        "model": MODEL,
        "input": "How warm is it?",
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "warmth"},
        "max_output_tokens": 400,
        "extra_body": {"seed": 1},
    }
    response = client.responses.create(**asked)
    [call] = response.output
    assert call.type == "function_call"
    assert call.name == "warmth"
    assert json.loads(call.arguments) in ({"place": "Rome"}, {"place": "Oslo"})
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        [streamed] = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    later = client.responses.create(
        model=MODEL,
        previous_response_id=response.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "20"}],
        max_output_tokens=5,
    )
    items = client.responses.input_items.list(later.id, order="asc")
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


class Thing(pydantic.BaseModel):
    place: Literal["Rome", "Oslo"]
    warm: bool


def test_an_answers_text_is_parsed_as_the_type_that_was_asked_for(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="Where?", text_format=Thing, max_output_tokens=600
    )
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Thing)


def test_two_workers_share_responses_which_outlive_the_router(tmp_path: Path, pair: Pair) -> None:
    file = tmp_path / "responses"
    flags = ("--workers", "2", "--response-store", str(file))
    router = Router(tmp_path / "router", [pair.shard.address], *flags)
    with running(router), connect(router) as client:
        made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
        for _ in range(12):
            assert client.responses.retrieve(made.id) == made
        for _ in range(6):
            begun = client.responses.create(model=MODEL, input="Hello", background=True)
            assert client.responses.cancel(begun.id).status == "cancelled"
        # Which worker makes it, the store knows; another answers for it when it is gone.
        begun = client.responses.create(
            model=MODEL, input="Hello", background=True, extra_body={"ignore_eos": True}
        )
    # It was killed with its workers, which are as if silent for so long that they are gone.
    with contextlib.closing(sqlite3.connect(file)) as store, store:
        store.execute("UPDATE owners SET beat_s = beat_s - 15")
    again = Router(tmp_path / "again", [pair.shard.address], "--response-store", str(file))
    with running(again), connect(again) as client:
        failed = until(client, begun.id, ended)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.code == "server_error"
        assert client.responses.retrieve(made.id) == made


def test_a_file_that_is_no_store_ends_the_start_with_a_line(tmp_path: Path) -> None:
    file = tmp_path / "other"
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE t (x)")
    file.chmod(0o600)
    router = Router(tmp_path / "router", ["127.0.0.1:1"], "--response-store", str(file))
    assert router.process.wait(30) == 2
    assert "response store" in router.log
    assert "Traceback" not in router.log
    router.close()
