"""Whatever a chat is like, a template refuses nothing and loses nothing of it."""

from __future__ import annotations

import copy

import pytest
from support.budget import budget, seeded
from unit.router.chat_template_styles import STYLES
from unit.router.template_fit.fitted import passing_over, refusing, template
from unit.router.template_fit.random_chats import random_chat

from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.traits import TemplateTraits

ALTERNATING = (
    "{%- if m.role in ['user', 'assistant'] and not m.tool_calls -%}"
    + refusing("(m.role == 'user') != (ns.turns % 2 == 0)")
    + "{%- set ns.turns = ns.turns + 1 -%}{%- endif -%}"
)
QUIRKS = {
    "alternates, with systems in front": template(
        BEFORE="{%- set ns = namespace(turns=0) -%}",
        HEAD=ALTERNATING + refusing("m.role not in ['user', 'assistant', 'tool'] and "
                                    "(m.role != 'system' or not loop.first)"),
    ),
    "alternates, without systems or tools": ChatTemplate(
        {
            "default": "{% for m in messages %}"
            + refusing("m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0)")
            + "[{{ m.role }} {{ m.content }}]{% endfor %}"
        },
        {},
    ),
    "one call, one of text and thinking": template(
        HEAD=refusing("m.tool_calls and m.tool_calls | length > 1")
        + refusing("m.tool_calls and m.thinking and m.content")
        + refusing("m.content is not string and not m.tool_calls"),
        REASON="{% if m.thinking %}({{ m.thinking }}){% endif %}",
    ),
    "drops all but users, answers and the first system": template(
        HEAD=passing_over("m.role not in ['user', 'assistant'] and "
                          "not (loop.first and m.role == 'system')"),
        CALLS="",
    ),
}  # fmt: skip
TEMPLATES = {**{name: ChatTemplate({"default": STYLES[name]}, {"bos_token": "", "eos_token": ""})
                for name in STYLES}, **QUIRKS}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_that_is_said_is_lost_moved_or_refused(name: str) -> None:
    made, rng = TEMPLATES[name], seeded(name)
    traits = made.traits(with_tools=False)
    for _ in range(budget(60, 3_000)):
        chat = random_chat(rng)
        given = copy.deepcopy(chat.messages)
        text = made.render(fit(chat.messages, traits))
        assert chat.messages == given
        lost = chat.is_lost_in(text, traits)
        assert not lost, (lost, traits, given, text)
        assert all(word in text for word in chat.beside_calls), (traits, given, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_another_turn_leaves_those_before_it_as_they_were(name: str) -> None:
    made, rng = TEMPLATES[name], seeded(name)
    traits = made.traits(with_tools=False)
    if traits.notes:
        assert name == "mistral"
        assert traits.notes == ("the chat template changes earlier turns when a turn is added",)
        return
    for _ in range(budget(30, 1_000)):
        chat = random_chat(rng)
        whole = made.render(fit(chat.messages, traits))
        for end, last in enumerate(chat.messages, 1):
            if last["role"] != "user" or not isinstance(last["content"], str):
                continue
            text = made.render(fit(chat.messages[:end], traits))
            begin = text[: text.rindex(last["content"]) + len(last["content"])]
            assert whole.startswith(begin), (traits, chat.messages, begin, whole)


def test_a_template_that_takes_all_gets_chats_as_they_are() -> None:
    rng = seeded("as they are")
    for _ in range(budget(50, 1_000)):
        chat = random_chat(rng)
        plain = [each for each in chat.messages if each["role"] in ("system", "user", "assistant")
                 and isinstance(each.get("content"), str) and "tool_calls" not in each]  # fmt: skip
        assert fit(plain, TemplateTraits()) == plain
