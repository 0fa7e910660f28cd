"""Roles and places that a template lacks: nothing that anybody says is lost or moved."""

from __future__ import annotations

import pytest
from unit.router.template_fit.fitted import (
    answer,
    call,
    calling,
    developer,
    passing_over,
    refusing,
    rendered,
    result,
    system,
    template,
    traits_of,
    user,
)

from penstock_router.text.chat_template import ChatTemplate

# ---- Developers --------------------------------------------------------------------------------

DROPS_DEVELOPERS = template(HEAD=passing_over("m.role == 'developer'"))
KNOWS_DEVELOPERS = template(
    HEAD="{%- if m.role == 'developer' -%}# Instructions: {{ m.content }}{%- continue -%}"
    "{%- endif -%}"
)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(template(HEAD=refusing("m.role == 'developer'")), id="refuses"),
        pytest.param(DROPS_DEVELOPERS, id="drops"),
        pytest.param(template(), id="repeats the role"),
    ],
)
def test_a_developer_whom_a_template_does_not_know_is_a_system(made: ChatTemplate) -> None:
    told = rendered(made, developer("Be brief."), user("Hi"), developer("Now long."), user("Go"))
    assert told == "[system Be brief.][user Hi][system Now long.][user Go]"


def test_a_developer_whom_a_template_knows_stays_one() -> None:
    told = rendered(KNOWS_DEVELOPERS, system("A"), developer("B"), user("Hi"), developer("C"))
    assert told == "[system A]# Instructions: B[user Hi]# Instructions: C"


FIRST_IS_DEVELOPER = template(
    BEFORE="{%- if messages[0].role in ['system', 'developer'] -%}<rules {{ messages[0].content }}>"
    "{%- set messages = messages[1:] -%}{%- endif -%}",
    HEAD=passing_over("m.role in ['system', 'developer']"),
)


def test_a_template_of_one_developer_at_the_front_gets_one() -> None:
    assert traits_of(FIRST_IS_DEVELOPER).developer == "first"
    chat = [developer("A"), system("B"), user("Hi"), developer("C"), answer("Yes"), user("Go")]
    assert rendered(FIRST_IS_DEVELOPER, *chat) == (
        "<rules A B>[user Hi][user C][assistant Yes][user Go]"
    )
    assert rendered(FIRST_IS_DEVELOPER, system("A"), developer("B"), user("Hi")) == (
        "<rules A B>[user Hi]"
    )


BESIDE_SYSTEM = template(
    BEFORE="{%- if messages[0].role == 'system' -%}<root {{ messages[0].content }}>"
    "{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- if messages[0].role == 'developer' -%}<rules {{ messages[0].content }}>"
    "{%- set messages = messages[1:] -%}{%- endif -%}",
    HEAD=passing_over("m.role in ['system', 'developer']"),
)


def test_a_developer_stays_one_beside_the_system_at_the_front() -> None:
    assert traits_of(BESIDE_SYSTEM).developer == "leading"
    told = rendered(BESIDE_SYSTEM, system("A"), developer("B"), user("Hi"), developer("C"))
    assert told == "<root A><rules B>[user Hi][user C]"
    told = rendered(BESIDE_SYSTEM, developer("B"), system("A"), user("Hi"))
    assert told == "<root B A>[user Hi]"


# ---- Systems -----------------------------------------------------------------------------------

SHOWS_THE_FIRST = (
    "{%- if messages[0].role == 'system' -%}[system {{ messages[0].content }}]{%- endif -%}"
)
LATER = {
    "hoists": template(
        BEFORE="{%- for m in messages if m.role == 'system' -%}[system {{ m.content }}]"
        "{%- endfor -%}",
        HEAD=passing_over("m.role == 'system'"),
    ),
    "drops": template(BEFORE=SHOWS_THE_FIRST, HEAD=passing_over("m.role == 'system'")),
    "keeps the last": template(
        BEFORE="{%- set ns = namespace(text='') -%}{%- for m in messages if m.role == 'system' -%}"
        "{%- set ns.text = m.content -%}{%- endfor -%}[system {{ ns.text }}]",
        HEAD=passing_over("m.role == 'system'"),
    ),
    "refuses": template(HEAD=refusing("m.role == 'system' and not loop.first")),
}


@pytest.mark.parametrize("made", LATER.values(), ids=LATER)
def test_a_later_system_that_a_template_would_lose_or_move_is_the_users_in_its_place(
    made: ChatTemplate,
) -> None:
    chat = [system("A"), user("Hi"), answer("Yes"), system("Be brief."), user("Go")]
    assert rendered(made, *chat) == ("[system A][user Hi][assistant Yes][user Be brief.][user Go]")
    assert rendered(made, *chat).startswith(rendered(made, *chat[:3]))


def test_a_later_system_that_a_template_shows_in_its_place_stays_one() -> None:
    chat = [user("Hi"), answer("Yes"), system("Be brief."), user("Go")]
    assert rendered(template(), *chat) == "[user Hi][assistant Yes][system Be brief.][user Go]"


def test_a_later_system_does_not_take_the_text_at_the_front_away() -> None:
    made = template(
        BEFORE="{%- if not messages | selectattr('role', 'equalto', 'system') | list -%}"
        "[system You are a model.]{%- endif -%}"
    )
    chat = [user("Hi"), answer("Yes"), system("Be brief."), user("Go")]
    assert rendered(made, *chat) == (
        "[system You are a model.][user Hi][assistant Yes][user Be brief.][user Go]"
    )


def test_several_systems_at_the_front_are_one_where_only_one_is_taken() -> None:
    chat = [system("A"), system("B"), user("Hi")]
    assert rendered(LATER["refuses"], *chat) == "[system A B][user Hi]"
    assert rendered(template(), *chat) == "[system A][system B][user Hi]"


REFUSES_SYSTEMS = template(HEAD=refusing("m.role == 'system'"))


def test_a_refused_system_is_the_beginning_of_the_first_thing_the_user_says() -> None:
    chat = [system("A"), system("B"), user("Hi"), answer("Yes"), user("Go")]
    assert rendered(REFUSES_SYSTEMS, *chat) == "[user A B Hi][assistant Yes][user Go]"
    assert rendered(REFUSES_SYSTEMS, system("A"), answer("Yes")) == "[user A][assistant Yes]"
    assert rendered(REFUSES_SYSTEMS, system("A")) == "[user A]"


IN_LAST_TURN = template(
    BEFORE="{%- if messages[0].role == 'system' -%}{%- set rules = messages[0].content -%}"
    "{%- set messages = messages[1:] -%}{%- endif -%}",
    HEAD=refusing("m.role == 'system'")
    + "{%- if m.role == 'user' and loop.last and rules -%}[user {{ rules }}\n\n{{ m.content }}]"
    "{%- continue -%}{%- endif -%}",
)


def test_a_system_that_a_template_puts_into_the_last_turn_is_there_while_tools_are_used() -> None:
    made = IN_LAST_TURN
    assert traits_of(made).first_system == "in_last_turn"
    chat = [system("A"), system("B"), user("Hi"), answer("Yes"), user("Go"), calling(call("c1"))]
    assert rendered(made, *chat[:5]) == "[user Hi][assistant Yes][user A B Go]"
    assert rendered(made, *chat, result("C", "c1")) == (
        '[user Hi][assistant Yes][user A B Go][assistant<look {"at": 1}>][tool C]'
    )
    assert rendered(made, *chat[:5], system("C")) == "[user Hi][assistant Yes][user Go][user A B C]"


# ---- Neighbours --------------------------------------------------------------------------------

ALTERNATES = template(
    BEFORE="{%- set ns = namespace(last='') -%}",
    HEAD="{%- if m.role != 'tool' -%}"
    + refusing("m.role == ns.last")
    + "{%- endif -%}"
    + refusing("m.role == 'user' and loop.previtem and loop.previtem.role == 'tool'")
    + refusing("m.role == 'system' and not loop.first")
    + "{%- set ns.last = '' if m.role == 'tool' else m.role -%}",
)


def test_neighbours_of_one_role_are_one_where_turns_have_to_alternate() -> None:
    chat = [user("A"), system("B"), user("C"), answer("D"), answer("E"), system("F"), user("G")]
    assert rendered(ALTERNATES, *chat) == "[user A B C][assistant D E][user F G]"
    assert rendered(template(), user("A"), user("B"), answer("C"), answer("D")) == (
        "[user A][user B][assistant C][assistant D]"
    )


def test_merged_answers_keep_their_reasoning_and_calls() -> None:
    chat = [
        user("A"),
        answer("B", reasoning_content="x"),
        calling(call("c1"), content="C", reasoning_content="y"),
        result("D", "c1"),
    ]
    assert rendered(ALTERNATES, *chat) == '[user A][assistant(x y)B C<look {"at": 1}>][tool D]'


def test_what_the_user_says_after_a_result_is_added_to_it_where_no_turn_may_follow() -> None:
    chat = [user("A"), calling(call("c1")), result("B", "c1"), user("C"), answer("D")]
    assert rendered(ALTERNATES, *chat) == (
        '[user A][assistant<look {"at": 1}>][tool B C][assistant D]'
    )
    assert "[tool B][user C]" in rendered(template(), *chat)


# ---- Notes -------------------------------------------------------------------------------------


def test_a_template_that_takes_all_asks_for_nothing() -> None:
    traits = traits_of(template())
    assert traits.notes == ()
    assert not any(
        (
            traits.one_first_system,
            traits.later_system_as_user,
            traits.merges_users,
            traits.merges_assistants,
            traits.joins_user_to_result,
            traits.calls_in_words,
            traits.results_in_words,
            traits.arguments_as_text,
            traits.one_call,
            traits.fills_ids,
            traits.names_results,
            traits.text_apart,
            traits.text_into_reasoning,
            traits.parts_only,
            traits.joints,
        )
    )
    assert (traits.first_system, traits.call_ids, traits.empty_content) == (
        "kept",
        "any",
        "as_given",
    )


def test_what_is_lost_all_the_same_is_noted() -> None:
    only_last = template(HEAD=passing_over("not loop.last"))
    notes = traits_of(only_last).notes
    assert "the chat template loses system messages" in notes
    assert "the chat template loses tool calls or their results" in notes
    assert "the chat template changes earlier turns when a turn is added" in notes


def test_a_template_that_puts_something_before_the_last_turn_is_noted() -> None:
    made = template(HEAD="{%- if loop.last -%}[tools]{%- endif -%}")
    assert traits_of(made).notes == (
        "the chat template changes earlier turns when a turn is added",
    )


def test_a_template_that_refuses_all_is_noted_and_gets_chats_as_they_are() -> None:
    made = ChatTemplate({"default": "{{ raise_exception('no') }}"}, {})
    assert traits_of(made).notes == ("the chat template refuses plain chats",)


# ---- Who does not speak ------------------------------------------------------------------------

USER_FIRST = template(
    BEFORE="{%- set chat = messages | rejectattr('role', 'equalto', 'system') | list -%}"
    + refusing("chat | length == 0 or chat[0].role != 'user'")
)
USER_EVER = template(
    BEFORE=refusing("messages | selectattr('role', 'equalto', 'user') | list | length == 0")
)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (USER_FIRST, "[system A][user][assistant Welcome][user Hi]"),
        (USER_EVER, "[system A][assistant Welcome][user Hi]"),
        (template(), "[system A][assistant Welcome][user Hi]"),
    ],
)
def test_an_assistant_may_speak_first(made: ChatTemplate, told: str) -> None:
    assert rendered(made, system("A"), answer("Welcome"), user("Hi")) == told


@pytest.mark.parametrize("made", [USER_FIRST, USER_EVER])
def test_a_user_need_not_speak(made: ChatTemplate) -> None:
    assert rendered(made, system("Say hello.")) == "[system Say hello.][user]"
    assert rendered(made, system("A"), user("B")) == "[system A][user B]"


def test_an_empty_answer_is_a_space_where_the_template_wants_some() -> None:
    wants = template(HEAD=refusing("m.role == 'assistant' and not m.content and not m.tool_calls"))
    assert traits_of(wants).fills_answers
    assert not traits_of(template()).fills_answers
    for said in (answer(""), {"role": "assistant"}):
        assert rendered(wants, user("Hi"), said, user("Go")) == "[user Hi][assistant][user Go]"
