"""Forms of messages that clients of other servers send: nothing of what they say is lost."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_router.apis.openai.requests import parse_chat
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
SAID: dict[str, Any] = {"type": "text", "text": "Hello"}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return parse_chat({"messages": list(messages), **fields})


def read(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a template is given it."""
    shown: dict[str, Any] = chat(HI, message, HI).messages[1]
    return shown


def answer(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", **more}


# ---- Parts of contents -------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["Hello", {"text": "Hello"}, {"type": None, "text": "Hello"}])
def test_a_part_of_text_may_be_a_string_or_leave_out_its_type(part: Any) -> None:
    assert read({"role": "user", "content": [part]}) == {"role": "user", "content": "Hello"}
    several = read({"role": "user", "content": [part, SAID]})
    assert several["content"] == [SAID, SAID]


def test_an_image_may_leave_out_its_type() -> None:
    image = {"image_url": {"url": "data:image/png;base64,AAAA"}}
    request = chat({"role": "user", "content": [image]})
    assert len(request.images) == 1


@pytest.mark.parametrize("part", [{}, {"type": None}, {"data": "x"}, {"text": None}])
def test_a_part_of_which_nothing_is_known_is_refused(part: Any) -> None:
    with pytest.raises(BadRequest, match="parts of type None are not served"):
        read({"role": "user", "content": [part]})


# ---- Reasoning and refusals of earlier answers -------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}], "closed": True},
        {"type": "reasoning", "reasoning": "Hm."},
        {"type": "reasoning", "text": "Hm."},
    ],
)
def test_parts_of_reasoning_are_the_reasoning_of_an_answer(part: Any) -> None:
    wanted = answer(content="Hello", reasoning_content="Hm.")
    assert read(answer(content=[part, SAID])) == wanted
    # It is not said twice where a client gives it twice.
    assert read(answer(content=[part, SAID], reasoning_content="Hm.")) == wanted


def test_what_cannot_be_read_of_reasoning_is_left_out() -> None:
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    assert read(answer(content=[hidden, SAID])) == answer(content="Hello")


def test_an_answer_may_be_reasoning_and_a_call() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    thought = {"type": "thinking", "thinking": "Hm."}
    shown = read(answer(content=[thought], tool_calls=[call]))
    assert shown == answer(reasoning_content="Hm.", tool_calls=[call])


def test_only_answers_have_reasoning() -> None:
    with pytest.raises(BadRequest, match="parts of type 'thinking' are not served"):
        read({"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]})


def test_a_refusal_is_what_an_answer_said_where_it_said_nothing_else() -> None:
    assert read(answer(content=None, refusal="No."))["content"] == "No."
    assert read(answer(content="Yes.", refusal="No."))["content"] == "Yes."
    assert "content" not in read(answer(content=None, refusal=None))


# ---- Calls and results -------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize("more", [{}, {"content": None}, {"content": []}])
def test_a_result_may_be_nothing(role: str, more: Any) -> None:
    assert read({"role": role, "name": "f", **more})["content"] == ""


def test_a_call_may_have_its_function_flat() -> None:
    [call] = read(answer(tool_calls=[{"id": "a", "name": "f", "arguments": '{"b": 1}'}]))[
        "tool_calls"
    ]
    assert call == {"id": "a", "function": {"name": "f", "arguments": {"b": 1}}}


def test_a_call_of_a_custom_tool_is_one_of_a_function_that_takes_a_text() -> None:
    given = {"id": "a", "type": "custom", "custom": {"name": "f", "input": "x\n"}}
    [call] = read(answer(tool_calls=[given]))["tool_calls"]
    function = {"name": "f", "arguments": {"input": "x\n"}}
    assert call == {"id": "a", "type": "function", "function": function}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"id": "a", "type": "function"}, r"tool_calls\[0\].function: must be an object"),
        ({"id": "a", "custom": 3}, r"tool_calls\[0\].custom: must be an object"),
        ({"id": "a", "custom": {"name": "f"}}, "custom.input: must be a string"),
        ({"id": "a", "custom": {"input": "x"}}, "function.name: must be a string"),
    ],
)
def test_a_call_of_which_nothing_can_be_shown_is_refused(call: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read(answer(tool_calls=[call]))


# ---- Answers to continue -----------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["prefix", "partial"])
def test_an_answer_that_is_marked_as_unfinished_is_continued(mark: str) -> None:
    asked = chat(HI, answer(content="The", **{mark: True}))
    assert (asked.continue_final_message, asked.add_generation_prompt) == (True, False)
    for begun in (answer(content="The", **{mark: False}), answer(content="The")):
        assert not chat(HI, begun).continue_final_message
    # Of an earlier answer it says nothing, and what a body says itself counts.
    assert not chat(HI, answer(content="The", **{mark: True}), HI).continue_final_message
    marked = answer(content="The", **{mark: True})
    assert not chat(HI, marked, continue_final_message=False).continue_final_message
    with pytest.raises(BadRequest, match=f"{mark}: must be true or false"):
        chat(HI, answer(content="The", **{mark: "yes"}))
