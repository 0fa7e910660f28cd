"""Systems and other roles among the turns of Messages, and what of them no prompt has."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_router.apis.messages.requests import parse
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, Message

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.b0a; cc_entrypoint=cli; cch=aaaa1;"
USER = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Hi"}


def request_of(*turns: Any, **fields: Any) -> ChatRequest:
    return parse({"model": "m", "max_tokens": 9, "messages": list(turns), **fields})


def messages_of(*turns: Any, **fields: Any) -> list[Message]:
    return request_of(*turns, **fields).messages


def block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def system(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_stands_where_it_was_said(role: str) -> None:
    later = {"role": role, "content": "It is late."}
    assert messages_of(USER, later, SAID, USER, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "system", "content": "It is late."},
        SAID,
        USER,
    ]


def test_a_system_is_the_same_as_a_text_and_in_a_block() -> None:
    # Claude Code sends its last system in a block, and in the next request as a text.
    assert messages_of(USER, system([block("Late.")])) == messages_of(USER, system("Late."))


@pytest.mark.parametrize("role", ["ctx", "msg"])
def test_roles_of_claude_code_are_the_users(role: str) -> None:
    assert messages_of({"role": role, "content": "Hello"}) == [USER]


@pytest.mark.parametrize(
    "given",
    [
        [block(BILLING), block("Be brief.")],
        [block("Be brief."), block(BILLING)],
        [block(f"{BILLING}\nBe brief.")],
        f"{BILLING}\n\nBe brief.",
    ],
)
def test_what_claude_code_tells_of_its_accounting_is_no_part_of_the_prompt(given: Any) -> None:
    expected = [{"role": "system", "content": "Be brief."}, USER]
    assert messages_of(USER, system=given) == expected
    assert messages_of(system(given), USER) == expected


@pytest.mark.parametrize("given", [BILLING, [block(BILLING)]])
def test_a_system_of_nothing_but_accounting_is_none(given: Any) -> None:
    assert messages_of(USER, system=given) == messages_of(USER, system(given)) == [USER]


def test_what_a_user_says_is_kept_whatever_it_begins_with() -> None:
    said = {"role": "user", "content": f"{BILLING}\nWhat is this?"}
    assert messages_of(said) == [said]
    inside = f"A header is {BILLING}"
    assert messages_of(USER, system=inside)[0]["content"] == inside


def test_a_system_for_one_turn_is_gone_when_the_user_speaks_again() -> None:
    passing = system("Look at line 3.", clear_at="next_user_message")
    assert messages_of(USER, passing) == [USER, system("Look at line 3.")]
    assert messages_of(USER, passing, SAID, USER) == [USER, SAID, USER]
    assert system("A") in messages_of(USER, system("A", clear_at="never"), SAID, USER)


def test_a_systems_effort_is_that_of_the_turn_it_stands_in() -> None:
    hard = system("Think.", output_config={"effort": "high"})
    fields = {"output_config": {"effort": "low"}}
    assert request_of(USER, hard, **fields).template_kwargs["reasoning_effort"] == "high"
    later = request_of(USER, hard, SAID, USER, **fields)
    assert later.template_kwargs["reasoning_effort"] == "low"
    alone = {"role": "system", "output_config": {"effort": "max"}}
    assert request_of(USER, alone).messages == [USER]
    assert request_of(USER, alone).template_kwargs["reasoning_effort"] == "max"


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (system(None), "messages[1].content: must be a string or an array of blocks"),
        (system(3), "messages[1].content: must be"),
        (system([3]), "messages[1].content[0]: must be an object"),
        (system([{"type": "text"}]), "messages[1].content[0].text: must be a string"),
        (system([{"type": "image"}]), "content[0]: blocks of type 'image' are not served in this"),
        (system("x", clear_at="now"), "messages[1].clear_at: must be one of"),
        (system("x", output_config=3), "messages[1].output_config: must be an object"),
        (system("x", output_config={"effort": 3}), "messages[1].output_config.effort: must be"),
        ({"role": ["system"], "content": "x"}, "messages[1].role: must be user, assistant or"),
    ],
)
def test_a_system_that_is_none_is_refused_by_field(turn: Any, words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        request_of(USER, turn)
    assert words in refused.value.message
