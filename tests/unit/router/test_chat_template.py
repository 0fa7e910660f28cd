"""Chat templates: rendered as transformers renders them, and safely."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
from tokenizers import Tokenizer
from unit.router.chat_template_styles import STYLES

from penstock_router.apis.openai.requests import parse_chat
from penstock_router.errors import BadRequest
from penstock_router.text.chat_template import (
    ChatTemplate,
    TemplateUnusable,
    load_chat_template,
    with_template,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|eos|>"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather of a <city> & its "surroundings" in °C',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": "  What's 2 < 3 & 'why'?\n"},
        {"role": "assistant", "content": "Because <b>\n\n日本語 😀"},
        {"role": "user", "content": "Thanks  "},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ],
    "answered": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>hm</think>Hello!", "reasoning": "thought"},
    ],
    "tools": [
        {"role": "user", "content": "Weather in Köln?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"c": 21}'},
        {"role": "tool", "tool_call_id": "c2", "content": "sunny"},
    ],
}


def theirs(tokenizer: Tokenizer, style: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=STYLES[style], **SPECIAL
    )


def _in_all_names(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each of its names, as not all releases of transformers add them."""
    if (reasoning := message.get("reasoning")) is None:
        return message
    return {"thinking": reasoning, "reasoning_content": reasoning, **message}


def ours(style: str) -> ChatTemplate:
    return ChatTemplate({"default": STYLES[style]}, SPECIAL)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_fifteen_styles_render_as_transformers_renders_them(
    byte_level: Tokenizer, style: str, conversation: str
) -> None:
    assert len(STYLES) == 15
    messages = CONVERSATIONS[conversation]
    known_there = [_in_all_names(message) for message in messages]
    reference, template = theirs(byte_level, style), ours(style)
    rendered_any = False
    for tools in (None, [WEATHER]):
        for add_generation_prompt in (True, False):
            wanted = got = refused_there = refused_here = None
            try:
                wanted = reference.apply_chat_template(
                    known_there,
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    enable_thinking=False,
                )
            except Exception as error:  # noqa: BLE001 - whatever it refuses with
                refused_there = error
            try:
                got = template.render(
                    [dict(message) for message in known_there],
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    kwargs={"enable_thinking": False},
                )
            except BadRequest as error:
                refused_here = error
            assert got == wanted
            rendered_any = rendered_any or bool(got)
            assert (refused_here is None) == (refused_there is None), refused_there
    refuses = (style, conversation) in {
        *(("gemma", "system"), ("llama-2", "tools")),
    }
    assert rendered_any != refuses


@pytest.mark.parametrize("content", ["I would say", "I would say  ", " x"])
@pytest.mark.parametrize("style", STYLES)
def test_a_final_message_is_continued_as_transformers_continues_it(
    byte_level: Tokenizer, style: str, content: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    wanted = theirs(byte_level, style).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    got = ours(style).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert got == wanted
    assert got.endswith(content.strip()) or got.endswith(content)


def test_a_request_goes_through_the_schema_to_what_transformers_renders(
    byte_level: Tokenizer,
) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "21"},
        ]
    }
    wanted = theirs(byte_level, "qwen-tools").apply_chat_template(
        [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}],
            },
            {"role": "tool", "content": "21"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours("qwen-tools").render(parse_chat(body).messages) == wanted


def test_what_a_template_raises_is_a_bad_request_with_its_words() -> None:
    with pytest.raises(BadRequest, match="System role not supported"):
        ours("gemma").render(CONVERSATIONS["system"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].missing.field }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ 'x'.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ namespace(__class__=1) }}",
        "{% for i in range(99999999) %}x{% endfor %}",
        "{{ dict.__init__.__globals__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ cycler() }}",
        "{{ ''|truncate(-1) }}",
        "{{ '%c' % 0xd800 }}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "x"}])


# From published escapes of templates, and what they build on.
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__']['__subclasses__']() }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__')|attr('__mro__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f')|attr('__base__') }}",
    "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "{{ ['{0.__class__.__init__.__globals__}'] | map('format', '') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'].sys }}",
    "{{ (strftime_now|attr('__globals__'))['datetime'] }}",
    "{{ messages.__class__.__init__ }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'content': 1}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ dict.fromkeys.__globals__ }}",
    "{{ dict|attr('__call__')|attr('__globals__') }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ (1).__class__.from_bytes.__self__.__subclasses__() }}",
    "{{ request.application.__globals__ }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ range(10 ** 9)|list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox_that_is_known_leads_anywhere(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate({"default": source}, {}).render(messages)
    except (BadRequest, TemplateUnusable) as refused:
        text = str(refused)
        # What it reached for may be named, as the template's own words; never shown.
        assert "<class" not in text
    else:
        assert "<" not in text
        assert "root:" not in text
        assert "builtin" not in text
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_that_does_not_parse_is_refused_at_load() -> None:
    with pytest.raises(TemplateUnusable, match="default"):
        ChatTemplate({"default": "{% for %}"}, {})


def test_a_message_that_a_template_hides_cannot_be_continued() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(BadRequest, match="does not show the last message"):
        template.render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequest, match="no content to continue"):
        template.render(
            [{"role": "assistant"}], add_generation_prompt=False, continue_final_message=True
        )


def test_rendering_leaves_the_messages_as_they_were() -> None:
    messages = [{"role": "assistant", "content": "x", "reasoning": "r"}]
    ours("chatml").render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "x", "reasoning": "r"}]


# ---- where the template comes from -------------------------------------------------------------


def rendered(files: dict[str, bytes], **kwargs: Any) -> str | None:
    template = load_chat_template(files)
    return None if template is None else template.render([{"role": "u", "content": "c"}], **kwargs)


def test_the_jinja_file_comes_before_the_tokenizers_configuration() -> None:
    files = {
        "chat_template.jinja": b"file",
        "tokenizer_config.json": json.dumps({"chat_template": "config"}).encode(),
    }
    assert rendered(files) == "file"
    del files["chat_template.jinja"]
    assert rendered(files) == "config"
    assert rendered({}) is None
    assert rendered({"tokenizer_config.json": b"{}"}) is None


def test_of_named_templates_tool_use_is_for_tools_and_default_for_the_rest() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    files = {"tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    assert rendered(files) == "plain"
    assert rendered(files, tools=[WEATHER]) == "tools"
    only_rag = [{"name": "rag", "template": "x"}]
    files = {"tokenizer_config.json": json.dumps({"chat_template": only_rag}).encode()}
    with pytest.raises(BadRequest, match="rag"):
        rendered(files)


def test_special_tokens_are_known_by_string_or_by_object() -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<img>"},
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}",
    }
    assert rendered({"tokenizer_config.json": json.dumps(config).encode()}) == "<s></s><img>"


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({}, "<map>"),
        ({"bos_token": "<config>"}, "<map>"),
        # The newer form of the file says everything itself.
        ({"bos_token": "<config>", "added_tokens_decoder": {}}, "<config>"),
    ],
)
def test_special_tokens_map_counts_where_transformers_reads_it(
    config: dict[str, object], shown: str
) -> None:
    files = {
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": b'{"bos_token": {"content": "<map>", "lstrip": false}}',
        "chat_template.jinja": b"{{ bos_token }}",
    }
    assert rendered(files) == shown


@pytest.mark.parametrize("value", [[{"name": "default"}], ["x"], [{"template": "x"}]])
def test_a_malformed_list_of_templates_is_unusable(value: object) -> None:
    files = {"tokenizer_config.json": json.dumps({"chat_template": value}).encode()}
    with pytest.raises(TemplateUnusable, match="no list of names and templates"):
        load_chat_template(files)


def test_strftime_now_gives_the_date() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", template.render([]))


def test_a_template_in_a_file_of_its_own_is_used_with_tools() -> None:
    files = {
        "chat_template.jinja": b"plain",
        "additional_chat_templates/tool_use.jinja": b"{{ tools | length }} tools",
    }
    template = load_chat_template(files)
    assert template is not None
    assert template.names == ("default", "tool_use")
    assert template.render([]) == "plain"
    assert template.render([], tools=[{}]) == "1 tools"
    assert template.takes_tools
    given = load_chat_template(with_template(files, "given"))
    assert given is not None
    assert given.render([], tools=[{}]) == "given"


def test_tools_are_given_under_the_name_that_the_template_reads() -> None:
    template = ChatTemplate({"default": "{{ xml_tools | length if xml_tools else 'no' }}"}, {})
    assert template.takes_tools
    assert template.render([], tools=[{}, {}]) == "2"
    assert template.render([]) == "no"
    assert template.render([], tools=[{}], kwargs={"xml_tools": [1, 2, 3]}) == "3"
