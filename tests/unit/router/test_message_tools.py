"""Tools of Messages: which are served, which are left out and named, and which a turn shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock_router.apis.messages.requests import parse
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, ToolChoice

USER = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
FETCH = {"name": "WebFetch", "description": "Fetches.", "input_schema": SCHEMA}
DEFERRED = {**FETCH, "defer_loading": True}
SHOWN: dict[str, Any] = {
    "type": "function",
    "function": {"name": "WebFetch", "description": "Fetches.", "parameters": SCHEMA},
}
CALL = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {"query": "fetch"}}


def request_of(*turns: Any, **fields: Any) -> ChatRequest:
    messages = list(turns) or [USER]
    return parse({"model": "m", "max_tokens": 9, "messages": messages, **fields})


def found(*blocks: Any) -> tuple[Any, ...]:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": list(blocks)}
    return (
        USER,
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result]},
    )


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}


# ---- Served or left out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825"),
        *("tool_search_tool_regex_20251119", "advisor_20260301", "computer_20250124"),
        *("browser_toolset_20260801", "something_new_20290101"),
    ],
)
def test_tools_that_are_not_the_clients_are_left_out_and_named(kind: str) -> None:
    request = request_of(tools=[FETCH, {"type": kind, "name": "x", "max_uses": 8}])
    assert [tool.name for tool in request.tools] == ["WebFetch"]
    assert request.warnings == (f"tools[1]: tools of type '{kind}' are left out",)
    alone = request_of(tools=[{"type": kind, "name": "x"}], tool_choice={"type": "auto"})
    assert (alone.tools, alone.tool_choice) == ((), ToolChoice("none"))


def test_a_choice_of_a_tool_that_is_left_out_is_refused() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    named = {"type": "tool", "name": "web_search"}
    with pytest.raises(BadRequest, match="tool_choice: none of the tools is named web_search"):
        request_of(tools=[FETCH, web], tool_choice=named)
    for choice in (named, {"type": "any"}):
        with pytest.raises(BadRequest, match="tool_choice: needs tools"):
            request_of(tools=[web], tool_choice=choice)


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", ("command", "restart")),
        ("bash_20290101", "bash", ("command", "restart")),
        ("text_editor_20250124", "str_replace_editor", ("command", "path", "new_str")),
        ("text_editor_20250728", "str_replace_based_edit_tool", ("insert_line", "insert_text")),
        ("memory_20250818", "memory", ("command", "path", "old_path", "new_path")),
    ],
)
def test_tools_of_anthropic_that_clients_run_have_their_arguments(
    kind: str, name: str, arguments: tuple[str, ...]
) -> None:
    [tool] = request_of(tools=[{"type": kind, "name": None}]).tools
    assert tool.name == name
    assert tool.parameters is not None
    assert set(arguments) <= set(tool.parameters["properties"])
    assert tool.shown["function"]["parameters"] == tool.parameters
    assert request_of(tools=[{"type": kind, "name": name}]).warnings == ()


def test_what_a_tool_has_for_others_is_taken() -> None:
    more: dict[str, Any] = {
        **{"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "type": None},
        **{"input_examples": [{"url": "x"}], "allowed_callers": ["direct"], "strict": True},
    }
    [tool] = request_of(tools=[{**FETCH, **more}]).tools
    assert tool.shown == SHOWN
    assert tool.strict


def test_a_tool_that_only_code_on_servers_may_call_is_left_out() -> None:
    request = request_of(tools=[FETCH, {**SEARCH, "allowed_callers": ["code_execution_20250825"]}])
    assert [tool.name for tool in request.tools] == ["WebFetch"]
    [warning] = request.warnings
    assert warning.startswith("tools[1]: left out, as only code on")


@pytest.mark.parametrize("schema", [None, {}, {"properties": {}}, {"type": None}])
def test_a_schema_may_say_little(schema: Any) -> None:
    [tool] = request_of(tools=[{"name": "f", "input_schema": schema}]).tools
    assert (tool.parameters or {"type": "object"})["type"] == "object"


def test_a_tool_of_an_unknown_type_with_a_schema_is_a_function() -> None:
    [tool] = request_of(tools=[{**FETCH, "type": "function"}]).tools
    assert tool.shown == SHOWN


@pytest.mark.parametrize(
    "given",
    [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"function": {"name": "f", "parameters": {"type": "object"}}},
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
        {"name": "f", "parameters": {"type": "object"}},
    ],
)
def test_a_tool_in_the_form_of_chats_or_responses_is_one_with_its_schema(given: Any) -> None:
    own = {"name": "f", "input_schema": {"type": "object"}}
    assert request_of(tools=[given]) == request_of(tools=[own])


def test_there_may_be_hundreds_of_tools() -> None:
    many = [{**FETCH, "name": f"tool_{number}"} for number in range(500)]
    assert len(request_of(tools=many).tools) == 500


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"defer_loading": "yes"}, "tools[0].defer_loading: must be true or false"),
        ({"allowed_callers": "direct"}, "tools[0].allowed_callers: must be an array"),
        ({"type": ["custom"]}, "tools[0].type: must be a string"),
        ({"input_schema": {"type": "array"}}, "tools[0].input_schema.type: must be object"),
        ({"name": None}, "tools[0].name: must be 1 to"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_field(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request_of(tools=[{**FETCH, **more}])
    assert words in refused.value.message


# ---- Deferred tools ----------------------------------------------------------------------------


def test_a_deferred_tool_is_shown_where_a_turn_refers_to_it_and_can_be_called() -> None:
    request = request_of(*found(reference("WebFetch")), tools=[SEARCH, DEFERRED])
    search, fetch = request.tools
    assert search.shown
    assert not fetch.shown
    assert (fetch.name, fetch.parameters) == ("WebFetch", SCHEMA)
    assert json.loads(request.messages[-1]["content"]) == SHOWN
    # Before, nothing shows it.
    assert "Fetches" not in str(request_of(tools=[SEARCH, DEFERRED]).messages)


def test_a_definition_is_shown_once_however_often_turns_refer_to_it() -> None:
    request = request_of(*found(*[reference("WebFetch")] * 3), tools=[SEARCH, DEFERRED])
    texts = [part["text"] for part in request.messages[-1]["content"]]
    assert texts == [json.dumps(SHOWN), "WebFetch", "WebFetch"]
    # A summary stands for the turn that showed it.
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "Short."}]}
    again = found(reference("WebFetch"))[1:]
    turns = (*found(reference("WebFetch")), summary, *again)
    assert request_of(*turns, tools=[SEARCH, DEFERRED]).messages[-1]["content"] == texts[0]


def test_of_two_tools_with_one_name_one_that_is_shown_is_not_shown_again() -> None:
    request = request_of(*found(reference("WebFetch")), tools=[SEARCH, FETCH, DEFERRED])
    assert request.messages[-1]["content"] == "WebFetch"
    assert [tool.name for tool in request.tools if tool.shown] == ["ToolSearch", "WebFetch"]


def test_references_to_other_tools_are_their_names() -> None:
    request = request_of(*found(reference("Gone")), tools=[SEARCH])
    assert request.messages[-1]["content"] == "Gone"
    request = request_of(*found(reference("WebFetch")), tools=[SEARCH, FETCH])
    assert request.messages[-1]["content"] == "WebFetch"


@pytest.mark.parametrize(
    "tools",
    [
        # Nothing could find it.
        [DEFERRED],
        # That search is left out.
        [SEARCH, DEFERRED, {"type": "tool_search_tool_bm25_20251119", "name": "search"}],
    ],
)
def test_a_deferred_tool_that_nothing_finds_is_shown(tools: list[Any]) -> None:
    fetch = next(tool for tool in request_of(tools=tools).tools if tool.name == "WebFetch")
    assert fetch.shown == SHOWN


def test_a_deferred_tool_that_must_be_called_is_shown() -> None:
    choice = {"type": "tool", "name": "WebFetch"}
    _, fetch = request_of(tools=[SEARCH, DEFERRED], tool_choice=choice).tools
    assert fetch.shown == SHOWN


def test_tools_that_turns_add_and_remove_are_told_and_served() -> None:
    named = {"type": "tool_reference", "name": "WebFetch"}
    defined = {"type": "tool_definition", "definition": {**FETCH, "name": "New"}}
    changes = [
        {"type": "tool_addition", "tool": named},
        {"type": "tool_addition", "tool": defined},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ToolSearch"}},
    ]
    turn = {"role": "system", "content": changes}
    request = request_of(USER, turn, tools=[SEARCH, DEFERRED])
    assert [(tool.name, bool(tool.shown)) for tool in request.tools] == [
        *(("ToolSearch", True), ("WebFetch", False), ("New", False)),
    ]
    lines = request.messages[1]["content"].split("\n")
    new = {"type": "function", "function": {**SHOWN["function"], "name": "New"}}
    assert lines == [
        f"Now available: {json.dumps(SHOWN)}",
        f"Now available: {json.dumps(new)}",
        "No longer available: ToolSearch",
    ]
    web = {"type": "tool_definition", "definition": {"type": "web_search_20250305"}}
    turn = {"role": "system", "content": [{"type": "tool_addition", "tool": web}]}
    assert "web_search_20250305" in request_of(USER, turn).warnings[0]
    for tool in (None, {}, {"type": "tool_definition"}):
        turn = {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}
        with pytest.raises(BadRequest, match=r"messages\[1\]\.content\[0\]\.tool"):
            request_of(USER, turn)
