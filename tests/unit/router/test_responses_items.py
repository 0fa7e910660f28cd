"""Calls, their outputs and reasoning as items: read, told to a template, kept and gone on from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter
from support.budget import budget, seeded
from support.router_doubles import Answer, FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.apis import chat_messages
from penstock_router.apis.openai.requests import parse_chat
from penstock_router.apis.responses.items.reading import read_input
from penstock_router.apis.responses.requests import parse_response
from penstock_router.errors import BadRequest
from penstock_router.request import ToolChoice

ITEM = TypeAdapter[Any](ResponseItem)

USER: Any = {"role": "user", "content": "How warm is it?"}
SAID: Any = {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
THOUGHT: Any = {
    "type": "reasoning",
    "id": "rs_9",
    "summary": [{"type": "summary_text", "text": "short"}],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
HIDDEN: Any = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"}


def call(call_id: str = "call_1", **more: Any) -> Any:
    named = {"type": "function_call", "call_id": call_id, "name": "warmth"}
    return {**named, "arguments": '{"place": "Rome"}', **more}


def output(call_id: str = "call_1", given: Any = "20") -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": given}


def called(call_id: str = "call_1", arguments: Any = None) -> Any:
    """A call as templates are given it."""
    arguments = {"place": "Rome"} if arguments is None else arguments
    function = {"name": "warmth", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def told(text: Any, call_id: str = "call_1") -> Any:
    return {"role": "tool", "tool_call_id": call_id, "name": "warmth", "content": text}


def messages(*items: Any, **fields: Any) -> Any:
    return parse_response({"input": list(items), **fields}).messages


# ---- What the template is given ----------------------------------------------------------------


def test_what_the_assistant_said_before_an_output_is_one_message() -> None:
    assert messages(USER, THOUGHT, SAID, call(), call("call_2"), output(), output("call_2")) == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [called(), called("call_2")],
        },
        told("20"),
        told("20", "call_2"),
    ]


def test_a_call_without_words_has_no_content() -> None:
    assert messages(USER, call(), output())[1] == {"role": "assistant", "tool_calls": [called()]}


def test_reasoning_between_two_calls_goes_with_the_one_that_follows() -> None:
    assert messages(USER, THOUGHT, call(), output(), THOUGHT, call("call_2"), output("call_2")) == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [called()]},
        told("20"),
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [called("call_2")]},
        told("20", "call_2"),
    ]


def test_words_after_a_call_stand_before_its_output() -> None:
    assert messages(USER, call(), SAID, output()) == [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [called()]},
        told("20"),
    ]
    [_, both, _] = messages(USER, SAID, call(), SAID, output())
    assert both["content"] == "I look.\nI look."


def test_two_messages_of_the_assistant_are_two() -> None:
    said = {"role": "assistant", "content": "I look."}
    assert messages(USER, SAID, SAID) == [USER, said, said]
    thought = {**said, "reasoning_content": "Hm."}
    assert messages(USER, SAID, THOUGHT, SAID) == [USER, said, thought]


def test_reasoning_that_nobody_can_read_is_left_out() -> None:
    assert messages(USER, HIDDEN, SAID) == [USER, {"role": "assistant", "content": "I look."}]
    assert messages(USER, HIDDEN, USER) == [USER, USER]
    # And an answer that was cut off within it has said nothing.
    nothing = {"role": "assistant", "reasoning_content": "Hm.", "content": ""}
    assert messages(USER, THOUGHT, USER) == [USER, nothing, USER]


def test_parts_of_an_output_are_those_of_a_chat() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages(USER, call(), output(given=parts))[-1] == told(content)


@pytest.mark.parametrize(
    ("text", "given"), [("", {}), ("{}", {}), ('{"a', '{"a'), ("[1]", "[1]"), ("null", "null")]
)
def test_arguments_are_an_object_where_they_are_one(text: str, given: Any) -> None:
    [_, said, _] = messages(USER, call(arguments=text), output())
    assert said["tool_calls"] == [called(arguments=given)]


def test_items_become_the_messages_that_a_chat_would_send() -> None:
    rng = seeded("items as chats")
    for _ in range(budget(200, 5000)):
        items: list[Any] = []
        chat: list[Any] = []
        for turn in range(rng.randrange(1, 5)):
            items.append(USER)
            chat.append(USER)
            calls = [f"call_{turn}_{number}" for number in range(rng.randrange(3))]
            items += [SAID, *map(call, calls), *map(output, calls)]
            as_calls = [
                {**called(call_id), "function": {"name": "warmth", "arguments": '{"place":"Rome"}'}}
                for call_id in calls
            ]
            chat.append({**SAID, "tool_calls": as_calls} if calls else SAID)
            chat += [told("20", call_id) for call_id in calls]
        assert messages(*items) == parse_chat({"messages": chat}).messages


# ---- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "param", "words"),
    [
        ([call(call_id="")], "input[0].call_id", "1 to"),
        ([{**call(), "call_id": None}], "input[0].call_id", "a string"),
        ([call(name=None)], "input[0].name", "a string"),
        ([call(arguments={"a": 1})], "input[0].arguments", "a string"),
        ([call(), {**output(), "output": None}], "input[1].output", "an array"),
        ([call(), output(given=[{"type": "a"}])], "input", "only text and input_image"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input", "only text and input_i"),
        ([{"role": "assistant", "content": [{"type": "input_image"}]}], "input", "only text$"),
        ([call(), output(given=[{"type": "input_image"}])], "input[1].output[0].image_url", "str"),
        ([{"type": "reasoning", "content": "a"}], "input[0].content", "an array"),
        ([{**THOUGHT, "content": [{"type": "a"}]}], "input[0].content[0].type", "reasoning_te"),
        ([USER, {**HIDDEN, "encrypted_content": 1}], "input[1].encrypted_content", "a string"),
        (
            [{**THOUGHT, "summary": [{"type": "summary_text"}]}],
            "input[0].summary[0].text",
            "string",
        ),
        ([THOUGHT, HIDDEN], "input", "at least one message"),
        ([USER, {"type": "custom_tool_call"}], "input[1].call_id", "a string"),
        ([USER, {"type": "fancy"}], "input", r"input\[1\].type: items of type 'fancy' are not s"),
        ([USER, {"type": ["message"]}], "input", r"input\[1\].type: items of type an array"),
        ([{"type": "web_search_call"}], "input", "at least one message"),
    ],
)
def test_a_bad_item_is_refused_by_its_name(items: Any, param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        messages(*items)
    assert refused.value.param == param


def test_parts_of_outputs_and_summaries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_messages, "MAX_PIECES", 8)
    many = [{"type": "input_text", "text": ""}] * 8
    for items in ([call(), output(given=many)], [USER, {**THOUGHT, "summary": many}]):
        with pytest.raises(BadRequest, match="at most 8 messages, parts"):
            read_input("input", items)


# ---- Tools, and what the text must be like -----------------------------------------------------

TOOL: Any = {
    "type": "function",
    "name": "warmth",
    "description": "How warm it is.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": True,
}
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED: Any = {"type": "json_schema", "name": "thing", "schema": SCHEMA}


def request(**fields: Any) -> Any:
    return parse_response({"input": "Hello", **fields})


def test_tools_are_those_of_a_chat_and_are_repeated() -> None:
    asked = request(tools=[TOOL])
    function = {key: item for key, item in TOOL.items() if key != "type"}
    chat = parse_chat({"messages": [USER], "tools": [{"type": "function", "function": function}]})
    assert (asked.tools, asked.tool_choice) == (chat.tools, ToolChoice("auto"))
    assert asked.repeated["tools"] == [TOOL]
    bare = request(tools=[{"type": "function", "name": "f"}]).repeated["tools"]
    nothing = {"description": None, "parameters": None, "strict": False}
    assert bare == [{"type": "function", "name": "f", **nothing}]


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "warmth"}, ToolChoice("named", "warmth")),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "warmth"}],
            },
            ToolChoice("required"),
        ),
    ],
)
def test_a_choice_of_tools_is_read_and_repeated(given: Any, choice: ToolChoice) -> None:
    asked = request(tools=[TOOL], tool_choice=given, parallel_tool_calls=False)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (choice, False)
    assert asked.repeated["tool_choice"] == given


def compact(schema: dict[str, Any]) -> Constraint:
    written = {**schema, "x-guidance": {"whitespace_flexible": False}}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(written, separators=(",", ":")))


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, compact({"type": "object"})),
        (NAMED, compact(SCHEMA)),
        ({**NAMED, "strict": True, "description": "d"}, ...),
    ],
)
def test_a_format_of_the_text_is_a_constraint_and_is_repeated(given: Any, constraint: Any) -> None:
    asked = request(text={"format": given})
    if constraint is ...:
        constraint = request(text={"format": NAMED}).constraint
    assert asked.constraint == constraint
    assert asked.constraint_field == ("" if constraint is None else "text.format")
    assert asked.repeated["text"] == {"format": given, "verbosity": "medium"}


def test_other_fields_of_chats_that_shape_an_answer_act_here_too() -> None:
    assert request(guided_regex="a+").constraint == Constraint(ConstraintKind.REGEX, "a+")
    outputs = request(structured_outputs={"choice": ["a", "b"]})
    assert outputs.constraint == Constraint(ConstraintKind.CHOICE, options=("a", "b"))
    asked = request(include_reasoning=False, thinking_token_budget=7)
    assert (asked.include_reasoning, asked.thinking_tokens) == (False, 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": 1}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "regex", "value": "a"}}}, "text.format.type"),
        ({"text": {"format": {**NAMED, "name": None}}}, "text.format.name"),
        ({"text": {"format": {**NAMED, "schema": None}}}, "text.format.schema"),
        ({"text": {"format": {**NAMED, "strict": 1}}}, "text.format.strict"),
        ({"text": {"format": NAMED}, "guided_regex": "a"}, "text.format"),
        ({"text": {"format": NAMED}, "tools": [TOOL], "tool_choice": "required"}, "text.format"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
    ],
)
def test_a_bad_tool_choice_or_format_is_refused_by_its_name(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request(**fields)
    assert refused.value.param == param


# ---- Kept and gone on from ---------------------------------------------------------------------

# Says all that it is given.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    ":{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.id }} {{ c.function.name }}"
    " {{ c.function.arguments.place }}>{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}]{% endfor %}"
)


def prompt_of(fleet: FakeFleet, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(
        list(fleet.requests[-1].prompt_token_ids), skip_special_tokens=False
    )
    return text


async def ask(router: MemoryRouter, given: Any, **fields: Any) -> Answer:
    body = {"input": given, "max_output_tokens": 1, **fields}
    return await router.post("/v1/responses", body)


async def items_of(router: MemoryRouter, response_id: str) -> list[Any]:
    path = f"/v1/responses/{response_id}/input_items?order=asc"
    listed: list[Any] = (await router.get(path)).json()["data"]
    for item in listed:
        ITEM.validate_json(json.dumps(item), strict=True)
    return listed


async def test_a_conversation_with_calls_is_gone_on_from_with_their_outputs_only(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level, TEMPLATE))
    eos = [0]
    fleet.script = lambda request: eos
    async with memory_router(fleet) as router:
        first = (await ask(router, [USER, THOUGHT, call()])).json()
        assert first["status"] == "completed"
        second = await ask(router, [output()], previous_response_id=first["id"])
        assert second.status == 200, second.body
        assert prompt_of(fleet, byte_level) == (
            "[user:How warm is it?]"
            # The answer to the first said nothing.
            "[assistant(Hm.):<call_1 warmth Rome>][tool:20=call_1]"
        )
        listed = await items_of(router, second.json()["id"])
        kinds = ["message", "reasoning", "function_call", "message", "function_call_output"]
        assert [item["type"] for item in listed] == kinds
        assert listed[1]["summary"] == THOUGHT["summary"]
        assert listed[2] == {**call(), "id": listed[2]["id"], "status": "completed"}
        assert listed[4] == {**output(), "id": listed[4]["id"], "status": "completed"}
        assert len({item["id"] for item in listed}) == len(listed)


# As Qwen's do, in short.
CALLING = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    ":{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}]{% endfor %}"
)
CALLS = (
    "<think>Hm.</think>I look."
    '<tool_call>\n{"name": "warmth", "arguments": {"place": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "warmth", "arguments": {"place": "Oslo"}}\n</tool_call>'
)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_model_calls_is_stored_and_its_outputs_are_all_that_follows(
    byte_level: Tokenizer, stream: bool
) -> None:
    fleet = FakeFleet(model_files(byte_level, CALLING))
    ids = [*byte_level.encode(CALLS, add_special_tokens=False).ids, 0]
    fleet.script = lambda request: ids
    async with memory_router(fleet) as router:
        fields = {"tools": [TOOL], "max_output_tokens": 300}
        answer = await ask(router, "Warm?", stream=stream, **fields)
        assert answer.status == 200, answer.body
        if stream:
            last = answer.body.decode().removesuffix("\n\n").rsplit("data: ", 1)[1]
            first = json.loads(last)["response"]
        else:
            first = answer.json()
        thought, said, *calls = first["output"]
        assert (first["status"], thought["content"][0]["text"]) == ("completed", "Hm.")
        assert said["content"][0]["text"] == "I look."
        places = [json.loads(item["arguments"])["place"] for item in calls]
        assert places == ["Rome", "Oslo"]
        assert first["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        got = (await router.get(f"/v1/responses/{first['id']}")).json()
        assert got == first
        outputs = [output(item["call_id"], item["call_id"][:6]) for item in calls]
        answer = await ask(router, outputs, previous_response_id=first["id"])
        assert answer.status == 200, answer.body
        assert prompt_of(fleet, byte_level) == (
            "[user:Warm?][assistant<think>Hm.</think>:I look."
            '<tool_call>warmth {"place": "Rome"}</tool_call>'
            '<tool_call>warmth {"place": "Oslo"}</tool_call>]'
            + "".join(f"[tool:{item['call_id'][:6]}]" for item in calls)
        )
        listed = await items_of(router, answer.json()["id"])
        assert [item["id"] for item in listed[1:5]] == [item["id"] for item in first["output"]]
