"""Tools and their choice, as three APIs write them: what they become, and every refusal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest
from support.budget import budget, seeded

from penstock_common.child_process.framing import HEADER_BYTES
from penstock_router.apis.messages import tools as message_tools
from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.apis.openai.requests import CHATS, parse_chat
from penstock_router.apis.responses.tools import functions as responses_tools
from penstock_router.apis.structured_output import MAX_NESTING
from penstock_router.apis.tokenize import TOKENIZE_FIELDS, chat_to_tokenize, parse_with
from penstock_router.apis.tools import (
    CHOICE,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    TOOLS,
    check_one_form,
    tool_options,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import Kind
from penstock_router.offload.body_kinds import Reading
from penstock_router.offload.text_messages import decode_outcome, encode_outcome
from penstock_router.request import NO_TOOLS, ChatRequest, Tool, ToolChoice

MESSAGES = [{"role": "user", "content": "Hi"}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
OF_MESSAGES = Kind(
    lambda name, value: message_tools.TOOLS.read(name, value).tools, message_tools.TOOLS.schema
)
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def function(name: Any = "look", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def shown(name: Any = "look", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": NOTHING, **more}}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"messages": MESSAGES, **fields})


def refusal_of(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert len(caught.value.message) < 250
    return caught.value


# ---- Tools -------------------------------------------------------------------------------------


def test_a_tool_is_what_a_template_is_shown_and_what_its_arguments_are_kept_to() -> None:
    given = function(description="looks", parameters=PARAMETERS, strict=True)
    [tool] = chat(tools=[given]).tools
    assert (tool.name, tool.parameters, tool.strict) == ("look", PARAMETERS, True)
    # Not whether it is strict: that is no matter of the model's.
    assert tool.shown == shown(description="looks", parameters=PARAMETERS)


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {}}, {"strict": None}])
def test_a_tool_without_parameters_is_shown_as_an_object_without_properties(more: Any) -> None:
    [tool] = chat(tools=[function(**more)]).tools
    assert tool == Tool("look", None, False, shown())


def test_arguments_are_always_an_object() -> None:
    parameters: dict[str, Any] = {"properties": {"city": {}}}
    [tool] = chat(tools=[function(parameters=parameters)]).tools
    assert tool.parameters == {"type": "object", **parameters}
    assert tool.shown == shown(parameters=parameters)


def test_a_template_is_shown_what_else_a_chat_says_of_a_function() -> None:
    [tool] = chat(tools=[function(**{"return": {"type": "string"}, "description": None})]).tools
    assert tool.shown == shown(**{"return": {"type": "string"}})


# Those of responses as the functions that stand for them.
FLAT_TOOLS = Kind(
    lambda name, value: responses_tools.TOOLS.read(name, value).named()[0],
    responses_tools.TOOLS.schema,
)
FORMS: dict[str, tuple[Kind, Callable[..., dict[str, Any]]]] = {
    "chats": (TOOLS, function),
    "responses": (
        FLAT_TOOLS,
        lambda name="look", **more: {"type": "function", "name": name, **more},
    ),
    "messages": (
        OF_MESSAGES,
        lambda name="look", parameters=PARAMETERS, **more: {
            **{"name": name, "input_schema": parameters},
            **more,
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_say_the_same(form: str) -> None:
    kind, made = FORMS[form]
    given = [made("look", description="looks", parameters=PARAMETERS), made("take.it_1-2")]
    first, second = kind.read("tools", given)
    assert first == Tool(
        "look", PARAMETERS, False, shown(description="looks", parameters=PARAMETERS)
    )
    assert second.name == "take.it_1-2"
    assert jsonschema_rs.is_valid(kind.schema, given)
    [strict] = kind.read("tools", [made(strict=True, parameters=PARAMETERS)])
    assert strict.strict


def test_what_is_for_servers_of_others_is_not_shown() -> None:
    given = {"name": "f", "input_schema": PARAMETERS, "cache_control": {"type": "ephemeral"}}
    [tool] = OF_MESSAGES.read("tools", [{**given, "type": "custom"}])
    assert tool.shown == shown("f", parameters=PARAMETERS)
    [tool] = FLAT_TOOLS.read("tools", [{"type": "function", "name": "f", "defer_loading": True}])
    assert tool.shown == shown("f")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name", ["", "a b", "é", "a\n", "x" * (MAX_NAME_CHARS + 1), 3, None, "a/b"]
)
def test_a_name_that_no_client_gives_is_refused(form: str, name: Any) -> None:
    kind, made = FORMS[form]
    with pytest.raises(BadRequest, match=r"tools\[1\].*name: must be 1 to 128 of a-z") as caught:
        kind.read("tools", [made("x" * MAX_NAME_CHARS), made(name)])
    assert (caught.value.param or "").startswith("tools[1]")
    assert not jsonschema_rs.is_valid(kind.schema, [made(name)])


@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_tools_is_bounded(form: str) -> None:
    kind, made = FORMS[form]
    most = [made(f"f{index}") for index in range(MAX_TOOLS)]
    assert len(kind.read("tools", most)) == MAX_TOOLS
    with pytest.raises(BadRequest, match=f"tools: at most {MAX_TOOLS} tools; given: 16385"):
        kind.read("tools", [*most, made("more")])
    with pytest.raises(BadRequest, match="tools: must be an array"):
        kind.read("tools", {})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parameters": []}, "must be an object; given: an array"),
        ({"parameters": "x"}, "must be an object; given: 'x'"),
        ({"parameters": {"type": "string"}}, "type: must be object, as arguments have names"),
        ({"parameters": {"type": ["object"]}}, "type: must be object"),
        ({"description": 3}, "description: must be a string"),
        ({"strict": "yes"}, "strict: must be true or false"),
    ],
)
def test_a_tool_that_is_none_is_refused(form: str, more: dict[str, Any], words: str) -> None:
    kind, made = FORMS[form]
    given = [made(**{"parameters": PARAMETERS, **more})]
    with pytest.raises(BadRequest) as caught:
        kind.read("tools", given)
    assert words in caught.value.message
    assert caught.value.message.startswith("tools[0].")
    assert not jsonschema_rs.is_valid(kind.schema, given)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_nested_too_deeply_are_refused(form: str) -> None:
    kind, made = FORMS[form]
    deep: dict[str, Any] = {}
    for _ in range(MAX_NESTING):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match=f"at most {MAX_NESTING} objects and arrays"):
        kind.read("tools", [made(parameters=deep)])
    assert kind.read("tools", [made(parameters=deep["items"])])


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (TOOLS, {"type": "custom", "custom": {}}, "tools of type 'custom' are not served"),
        (TOOLS, {"google_search": {}}, "tools[0].function: must be an object"),
        (TOOLS, {"type": "function"}, "tools[0].function: must be an object"),
        (TOOLS, 3, "tools[0]: must be an object"),
        (FLAT_TOOLS, {"name": "f"}, "tools[0].type: must be a string"),
        (OF_MESSAGES, {"name": "f", "input_schema": 3}, "tools[0].input_schema: must be"),
    ],
)
def test_tools_of_other_kinds_are_refused_by_name(kind: Kind, given: Any, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        kind.read("tools", [given])
    assert words in caught.value.message
    assert not jsonschema_rs.is_valid(kind.schema, [given])


def test_no_tools_at_all_are_taken() -> None:
    assert chat(tools=[]) == chat()
    assert FLAT_TOOLS.read("tools", []) == OF_MESSAGES.read("tools", []) == ()


# ---- Choice ------------------------------------------------------------------------------------

TWO = [function("look"), function("take")]
ALLOWED = {"mode": "required", "tools": [function("take")]}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        (function("take"), ToolChoice("named", "take")),
        # As Hugging Face's clients send it.
        ({"function": {"name": "take"}}, ToolChoice("named", "take")),
        # As responses have it, and Messages; a word may be a type; Mistral has a word of its own.
        ({"type": "function", "name": "take"}, ToolChoice("named", "take")),
        ({"type": "tool", "name": "take"}, ToolChoice("named", "take")),
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "any"}, ToolChoice("required")),
        ("any", ToolChoice("required")),
    ],
)
def test_the_choices_of_a_chat(given: Any, wanted: ToolChoice) -> None:
    request = chat(tools=TWO, tool_choice=given)
    assert request.tool_choice == wanted
    assert [tool.name for tool in request.tools] == ["look", "take"]
    assert request.parallel_tool_calls
    assert jsonschema_rs.is_valid(CHAT_FIELDS["tool_choice"].schema, given)


@pytest.mark.parametrize(
    "given",
    [
        {"type": "allowed_tools", "allowed_tools": ALLOWED},
        {"type": "allowed_tools", **ALLOWED},
        {"type": "allowed_tools", "mode": "required", "tools": [{"name": "take"}]},
    ],
)
def test_of_allowed_tools_there_are_no_others(given: Any) -> None:
    request = chat(tools=TWO, tool_choice=given)
    assert request.tool_choice == ToolChoice("required")
    assert [tool.name for tool in request.tools] == ["take"]
    assert jsonschema_rs.is_valid(CHAT_FIELDS["tool_choice"].schema, given)


def test_without_tools_none_are_called() -> None:
    for request in (chat(), chat(tool_choice="none"), chat(parallel_tool_calls=False)):
        assert (request.tools, request.tool_choice) == ((), NO_TOOLS)
    for choice in ("required", function("look")):
        assert refusal_of(tool_choice=choice).message == "tool_choice: needs tools"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("look", "tool_choice: must be none, auto, required or an object"),
        (3, "tool_choice: must be none"),
        ({}, "tool_choice: must be none"),
        ({"type": "custom"}, "tool_choice.type: must be function or allowed_tools"),
        ({"type": "function"}, "tool_choice.function: must be an object"),
        ({"type": "function", "function": {}}, "tool_choice.function.name: must be 1 to"),
        ({"type": "function", "name": 3}, "tool_choice.name: must be 1 to"),
        (function("give"), "tool_choice: none of the tools is named give"),
        ({"type": "allowed_tools"}, "tool_choice.mode: must be auto or required"),
        ({"type": "allowed_tools", "allowed_tools": 3}, "tool_choice.allowed_tools: must be an"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools: must be an array"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tools: 1 to 16384 tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [3]}, "tools[0]: must be an object"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}, "'mcp' are not"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [function("give")]}, "named give"),
    ],
)
def test_a_choice_that_is_none_is_refused(given: Any, words: str) -> None:
    error = refusal_of(tools=TWO, tool_choice=given)
    assert words in error.message
    assert (error.param or "").split(".")[0] == "tool_choice"
    if "named" not in words:
        assert not jsonschema_rs.is_valid(CHAT_FIELDS["tool_choice"].schema, given)


def options(kind: Kind, tools: Any, choice: Any, **more: Any) -> dict[str, Any]:
    values = {"tools": tools, "tool_choice": kind.read("tool_choice", choice), **more}
    assert jsonschema_rs.is_valid(kind.schema, choice)
    return tool_options(values)


@pytest.mark.parametrize(
    ("given", "wanted", "parallel"),
    [
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "tool", "name": "a", "disable_parallel_tool_use": False},
         ToolChoice("named", "a"), True),
    ],
)  # fmt: skip
def test_the_choices_of_messages(given: Any, wanted: ToolChoice, parallel: bool) -> None:
    tools = OF_MESSAGES.read("tools", [{"name": "a", "input_schema": PARAMETERS}])
    found = options(message_tools.CHOICE, tools, given)
    assert found == {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": parallel}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("auto", "tool_choice: must be an object"),
        ({}, "tool_choice.type: must be auto, any, tool or none"),
        ({"type": "tool"}, "tool_choice.name: must be"),
        ({"type": "any", "disable_parallel_tool_use": 1}, "disable_parallel_tool_use: must be"),
    ],
)
def test_choices_of_messages_that_are_none_are_refused(given: Any, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        message_tools.CHOICE.read("tool_choice", given)
    assert words in caught.value.message
    assert not jsonschema_rs.is_valid(message_tools.CHOICE.schema, given)


def test_several_calls_are_allowed_unless_the_body_says_otherwise() -> None:
    assert not chat(tools=TWO, parallel_tool_calls=False).parallel_tool_calls
    assert refusal_of(tools=TWO, parallel_tool_calls=1).param == "parallel_tool_calls"


# ---- Beside other fields -----------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", function("look")])
def test_an_answer_that_must_be_a_call_has_no_other_form(choice: Any) -> None:
    error = refusal_of(tools=TWO, tool_choice=choice, response_format={"type": "json_object"})
    assert error.param == "response_format"
    assert "response_format: not together with a tool_choice" in error.message
    assert chat(tools=TWO, tool_choice=choice, response_format={"type": "text"})


@pytest.mark.parametrize("choice", ["none", "auto", None])
def test_a_form_holds_for_an_answer_that_may_do_without_calls(choice: Any) -> None:
    request = chat(tools=TWO, tool_choice=choice, guided_regex="a")
    assert request.constraint is not None
    check_one_form(request)


def test_choices_and_log_probabilities_are_fine_beside_tools() -> None:
    request = chat(tools=TWO, tool_choice="required", n=3, logprobs=True, stream=True)
    assert (request.n, request.logprobs, len(request.tools)) == (3, 0, 2)


def test_the_older_form_of_tools_is_refused_unless_it_asks_for_nothing() -> None:
    assert chat(functions=[], function_call="none").tools == ()
    assert refusal_of(functions=[{"name": "f"}]).param == "functions"
    assert refusal_of(function_call="auto").param == "function_call"


def test_reasoning_is_shown_and_without_bound_unless_the_body_says_otherwise() -> None:
    assert (chat().include_reasoning, chat().thinking_tokens) == (True, None)
    request = chat(include_reasoning=False, thinking_token_budget=0)
    assert (request.include_reasoning, request.thinking_tokens) == (False, 0)
    assert "at least 0" in refusal_of(thinking_token_budget=-1).message


def test_a_chat_is_counted_with_its_tools() -> None:
    parse = parse_with(TOKENIZE_FIELDS)
    body = {"messages": MESSAGES, "tools": TWO, "tool_choice": "none"}
    counted = chat_to_tokenize(parse(body))
    assert (counted.tools, counted.tool_choice) == (chat(tools=TWO).tools, ToolChoice("none"))
    assert chat_to_tokenize(parse({"messages": MESSAGES, "tools": TWO})).tools


async def test_a_request_goes_to_another_process_with_its_tools_names_and_types() -> None:
    asked = chat(tools=[function(parameters=PARAMETERS, strict=True)], tool_choice="required")
    there = await decode_outcome(encode_outcome(Reading(CHATS, asked))[HEADER_BYTES:])
    assert isinstance(there, Reading)
    assert there.asked == asked.without_text()
    kinds = {"type": ["object"], "properties": {"city": {"type": ["string"]}}}
    assert there.asked.tools == (Tool("look", kinds),)
    assert there.asked.tool_choice == ToolChoice("required")


# ---- Nonsense ----------------------------------------------------------------------------------

ITEMS: list[Any] = [
    *(None, True, 0, "", "a", "auto", "required", [], {}, [{}], PARAMETERS, NOTHING, function("a")),
    *(function(), {"name": "a"}, {"type": "function", "name": "a"}, {"type": "any"}, 10**30),
    *({"name": "a", "input_schema": {}}, [function("a")], {"mode": "auto"}, {"type": "custom"}),
]
KEYS = (
    *("type", "name", "function", "parameters", "input_schema", "strict", "description", "mode"),
    *("tools", "allowed_tools", "disable_parallel_tool_use"),
)


def odd(rng: random.Random) -> Any:
    """Something that is nearly a tool or a choice."""
    item = rng.choice(ITEMS)
    if isinstance(item, dict):
        item = item | {key: rng.choice(ITEMS) for key in rng.sample(KEYS, rng.randrange(3))}
        if isinstance(item.get("function"), dict):
            extra = {key: rng.choice(ITEMS) for key in rng.sample(KEYS, rng.randrange(2))}
            item["function"] = item["function"] | extra
    return item


@pytest.mark.parametrize("kind", [TOOLS, OF_MESSAGES, CHOICE, message_tools.CHOICE])
def test_whatever_is_taken_is_documented_and_no_nonsense_raises_anything_else(kind: Kind) -> None:
    rng = seeded("odd tools")
    validator = jsonschema_rs.validator_for(kind.schema)
    taken = 0
    for _ in range(budget(10_000, 300_000)):
        several = kind in (TOOLS, OF_MESSAGES)
        given = [odd(rng) for _ in range(rng.randrange(3))] if several else odd(rng)
        try:
            kind.read("field", given)
        except BadRequest:
            continue
        taken += 1
        assert validator.is_valid(given), given
    assert taken > 50
