"""Calls and results in the form that a template renders, and in words where it renders none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from support.budget import budget, seeded
from unit.router.template_fit.fitted import (
    answer,
    call,
    calling,
    passing_over,
    refusing,
    rendered,
    result,
    template,
    traits_of,
    user,
)

from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.traits import TemplateTraits

ASKED = user("Hi")
SHOWN = '<look {"at": 1}>'


def loop(of_call: str) -> str:
    """A piece that shows calls so."""
    return "{%- for c in m.tool_calls or [] -%}" + of_call + "{%- endfor -%}"


# ---- Contents of messages with calls -----------------------------------------------------------

EMPTY = {
    "cannot add to nothing": template(TEXT="{{ '' + m.content }}"),
    "writes None": template(TEXT="{{ m.get('content') }}"),
    "knows calls by null": template(
        TEXT="{%- if m.content is not none -%}{{ m.content }}{%- endif -%}",
        CALLS="{%- if m.content is none -%}"
        + loop("<{{ c.function.name }} {{ c.function.arguments | tojson }}>")
        + "{%- endif -%}",
    ),
    "wants no content at all": template(HEAD=refusing("m.tool_calls and m.content is defined")),
}


@pytest.mark.parametrize("content", [{}, {"content": ""}])
@pytest.mark.parametrize("made", EMPTY.values(), ids=EMPTY)
def test_calls_without_text_have_the_content_that_the_template_takes(
    made: ChatTemplate, content: dict[str, Any]
) -> None:
    said = calling(call("c1"), **content)
    assert rendered(made, ASKED, said, result("B", "c1"), answer("C")) == (
        f"[user Hi][assistant{SHOWN}][tool B][assistant C]"
    )


def test_no_text_is_rendered_like_an_empty_one() -> None:
    made = template(TEXT="{{ m.content if m.content is defined else '-' }}")
    left_out, empty = (
        rendered(made, ASKED, calling(call("c1"), **content), result("B", "c1"))
        for content in ({}, {"content": ""})
    )
    assert left_out == empty


# ---- Arguments ---------------------------------------------------------------------------------

TEXTS_ONLY = template(CALLS=loop("<{{ c.function.name + ' ' + c.function.arguments }}>"))
OBJECTS_ONLY = template(
    CALLS=loop(
        "<{{ c.function.name }}{% for key, value in c.function.arguments.items() %}"
        " {{ key }}={{ value }}{% endfor %}>"
    )
)


def test_arguments_are_json_text_where_the_template_joins_texts() -> None:
    said = calling(call("c1"))
    assert rendered(TEXTS_ONLY, ASKED, said, result("B", "c1")) == (
        f"[user Hi][assistant{SHOWN}][tool B]"
    )
    assert not traits_of(OBJECTS_ONLY).arguments_as_text
    assert not traits_of(template()).arguments_as_text


def test_an_object_that_would_be_written_as_python_does_is_given_as_json() -> None:
    made = template(CALLS=loop("<{{ c.function.name }} {{ c.function.arguments }}>"))
    assert rendered(made, ASKED, calling(call("c1")), result("B", "c1")) == (
        f"[user Hi][assistant{SHOWN}][tool B]"
    )


def test_calls_that_a_template_writes_as_python_does_stay_its_own() -> None:
    made = template(CALLS=loop("<{{ {'arguments': c.function.arguments} }} {{ c.function.name }}>"))
    assert rendered(made, ASKED, calling(call("c1")), result("B", "c1")) == (
        "[user Hi][assistant<{'arguments': {'at': 1}} look>][tool B]"
    )


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "null", "", "\ud800", "[" * 100_000])
@pytest.mark.parametrize("made", [template(), OBJECTS_ONLY, TEXTS_ONLY])
def test_arguments_that_are_no_object_are_an_empty_one(made: ChatTemplate, arguments: str) -> None:
    said = calling(call("c1", arguments=arguments))
    told = rendered(made, ASKED, said, result("B", "c1"))
    assert told.replace(" {}", "") == "[user Hi][assistant<look>][tool B]"


def test_arguments_given_as_json_text_are_the_object() -> None:
    said = calling(call("c1", arguments='{"at":1}'))
    assert SHOWN in rendered(template(), ASKED, said, result("B", "c1"))


@pytest.mark.parametrize(
    ("of_call", "separators", "is_ascii"),
    [
        ("{{ c.function.name }} {{ c.function.arguments | tojson }}", (", ", ": "), False),
        (
            "{{ c.function.name }} {{ c.function.arguments | tojson(separators=(',', ':')) }}",
            (",", ":"),
            False,
        ),
        ("{{ c.function | tojson(ensure_ascii=true) }}", (", ", ": "), True),
        ("{{ c.function.name ~ ' ' ~ c.function.arguments }}", (", ", ": "), False),
        ("{{ c.function.name }} {{ c.function.arguments | tojson(indent=2) }}", None, False),
        (
            "{{ c.function.name }}{% for key, value in c.function.arguments.items() %}"
            " {{ key }}={{ value }}{% endfor %}",
            None,
            False,
        ),
    ],
)
def test_how_a_template_writes_json_is_found(
    of_call: str, separators: tuple[str, str] | None, is_ascii: bool
) -> None:
    traits = traits_of(template(CALLS=loop(f"<{of_call}>")))
    assert (traits.argument_separators, traits.argument_ascii) == (separators, is_ascii)


# ---- Several calls -----------------------------------------------------------------------------

SINGLE = {
    "refuses more": template(HEAD=refusing("m.tool_calls and m.tool_calls | length > 1")),
    "shows the first": template(
        CALLS="{%- if m.tool_calls -%}{%- set c = m.tool_calls[0] -%}<{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}>{%- endif -%}"
    ),
}
TWICE = calling(
    call("c1"), call("c2", "find", {"at": 2}), content="So:", reasoning_content="Hm."
)  # fmt: skip


@pytest.mark.parametrize("made", SINGLE.values(), ids=SINGLE)
def test_each_call_stands_before_its_result_where_a_message_may_have_one(
    made: ChatTemplate,
) -> None:
    told = rendered(made, ASKED, TWICE, result("C", "c2"), result("B", "c1"), answer("D"))
    assert told == (
        f"[user Hi][assistant(Hm.)So:{SHOWN}][tool B]"
        '[assistant<find {"at": 2}>][tool C][assistant D]'
    )


def test_calls_without_results_or_ids_are_told_apart_too() -> None:
    made = SINGLE["refuses more"]
    assert rendered(made, ASKED, calling(call(), call()), result("B"), result("C")) == (
        f"[user Hi][assistant{SHOWN}][tool B][assistant{SHOWN}][tool C]"
    )
    assert rendered(made, ASKED, calling(call("c1"), call("c2"))) == (
        f"[user Hi][assistant{SHOWN}][assistant{SHOWN}]"
    )


def test_calls_of_one_message_stay_together_where_they_may() -> None:
    told = rendered(template(), ASKED, TWICE, result("B", "c1"), result("C", "c2"))
    assert told == f'[user Hi][assistant(Hm.)So:{SHOWN}<find {{"at": 2}}>][tool B][tool C]'


# ---- Results -----------------------------------------------------------------------------------


def test_results_stand_in_the_order_of_their_calls() -> None:
    said = calling(call("c1"), call("c2"), call("c3"))
    mixed = [result("3", "c3"), result("?", "c9"), user("Well?"), result("1", "c1"),
             result("2", "c2")]  # fmt: skip
    told = rendered(template(), ASKED, said, *mixed, answer("D"), result("4", "c1"))
    assert told.endswith("[tool 1][tool ?][tool 2][tool 3][user Well?][assistant D][tool 4]")


def test_a_late_result_stands_behind_its_call() -> None:
    said = [calling(call("c1"), call("c2")), calling(call("c3")), result("1", "c1"), answer("B")]
    told = rendered(template(), ASKED, *said, result("3", "c3"), result("2", "c2"), user("Go"))
    assert told == (
        f"[user Hi][assistant{SHOWN}{SHOWN}][tool 1][tool 2][assistant{SHOWN}][tool 3]"
        "[assistant B][user Go]"
    )


NAMED = template(RESULT="{{ m.tool_call_id + ' ' + m.content }}")


@pytest.mark.parametrize("stray", ["c9", "", None])
def test_a_result_that_names_no_call_is_of_the_first_that_has_none(stray: str | None) -> None:
    said = calling(call("c1"), call("c2"), call("c3"))
    given = {"role": "tool", "content": "2"} | ({} if stray is None else {"tool_call_id": stray})
    told = rendered(NAMED, ASKED, said, given, result("1", "c1"), answer("C"))
    assert told == f"[user Hi][assistant{SHOWN * 3}][tool c1 1][tool c2 2][assistant C]"


def test_an_id_without_characters_is_none() -> None:
    said = calling(call(""), call("c2"))
    told = rendered(NAMES, ASKED, said, result("A", ""), result("B", "c2"))
    assert told.endswith("[tool look: A][tool look: B]")


ORPHANS = {
    "refuses": template(
        BEFORE="{%- set calls = namespace(any=false) -%}",
        HEAD="{%- if m.role == 'assistant' -%}{%- set calls.any = m.tool_calls is defined -%}"
        "{%- endif -%}" + refusing("m.role == 'tool' and not calls.any"),
    ),
    "drops": template(
        BEFORE="{%- set calls = namespace(any=false) -%}",
        HEAD="{%- if m.role == 'assistant' -%}{%- set calls.any = m.tool_calls is defined -%}"
        "{%- endif -%}" + passing_over("m.role == 'tool' and not calls.any"),
    ),
}


@pytest.mark.parametrize("made", ORPHANS.values(), ids=ORPHANS)
def test_a_result_without_a_call_is_what_the_user_says(made: ChatTemplate) -> None:
    called = [calling(call("c1")), result("1", "c1")]
    told = rendered(made, result("A", "c0"), user("Hi"), *called, answer("B"), result("C", "c8"))
    assert told == (
        f"[user Result: A][user Hi][assistant{SHOWN}][tool 1][assistant B][user Result: C]"
    )


def test_a_result_without_a_call_stays_where_the_template_takes_it() -> None:
    assert rendered(template(), result("A", "c0"), user("Hi")) == "[tool A][user Hi]"


ANSWERED = template(
    HEAD=refusing("m.role == 'user' and loop.previtem and loop.previtem.tool_calls")
)


def test_a_call_has_a_result_where_the_template_wants_one() -> None:
    said = calling(call("c1"), call("c2"))
    told = rendered(ANSWERED, ASKED, said, result("2", "c2"), user("Stop"), calling(call("c3")))
    assert told == (
        f"[user Hi][assistant{SHOWN}{SHOWN}][tool(no result)][tool 2][user Stop][assistant{SHOWN}]"
    )
    assert rendered(template(), ASKED, said, user("Stop")).endswith(f"{SHOWN}][user Stop]")


NAMES = template(RESULT="{{ m.name or 'nobody' }}: {{ m.content }}")


def test_results_have_the_names_of_their_functions() -> None:
    said = calling(call("c1"), call("c2", "find"))
    told = rendered(
        NAMES, ASKED, said, result("A", "c1"), result("B", "c2", name="own"), result("C", "c9")
    )
    assert told.endswith("[tool look: A][tool own: B][tool nobody: C]")
    told = rendered(NAMES, ASKED, calling(call(name="a"), call(name="b")), result("A"), result("B"))
    assert told.endswith("[tool a: A][tool b: B]")


def test_a_template_that_wants_names_gets_them() -> None:
    made = template(HEAD=refusing("m.role == 'tool' and not m.name"))
    assert rendered(made, ASKED, calling(call("c1")), result("B", "c1")).endswith("[tool B]")


def test_results_have_no_names_where_nobody_reads_them() -> None:
    chat = [ASKED, calling(call("c1")), result("B", "c1")]
    assert "name" not in fit(chat, traits_of(template()))[2]


# ---- Ids ---------------------------------------------------------------------------------------

WITH_IDS = {
    "CALLS": loop("<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>"),
    "RESULT": "{{ m.tool_call_id }}: {{ m.content }}",
}
NINE = template(
    **WITH_IDS,
    HEAD=refusing("m.role == 'tool' and (m.tool_call_id is not defined or "
                  "m.tool_call_id | length != 9)")
    + "{%- for c in m.tool_calls or [] -%}"
    + refusing("c.id is not defined or c.id | length != 9")
    + "{%- endfor -%}",
)  # fmt: skip
IN_CALLS, IN_RESULTS = re.compile(r"<(\w+) look "), re.compile(r"\[tool (\w+):")


def ids_in(told: str) -> tuple[list[str], list[str]]:
    return IN_CALLS.findall(told), IN_RESULTS.findall(told)


def test_ids_have_nine_characters_where_a_template_wants_that() -> None:
    chat = [ASKED, calling(call("call_1234567890"), call("abcdefgh1"), call("call_1")),
            result("A", "call_1234567890"), result("B", "abcdefgh1"), result("C", "call_1"),
            result("D", "call_9")]  # fmt: skip
    told = rendered(NINE, *chat)
    calls, results = ids_in(told)
    assert calls == results[:3]
    assert calls[1] == "abcdefgh1"
    assert len({*calls, *results}) == 4
    assert told == rendered(NINE, *chat)
    more = [*chat, answer("E"), calling(call("call_1")), result("F", "call_1")]
    assert rendered(NINE, *more).startswith(told)


def test_ids_of_nine_characters_do_not_collide() -> None:
    rng = seeded("ids of nine")
    for _ in range(budget(20, 500)):
        first = f"call_{rng.getrandbits(64)}"
        [made] = fit([calling(call(first))], TemplateTraits(call_ids="nine"))
        taken = made["tool_calls"][0]["id"]
        both = [calling(call(taken), call(first)), calling(call(first), call(taken))]
        for chat in both:
            [fitted] = fit([chat], TemplateTraits(call_ids="nine"))
            assert len({each["id"] for each in fitted["tool_calls"]}) == 2


def test_calls_and_results_without_ids_get_them_where_a_template_wants_some() -> None:
    wants = template(**WITH_IDS, HEAD="{%- for c in m.tool_calls or [] -%}"
                     + refusing("not c.id") + "{%- endfor -%}")  # fmt: skip
    chat = [ASKED, calling(call(), call("c1")), result("A"), result("B", "c1")]
    for made in (wants, NINE):
        calls, results = ids_in(rendered(made, *chat))
        assert calls == results
        assert len(set(calls)) == 2
    assert ids_in(rendered(template(**WITH_IDS), *chat)) == (["c1"], ["c1"])


def test_a_result_of_no_call_has_an_id_too_where_a_template_wants_one() -> None:
    chat = [result("A"), ASKED, calling(call("c1")), result("B", "c1"), result("C")]
    for hooks in ({}, {"native_call_id": lambda name, number: None}):
        [call_id], results = ids_in(rendered(NINE, *chat, **hooks))
        assert len(set(results)) == 3
        assert results[1] == call_id


def test_ids_are_those_that_the_model_itself_writes() -> None:
    chat = [ASKED, calling(call("x"), call("y")), result("A", "x"), result("B", "y"),
            calling(call("x")), result("C", "x"), calling(call()), result("D"),
            result("E", "z")]  # fmt: skip
    told = rendered(
        template(**WITH_IDS),
        *chat,
        native_call_id=lambda name, number: f"functions_{name}_{number}",
    )
    calls, results = ids_in(told)
    assert calls == ["functions_look_0", "functions_look_1", "functions_look_2", "functions_look_3"]
    assert results == [*calls, "z"]


# ---- Text beside calls -------------------------------------------------------------------------

DROPS_TEXT = template(TEXT="{% if not m.tool_calls %}{{ m.content }}{% endif %}")


def test_text_beside_calls_is_a_message_before_them_where_it_would_be_lost() -> None:
    said = calling(call("c1"), content="So:", reasoning_content="Hm.")
    assert rendered(DROPS_TEXT, ASKED, said, result("B", "c1")) == (
        f"[user Hi][assistant(Hm.)So:][assistant{SHOWN}][tool B]"
    )


def test_text_beside_calls_that_cannot_be_told_is_noted() -> None:
    made = template(
        TEXT="{% if not m.tool_calls %}{{ m.content }}{% endif %}",
        HEAD=refusing("m.role == 'assistant' and loop.previtem.role == 'assistant'"),
    )
    assert traits_of(made).notes == (
        "the chat template loses the text of a message that calls tools",
    )
    only_now = template(TEXT="{% if not m.tool_calls or messages[-1].role == 'tool' %}"
                        "{{ m.content }}{% endif %}")  # fmt: skip
    [note] = traits_of(only_now).notes
    assert note == (
        "the chat template loses the text of a message that calls tools when the next answer is "
        "there"
    )


# ---- In words ----------------------------------------------------------------------------------

NO_CALLS = template(CALLS="")
NO_TOOLS = ChatTemplate(
    {"default": "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"}, {}
)
IN_WORDS = '{"name": "look", "arguments": {"at": 1}}'


def test_calls_that_a_template_does_not_render_are_told() -> None:
    chat = [ASKED, calling(call("c1"), content="So:"), result("B", "c1"), answer("C")]
    assert rendered(NO_CALLS, *chat) == (
        f"[user Hi][assistant So: {IN_WORDS}][tool B][assistant C]"
    )
    several = [ASKED, calling(call("c1"), call("c2")), result("B", "c1"), result("C", "c2")]
    assert f"[{IN_WORDS}, {IN_WORDS}]" in rendered(NO_CALLS, *several)


def test_calls_are_told_in_the_form_that_the_model_writes() -> None:
    chat = [ASKED, calling(call("c1"), call("c2")), result("B", "c1"), result("C", "c2")]
    given: list[tuple[str, str]] = []

    def in_words(calls: Sequence[tuple[str, str]]) -> str:
        given.extend(calls)
        return "CALLED"

    told = rendered(NO_CALLS, *chat, calls_in_words=in_words)
    assert told.startswith("[user Hi][assistant CALLED][tool B]")
    assert given[:2] == [("look", '{"at": 1}')] * 2


def test_results_that_a_template_does_not_render_are_what_the_user_says() -> None:
    made = template(HEAD=passing_over("m.role == 'tool'"))
    chat = [ASKED, calling(call("c1")), result("B", "c1"), user("C"), answer("D")]
    assert rendered(made, *chat) == (
        f"[user Hi][assistant{SHOWN}][user Result of look: B C][assistant D]"
    )


def test_a_template_that_knows_nothing_of_tools_is_told_both() -> None:
    chat = [ASKED, calling(call("c1")), result("B", "c1"), result("C", "c9"), answer("D")]
    assert rendered(NO_TOOLS, *chat) == (
        f"[user Hi][assistant {IN_WORDS}][user Result of look: B Result: C][assistant D]"
    )


def test_a_template_that_shows_only_what_it_knows_of_arguments_keeps_its_calls() -> None:
    made = template(CALLS=loop("<{{ c.function.name }} {{ c.function.arguments.at }}>"))
    assert rendered(made, ASKED, calling(call("c1")), result("B", "c1")) == (
        "[user Hi][assistant<look 1>][tool B]"
    )


# ---- With tools and without --------------------------------------------------------------------


def test_a_template_for_tools_is_asked_by_itself() -> None:
    made = ChatTemplate({"default": NO_CALLS.source, "tool_use": TEXTS_ONLY.source}, {})
    assert made.traits(with_tools=False).calls_in_words
    with_tools = made.traits(with_tools=True)
    assert (with_tools.calls_in_words, with_tools.arguments_as_text) == (False, True)


def test_a_template_that_shows_calls_only_beside_tools_is_given_them() -> None:
    shown = "{% if tools %}" + loop("<{{ c.function.name }} {{ c.function.arguments | tojson }}>")
    made = template(CALLS=shown + "{% endif %}")
    assert not traits_of(made).calls_in_words
    assert SHOWN in rendered(made, ASKED, calling(call("c1")), result("B", "c1"))


@pytest.mark.parametrize(("condition", "which"), [("tools", "with"), ("not tools", "without")])
def test_a_template_that_refuses_tools_or_their_absence_is_noted(
    condition: str, which: str
) -> None:
    made = template(BEFORE=refusing(condition))
    assert traits_of(made).notes == (f"the chat template refuses chats {which} tools",)
