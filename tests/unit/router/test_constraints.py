"""The constraint that answers are held to: a request, its tools and its reasoning make one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.errors import BadRequest
from penstock_router.request import ChatRequest, CompletionRequest, Tool, ToolChoice
from penstock_router.text.answer_constraint import answer_constraint
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.json_formats.hermes import HERMES
from penstock_router.text.reasoning import STYLES

ADD = Tool("add", {"type": "object", "properties": {"a": {"type": "integer"}}})
SUB = Tool("sub")
SCHEMA = '{"type": "object", "big": 123456789012345678901234567890, "x": 1e400}'
JSON = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)
JSON_FORMAT = f'{{"type":"json_schema","json_schema":{SCHEMA}}}'
SPACE = {"type": "regex", "pattern": "[ \\n]{0,2}"}
REASONING = {
    "type": "tag",
    "begin": "<think>",
    "content": {"type": "any_text"},
    "end": "</think>",
}


THINK = STYLES["think"]


def chat(*tools: Tool, mode: Any = "auto", name: str = "", **fields: Any) -> ChatRequest:
    choice = ToolChoice(mode, name) if tools else ToolChoice()
    return ChatRequest(messages=[], tools=tools, tool_choice=choice, **fields)


def format_in(made: Constraint | None) -> Any:
    assert made is not None
    assert made.kind is ConstraintKind.STRUCTURAL_TAG
    tag = json.loads(made.value)
    assert tag.keys() == {"type", "format"}
    assert tag["type"] == "structural_tag"
    return tag["format"]


def calls(*tools: Tool, required: bool, parallel: bool = True) -> Any:
    return HERMES.calls(tools, CallRule(required=required, parallel=parallel))


def test_what_need_not_be_combined_goes_as_it_is() -> None:
    assert answer_constraint(chat(), HERMES, THINK) is None
    assert answer_constraint(chat(ADD), HERMES, THINK) is None
    assert answer_constraint(chat(constraint=JSON), HERMES, None) is JSON
    assert answer_constraint(chat(ADD, mode="none", constraint=JSON), HERMES, None) is JSON
    completion = CompletionRequest(prompts=("a",), constraint=JSON)
    assert answer_constraint(completion, HERMES, THINK) is JSON
    # The prompt itself says that there is no reasoning.
    assert answer_constraint(chat(constraint=JSON), HERMES, None) is JSON


def test_calls_that_are_asked_for_are_all_of_the_answer() -> None:
    made = format_in(answer_constraint(chat(ADD, SUB, mode="required"), HERMES, None))
    assert made == calls(ADD, SUB, required=True)
    one = chat(ADD, SUB, mode="required", parallel_tool_calls=False, constraint=JSON)
    made = format_in(answer_constraint(one, HERMES, None))
    assert made == calls(ADD, SUB, required=True, parallel=False)


def test_a_named_function_is_called_once() -> None:
    made = format_in(answer_constraint(chat(ADD, SUB, mode="named", name="sub"), HERMES, None))
    assert made == calls(SUB, required=True, parallel=False)


def test_calls_that_may_be_made_are_held_to_what_is_strict_and_to_their_number() -> None:
    strict = dataclasses.replace(ADD, strict=True)
    made = format_in(answer_constraint(chat(strict, SUB), HERMES, None))
    assert made == calls(strict, SUB, required=False)
    made = format_in(answer_constraint(chat(ADD, parallel_tool_calls=False), HERMES, None))
    assert made == calls(ADD, required=False, parallel=False)


def test_an_answer_of_some_format_may_be_calls_instead() -> None:
    made = answer_constraint(chat(ADD, constraint=JSON), HERMES, None)
    assert made is not None
    wanted = [calls(ADD, required=True), json.loads(JSON_FORMAT)]
    assert format_in(made) == {"type": "or", "elements": wanted}


def test_reasoning_comes_before_what_is_constrained_or_not_at_all() -> None:
    made = format_in(answer_constraint(chat(constraint=JSON), HERMES, THINK))
    maybe = [
        {"type": "sequence", "elements": [REASONING, SPACE]},
        {"type": "const_string", "value": ""},
    ]
    wanted = [{"type": "or", "elements": maybe}, json.loads(JSON_FORMAT)]
    assert made == {"type": "sequence", "elements": wanted}


def test_reasoning_that_the_prompt_began_comes_to_its_end() -> None:
    for request, rest in (
        (chat(constraint=JSON), json.loads(JSON_FORMAT)),
        (chat(ADD, mode="required"), calls(ADD, required=True)),
    ):
        made = format_in(answer_constraint(request, HERMES, THINK, begun=True))
        wanted = [REASONING | {"begin": ""}, SPACE, rest]
        assert made == {"type": "sequence", "elements": wanted}


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        (JSON, JSON_FORMAT),
        (
            Constraint(ConstraintKind.JSON_OBJECT),
            '{"type":"json_schema","json_schema":{"type":"object"}}',
        ),
        (Constraint(ConstraintKind.REGEX, "a+"), '{"type":"regex","pattern":"a+"}'),
        (
            Constraint(ConstraintKind.GRAMMAR, 'start: "ü"'),
            '{"type":"grammar","grammar":"start: \\"ü\\""}',
        ),
        (
            Constraint(ConstraintKind.CHOICE, options=("a", "b")),
            '{"type":"or","elements":[{"type":"const_string","value":"a"},'
            '{"type":"const_string","value":"b"}]}',
        ),
        (
            Constraint(ConstraintKind.CHOICE, options=("a",)),
            '{"type":"const_string","value":"a"}',
        ),
        (
            Constraint(
                ConstraintKind.STRUCTURAL_TAG,
                f'{{"type": "structural_tag", "format": {JSON_FORMAT}}}',
            ),
            JSON_FORMAT,
        ),
        (
            Constraint(
                ConstraintKind.STRUCTURAL_TAG,
                f'{{"type": "structural_tag", "triggers": ["<f"], "structures": '
                f'[{{"begin": "<f>", "schema": {SCHEMA}, "end": "</f>"}}]}}',
            ),
            '{"type":"triggered_tags","triggers":["<f"],"tags":[{"type":"tag","begin":"<f>",'
            f'"content":{JSON_FORMAT},"end":"</f>"}}]}}',
        ),
    ],
)
def test_each_kind_has_its_form_behind_reasoning_and_json_stays_as_it_was_written(
    constraint: Constraint, wanted: str
) -> None:
    made = answer_constraint(chat(constraint=constraint), HERMES, THINK, begun=True)
    assert made is not None
    assert made.value.endswith(f",{wanted}]}}}}")
    format_in(made)


def test_a_structural_tag_that_is_none_is_refused_by_name() -> None:
    broken = Constraint(ConstraintKind.STRUCTURAL_TAG, '{"structures": 5}')
    with pytest.raises(BadRequest, match="structural_tag: ") as refused:
        answer_constraint(chat(constraint=broken), HERMES, THINK)
    assert refused.value.param == "structural_tag"


def test_calls_cannot_be_asked_for_where_none_are_read() -> None:
    assert answer_constraint(chat(ADD), None, None) is None
    assert answer_constraint(chat(ADD, constraint=JSON), None, None) is JSON
    for mode in ("required", "named"):
        with pytest.raises(BadRequest, match=r"tool_choice: .*--tool-call-parser") as refused:
            answer_constraint(chat(ADD, mode=mode, name="add"), None, None)
        assert refused.value.param == "tool_choice"
