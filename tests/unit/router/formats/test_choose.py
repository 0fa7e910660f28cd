"""The format that a chat template has, and the format that a name means."""

from __future__ import annotations

import json

import pytest

from penstock_router.request import Tool
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.json_formats.plain_json import instructions
from penstock_router.text.formats.registry import FORMATS, tool_format_of
from penstock_router.text.model_conventions import conventions_of

_TEMPLATES = {
    "hermes": '{% if tools %}<tools>..</tools><tool_call>\n{"name": ..}\n</tool_call>{% endif %}',
    "qwen_xml": "{% if tools %}<tool_call>\n<function=name>\n<parameter=a>{% endif %}",
    "llama_json": "{% if tools %}{{ '<|start_header_id|>ipython<|end_header_id|>' }}"
    "{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}{% endif %}",
    "pythonic": "{% if tools %}[func_name1(params_name1=params_value1, p2=p3)]{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS] [' }}",
    "mistral_named": "{% if tools %}{% endif %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "deepseek_v3": "{% if tools %}{% endif %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' "
    "+ tool['type'] + '<｜tool▁sep｜>' + '```json' }}",
    "deepseek_v31": "{% if tools %}{% endif %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' "
    "+ name + '<｜tool▁sep｜>' + arguments }}",
    "plain_json": "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_a_template_shows_its_format(name: str) -> None:
    chosen = tool_format_of(_TEMPLATES[name])
    assert chosen is not None
    assert chosen.name == name


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}<|tool▁of▁nobody|>{% endif %}",
        "{% if tools %}<call name=f><argument name=a>{% endif %}",
    ],
)
def test_a_template_whose_calls_nobody_here_reads_has_none(template: str) -> None:
    assert tool_format_of(template) is None


def test_a_name_is_stronger_than_the_template() -> None:
    chosen = tool_format_of(_TEMPLATES["hermes"], "mistral")
    assert chosen is not None
    assert chosen.name == "mistral"
    assert tool_format_of(_TEMPLATES["hermes"], "none") is None


def test_names_that_others_use_are_known() -> None:
    assert FORMATS["qwen"] is FORMATS["hermes"]
    assert FORMATS["llama3_json"] is FORMATS["llama_json"]
    assert FORMATS["llama4_pythonic"] is FORMATS["pythonic"]


def test_a_template_without_tools_whose_model_has_calls_of_its_own_is_told_of_those() -> None:
    source = (
        "{{ messages[0].content }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
        "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{% endfor %}"
        "{% endfor %}"
    )
    template = ChatTemplate({"default": source}, {})
    chosen = conventions_of(template, "auto", "auto").tool_format
    assert chosen is FORMATS["deepseek_v31"]
    text = instructions([Tool("now")], chosen)
    called = '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"ARGUMENT": "VALUE"}<｜tool▁call▁end｜>'
    assert called in text
    assert called not in instructions([Tool("now")], FORMATS["plain_json"])


def test_the_system_message_says_every_function_and_how_to_call_it() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    shown = {"type": "function", "function": {"name": "get_weather", "description": "Wetter für"}}
    text = instructions([Tool("get_weather", schema, shown=shown), Tool("now")])
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert lines == [
        {"name": "get_weather", "description": "Wetter für", "parameters": schema},
        {"name": "now", "parameters": {"type": "object"}},
    ]
    assert '{"name": its name, "arguments":' in text
