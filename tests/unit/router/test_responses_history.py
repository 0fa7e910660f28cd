"""Items that agents send back to the Responses API: of every kind, and stored ones by reference."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    Answer,
    FakeFleet,
    MemoryRouter,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_router.apis.responses.errors import error_object
from penstock_router.apis.responses.items.encrypted_reasoning import seal, unseal
from penstock_router.apis.responses.items.reading import INPUT
from penstock_router.apis.responses.requests import parse_response
from penstock_router.errors import BadRequest, ContextExceeded, TimedOut, TooManyRequests

USER: Any = {"type": "message", "role": "user", "content": "Go."}
THOUGHT: Any = {"type": "reasoning", "summary": [], "content": None}


def call(name: str, arguments: Any, call_id: str = "c") -> Any:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def told(content: Any, name: str = "", call_id: str = "c") -> Any:
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**message, "name": name} if name else message


def said(*items: Any, **fields: Any) -> Any:
    """The messages behind the user's."""
    return parse_response({"input": [USER, *items], **fields}).messages[1:]


def warnings(*items: Any) -> Any:
    return parse_response({"input": [USER, *items]}).warnings


# ---- Every kind of item ------------------------------------------------------------------------

ACTION: Any = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None, "user": "me"}
CHUNK: Any = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
OPERATION: Any = {"type": "delete_file", "path": "a", "diff": None}
ADD: Any = {"type": "function", "name": "add", "parameters": {}}
MINE: Any = {"type": "namespace", "name": "mine", "description": "", "tools": [ADD]}

PAIRS: list[tuple[Any, Any, Any]] = [
    (
        {"type": "function_call", "name": "add", "namespace": "mine", "arguments": '{"a":1}'},
        {"type": "function_call_output", "output": [{"type": "output_text", "text": "3"}]},
        [call("mine__add", {"a": 1}), told("3", "mine__add")],
    ),
    (
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "output": "Done", "name": "patch"},
        [call("patch", {"input": "*** Begin"}), told("Done", "patch")],
    ),
    (
        {"type": "local_shell_call", "action": ACTION},
        {"type": "local_shell_call_output", "output": '{"output":"a"}'},
        [call("local_shell", {"command": ["ls"], "user": "me"}), told('{"output":"a"}',
                                                                     "local_shell")],
    ),
    (
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 5}},
        {"type": "shell_call_output", "output": [CHUNK]},
        [call("shell", {"commands": ["ls"], "timeout_ms": 5}),
         told(json.dumps([CHUNK], separators=(",", ":")), "shell")],
    ),
    (
        {"type": "apply_patch_call", "operation": OPERATION},
        {"type": "apply_patch_call_output", "status": "failed"},
        [call("apply_patch", {"type": "delete_file", "path": "a"}), told("failed", "apply_patch")],
    ),
    (
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "add"}},
        {"type": "tool_search_output", "tools": [MINE]},
        [call("tool_search", {"query": "add"}),
         told("Found, and can be called now:\n" + json.dumps(
             {"type": "function", "function": {
                 "name": "mine__add", "parameters": {"type": "object", "properties": {}}}}),
             "tool_search")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("item", "output", "shown"), PAIRS, ids=lambda each: str(each)[10:26])
def test_calls_and_outputs_of_every_kind_are_shown(item: Any, output: Any, shown: Any) -> None:
    more = {"id": None, "status": None, "phase": None, "internal": {"a": 1}, "call_id": "c"}
    assert said({**more, **item}, {**more, **output}) == shown
    # An output whose call is gone, as after a compaction, ends no session.
    assert said({**more, **output}) == [{**told(shown[1]["content"])}]
    assert jsonschema_rs.is_valid(INPUT.schema, [{**more, **item}, {**more, **output}])


def test_a_shells_output_may_name_its_call_by_the_items_id() -> None:
    item = {"type": "local_shell_call", "id": "c", "action": ACTION}
    output = {"type": "local_shell_call_output", "id": "c", "output": "a"}
    assert said(item, output)[1] == told("a", "local_shell")


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (
            {"type": "mcp_call", "server_label": "mine", "name": "add", "arguments": '{"a":1}',
             "output": "3"},
            [("mine__add", {"a": 1}), "3"],
        ),
        (
            {"type": "mcp_call", "server_label": "mine", "name": "add", "arguments": "",
             "error": {"code": 1}},
            [("mine__add", {}), '{"code":1}'],
        ),
        (
            {"type": "code_interpreter_call", "code": "1+1",
             "outputs": [{"type": "logs", "logs": "2"}]},
            [("code_interpreter_call", {"code": "1+1"}), '[{"type":"logs","logs":"2"}]'],
        ),
        (
            {"type": "file_search_call", "queries": ["a"], "results": [{"text": "b"}]},
            [("file_search_call", {"queries": ["a"]}), '[{"text":"b"}]'],
        ),
    ],
)  # fmt: skip
def test_what_a_server_ran_is_a_call_and_what_came_of_it(item: Any, shown: Any) -> None:
    [calls, output] = said(item)
    [(name, arguments), text] = shown
    assert calls["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
    assert (output["content"], output["name"]) == (text, name)
    assert output["tool_call_id"] == calls["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_call", "image_generation_call", "computer_call", "computer_call_output"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"),
        *("context_compaction", "compaction_trigger", "ghost_snapshot", "configuration_update"),
        *("code_interpreter_call", "file_search_call"),
    ],
)
def test_what_no_model_here_can_be_shown_is_left_out_and_named(kind: str) -> None:
    item = {"type": kind, "id": "x", "encrypted_content": "gAAA"}
    assert said(item) == []
    [line] = warnings(item)
    assert line.startswith("input[1]: ")
    assert kind in line


def test_what_another_agent_says_is_the_users_words() -> None:
    parts = [{"type": "input_text", "text": "Done."}, {"type": "encrypted_content", "a": 1}]
    item = {"type": "agent_message", "author": "/main/a", "recipient": "/main", "content": parts}
    assert said(item) == [{"role": "user", "content": "/main/a to /main:\nDone."}]
    assert warnings(item) == (
        "input[1].content[1]: parts of type 'encrypted_content' are left out",
    )


def test_an_output_says_which_of_its_parts_no_model_sees() -> None:
    parts = [{"type": "input_file", "file_id": "f"}, {"type": "input_text", "text": "a"}]
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": parts}
    texts = [part["text"] for part in said(output)[0]["content"]]
    assert texts == ["[input_file: left out]", "a"]


def test_an_image_of_an_item_is_named_by_its_place_in_the_body() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    output = {"type": "function_call_output", "call_id": "c", "output": [image]}
    asked = parse_response({"input": [USER, {"type": "compaction"}, output]})
    assert [each.param for each in asked.images] == ["input[2].output[0]"]


async def test_a_model_that_sees_nothing_is_told_of_the_image_of_a_tool(
    thinking: FakeFleet, byte_level: Tokenizer
) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    parts = [image, {"type": "input_text", "text": "a"}]
    output = {"type": "function_call_output", "call_id": "c"}
    calls = {"type": "function_call", "name": "view", "call_id": "c", "arguments": "{}"}
    async with memory_router(thinking) as router:
        for given in (parts, parts * 5_000):
            answer = await ask(
                router, [USER, calls, {**output, "output": given}], truncation="auto"
            )
            assert answer.status == 200, answer.body
            assert "the model cannot see them" in answer.headers["x-penstock-warnings"]
            assert "(an image, which this model cannot see)" in prompt_of(thinking, byte_level)
        # What a user shows is no tool's: nobody would know that the model did not see it.
        refused = await ask(router, [{"role": "user", "content": [image]}])
        assert (refused.status, refused.error["param"]) == (400, "input[0].content[0]")


# ---- Reasoning ---------------------------------------------------------------------------------


def test_reasoning_comes_back_by_its_content_or_in_sealed_form() -> None:
    text = "Hm. 日本 \n"
    sealed = seal(text)
    answer = {"role": "assistant", "content": "I look."}
    thought = {**answer, "reasoning_content": text}
    assert said({**THOUGHT, "encrypted_content": sealed}, answer) == [thought]
    plain = [{"type": "reasoning_text", "text": text}]
    assert said({**THOUGHT, "content": plain, "encrypted_content": sealed}, answer) == [thought]
    other = [{"type": "text", "text": text}]
    assert said({**THOUGHT, "content": other, "encrypted_content": None}, answer) == [thought]
    # At the end, as after an answer that was cut off.
    [cut] = said({**THOUGHT, "encrypted_content": sealed})
    assert cut == {"role": "assistant", "content": "", "reasoning_content": text}


@pytest.mark.parametrize("sealed", ["gAAAAABo", "penstock1:%", "penstock1:gICA", ""])
def test_reasoning_that_another_server_sealed_is_left_out_and_named(sealed: str) -> None:
    assert unseal(sealed) is None
    item = {**THOUGHT, "encrypted_content": sealed}
    assert said(item) == []
    assert warnings(item) == (
        "input[1].encrypted_content: it is not of this server and is left out",
    )


THINKS = (
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    ":{{ m.content }}]{% endfor %}"
)


async def ask(router: MemoryRouter, given: Any, **fields: Any) -> Answer:
    return await router.post("/v1/responses", {"input": given, "max_output_tokens": 60, **fields})


def prompt_of(fleet: FakeFleet, tokenizer: Tokenizer) -> str:
    ids = list(fleet.requests[-1].prompt_token_ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


@pytest.fixture
def thinking(byte_level: Tokenizer) -> FakeFleet:
    fleet = FakeFleet(model_files(byte_level, THINKS))
    ids = [*byte_level.encode("<think>Well.</think>Yes.", add_special_tokens=False).ids, 0]
    fleet.script = lambda request: ids
    return fleet


async def test_reasoning_is_sealed_for_who_asks_and_understood_when_it_comes_back(
    thinking: FakeFleet, byte_level: Tokenizer
) -> None:
    async with memory_router(thinking) as router:
        plain = (await ask(router, "Go.")).json()["output"][0]
        assert "encrypted_content" not in plain
        include = ["reasoning.encrypted_content"]
        streamed = await ask(router, "Go.", include=include, stream=True, store=False)
        events = [json.loads(line[6:]) for line in streamed.body.decode().split("\n")
                  if line.startswith("data: {")]  # fmt: skip
        assert streamed.headers["x-reasoning-included"] == "true"
        items = [event["item"] for event in events if "output_item" in event["type"]]
        begun, thought, _, text = items
        assert "encrypted_content" not in begun
        assert base64.b64decode(thought["encrypted_content"].split(":")[1]) == b"Well."
        thought["content"] = None
        await ask(router, [USER, thought, text])
        assert prompt_of(thinking, byte_level) == "[user:Go.][assistant<think>Well.</think>:Yes.]"


# ---- References --------------------------------------------------------------------------------


async def test_items_that_are_stored_may_be_sent_by_their_ids(
    thinking: FakeFleet, byte_level: Tokenizer
) -> None:
    async with memory_router(thinking) as router:
        first = (await ask(router, "Go.")).json()
        items = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        user = {"role": "user", "content": "On."}
        second = await ask(router, [USER, *items, user])
        assert second.status == 200, second.body
        expected = "[user:Go.][assistant<think>Well.</think>:Yes.][user:On.]"
        assert prompt_of(thinking, byte_level) == expected
        # And what was referred to is stored with the second, from which a third goes on.
        third = await ask(router, "Go.", previous_response_id=second.json()["id"])
        assert third.status == 200, third.body
        assert prompt_of(thinking, byte_level).startswith(expected + "[assistant")
        inputs = (await router.get(f"/v1/responses/{second.json()['id']}/input_items")).json()
        assert {item["type"] for item in inputs["data"]} == {"message", "reasoning"}


@pytest.mark.parametrize("item_id", ["msg_00000000000000000000000000000000", "x", "_", "a_b_c"])
async def test_a_reference_to_nothing_is_refused_by_name(thinking: FakeFleet, item_id: str) -> None:
    async with memory_router(thinking) as router:
        reference = {"type": "item_reference", "id": item_id}
        refused = await ask(router, [USER, reference])
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert f"no stored item has the id '{item_id}'" in refused.error["message"]
        many = [{**reference, "id": f"msg_{number}_1"} for number in range(300)]
        refused = await ask(router, [USER, *many])
        assert "references to at most 256 responses; given: 300" in refused.error["message"]
        assert thinking.requests == []


# ---- Errors, and routes beside -----------------------------------------------------------------


async def test_errors_are_openais(thinking: FakeFleet) -> None:
    async with memory_router(thinking) as router:
        bad = await ask(router, "Go.", temperature="hot")
        assert (bad.status, bad.error["type"], bad.error["code"]) == (
            *(400, "invalid_request_error", None),
        )
        long = await ask(router, "word " * 3000, stream=True)
        assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
        assert long.error["type"] == "invalid_request_error"
        model = await ask(router, "Go.", model="nobody")
        assert (model.status, model.error["code"]) == (404, "model_not_found")
        gone = await router.get("/v1/responses/resp_1")
        assert (gone.status, gone.error["type"]) == (404, "invalid_request_error")
        unknown = await router.get("/v1/responses/a/b/c")
        assert (unknown.status, unknown.error["type"]) == (404, "invalid_request_error")
        # Chats keep vLLM's.
        chat = await router.post("/v1/chat/completions", {"messages": []})
        assert chat.error["type"] == "BadRequestError"


def test_a_stream_that_fails_says_so_in_codes_that_codex_knows() -> None:
    full = error_object(TooManyRequests("the queues are full", retry_after_s=3))
    assert full["code"] == "rate_limit_exceeded"
    assert re.search(r"try again in\s*(\d+)\s*s", full["message"])
    long = ContextExceeded("too long", limit_tokens=5)
    assert error_object(long)["code"] == "context_length_exceeded"
    assert error_object(BadRequest("no"))["code"] == "invalid_prompt"
    assert error_object(TimedOut("late"))["code"] == "server_error"


async def test_a_body_of_responses_at_the_route_of_chats_is_told_its_own(
    thinking: FakeFleet,
) -> None:
    async with memory_router(thinking) as router:
        refused = await router.post("/v1/chat/completions", {"input": [USER], "tools": [ADD]})
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert "is for /v1/responses" in refused.error["message"]


async def test_a_response_in_the_background_is_queued_first(thinking: FakeFleet) -> None:
    thinking.step_s = 0.05
    async with memory_router(thinking) as router:
        begun = (await ask(router, "Go.", background=True)).json()
        assert begun["status"] == "queued"
        seen: list[str] = []
        async with asyncio.timeout(20):
            while not seen or seen[-1] in ("queued", "in_progress"):
                shown = (await router.get(f"/v1/responses/{begun['id']}")).json()
                seen.append(shown["status"])
                await asyncio.sleep(0.01)
        assert seen[-1] == "completed"
        assert "in_progress" in seen


async def test_a_websocket_is_refused_so_that_clients_go_on_over_http(thinking: FakeFleet) -> None:
    async with memory_router(thinking) as router:
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
        refused = await router.request("GET", "/v1/responses", b"", upgrade)
        assert (refused.status, refused.headers["upgrade"]) == (426, "HTTP/1.1")
        assert "no WebSocket is served" in refused.error["message"]
        plain = await router.request("GET", "/v1/responses", b"", {})
        assert plain.status == 405


async def test_codex_finds_a_catalogue_that_it_can_read(thinking: FakeFleet) -> None:
    async with memory_router(thinking) as router:
        plain = (await router.get("/v1/models")).json()
        assert "models" not in plain
        assert (await router.get("/v1/models?client_version=0.171.0")).json() == {
            **plain,
            "models": [],
        }


# ---- Whatever is sent --------------------------------------------------------------------------

CODEX: Any = {
    "model": INFO.model,
    "instructions": "Be brief.",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"a": "b"},
    "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "codex_output_schema",
             "strict": True, "schema": {"type": "object", "properties": {}}}},
    "tools": [
        {"type": "function", "name": "exec", "description": "Runs.", "strict": False,
         "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
        MINE,
        {"type": "custom", "name": "apply_patch", "description": "Edits.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
        {"type": "tool_search", "execution": "client", "description": "Finds.",
         "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
        {"type": "web_search", "external_web_access": True},
        {"type": "local_shell"},
    ],
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer",
         "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "additional_tools", "role": "developer", "tools": [ADD]},
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": "gAAA"},
        {"type": "message", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        *({**each, "call_id": f"c{number}"}
          for number, pair in enumerate(PAIRS) for each in pair[:2]),
        {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "a", "server_label": "m"},
        {"type": "agent_message", "author": "a", "recipient": "b",
         "content": [{"type": "input_text", "text": "c"}]},
        {"type": "context_compaction", "encrypted_content": "gAAA"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ],
}  # fmt: skip
ODD: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, "", "a", "\ud800", [], [[]], [None], {}, {"type": "a"}),
    *({"type": "message"}, {"type": "custom"}, "function", "namespace", ["a"] * 3, {"a": {}}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within, with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def varied(rng: random.Random) -> Any:
    """A request of Codex with a few things that are not as they should be."""
    body = copy.deepcopy(CODEX)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, key = rng.choice(list(places(body)))
        match rng.choice(["drop", "double", "odd", "odd", "wrap"]):
            case "drop":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "double":
                holder[f"{key}_"] = copy.deepcopy(holder[key])
            case "wrap":
                holder[key] = rng.choice([[holder[key]], {"type": holder[key]}])
            case _:
                holder[key] = rng.choice(ODD)
    return body


async def test_whatever_an_agent_sends_is_answered_or_refused_by_name(
    byte_level: Tokenizer,
) -> None:
    rng = seeded("odd requests of agents")
    fleet = FakeFleet(model_files(byte_level, THINKS))
    fleet.shards[0].info = dataclasses.replace(INFO, max_model_len=9000)
    fleet.script = lambda request: [*byte_level.encode("Yes.").ids, 0]
    answered = 0
    count = budget(300, 4_000)
    async with memory_router(fleet) as router:
        for _ in range(count):
            body = varied(rng)
            sent = json.dumps(body, ensure_ascii=True).encode()
            headers = {"Content-Type": "application/json"}
            answer = await router.request("POST", "/v1/responses", sent, headers)
            assert answer.status in (200, 400, 404), (answer.status, answer.body, body)
            if answer.status != 200:
                error = answer.error
                assert error["type"] == "invalid_request_error"
                named = error["param"] or error["message"]
                assert any(word in named for word in (*CODEX, "body")), (error, body)
                continue
            answered += 1
            if body.get("stream"):
                text = answer.body.decode()
                ends = text.count("event: response.completed\n")
                ends += text.count("event: response.incomplete\n")
                ends += text.count("event: response.failed\n")
                assert ends == 1, text[-500:]
    assert count * 0.2 < answered < count


def test_a_bad_item_names_its_place() -> None:
    with pytest.raises(BadRequest) as refused:
        said({"type": "shell_call", "call_id": "c", "action": []})
    assert refused.value.param == "input[1].action"
