"""Tools of responses that are not plain functions: shown to a model as functions, and answered."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from typing import Any

import jsonschema_rs
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.budget import budget, seeded
from support.router_doubles import INFO, Answer, FakeFleet, memory_router, model_files
from tokenizers import Tokenizer

from penstock_router.apis.responses.output.encoded_text import EncodedText
from penstock_router.apis.responses.requests import parse_response
from penstock_router.apis.responses.tools.choice import CHOICE
from penstock_router.apis.responses.tools.functions import TOOLS, hold_to_grammars
from penstock_router.errors import BadRequest
from penstock_router.request import ToolChoice
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.structural_tag_builder import encoded

EVENT = TypeAdapter[Any](ResponseStreamEvent)

LOOK: Any = {"type": "function", "name": "look", "parameters": None}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a" "b"'},
}
SAY: Any = {"type": "custom", "name": "say", "format": {"type": "text"}}
MINE: Any = {
    "type": "namespace",
    "name": "mcp__mine",
    "description": "My tools.",
    "tools": [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": {}},
        {"type": "custom", "name": "write", "defer_loading": True},
    ],
}
CLIENTS: Any = [
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
HOSTED: Any = [
    {"type": "web_search", "external_web_access": True},
    {"type": "file_search", "vector_store_ids": []},
    {"type": "shell", "environment": {"type": "container_auto"}},
    {"type": "tool_search"},
    {"type": "of_the_future"},
]


def request(**fields: Any) -> Any:
    return parse_response({"input": "Hello", **fields})


def names(**fields: Any) -> list[str]:
    return [tool.name for tool in request(**fields).tools]


# ---- What a model is shown ---------------------------------------------------------------------


def test_a_model_is_shown_functions_only() -> None:
    asked = request(tools=[LOOK, PATCH, MINE, *CLIENTS])
    shown = [tool.shown["function"] for tool in asked.tools]
    assert [function["name"] for function in shown] == [
        *("look", "patch", "mcp__mine__add", "mcp__mine__write"),
        *("local_shell", "shell", "apply_patch", "tool_search"),
    ]
    assert {tool.shown["type"] for tool in asked.tools} == {"function"}
    # A namespace's own words are with its first function.
    assert shown[2]["description"] == "My tools.\n\nAdds."
    assert shown[1]["parameters"]["required"] == ["input"]
    assert "Edits files." in shown[1]["description"]
    assert 'start: "a" "b"' in shown[1]["description"]
    assert asked.repeated["tools"][1:] == [PATCH, MINE, *CLIENTS]


def test_no_two_tools_are_shown_by_one_name() -> None:
    long = {"type": "namespace", "name": "n" * 100, "tools": [{**LOOK, "name": "f" * 100}]}
    plain = {**LOOK, "name": "mcp__mine__add"}
    found = names(tools=[MINE, {**SAY, "name": "look"}, LOOK, plain, long])
    assert len(set(found)) == len(found) == 6
    assert {"look", "mcp__mine__add"} <= set(found)
    assert all(len(name) <= 128 for name in found)
    # In every request the same, so that a conversation's beginning stays as it is.
    assert names(tools=[MINE, {**SAY, "name": "look"}, LOOK, plain, long]) == found


def test_of_tools_that_are_named_alike_the_last_counts() -> None:
    asked = request(tools=[LOOK, {**LOOK, "description": "Again."}, {**MINE, "name": "n"}, MINE])
    assert [tool.name for tool in asked.tools if tool.name == "look"] == ["look"]
    assert asked.tools[0].shown["function"]["description"] == "Again."
    assert any("several are named look" in line for line in asked.warnings)
    twice = {**MINE, "tools": [*MINE["tools"], MINE["tools"][1]]}
    assert request(tools=[twice]).warnings == ("tools: several are named write; the last counts",)
    # Of tools that come again as items nothing is said.
    more = {"type": "additional_tools", "tools": [LOOK]}
    given = [{"role": "user", "content": "a"}, more, more]
    assert request(input=given, tools=[LOOK]).warnings == ()


def test_very_many_tools_are_read_in_a_moment() -> None:
    many = [{**SAY, "name": f"n{number}"} for number in range(16_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": many}
    begun_s = time.perf_counter()
    assert len(names(tools=many, tool_choice=choice)) == 16_000
    assert time.perf_counter() - begun_s < 10


@pytest.mark.parametrize("tool", HOSTED)
def test_what_only_openais_servers_run_is_left_out_and_named(tool: Any) -> None:
    asked = request(tools=[LOOK, tool])
    assert [each.name for each in asked.tools] == ["look"]
    assert asked.warnings == (f"tools[1]: tools of type {tool['type']} are left out",)
    assert len(asked.repeated["tools"]) == 1


def test_tools_that_come_as_items_count_too() -> None:
    found = {"type": "tool_search_output", "call_id": "c", "tools": [MINE]}
    more = {"type": "additional_tools", "role": "developer", "tools": [SAY, HOSTED[0]]}
    asked = request(input=[{"role": "user", "content": "a"}, more, found], tools=[LOOK])
    assert {tool.name for tool in asked.tools} == {
        *("look", "say", "mcp__mine__add", "mcp__mine__write")
    }
    assert asked.warnings == ("input[1].tools[1]: tools of type web_search are left out",)
    assert len(asked.repeated["tools"]) == 1
    # What was found is shown where it was found: the beginning of the prompt stays as it was.
    first, *definitions = asked.messages[-1]["content"].split("\n")
    assert first == "Found, and can be called now:"
    named = [json.loads(line)["function"]["name"] for line in definitions]
    assert named == ["mcp__mine__add", "mcp__mine__write"]
    assert [tool.name for tool in asked.tools if tool.shown] == ["look", "say"]
    again = request(input=[{"role": "user", "content": "a"}, found], tools=[LOOK, MINE])
    assert all(tool.shown for tool in again.tools)
    with pytest.raises(BadRequest, match=r"input\[1\]\.tools\[0\]\.name: must be"):
        request(input=[{"role": "user", "content": "a"}, {**more, "tools": [{"type": "custom"}]}])


# ---- tool_choice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "look"}, "look"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "function", "name": "add", "namespace": "mcp__mine"}, "mcp__mine__add"),
        ({"type": "function", "name": "mcp__mine__add"}, "mcp__mine__add"),
        ({"type": "local_shell"}, "local_shell"),
        ({"type": "apply_patch"}, "apply_patch"),
    ],
)
def test_a_choice_may_name_a_tool_of_any_kind(choice: Any, name: str) -> None:
    asked = request(tools=[LOOK, PATCH, MINE, *CLIENTS], tool_choice=choice)
    assert asked.tool_choice == ToolChoice("named", name)
    assert asked.repeated["tool_choice"] == choice


def test_only_allowed_tools_are_shown() -> None:
    allowed = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "mcp__mine"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [*allowed, HOSTED[0]]}
    asked = request(tools=[LOOK, PATCH, MINE, *HOSTED], tool_choice=choice)
    assert [tool.name for tool in asked.tools] == ["patch", "mcp__mine__add", "mcp__mine__write"]
    assert asked.tool_choice == ToolChoice("required")
    assert asked.repeated["tool_choice"] == {**choice, "tools": allowed}
    nothing = {**choice, "mode": "auto", "tools": [HOSTED[0]]}
    assert request(tools=[LOOK, *HOSTED], tool_choice=nothing).tool_choice == ToolChoice("none")


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (HOSTED, "required", "tool_choice"),
        ([LOOK, *HOSTED], {"type": "web_search"}, "tool_choice.type"),
        ([LOOK, *HOSTED], {"type": "mcp", "server_label": "x"}, "tool_choice.type"),
        ([LOOK], {"type": "custom", "name": "look"}, "tool_choice"),
        ([LOOK], {"type": "custom"}, "tool_choice.name"),
        ([LOOK], {"type": "local_shell"}, "tool_choice"),
        ([LOOK], {"name": "look"}, "tool_choice.type"),
        ([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{}]},
         "tool_choice.tools[0].type"),
        ([LOOK], {"type": "allowed_tools", "mode": "required", "tools": [HOSTED[0]]},
         "tool_choice.tools"),
    ],
)  # fmt: skip
def test_a_choice_of_what_is_not_there_is_refused(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request(tools=tools, tool_choice=choice)
    assert refused.value.param == param


# ---- Grammars ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_is_enforced_where_strings_stand_in_calls_as_they_are(name: str) -> None:
    asked, call_format = request(tools=[LOOK, PATCH, SAY]), FORMATS[name]
    tools, unenforced = hold_to_grammars(asked.tools, asked.served, call_format)
    if not call_format.writes_plain_strings:
        assert (tools, unenforced) == (asked.tools, ("patch",))
        return
    assert unenforced == ()
    for required in (True, False):
        made = encoded(call_format.calls(tools, CallRule(required)))
        assert json.dumps(PATCH["format"]["definition"]) in made
    # Tools without a grammar are held to nothing.
    assert not tools[2].strict


def test_some_formats_write_strings_as_they_are() -> None:
    plain = {name for name, each in FORMATS.items() if each.writes_plain_strings}
    assert {"qwen_xml", "glm", "kimi_k3", "gemma4"} <= plain
    assert not plain & {"hermes", "llama_json", "harmony"}


# ---- The text of a call ------------------------------------------------------------------------


def read(pieces: list[str], *, was_cut: bool = False) -> str:
    text = EncodedText()
    shown = [text.feed(piece) for piece in pieces] + [text.end(was_cut=was_cut)]
    assert "".join(shown) == text.text
    return text.text


def cut(rng: random.Random, text: str) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def test_the_text_is_the_string_wherever_its_json_is_cut() -> None:
    rng = seeded("texts of custom tools")
    characters = ["a", " ", "\n", '"', "\\", "/", "\t", "é", "日", "😀", "\x00", "{", "}", "\u2028"]
    for _ in range(budget(2_000, 100_000)):
        text = "".join(rng.choice(characters) for _ in range(rng.randrange(12)))
        written = json.dumps({"input": text}, ensure_ascii=rng.random() < 0.5)
        written = rng.choice([written, written.replace("{", "{ \n", 1)])
        text_read = read(cut(rng, written))
        assert text_read == text, written


def test_text_is_shown_while_it_comes_and_never_taken_back() -> None:
    text = EncodedText()
    assert text.feed('{"input": "*** Be') == "*** Be"
    assert text.feed("gin\\") == "gin"
    assert text.feed("n\\ud83d") == "\n"
    assert text.feed("\\ude00!") == "😀!"
    assert text.feed('"}') == ""
    assert text.end(was_cut=False) == ""


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\ud83d"}', "a\ufffd"),
        ('{"input": "a\\ud83db"}', "a\ufffdb"),
        ('{"input": "a\\ude00"}', "a\ufffd"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"input": "\\qa\\u12x"}', "qau12x"),
        ('{"other": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ("plain words", "plain words"),
        ("{}", ""),
        ("", ""),
    ],
)
def test_odd_json_loses_no_text(written: str, text: str) -> None:
    for size in (1, 2, 3, 100):
        pieces = [written[at : at + size] for at in range(0, len(written), size)]
        assert read(pieces) == text


@pytest.mark.parametrize(
    ("written", "text"), [('{"input": "a\\', "a"), ('{"inp', ""), ('{"input": "a\\ud83d', "a")]
)
def test_of_a_call_that_was_cut_off_there_is_what_was_complete(written: str, text: str) -> None:
    assert read([written], was_cut=True) == text


# ---- What is answered --------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}]{% endfor %}"
)


async def calling(
    byte_level: Tokenizer, calls: list[tuple[str, Any]], **fields: Any
) -> tuple[Any, list[Any], Answer]:
    """The response in which a model makes the calls, its stream's events, and the whole answer."""
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"
        for name, given in calls
    )
    fleet = FakeFleet(model_files(byte_level, TEMPLATE))
    fleet.script = lambda request: [*byte_level.encode(text, add_special_tokens=False).ids, 0]
    fleet.shards[0].info = dataclasses.replace(INFO, max_model_len=9000)
    body = {"input": "Go.", **fields}
    async with memory_router(fleet) as router:
        whole = await router.post("/v1/responses", body)
        assert whole.status == 200, whole.body
        stream = await router.post("/v1/responses", {**body, "stream": True})
    events = []
    for frame in stream.body.decode().removesuffix("\n\n").split("\n\n"):
        data = frame.split("\n", 1)[1].removeprefix("data: ")
        EVENT.validate_json(data, strict=True)
        events.append(json.loads(data))
    Response.model_validate_json(whole.body, strict=True)
    return whole.json(), events, whole


async def test_a_tool_that_takes_text_is_answered_with_its_text(byte_level: Tokenizer) -> None:
    text = 'one "line"\nand 😀'
    response, events, _ = await calling(
        byte_level, [("patch", {"input": text}), ("say", {"input": ""})], tools=[PATCH, SAY]
    )
    first, second = response["output"]
    assert first["type"] == second["type"] == "custom_tool_call"
    assert (first["name"], first["input"], first["status"]) == ("patch", text, "completed")
    assert (second["name"], second["input"]) == ("say", "")
    assert first["id"].startswith("ctc_")
    assert first["call_id"].startswith("call_")
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.custom_tool_call_input.delta"
    ]
    assert "".join(deltas) == text
    assert len(deltas) > 3
    done = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert [event["input"] for event in done] == [text, ""]
    final = events[-1]["response"]["output"]
    assert [item["input"] for item in final] == [text, ""]
    kinds = [event["type"] for event in events if "output_item" in event["type"]]
    assert kinds == ["response.output_item.added", "response.output_item.done"] * 2


async def test_a_grammar_that_is_not_enforced_is_named(byte_level: Tokenizer) -> None:
    response, _, whole = await calling(byte_level, [("patch", {"input": "c"})], tools=[PATCH, SAY])
    assert response["usage"]["x_penstock_unenforced"] == ["patch"]
    assert "the grammar of patch is shown, not enforced" in whole.headers["x-penstock-warnings"]
    response, _, whole = await calling(byte_level, [("say", {"input": "c"})], tools=[SAY])
    assert "x_penstock_unenforced" not in response["usage"]
    assert "x-penstock-warnings" not in whole.headers


async def test_a_tool_in_a_namespace_is_answered_with_both_names(byte_level: Tokenizer) -> None:
    response, events, _ = await calling(
        byte_level,
        [("mcp__mine__add", {"a": 1}), ("mcp__mine__write", {"input": "b"}), ("look", {})],
        tools=[MINE, LOOK],
    )
    add, write, look = response["output"]
    assert (add["type"], add["name"], add["namespace"]) == ("function_call", "add", "mcp__mine")
    assert json.loads(add["arguments"]) == {"a": 1}
    assert (write["type"], write["name"], write["namespace"], write["input"]) == (
        *("custom_tool_call", "write", "mcp__mine", "b"),
    )
    assert (look["name"], "namespace" in look) == ("look", False)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("namespace") for item in added] == ["mcp__mine", "mcp__mine", None]


async def test_tools_of_the_client_are_answered_with_their_fields(byte_level: Tokenizer) -> None:
    shell = {"command": ["ls", "-l"], "working_directory": "/x", "timeout_ms": 5, "env": {"A": "b"}}
    response, events, _ = await calling(
        byte_level,
        [
            ("local_shell", shell),
            ("local_shell", {"command": "ls"}),
            ("shell", {"commands": ["ls"], "timeout_ms": "soon"}),
            ("apply_patch", {"type": "update_file", "path": "a", "diff": "@@"}),
            ("apply_patch", {"type": "delete_file", "path": "a"}),
            ("tool_search", {"query": "add"}),
        ],
        tools=CLIENTS,
    )
    first, second, shells, update, gone, search = response["output"]
    assert first["type"] == second["type"] == "local_shell_call"
    assert first["action"] == {"type": "exec", **shell}
    assert second["action"] == {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}}
    assert (shells["type"], shells["action"]) == ("shell_call", {"commands": ["ls"]})
    assert update["operation"] == {"type": "update_file", "path": "a", "diff": "@@"}
    assert gone["operation"] == {"type": "delete_file", "path": "a"}
    assert (search["type"], search["execution"]) == ("tool_search_call", "client")
    assert search["arguments"] == {"query": "add"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == [item["type"] for item in response["output"]]
    assert done[0]["action"] == first["action"]


async def test_calls_of_every_kind_are_gone_on_from(byte_level: Tokenizer) -> None:
    tools = [PATCH, MINE, *CLIENTS]
    response, _, _ = await calling(
        byte_level,
        [("patch", {"input": "x"}), ("mcp__mine__add", {"a": 1}), ("local_shell", {"command": []})],
        tools=tools,
    )
    outputs: list[Any] = [
        {"type": "custom_tool_call_output", "output": "one"},
        {"type": "function_call_output", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "local_shell_call_output", "output": "three"},
    ]
    calls = response["output"]
    for item, output in zip(calls, outputs, strict=True):
        output["call_id"] = item["call_id"]
    user = {"role": "user", "content": "Go."}
    asked = request(input=[user, *calls, *outputs], tools=tools)
    [said, *given] = asked.messages[1:]
    functions = [call["function"] for call in said["tool_calls"]]
    assert functions == [
        {"name": "patch", "arguments": {"input": "x"}},
        {"name": "mcp__mine__add", "arguments": {"a": 1}},
        {"name": "local_shell", "arguments": {"command": []}},
    ]
    assert [message["content"] for message in given] == ["one", "two", "three"]
    assert [message["name"] for message in given] == [each["name"] for each in functions]


# ---- Nonsense ----------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, 0, "", "a", "auto", [], {}, [{}], LOOK, PATCH, SAY, MINE, *CLIENTS, *HOSTED),
    *({"type": "allowed_tools", "mode": "auto", "tools": [LOOK]}, PATCH["format"], 10**30),
]
KEYS = ("type", "name", "namespace", "tools", "format", "syntax", "definition", "mode", "strict")


def odd(rng: random.Random) -> Any:
    item = rng.choice(ODD)
    if isinstance(item, dict):
        item = item | {key: rng.choice(ODD) for key in rng.sample(KEYS, rng.randrange(3))}
    return item


@pytest.mark.parametrize("kind", [TOOLS, CHOICE])
def test_whatever_is_taken_is_documented_and_no_nonsense_raises_anything_else(kind: Any) -> None:
    rng = seeded("odd tools of responses")
    validator = jsonschema_rs.validator_for(kind.schema)
    taken, refused = 0, []
    for _ in range(budget(10_000, 300_000)):
        given = odd(rng) if kind is CHOICE else [odd(rng) for _ in range(rng.randrange(3))]
        try:
            kind.read("field", given)
        except BadRequest as error:
            refused.append(error.param)
            continue
        taken += 1
        assert validator.is_valid(given), given
    assert taken > 50
    assert all(param and param.startswith("field") for param in refused)
