"""The features that a request asks of an engine, and those that the engine does not honour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from support.submissions import submission

from penstock_proto.facts import FieldBound
from penstock_proto.features import Asked
from penstock_proto.types import Constraint, PromptImage


@dataclass
class Engine:
    capabilities: frozenset[str] = frozenset(("logit_bias", "min_tokens", "adapter", "regex"))
    bounds: tuple[FieldBound, ...] = ()
    uncontinued: frozenset[str] = frozenset()


def asked(*, is_continued: bool = False, **fields: Any) -> Asked:
    return Asked(submission(**fields).request, has_output=is_continued)


def refusal(request: Asked, engine: Engine) -> str:
    unserved = request.unserved_by(engine)
    return "" if unserved is None else unserved.text("it")


def test_values_that_change_nothing_need_nothing() -> None:
    plain = asked(typical_p=1.0, presence_penalty=0.0, adapter="", min_tokens=0, images=())
    assert refusal(plain, Engine(frozenset())) == ""


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"typical_p": 0.5}, "typical_p is not served by it"),
        ({"images": [PromptImage("ab" * 32, 1, 1, 0, 1)]}, "images is not served by it"),
        ({"constraint": Constraint("grammar")}, "grammar is not served by it"),
        (
            {
                "constraint": Constraint("regex"),
                "min_tokens": 2,
                "adapter": "a",
                "logit_bias": {1: 1.0},
            },
            "",
        ),
    ],
)
def test_a_field_without_its_capability_is_named(fields: dict[str, Any], text: str) -> None:
    assert refusal(asked(**fields), Engine()) == text


@pytest.mark.parametrize(
    ("bound", "fields", "text"),
    [
        (FieldBound("temperature", most=2, least=0.01), {"temperature": 0.0}, ""),
        (FieldBound("temperature", most=2, least=0.01), {}, ""),
        (FieldBound("temperature", most=2, least=0.01), {"temperature": 2.0}, ""),
        (
            FieldBound("temperature", most=2, least=0.01),
            {"temperature": 0.005},
            "temperature: 0.005 is not served by it: 0, or 0.01 to 2",
        ),
        (FieldBound("logit_bias", most=2), {"logit_bias": {1: 1.0, 2: 1.0}}, ""),
        (
            FieldBound("logit_bias", most=2),
            {"logit_bias": dict.fromkeys(range(3), 1.0)},
            "logit_bias: 3 entries is not served by it: at most 2",
        ),
    ],
)
def test_a_bound_is_of_a_number_or_of_how_many_entries_a_list_has(
    bound: FieldBound, fields: dict[str, Any], text: str
) -> None:
    assert refusal(asked(**fields), Engine(bounds=(bound,))) == text


def test_what_does_not_go_on_is_refused_only_where_there_is_output() -> None:
    engine = Engine(uncontinued=frozenset({"min_tokens"}))
    assert refusal(asked(min_tokens=4), engine) == ""
    assert refusal(asked(is_continued=True), engine) == ""
    text = "min_tokens: 4 is not served by it: it does not go on from a request's output"
    assert refusal(asked(min_tokens=4, is_continued=True), engine) == text
