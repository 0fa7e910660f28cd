"""Fields of chats, and other servers' names of them, on the routes of other APIs: each has its
effect or is refused by name; a warning is for what cannot change an answer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from unit.router.test_every_field import PROOFS

from penstock_router.apis.messages.requests import FIELDS, parse
from penstock_router.apis.openai.elsewhere import with_fields_of_chats
from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.apis.responses.requests import RESPONSES_FIELDS, parse_response
from penstock_router.errors import BadRequest
from penstock_router.json_fields import Use

MESSAGES = [{"role": "user", "content": "Hi"}]
PARSERS: dict[str, Any] = {"messages": parse, "responses": parse_response}
TABLES = {"messages": FIELDS, "responses": RESPONSES_FIELDS}
NEEDED: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 12, "messages": MESSAGES},
    "responses": {"model": "m", "input": "Hi", "top_p": 0.5},
}
REFUSED = with_fields_of_chats([])


def parsed(route: str, /, **fields: Any) -> Any:
    asked = PARSERS[route]({**NEEDED[route], **fields})
    # An item's id is another each time.
    return dataclasses.replace(asked, items=[]) if route == "responses" else asked


@pytest.mark.parametrize("route", PARSERS)
@pytest.mark.parametrize("name", CHAT_FIELDS)
def test_a_field_of_chats_is_known_on_every_route(route: str, name: str) -> None:
    of_chats, here = CHAT_FIELDS[name], TABLES[route][name]
    if of_chats.use is Use.REFUSED:
        assert here.use is Use.REFUSED
    elif of_chats.use is Use.HONOURED:
        # Streams of these two always have the usage, and none has a field of its own for it.
        assert here.use is not Use.TAKEN or name == "stream_options"


@pytest.mark.parametrize("route", PARSERS)
@pytest.mark.parametrize("name", [name for name in PROOFS["chat"] if name in CHAT_FIELDS])
def test_a_field_that_chats_honour_has_its_effect_or_is_refused(route: str, name: str) -> None:
    entry, proof = TABLES[route][name], PROOFS["chat"][name]
    if entry is CHAT_FIELDS[name] and entry.use is Use.HONOURED and not proof.inert:
        assert parsed(route, **proof.beside, **{name: proof.value}) != parsed(route, **proof.beside)
    elif entry.use is Use.REFUSED and proof.value not in entry.neutral:
        with pytest.raises(BadRequest, match="not served") as caught:
            parsed(route, **{name: proof.value})
        assert caught.value.param == name


@pytest.mark.parametrize("route", PARSERS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", "[0-9]"),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {"type": "object"}),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"choice": ["a", "b"]}),
    ],
)
def test_a_constraint_is_honoured_under_every_name(route: str, name: str, value: Any) -> None:
    asked = parsed(route, **{name: value})
    assert (asked.constraint is not None, asked.constraint_field) == (True, name)
    assert asked.warnings == ()


def test_an_adapter_of_a_response_has_either_name_and_that_of_a_message_is_its_model() -> None:
    assert parsed("responses", lora_path="a") == parsed("responses", model="a")
    with pytest.raises(BadRequest, match="lora_path: not served"):
        parsed("messages", lora_path="a")


def test_two_constraints_of_a_message_are_refused_together() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    with pytest.raises(BadRequest, match="output_config: not together with regex"):
        parsed("messages", regex="a", output_config={"format": form})


@pytest.mark.parametrize("route", PARSERS)
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("repeat_penalty", "repetition_penalty", 1.5),
        ("typical", "typical_p", 0.5),
        ("sampling_seed", "seed", 7),
        ("rid", "request_id", "r"),
    ],
)
def test_another_servers_name_of_a_field_means_the_same(
    route: str, name: str, field: str, value: Any
) -> None:
    asked = parsed(route, **{name: value})
    assert getattr(asked, field) == value
    assert asked.warnings == ()


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_new_tokens", "n_predict"])
def test_a_message_has_its_length_under_any_name(name: str) -> None:
    body = {"model": "m", "messages": MESSAGES, name: 5}
    assert parse(body).max_tokens == 5
    with pytest.raises(BadRequest, match="max_tokens: required"):
        parse({**body, name: None})


def test_a_message_has_its_stop_strings_under_either_name() -> None:
    assert parsed("messages", stop=["a"]) == parsed("messages", stop_sequences=["a"])


@pytest.mark.parametrize("route", PARSERS)
def test_reasoning_is_asked_for_by_the_fields_of_chats(route: str) -> None:
    assert parsed(route, reasoning_effort="low").template_kwargs == {"reasoning_effort": "low"}
    assert parsed(route, enable_thinking=False).template_kwargs["enable_thinking"] is False
    asked = parsed(route, thinking={"type": "disabled"})
    assert asked.template_kwargs["enable_thinking"] is False


@pytest.mark.parametrize("route", PARSERS)
@pytest.mark.parametrize(
    ("name", "nothing"),
    [("n", 1), ("logprobs", False), ("echo", False), ("mirostat", 0), ("functions", [])],
)
def test_what_asks_for_nothing_is_taken(route: str, name: str, nothing: Any) -> None:
    assert parsed(route, **{name: nothing}) == parsed(route)
    assert REFUSED[name].use is Use.REFUSED


@pytest.mark.parametrize("name", ["reasoning", "text"])
def test_entries_of_a_responses_fields_that_have_no_effect_are_named(name: str) -> None:
    asked = parsed("responses", **{name: {"depth": 3, "none": None}})
    assert asked.warnings == (f"{name}: entries without effect: 'depth'",)
    assert dataclasses.replace(asked, warnings=()) == parsed("responses")
