"""Templates are told whether their model should think, and how much."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_router.text.chat_template import ChatTemplate

SAID = "{{ messages[0].content }} "
SWITCHES = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "reasoning": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "thinking_option": ("on", "off"),
    "thinking_budget": (-1, 0),
}
RAISES = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['no_think', 'low', 'high'] %}"
    "{{ raise_exception('unknown effort') }}{% endif %}"
)
WRITES_DOWN = "Reasoning: {{ reasoning_effort | default('medium') }}"


def told(source: str, **given: Any) -> dict[str, Any]:
    """Return the variables that a template is given in addition to those of the request."""
    fitted = ChatTemplate({"default": SAID + source}, {}).thinking(given)
    return {name: value for name, value in fitted.items() if given.get(name, ...) != value}


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("given", ["enable_thinking", "thinking"])
def test_a_switch_is_given_under_the_name_that_the_template_reads(name: str, given: str) -> None:
    on, off = SWITCHES[name]
    for wanted, value in ((True, on), (False, off)):
        expected = {} if name == given else {name: value}
        assert told(f"{{{{ {name} }}}}", **{given: wanted}) == expected


def test_what_a_request_says_itself_is_not_changed() -> None:
    both = {"enable_thinking": False, "thinking_budget": 100}
    assert told("{{ thinking_budget }}", **both) == {}
    assert told("{{ enable_thinking }}{{ reasoning_effort }}") == {}


def test_no_effort_turns_thinking_off() -> None:
    assert told("{{ thinking }}", reasoning_effort="none") == {"thinking": False}
    assert told("{{ thinking }}", reasoning_effort="low") == {}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("none", "no_think"),
        ("minimal", "low"),
        ("medium", "low"),
        ("high", "high"),
        ("max", "high"),
    ],
)
def test_an_effort_that_a_template_refuses_is_the_nearest_that_it_takes(
    given: str, taken: str
) -> None:
    assert told(RAISES, reasoning_effort=given).get("reasoning_effort", given) == taken


def test_where_there_is_only_effort_thinking_is_turned_off_or_down_by_it() -> None:
    assert told(RAISES, enable_thinking=False) == {"reasoning_effort": "no_think"}
    assert told(WRITES_DOWN, enable_thinking=False) == {"reasoning_effort": "low"}
    assert told(WRITES_DOWN, reasoning_effort="none") == {"reasoning_effort": "low"}
    assert told(WRITES_DOWN, enable_thinking=True) == {}


def test_an_effort_is_given_under_other_names_too() -> None:
    assert told("{{ thinking_effort }}", reasoning_effort="high") == {"thinking_effort": "high"}
    given = {"reasoning_effort": "high", "thinking_effort": "low"}
    assert told("{{ thinking_effort }}", **given) == {}


def test_a_level_that_nobody_knows_is_passed_on() -> None:
    assert told(RAISES, reasoning_effort="colossal") == {}
