"""Bodies of the kinds that Claude Code 2.1 and Codex 0.171 post, as small as they can be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.router_doubles import (
    INFO,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

# What a template is given, a message a line; and which tools.
TEMPLATE = (
    "{% for tool in tools or [] %}(tool {{ tool.function.name }})\n{% endfor %}"
    "{% for message in messages %}"
    "[{{ message.role }}] "
    "{% if message.reasoning_content %}({{ message.reasoning_content }}) {% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ ' ' }}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ROOMY = replace(INFO, max_model_len=100_000)


@pytest.fixture
async def router(byte_level: Tokenizer) -> AsyncIterator[MemoryRouter]:
    fleet = FakeFleet(model_files(byte_level, TEMPLATE), lambda _: [5, 0], [FakeShard(ROOMY)])
    async with memory_router(fleet, tool_call_parser="hermes") as served:
        yield served


async def prompt_of(
    router: MemoryRouter, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> list[str]:
    """The lines of the prompt that the body becomes; it must be answered."""
    answer = await router.post(path, body)
    assert answer.status == 200, answer.body
    ids = list(router.fleet.requests[-1].prompt_token_ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text.splitlines()


# ---- Claude Code ---------------------------------------------------------------------------------

CACHED = {"cache_control": {"type": "ephemeral"}}
PLACEHOLDER = {
    "name": "Placeholder",
    "description": "Keeps a place.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}


def claude_tool(name: str, **more: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"path": {"type": "string"}},
        "required": ["path"],
        "additionalProperties": False,
    }
    return {"name": name, "description": "A tool.", "input_schema": schema, **more}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(number: int, name: str, **more: Any) -> dict[str, Any]:
    named = {"type": "tool_use", "id": f"toolu_{number}", "name": name}
    return {**named, "input": {"path": "a"}, **more}


def result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"tool_use_id": f"toolu_{number}", "type": "tool_result", "content": content, **more}


def claude(*messages: dict[str, Any], build: str = "1a2", **more: Any) -> dict[str, Any]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.332.{build}; cc_entrypoint=cli;"
    return {
        "model": "fake-model",
        "messages": list(messages),
        "system": [text(billing), text("You are an agent.", **CACHED), text("Work.", **CACHED)],
        "tools": [claude_tool("Read"), claude_tool("ToolSearch"), PLACEHOLDER],
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **more,
    }


ASKED = {"role": "user", "content": [text("<reminder>r</reminder>"), text("Read a.")]}
READ = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "It is a file.", "signature": "c2ln"},
        text("I read."),
        use(1, "Read"),
    ],
}


def surroundings(content: Any) -> dict[str, Any]:
    """Return a message of the role system that says where the agent runs."""
    return {"role": "system", "content": content}


FIRST = claude(ASKED, surroundings([text("The shell is bash.", **CACHED)]))
SECOND = claude(
    ASKED,
    surroundings("The shell is bash."),
    READ,
    {"role": "user", "content": [result(1, "1\tone", **CACHED)]},
    build="b3c",
)


async def test_claude_codes_first_and_second_request_have_a_prompt_in_common(
    router, byte_level
) -> None:
    first = await prompt_of(router, byte_level, "/v1/messages?beta=true", FIRST)
    second = await prompt_of(router, byte_level, "/v1/messages?beta=true", SECOND)
    for lines in (first, second):
        assert "billing" not in "\n".join(lines)
        assert "Placeholder" not in "\n".join(lines)
        assert [line for line in lines if "bash" in line]
        assert [line for line in lines if "Read a." in line]
    assert first[-1] == "[assistant] "
    assert second[: len(first) - 1] == first[:-1]
    assert second[len(first) - 1 :] == [
        '[assistant] (It is a file.) I read. Read{"path": "a"}',
        "[tool] 1\tone",
        "[assistant] ",
    ]


async def test_claude_codes_results_of_every_kind_are_told(router, byte_level) -> None:
    calls = [use(2, "Read"), use(3, "Read"), use(4, "ToolSearch", **CACHED)]
    references = [{"type": "tool_reference", "tool_name": "WebFetch"}]
    results = [
        result(3, "no such file", is_error=True),
        result(2, [text("three")], is_error=False),
        {"type": "tool_result", "tool_use_id": "toolu_4", "content": references},
        text("<reminder>more</reminder>", **CACHED),
    ]
    body = claude(
        {"role": "user", "content": "The summary of before."},
        surroundings("It is Friday."),
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
        surroundings([text("There are tools.", **CACHED)]),
        tools=[
            claude_tool("Read"),
            claude_tool("ToolSearch"),
            claude_tool("WebFetch", defer_loading=True),
        ],
    )
    lines = await prompt_of(router, byte_level, "/v1/messages?beta=true", body)
    # What was found is told where it was found.
    (found,) = (line for line in lines if "WebFetch" in line)
    assert found.startswith("[tool] ")
    assert '"properties": {"path"' in found
    for told in (
        "summary of before",
        "Friday",
        "no such file",
        "three",
        "more",
        "are tools",
    ):
        assert [line for line in lines if told in line], told
    assert '[assistant]  Read{"path": "a"} Read{"path": "a"} ToolSearch{"path": "a"}' in lines


async def test_claude_codes_search_of_the_web_is_answered_without_its_tool(
    router, byte_level
) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    body = claude(
        {"role": "user", "content": [text("Search for cats.")]},
        tools=[search],
        tool_choice={"type": "auto"},
    )
    lines = await prompt_of(router, byte_level, "/v1/messages?beta=true", body)
    assert not [line for line in lines if line.startswith("(tool")]


# ---- Codex ---------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}


def function(name: str, **more: Any) -> dict[str, Any]:
    about = {"type": "function", "name": name, "description": "Does it.", "strict": False}
    return {**about, **more, "parameters": {**SCHEMA, "additionalProperties": False}}


def namespace(name: str, *names: str, **more: Any) -> dict[str, Any]:
    tools = [function(each, **more) for each in names]
    return {"type": "namespace", "name": name, "description": "Tools.", "tools": tools}


SEARCHES = {"type": "web_search", "external_web_access": True}
PATCHES = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x" /.+/'},
}
FINDS = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def item(number: int, role: str, *words: str) -> dict[str, Any]:
    content = [{"type": "input_text", "text": each} for each in words]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}


BEGIN = (
    item(1, "developer", "You are a coding agent."),
    item(2, "developer", "<skills/>", "<permissions/>"),
    item(3, "user", "<environment/>"),
    item(4, "user", "Read a."),
)


def codex(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    tools: Sequence[Any] = (
        function("exec_command"),
        namespace("mcp__mine", "add"),
        SEARCHES,
    )
    return {
        "model": "fake-model",
        "stream": True,
        "input": [*BEGIN, *items],
        "tools": list(tools),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a21eb1-855d",
        "client_metadata": {"turn_id": "t"},
        **more,
    }


def called(number: int, name: str, **more: Any) -> dict[str, Any]:
    about = {"type": "function_call", "status": "completed", "id": f"fc_{number}", "name": name}
    return {**about, **more, "arguments": '{"cmd": "ls"}', "call_id": f"call_{number}"}


def returned(number: int, output: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "id": f"fco_{number}", "call_id": f"call_{number}", "output": output}


THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "It is a file."}],
    "encrypted_content": None,
}
SAID = {
    "type": "message",
    "status": "completed",
    "id": "msg_9",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "I read.", "annotations": []}],
}
SUM = [{"type": "input_text", "text": "Output:"}, {"type": "input_text", "text": "3"}]


async def test_codexs_first_and_second_request_have_a_prompt_in_common(router, byte_level) -> None:
    first = await prompt_of(router, byte_level, "/v1/responses", codex())
    calls = [called(1, "exec_command"), called(2, "add", namespace="mcp__mine")]
    later = codex(THOUGHT, SAID, *calls, returned(1, "one"), returned(2, SUM))
    second = await prompt_of(router, byte_level, "/v1/responses", later)
    assert [line for line in first if line.startswith("(tool") and "add" in line]
    for told in ("You are a coding agent.", "<permissions/>", "<environment/>", "Read a."):
        assert [line for line in first if told in line], told
    assert second[: len(first) - 1] == first[:-1]
    (said, *results, last) = second[len(first) - 1 :]
    assert said.startswith('[assistant] (It is a file.) I read. exec_command{"cmd": "ls"} ')
    assert said.endswith('add{"cmd": "ls"}')
    assert results == ["[tool] one", "[tool] Output:", "3"]
    assert last == "[assistant] "


async def test_codexs_own_tools_are_told_and_what_came_of_them(router, byte_level) -> None:
    patch = {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "call_1"}
    search = {"type": "tool_search_call", "id": "tsc_2", "call_id": "call_2", "status": "completed"}
    found = {
        **{"type": "tool_search_output", "id": "tso_2", "call_id": "call_2"},
        **{"status": "completed", "execution": "client"},
        "tools": [namespace("mcp__mine", "add", defer_loading=True)],
    }
    items = [
        {**patch, "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch\n"},
        returned(1, "Done it.", "custom_tool_call_output"),
        {**search, "execution": "client", "arguments": {"query": "sums"}},
        found,
        called(3, "add", namespace="mcp__mine"),
        returned(3, SUM),
    ]
    tools = [
        function("exec_command"),
        PATCHES,
        FINDS,
        {**SEARCHES, "search_content_types": ["text"]},
    ]
    body = codex(*items, tools=tools, text={"verbosity": "low"}, reasoning={"effort": "medium"})
    lines = await prompt_of(router, byte_level, "/v1/responses", body)
    told = "\n".join(lines)
    for words in ("Begin Patch", "Done it.", "sums", "Output:"):
        assert words in told
    for name in ("apply_patch", "tool_search"):
        assert [line for line in lines if line.startswith("(tool") and name in line], name
    # What was found is told where it was found.
    assert not [line for line in lines if line.startswith("(tool") and "mcp__mine" in line]
    assert "mcp__mine__add" in told


async def test_codexs_compaction_without_tools_is_answered(router, byte_level) -> None:
    body = codex(
        *[called(1, "exec_command"), returned(1, "one"), item(7, "user", "Summarize.")],
        tools=[],
        parallel_tool_calls=False,
    )
    lines = await prompt_of(router, byte_level, "/v1/responses", body)
    assert not [line for line in lines if line.startswith("(tool")]
    assert lines[-2:] == ["[user] Summarize.", "[assistant] "]
