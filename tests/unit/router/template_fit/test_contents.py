"""Contents and reasoning in the form, and the place, that a template reads."""

from __future__ import annotations

from typing import Any

import pytest
from unit.router.template_fit.fitted import (
    answer,
    call,
    calling,
    parts,
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
from penstock_router.text.template_fit.fit import fit
from penstock_router.text.template_fit.traits import TemplateTraits

# ---- Parts of text -----------------------------------------------------------------------------

PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}GAP{% endfor %}{% endif %}"
)


def of_parts(gap: str) -> ChatTemplate:
    shown = PARTS.replace("GAP", "{{ '' if loop.last else '" + gap + "' }}")
    return ChatTemplate(
        {"default": "{% for m in messages %}[{{ m.role }} " + shown + "]{% endfor %}"}, {}
    )


@pytest.mark.parametrize(
    ("gap", "joint"), [("", ""), (" ", " "), ("\\n", "\n"), ("\\n\\n", "\n\n")]
)
def test_parts_of_text_are_joined_as_the_template_joins_them(gap: str, joint: str) -> None:
    made = of_parts(gap)
    chat = [system(parts("a", "b")), user(parts("c", "d")), answer(parts("e", "f"))]
    assert (
        made.render(fit(chat, traits_of(made)))
        == made.render(chat)
        == (f"[system a{joint}b][user c{joint}d][assistant e{joint}f]")
    )


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(template(), id="prints lists as Python does"),
        pytest.param(template(HEAD=refusing("m.content is not string")), id="refuses"),
        pytest.param(template(HEAD=passing_over("m.content is not string")), id="drops"),
        pytest.param(of_parts(" and "), id="has words between"),
    ],
)
def test_parts_of_text_are_lines_where_a_template_takes_none(made: ChatTemplate) -> None:
    chat = fit([user(parts("a", "b")), answer(parts("c"))], traits_of(made))
    assert chat == [user("a\nb"), answer("c")]


def test_texts_are_parts_where_a_template_takes_nothing_else() -> None:
    made = template(
        RESULT="{{ m.content[0].text }}",
        HEAD="{%- if m.role == 'user' -%}[user {{ m.content[0].text }}]{%- continue -%}"
        "{%- endif -%}",
    )
    assert traits_of(made).parts_only == {"user", "tool"}
    chat = [system("A"), user("B"), calling(call("c1")), result(parts("C", "D"), "c1"), answer("E")]
    assert rendered(made, *chat) == (
        '[system A][user B][assistant<look {"at": 1}>][tool C D][assistant E]'
    )


def test_an_answer_without_content_is_an_empty_one() -> None:
    made = template(TEXT="{{ '' + m.content }}")
    silent = {"role": "assistant", "reasoning_content": "Hm."}
    assert rendered(made, user("Hi"), silent, user("?")) == "[user Hi][assistant(Hm.)][user ?]"


def test_images_stay_where_they_are() -> None:
    image: dict[str, Any] = {"type": "image"}
    content = [*parts("a", "b"), image]
    assert fit([user(content)], TemplateTraits()) == [user(content)]
    merged = fit([user(content), user("c")], TemplateTraits(merges_users=True))
    assert merged == [user([*content, *parts("\n\nc")])]


# ---- Reasoning ---------------------------------------------------------------------------------

ASKED, HM = user("Hi"), {"reasoning": "Hm."}


def reading(name: str) -> ChatTemplate:
    return template(REASON="{% if m." + name + " %}({{ m." + name + " }}){% endif %}")


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_found_under_whichever_name_it_was_given(given: str, read: str) -> None:
    told = rendered(reading(read), ASKED, answer("Yes", **{given: "Hm."}))
    assert told == "[user Hi][assistant(Hm.)Yes]"


def test_reasoning_is_given_under_the_name_that_is_read_and_no_other() -> None:
    [_, fitted] = fit([ASKED, answer("Yes", **HM)], traits_of(reading("thinking")))
    assert fitted == answer("Yes", thinking="Hm.")


THINKING_PARTS = template(
    REASON="",
    TEXT="{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type == 'thinking' -%}({{ p.thinking }}){%- else -%}{{ p.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}",
)


def test_reasoning_is_a_part_of_the_content_where_a_template_reads_it_there() -> None:
    chat = [ASKED, answer(parts("Y", "es"), **HM), user("Go"), calling(call("c1"), **HM)]
    assert rendered(THINKING_PARTS, *chat, result("B", "c1")) == (
        '[user Hi][assistant(Hm.)Yes][user Go][assistant(Hm.)<look {"at": 1}>][tool B]'
    )


def test_reasoning_that_only_a_variable_shows_is_found() -> None:
    made = template(REASON="{% if enable_thinking and m.thinking %}({{ m.thinking }}){% endif %}")
    assert traits_of(made).reasoning_names == ("thinking",)


def test_reasoning_that_no_probe_shows_is_given_under_the_names_in_the_template() -> None:
    made = template(REASON="{% if seldom and m.reasoning %}({{ m['thinking'] }}){% endif %}")
    traits = traits_of(made)
    assert traits.reasoning_names == ("reasoning", "thinking")
    assert not traits.shows_reasoning
    assert fit([answer("Yes", reasoning_content="Hm.")], traits) == [
        answer("Yes", reasoning="Hm.", thinking="Hm.")
    ]


EITHER = template(
    REASON="{% if m.thinking and m.tool_calls and m.content %}{{ raise_exception('both') }}"
    "{% elif m.thinking %}({{ m.thinking }}){% endif %}"
)


def test_text_beside_calls_is_added_to_the_reasoning_where_only_one_is_taken() -> None:
    chat = [ASKED, calling(call("c1"), content="So:", **HM), result("B", "c1")]
    assert rendered(EITHER, *chat) == '[user Hi][assistant(Hm. So:)<look {"at": 1}>][tool B]'
    alone = [ASKED, calling(call("c1"), content="So:"), result("B", "c1")]
    assert rendered(EITHER, *alone) == '[user Hi][assistant So:<look {"at": 1}>][tool B]'


# ---- Reasoning between marks -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("<think>\nHm.\n</think>\n\nYes", "(Hm.)Yes"),
        (" <think>Hm.</think>", "(Hm.)"),
        ("<think>\n\n</think>\n\nYes", " Yes"),
        ("<think>Hm.", "<think>Hm."),
        ("So <think>Hm.</think>", " So<think>Hm.</think>"),
    ],
)
def test_reasoning_at_the_beginning_of_an_answer_is_taken_out_of_it(
    content: str, told: str
) -> None:
    assert rendered(template(), ASKED, answer(content)) == f"[user Hi][assistant{told}]"


def test_reasoning_between_marks_stays_where_it_has_no_other_place() -> None:
    marked = answer("<think>Hm.</think>Yes")
    assert rendered(template(REASON=""), ASKED, marked).endswith("<think>Hm.</think>Yes]")
    given = answer("<think>Hm.</think>Yes", reasoning="Other.")
    assert rendered(template(), ASKED, given).endswith("(Other.)<think>Hm.</think>Yes]")


def test_reasoning_that_is_to_be_continued_stays_in_the_text() -> None:
    marked = answer("<think>Hm.</think>Y")
    told = rendered(template(), ASKED, marked, user("?"), marked, keep_last=True)
    assert told.endswith("[assistant(Hm.)Y][user ?][assistant<think>Hm.</think>Y]")
