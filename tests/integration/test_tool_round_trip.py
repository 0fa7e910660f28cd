"""A question, a call of a tool, its result, an answer: the built-in model's whole conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

MODEL = "penstock-toy"
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
]
MESSAGE_TOOLS = [{"name": "get_weather", "input_schema": PARAMETERS}]
FLAT_TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
]


@pytest.fixture
def client(pair) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=pair.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("parallel", [False, True])
def test_a_chat_goes_on_with_the_results_of_the_calls_that_it_asked_for(
    client: openai.OpenAI, parallel: bool
) -> None:
    messages: list[Any] = [QUESTION]
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=parallel, max_tokens=1000, seed=3,
    )  # fmt: skip
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    messages.append(choice.message.to_dict())
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
    second = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=12, seed=3
    )
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls


def test_a_message_goes_on_with_the_results_of_its_calls(pair) -> None:
    asked = {"model": MODEL, "max_tokens": 1000, "tools": MESSAGE_TOOLS}
    status, text = pair.router.ask(
        "/v1/messages", {**asked, "messages": [QUESTION], "tool_choice": {"type": "any"}}
    )
    assert status == 200, text
    said = json.loads(text)["content"]
    assert {block["type"] for block in said} == {"tool_use"}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "Rain."} for block in said
    ]
    turns = [
        QUESTION,
        {"role": "assistant", "content": said},
        {"role": "user", "content": [*results, {"type": "text", "text": "And so?"}]},
    ]
    status, text = pair.router.ask("/v1/messages", {**asked, "max_tokens": 12, "messages": turns})
    assert status == 200, text
    assert json.loads(text)["usage"]["output_tokens"] > 0


def test_a_response_goes_on_with_the_results_of_its_calls(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input=QUESTION["content"], tools=FLAT_TOOLS, tool_choice="required",
        max_output_tokens=1000,
    )  # fmt: skip
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        for call in calls
    ]
    second = client.responses.create(
        model=MODEL, previous_response_id=first.id, input=outputs, tools=FLAT_TOOLS,
        tool_choice="none", max_output_tokens=12,
    )  # fmt: skip
    assert second.output_text
