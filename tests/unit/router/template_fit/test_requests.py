"""Requests of every API whose messages the model's template would refuse as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from support.router_doubles import INFO, byte_level_tokenizer, model_files
from unit.router.template_fit.fitted import refusing, template

from penstock_router.apis.messages import requests as messages_api
from penstock_router.apis.ollama import requests as ollama_api
from penstock_router.apis.openai.requests import parse_chat
from penstock_router.apis.responses.requests import parse_response
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest
from penstock_router.text import chat_template as chat_templates
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import TextModel, prepare_prompts, render
from penstock_router.text.template_fit.probes import probe
from penstock_router.text.tokenizer import load_tokenizer

# Roles of its own, calls of objects, one in a message; parts of texts, which it joins by a space.
STRICT = template(
    HEAD=refusing("m.role not in ['system', 'user', 'assistant', 'tool']")
    + refusing("m.role == 'system' and not loop.first")
    + refusing("m.tool_calls and m.tool_calls | length > 1")
    + "{%- if m.content is not string and m.role == 'user' -%}"
    "[user {{ m.content | map(attribute='text') | join(' ') }}]{%- continue -%}{%- endif -%}",
    CALLS="{%- for c in m.tool_calls or [] -%}<{{ c.function.name }}"
    "{%- for key, value in c.function.arguments.items() %} {{ key }}={{ value }}{%- endfor %}>"
    "{%- endfor -%}",
)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel(
        INFO.model,
        INFO.max_model_len,
        INFO.vocab_size,
        load_tokenizer(model_files(byte_level_tokenizer())),
        STRICT,
        True,
        Conventions(),
    )


def told(request: ChatRequest, model: TextModel) -> str:
    return " ".join("".join(render(request, model)).split())


def function(arguments: str, name: str = "look") -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


CHAT = {
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": function('{"at": 1}')},
                {"id": "c2", "type": "function", "function": function('{"at": ')},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "B"},
        {"role": "tool", "tool_call_id": "c1", "content": "A"},
        {"role": "system", "content": "Now long."},
        {"role": "user", "content": "Go"},
    ]
}
RESPONSES = {
    "model": "",
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("Hi", "!")]},
        {"type": "function_call", "call_id": "c1", **function('{"at": 1}')},
        {"type": "function_call", "call_id": "c2", **function('{"at": ')},
        {"type": "function_call_output", "call_id": "c2", "output": "B"},
        {"type": "function_call_output", "call_id": "c1", "output": "A"},
        {"role": "system", "content": "Now long."},
        {"role": "user", "content": "Go"},
    ],
}
OLLAMA = {
    "model": "fake-model",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi !"},
        {"role": "assistant", "tool_calls": [{"function": function('{"at": 1}')},
                                             {"function": function('{"at": ', "find")}]},
        {"role": "tool", "tool_name": "find", "content": "B"},
        {"role": "tool", "tool_name": "look", "content": "A"},
        {"role": "system", "content": "Now long."},
        {"role": "user", "content": "Go"},
    ],
}  # fmt: skip
MESSAGES = {
    "model": "fake-model",
    "max_tokens": 5,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "!")]},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c2", "content": "B"},
            {"type": "tool_result", "tool_use_id": "c1", "content": "A"},
            {"type": "text", "text": "Now long."},
        ]},
        {"role": "user", "content": "Go"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        pytest.param(parse_chat, CHAT, id="chat completions"),
        pytest.param(parse_response, RESPONSES, id="responses"),
        pytest.param(ollama_api.parse_chat, OLLAMA, id="ollama"),
        pytest.param(messages_api.parse, MESSAGES, id="messages"),
    ],
)
def test_a_chat_of_any_api_is_told_as_its_template_takes_it(
    parse: Any, body: Mapping[str, Any], model: TextModel
) -> None:
    prompt = told(parse(dict(body)), model).replace("<find>", "<look>")
    assert prompt == (
        "[system Be brief.][user Hi !][assistant <look at=1>][tool A][assistant <look>][tool B]"
        "[user Now long.][user Go]"
    )


def test_a_template_of_a_request_is_asked_what_it_takes_once(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(made: ChatTemplate, *rest: Any) -> Any:
        asked.append(made.source)
        return probe(made, *rest)

    monkeypatch.setattr(chat_templates, "probe", counted)
    brought = {**CHAT, "chat_template": STRICT.source + "{# of a request #}"}
    first, second = (told(parse_chat(dict(brought)), model) for _ in range(2))
    assert first == second == told(parse_chat(dict(CHAT)), model)
    assert asked == [brought["chat_template"]]


def test_instructions_for_tools_are_told_where_systems_are_refused(model: TextModel) -> None:
    refuses = dataclasses.replace(
        model,
        chat_template=ChatTemplate(
            {
                "default": "{% for m in messages %}"
                + refusing("m.role not in ['user', 'assistant']")
                + "[{{ m.role }} {{ m.content }}]{% endfor %}"
            },
            {},
        ),
    )
    look = {"type": "function", "function": {"name": "look"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [look]}
    prompt = told(parse_chat(body), refuses)
    assert prompt.startswith("[user You can call these functions.")
    assert prompt.endswith("answer in plain words. Hi]")


def test_an_answer_that_is_continued_stays_the_last(model: TextModel) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>Hm.</think>Y"},
        ],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    }
    request = parse_chat(body)
    assert told(request, model) == "[system Be brief.][user Hi][assistant <think>Hm.</think>Y"
    assert prepare_prompts(request, model).prompts[0].text == "<think>Hm.</think>Y"


OLDER = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "function_call": function('{"at": 1}')},
        {"role": "function", "name": "look", "content": "A"},
        {"role": "user", "content": "Go"},
    ]
}


def test_calls_and_results_of_the_form_before_tools_are_those_of_tools(model: TextModel) -> None:
    prompt = told(parse_chat(OLDER), model)
    assert prompt == "[user Hi][assistant <look at=1>][tool A][user Go]"


def test_a_call_of_the_older_form_is_checked() -> None:
    chat = {"messages": [{"role": "assistant", "function_call": "look"}]}
    with pytest.raises(BadRequest, match="messages\\[0\\]"):
        parse_chat(chat)


# It joins descriptions to other text and looks types up, whether or not there are any.
JOINING = ChatTemplate(
    {
        "default": "{%- set known = {'string': 's', 'integer': 'i'} -%}"
        "{%- for t in tools or [] -%}{{ t.function.name }}: {{ t.function.description + '.' }}"
        "{%- for key, value in t.function.parameters.properties.items() %}"
        " {{ key }} {{ known[value.type] }} {{ value.description + '.' }}{%- endfor %}"
        "{%- endfor -%}{%- for m in messages -%}[{{ m.role }} {{ m.content }}]{%- endfor -%}"
    },
    {},
)
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": ["null", "integer"]}}}


@pytest.mark.parametrize(
    ("tool", "shown"),
    [
        ({"name": "f", "description": "It", "parameters": {"type": "object"}}, "f: It."),
        ({"name": "f"}, "f: ."),
        ({"name": "f", "description": None, "parameters": _SCHEMA}, "f: . a i ."),
    ],
)
def test_a_tool_need_not_have_what_the_template_reads(
    model: TextModel, tool: dict[str, Any], shown: str
) -> None:
    joining = dataclasses.replace(model, chat_template=JOINING)
    asked = parse_chat({**CHAT, "tools": [{"type": "function", "function": tool}]})
    assert told(asked, joining).startswith(f"{shown}[")


def test_tools_that_the_template_takes_are_shown_as_they_are(model: TextModel) -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    showing = dataclasses.replace(model, chat_template=ChatTemplate({"default": source}, {}))
    asked = parse_chat({**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]})
    assert "description" not in told(asked, showing)
