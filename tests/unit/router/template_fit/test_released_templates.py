"""Chat templates of released models: what is made to fit is rendered, whole and in order."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from support.budget import budget, seeded
from support.vendored_templates import vendored_templates
from unit.router.template_fit.fitted import (
    answer,
    call,
    calling,
    developer,
    parts,
    result,
    system,
    user,
)
from unit.router.template_fit.random_chats import random_chat

from penstock_router.errors import BadRequest
from penstock_router.request import Message
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.probes import probe
from penstock_router.text.template_fit.scenes import TOOL
from penstock_router.text.template_fit.traits import TemplateTraits

pytestmark = pytest.mark.soak

SOURCES = vendored_templates() or {"": ""}
CHANGES_TURNS = "the chat template changes earlier turns when a turn is added"
LOSES_TEXT = "the chat template loses the text of a message that calls tools"


@pytest.fixture(params=SOURCES)
def made(request: pytest.FixtureRequest) -> ChatTemplate:
    if not SOURCES[request.param]:
        pytest.skip("no folder of chat templates: PENSTOCK_TEMPLATES")
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate({"default": SOURCES[request.param]}, special_tokens)


def ways(made: ChatTemplate) -> list[list[dict[str, Any]] | None]:
    """The tools with which it renders anything at all: none, some."""
    notes = " ".join(made.traits(with_tools=False).notes)
    if "refuses plain chats" in notes:
        return []
    without = [] if "refuses chats without tools" in notes else [None]
    return [*without, *([] if "refuses chats with tools" in notes else [[TOOL]])]


LOOK = TOOL["function"]["name"]
IDS = [f"call_{number:020}" for number in range(4)]
ASKED = [developer("zqrule"), user("zqfirst")]
USED = calling(
    call(IDS[0], LOOK, {"zqplace": "zqhere"}),
    call(IDS[1], LOOK, {"zqplace": "zqthere"}),
    reasoning_content="zqreason",
)
RESULTS = [result("zqtwo", IDS[1]), result("zqone", IDS[0])]
MORE = [
    system("zqlater"),
    user(parts("zqask", "zqagain")),
    answer(parts("zqsaid", "zqso")),
    user("zqgo"),
    calling(call(IDS[2], "zqbad", '{"zqplace": '), content="zqbeside"),
    result(parts("zqthree", "zqfour"), IDS[2]),
    user("zqlast"),
]
CHAT: list[Message] = [*ASKED, USED, *RESULTS, *MORE]
IN_ORDER = (
    ("zqrule", "zqfirst", "zqhere", "zqone", "zqtwo"),
    ("zqfirst", "zqhere", "zqthere", "zqtwo", "zqlater", "zqask", "zqagain", "zqsaid", "zqso"),
    ("zqso", "zqgo", "zqbad", "zqthree", "zqfour", "zqlast"),
)


def rendered(made: ChatTemplate, chat: list[Message], tools: Any) -> str:
    return made.render(fit(chat, made.traits(with_tools=tools is not None)), tools=tools)


def stands_in(chain: tuple[str, ...], text: str) -> bool:
    return re.search(".*?".join(chain), text, re.DOTALL) is not None


def test_a_chat_with_all_that_is_difficult_is_rendered_whole(made: ChatTemplate) -> None:
    given = copy.deepcopy(CHAT)
    for tools in ways(made):
        text = rendered(made, CHAT, tools)
        assert given == CHAT
        moved = made.traits(with_tools=False).first_system == "in_last_turn"
        for chain in IN_ORDER:
            assert stands_in(chain[chain[0] == "zqrule" and moved :], text), (chain, text)
        assert "zqrule" in text
        beside = "zqbeside" in text
        assert beside or any(note.startswith(LOSES_TEXT) for note in notes_of(made)), text


def notes_of(made: ChatTemplate) -> tuple[str, ...]:
    return made.traits(with_tools=False).notes


def test_reasoning_is_in_the_prompt_within_a_turn_where_the_template_shows_any(
    made: ChatTemplate,
) -> None:
    traits = made.traits(with_tools=False)
    if not traits.shows_reasoning:
        return
    kwargs = {"enable_thinking": True, "thinking": True, "preserve_thinking": True}
    within, answered = [*ASKED, USED, *RESULTS], [*ASKED, answer("zqsaid", thinking="zqreason")]
    for tools in ways(made):
        texts = [
            made.render(fit(chat, traits), tools=tools, kwargs=kwargs)
            for chat in (within, answered)
        ]
        assert any("zqreason" in text for text in texts)


def test_another_turn_leaves_those_before_it_or_a_note_says_so(made: ChatTemplate) -> None:
    again = calling(call(IDS[3], LOOK, {"zqplace": "zqhere"}))
    chats: list[list[Message]] = [
        [*ASKED, answer("zqsaid"), system("zqlater"), user("zqask"), answer("zqso"), MORE[-1]],
        [*ASKED, {**USED, "content": "zqbeside"}, *RESULTS, again, result("zqlast", IDS[3])],
    ]
    changed = False
    for tools in ways(made):
        for chat in chats:
            whole = rendered(made, chat, tools)
            for end, last in enumerate(chat, 1):
                if last["role"] in ("user", "tool") and last is not RESULTS[0]:
                    text = rendered(made, chat[:end], tools)
                    place = max(map(text.rfind, ("zqfirst", "zqask", "zqtwo", "zqlast")))
                    changed = changed or not whole.startswith(text[:place])
    assert changed == (CHANGES_TURNS in notes_of(made))


def test_random_chats_are_rendered_whole(made: ChatTemplate) -> None:
    rng = seeded("random chats")
    for _ in range(budget(20, 300)):
        chat = random_chat(rng)
        for tools in ways(made):
            text = rendered(made, chat.messages, tools)
            traits = made.traits(with_tools=tools is not None)
            loses = any(note.startswith(LOSES_TEXT) for note in traits.notes)
            if not (traits.merges_assistants and loses):
                assert not chat.is_lost_in(text, traits), (chat.messages, text)


class Counting:
    """A template whose renderings are counted."""

    def __init__(self, made: ChatTemplate) -> None:
        self._made = made
        self.num_rendered = 0

    def render(self, messages: list[Message], **options: Any) -> str:
        self.num_rendered += 1
        return self._made.render(messages, **options)


def test_traits_are_found_by_few_renderings(made: ChatTemplate) -> None:
    counting = Counting(made)
    found = probe(counting, made.source, (False, True) if made.takes_tools else (False,))
    assert found == made.traits(with_tools=False)
    # A rendering takes a tenth of a millisecond, or two.
    assert counting.num_rendered <= 200


def test_a_plain_chat_is_left_as_it_is(made: ChatTemplate) -> None:
    chat = [user("Hi"), answer("Yes"), user("Go")]
    traits = made.traits(with_tools=False)
    if not traits.parts_only:
        assert fit(chat, traits) == chat
    for tools in ways(made):
        assert made.render(fit(chat, traits), tools=tools) == made.render(chat, tools=tools)


def test_templates_that_refuse_are_refused(made: ChatTemplate) -> None:
    if not ways(made):
        assert made.traits(with_tools=False) == TemplateTraits(notes=notes_of(made))
        with pytest.raises(BadRequest):
            made.render([user("Hi")])
