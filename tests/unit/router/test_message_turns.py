"""Bodies of Messages -> chats: turns of blocks, tools, thinking, and the form of the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.router_doubles import FakeFleet, MemoryRouter

from penstock_proto.types import ConstraintKind
from penstock_router.apis.messages.requests import parse, parse_count
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, Message, ToolChoice

USER = {"role": "user", "content": "Hello"}
TEXT = {"type": "text", "text": "I look."}
THOUGHT = {"type": "thinking", "thinking": "Look it up.", "signature": "s"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "A letter."}
TOOL = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}
CALLED = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "é"}},
}


def request_of(**fields: Any) -> ChatRequest:
    return parse({"model": "m", "max_tokens": 9, "messages": [USER], **fields})


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def asked(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def messages_of(*turns: Any) -> list[Message]:
    return request_of(messages=[USER, *turns]).messages[1:]


# ---- Turns -------------------------------------------------------------------------------------


def test_a_turn_with_calls_is_one_message_with_what_led_to_them() -> None:
    assert messages_of(said(THOUGHT, TEXT, CALL), asked(RESULT)) == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look it up.",
            "tool_calls": [CALLED],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "look_up", "content": "A letter."},
    ]


def test_a_turn_of_calls_only_has_no_content() -> None:
    assert messages_of(said(CALL), asked(RESULT))[0] == {
        "role": "assistant",
        "tool_calls": [CALLED],
    }


def test_results_are_messages_of_their_own_before_the_text_that_follows_them() -> None:
    second = {**RESULT, "tool_use_id": "toolu_2"}
    blocks = [RESULT, second, {**TEXT, "text": "So?"}, {**TEXT, "text": "Well?"}]
    turns = [said(CALL, {**CALL, "id": "toolu_2", "name": "add"}), asked(*blocks)]
    shown = [(one["role"], one.get("name"), one["content"]) for one in messages_of(*turns)[1:]]
    assert shown == [
        ("tool", "look_up", "A letter."),
        ("tool", "add", "A letter."),
        ("user", None, [{**TEXT, "text": "So?"}, {**TEXT, "text": "Well?"}]),
    ]


def test_text_before_a_result_stays_before_it() -> None:
    turns = [said(CALL), asked({**TEXT, "text": "Here:"}, RESULT)]
    assert [one["role"] for one in messages_of(*turns)] == ["assistant", "user", "tool"]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": [TEXT]}, "I look."),
        ({"content": [TEXT, TEXT]}, [TEXT, TEXT]),
        ({"content": [TEXT, TEXT], "is_error": True}, [{**TEXT, "text": "Error: I look."}, TEXT]),
        ({"content": None}, ""),
        ({"content": [], "is_error": False}, ""),
        ({"content": "no such word", "is_error": True}, "Error: no such word"),
    ],
)
def test_a_result_is_text_and_an_error_says_so(fields: dict[str, Any], content: Any) -> None:
    assert messages_of(said(CALL), asked({**RESULT, **fields}))[1]["content"] == content


def test_thinking_that_nobody_can_read_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages_of(said(redacted, TEXT), USER)[0] == {"role": "assistant", "content": "I look."}


def test_an_answer_that_was_begun_with_thinking_is_gone_on_with() -> None:
    request = request_of(messages=[USER, said(THOUGHT, TEXT)])
    assert request.continue_final_message
    assert not request.add_generation_prompt


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([{"role": "user"}], "messages[1].content: must be a string or an array of blocks"),
        ([{"content": "x"}], "messages[1].role: must be user, assistant or system; given: null"),
        (["x"], "messages[1]: must be an object"),
        ([asked("x")], "messages[1].content[0]: must be an object"),
        ([asked({"type": "text"})], "messages[1].content[0].text: must be a string"),
        ([asked(CALL)], "messages[1].content[0]: blocks of type 'tool_use' are not served in"),
        ([said(RESULT)], "messages[1].content[0]: blocks of type 'tool_result' are not served"),
        ([said({"type": ["text"]})], "messages[1].content[0]: blocks of type an array"),
        ([said({**CALL, "input": "{}"})], "messages[1].content[0].input: must be an object"),
        ([said({**CALL, "id": ""})], "messages[1].content[0].id: must be a string of 1 to 256"),
        ([said({**CALL, "name": None})], "messages[1].content[0].name: must be a string"),
        ([said({**THOUGHT, "thinking": 1})], "messages[1].content[0].thinking: must be a string"),
        ([asked({**RESULT, "tool_use_id": None})], "content[0].tool_use_id: must be a string"),
        ([asked({**RESULT, "is_error": "yes"})], "content[0].is_error: must be true or false"),
        (
            [asked({**RESULT, "content": [{"type": "document", "source": {}}]})],
            "content[0].content[0]: documents are read from a source of type text or content",
        ),
        ([said(CALL)], "messages: the last turn calls tools"),
    ],
)
def test_a_block_that_cannot_be_honoured_is_refused(turns: list[Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        messages_of(*turns)
    assert words in refused.value.message


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_what_comes_before_the_chat_has_no_images(kind: str) -> None:
    words = rf"system\[0\]: parts of type '{kind}' are not served, only text$"
    with pytest.raises(BadRequest, match=words):
        request_of(system=[{"type": kind}])


def test_blocks_are_bounded_over_all_turns_and_results() -> None:
    many = [asked({**RESULT, "content": [TEXT] * 1000}) for _ in range(17)]
    with pytest.raises(BadRequest, match="messages: at most 16384"):
        request_of(messages=many)


# ---- Tools, thinking, the form of the answer ---------------------------------------------------


def test_tools_are_those_of_a_chat() -> None:
    request = request_of(
        tools=[{**TOOL, "strict": True, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "tool", "name": "look_up", "disable_parallel_tool_use": True},
    )
    [tool] = request.tools
    assert (tool.name, tool.strict, tool.parameters) == ("look_up", True, TOOL["input_schema"])
    function = {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": TOOL["input_schema"],
    }
    assert tool.shown == {"type": "function", "function": function}
    assert request.tool_choice == ToolChoice("named", "look_up")
    assert not request.parallel_tool_calls


def test_tools_are_called_or_not_as_the_model_likes_unless_told_otherwise() -> None:
    assert request_of(tools=[TOOL]).tool_choice == ToolChoice("auto")
    any_of = request_of(tools=[TOOL], tool_choice={"type": "any"})
    assert any_of.tool_choice == ToolChoice("required")
    assert request_of(tool_choice={"type": "auto"}).tool_choice == ToolChoice("none")


@pytest.mark.parametrize(
    ("thinking", "budget", "kwargs", "shown"),
    [
        (None, None, {}, True),
        ({"type": "disabled"}, None, {"enable_thinking": False}, True),
        ({"type": "adaptive"}, None, {"enable_thinking": True}, True),
        (
            {"type": "enabled", "budget_tokens": 7, "display": "omitted"},
            7,
            {"enable_thinking": True},
            False,
        ),
    ],
)
def test_thinking_is_told_to_the_template_and_its_budget_is_kept(
    thinking: Any, budget: int | None, kwargs: dict[str, bool], shown: bool
) -> None:
    request = request_of(thinking=thinking)
    assert request.thinking_tokens == budget
    assert request.template_kwargs == kwargs
    assert request.include_reasoning is shown


def test_a_form_of_the_answer_and_effort_are_asked_for() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        request = request_of(**fields)
        assert request.constraint is not None
        assert request.constraint.kind is ConstraintKind.JSON_SCHEMA
        compact = {"x-guidance": {"whitespace_flexible": False}}
        assert json.loads(request.constraint.value) == {"type": "object", **compact}
        assert [request.constraint_field] == list(fields)
    effort = request_of(output_config={"effort": "low"}, thinking={"type": "adaptive"})
    assert effort.template_kwargs["reasoning_effort"] == "low"
    assert effort.template_kwargs["enable_thinking"]
    assert effort.constraint is None


def test_fields_of_other_servers_of_this_api_have_their_effect() -> None:
    request = request_of(seed=7, min_p=0.1, logit_bias={"5": 1}, session_id="s", timeout=3,
                         stop_sequences=["x"], thinking={"type": "disabled"},
                         chat_template_kwargs={"thinking": True, "tone": "dry"})  # fmt: skip
    assert (request.seed, request.min_p, request.logit_bias) == (7, 0.1, {5: 1.0})
    assert (request.session, request.timeout_s, request.stop) == ("s", 3.0, ("x",))
    assert request.template_kwargs == {"enable_thinking": False, "thinking": True, "tone": "dry"}
    assert request.warnings == ()


FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{**TOOL, "type": 3}]}, "tools[0].type: must be a string"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "is named x"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: must be one of enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "must be at least 1"),
        ({"thinking": {"type": "adaptive", "display": 3}}, "thinking.display: must be a string"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is a field"),
        ({"output_config": {"effort": 3}}, "output_config.effort: must be a string"),
        (
            {"output_config": {"format": FORM}, "output_format": FORM},
            "output_format: not together with output_config",
        ),
        (
            {"output_format": FORM, "tools": [TOOL], "tool_choice": {"type": "any"}},
            "output_format: not together with a tool_choice",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request_of(**fields)
    assert words in refused.value.message


def test_what_is_counted_is_what_would_be_answered() -> None:
    fields: dict[str, Any] = {
        "model": "m",
        "messages": [USER, said(CALL), asked(RESULT)],
        "system": "Be brief.",
        "tools": [TOOL],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low", "format": FORM},
    }
    counted, answered = parse_count(fields), parse({**fields, "max_tokens": 9})
    for name in ("messages", "tools", "tool_choice", "template_kwargs", "constraint"):
        assert getattr(counted, name) == getattr(answered, name)


async def test_tools_count_as_tokens(router: MemoryRouter, fleet: FakeFleet) -> None:
    body = {"model": "fake-model", "messages": [USER]}
    url = "/v1/messages/count_tokens"
    without = (await router.post(url, body)).json()["input_tokens"]
    answer = await router.post(url, {**body, "tools": [TOOL]})
    assert answer.json()["input_tokens"] > without
    assert fleet.requests == []
