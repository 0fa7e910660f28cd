"""Every form in which a body asks for a structured answer, what it becomes, and every refusal."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import jsonschema_rs
import pytest
from support.budget import budget, seeded

from penstock_common.child_process.framing import HEADER_BYTES
from penstock_proto.limits import MAX_CHOICE_OPTIONS
from penstock_proto.types import Constraint, ConstraintKind
from penstock_router.apis.base import Api
from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.apis.openai.requests import CHATS, COMPLETIONS, parse_chat, parse_completion
from penstock_router.apis.structured_output import (
    ANY_OBJECT,
    CONSTRAINT_FIELDS,
    FORMATS,
    MAX_NESTING,
    close,
    wish_of_format,
)
from penstock_router.apis.tgi.requests import GENERATE, PARAMETERS, parse_generate
from penstock_router.errors import BadRequest
from penstock_router.json_fields import decode_object
from penstock_router.offload.body_kinds import Reading
from penstock_router.offload.text_messages import decode_outcome, encode_outcome
from penstock_router.request import CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
OLDER_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def schema(value: Any, **written: Any) -> Constraint:
    """JSON of a schema, without white space unless it is `written` otherwise."""
    value = {**value, "x-guidance": written or {"whitespace_flexible": False}}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value, separators=(",", ":")))


OBJECT = schema({"type": "object"})


def tag(value: Any) -> Constraint:
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(value, separators=(",", ":")))


def asked(**fields: Any) -> tuple[Constraint | None, str]:
    """Return the constraint and the field that asks for it, equal for completions and chats."""
    completion = parse_completion({"prompt": "x", **fields})
    chat = parse_chat({"messages": MESSAGES, **fields})
    found = completion.constraint, completion.constraint_field
    assert (chat.constraint, chat.constraint_field) == found
    return found


def refusal_of(**fields: Any) -> BadRequest:
    """Return the refusal. Check that it is short, and the same for a completion and a chat."""
    with pytest.raises(BadRequest) as of_completion:
        parse_completion({"prompt": "x", **fields})
    with pytest.raises(BadRequest) as of_chat:
        parse_chat({"messages": MESSAGES, **fields})
    assert of_chat.value.message == of_completion.value.message
    assert len(of_chat.value.message) < 250
    assert "\n" not in of_chat.value.message
    return of_chat.value


# ---- response_format ---------------------------------------------------------------------------

REGEX = Constraint(ConstraintKind.REGEX, "a+")
RESPONSE_FORMATS: list[tuple[dict[str, Any], Constraint]] = [
    ({"type": "json_object"}, OBJECT),
    ({"type": "json_object", "value": SCHEMA}, schema(SCHEMA)),
    ({"type": "json_object", "value": json.dumps(SCHEMA)}, schema(SCHEMA)),
    ({"type": "json_object", "schema": SCHEMA}, schema(SCHEMA)),
    ({"type": "json_object", "value": None, "schema": None}, OBJECT),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, schema(SCHEMA)),
    (
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True, "name": None}},
        schema(SCHEMA),
    ),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}, schema(SCHEMA)),
    ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, schema(SCHEMA)),
    ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, schema(SCHEMA)),
    ({"type": "json", "value": SCHEMA}, schema(SCHEMA)),
    ({"type": "regex", "value": "a+"}, REGEX),
    (TAG, tag(TAG)),
    (OLDER_TAG, tag(OLDER_TAG)),
    ({**TAG, "structures": None, "more": 1}, tag(TAG)),
]


@pytest.mark.parametrize(("given", "wanted"), RESPONSE_FORMATS)
def test_every_form_of_a_response_format_becomes_a_constraint(
    given: dict[str, Any], wanted: Constraint
) -> None:
    assert asked(response_format=given) == (wanted, "response_format")
    assert_documented("response_format", given)


@pytest.mark.parametrize("given", [{"type": "text"}, None])
def test_a_response_format_of_text_asks_for_nothing(given: Any) -> None:
    assert asked(response_format=given) == (None, "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("json", "response_format: must be an object"),
        ({}, "response_format.type: must be one of text, json_object"),
        ({"type": "xml"}, "given: 'xml'"),
        ({"type": ["text"]}, "given: an array"),
        ({"type": "json_schema"}, "response_format: needs json_schema"),
        ({"type": "json_schema", "schema": {}, "value": {}}, "not both value and schema"),
        ({"type": "json_object", "schema": {}, "value": {}}, "not both value and schema"),
        ({"type": "json_schema", "json_schema": 3}, "response_format.json_schema: must be"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema: must"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "schema: must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "strict: must be"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}, "name: must be a str"),
        ({"type": "json_schema", "value": SCHEMA}, "response_format.value.schema: must be"),
        ({"type": "json"}, "response_format.value: must be an object"),
        ({"type": "json", "value": "{"}, "response_format.value: not valid JSON"),
        ({"type": "json", "value": "[]"}, "response_format.value: must be an object"),
        ({"type": "json", "value": "[" * 99_999}, "response_format.value: nested too deeply"),
        ({"type": "regex"}, "response_format.value: must be a string"),
        ({"type": "regex", "value": ""}, "response_format.value: must be a string of 1"),
        ({"type": "structural_tag"}, "must have either format, or structures and triggers"),
        ({**TAG, **OLDER_TAG}, "must have either format, or structures and triggers"),
        ({"type": "structural_tag", "format": 1}, "response_format.format: must be an object"),
        ({"type": "structural_tag", "structures": []}, "response_format.triggers: must be"),
        ({"type": "structural_tag", "structures": {}, "triggers": []}, "structures: must be"),
    ],
)
def test_a_response_format_that_is_none_is_refused_by_name(given: Any, words: str) -> None:
    error = refusal_of(response_format=given)
    assert words in error.message
    assert (error.param or "").split(".")[0] == "response_format"


def test_properties_stay_in_the_order_in_which_they_were_given() -> None:
    body = decode_object(
        b'{"prompt": "x", "guided_json": {"properties": {"z": {}, "a": {}, "m": {}}}}'
    )
    constraint = parse_completion(body).constraint
    assert constraint is not None
    assert constraint.value.startswith('{"properties":{"z":{},"a":{},"m":{}}')


def nested(depth: int) -> dict[str, Any]:
    innermost: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        innermost = {"x": innermost}
    return innermost


@pytest.mark.parametrize(
    "field",
    [
        lambda value: {"guided_json": value},
        lambda value: {"guided_json": json.dumps(value)},
        lambda value: {"structured_outputs": {"json": value}},
        lambda value: {"response_format": {"type": "json_object", "value": value}},
    ],
)
def test_a_schema_nested_too_deeply_is_refused_with_the_bound(field: Any) -> None:
    assert asked(**field(nested(MAX_NESTING)))[0] == schema(nested(MAX_NESTING))
    error = refusal_of(**field(nested(MAX_NESTING + 1)))
    assert f"at most {MAX_NESTING} objects and arrays within each other" in error.message


def test_a_structural_tag_nested_too_deeply_is_refused() -> None:
    error = refusal_of(response_format={"type": "structural_tag", "format": nested(MAX_NESTING)})
    assert f"at most {MAX_NESTING}" in error.message


def test_numbers_of_any_size_stay_in_a_schema() -> None:
    large = {"minimum": -(10**40), "maximum": 1e300}
    constraint, _ = asked(guided_json=large)
    assert constraint is not None
    written = json.loads(constraint.value)
    assert {name: written[name] for name in large} == large


# ---- structured_outputs and guided_* -----------------------------------------------------------

CHOICES = Constraint(ConstraintKind.CHOICE, options=("yes", "no", ""))
LARK = Constraint(ConstraintKind.GRAMMAR, 'start: "a"+')
OUTPUTS: list[tuple[dict[str, Any], Constraint]] = [
    ({"json": SCHEMA}, schema(SCHEMA)),
    ({"json": json.dumps(SCHEMA)}, schema(SCHEMA)),
    ({"json": {}}, schema({})),
    ({"json": SCHEMA, "regex": None, "disable_fallback": True}, schema(SCHEMA)),
    ({"regex": "a+"}, REGEX),
    ({"choice": ["yes", "no", ""]}, CHOICES),
    ({"grammar": 'start: "a"+'}, LARK),
    ({"json_object": True}, OBJECT),
    ({"structural_tag": json.dumps(TAG)}, tag(TAG)),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}},
     tag({"type": "structural_tag", "structures": [], "triggers": ["<"]})),
    ({"json": SCHEMA, "whitespace_pattern": " ?"}, schema(SCHEMA, whitespace_pattern=" ?")),
    ({"json": SCHEMA, "disable_any_whitespace": True}, schema(SCHEMA, whitespace_flexible=False)),
    ({"json": SCHEMA, "disable_any_whitespace": False}, schema(SCHEMA, whitespace_flexible=True)),
    ({"json_object": True, "disable_any_whitespace": False},
     schema({"type": "object"}, whitespace_flexible=True)),
    ({"json": SCHEMA, "whitespace_pattern": " ?", "disable_any_whitespace": False},
     schema(SCHEMA, whitespace_pattern=" ?")),
    # vLLM's clients send it beside whatever they ask for.
    ({"regex": "a+", "disable_any_whitespace": False}, REGEX),
    ({"structural_tag": TAG, "disable_any_whitespace": False}, tag(TAG)),
    ({"json_object": True, "disable_any_whitespace": True},
     schema({"type": "object"}, whitespace_flexible=False)),
    ({"json": SCHEMA, "disable_additional_properties": True},
     schema({**SCHEMA, "additionalProperties": False})),
]  # fmt: skip


@pytest.mark.parametrize(("given", "wanted"), OUTPUTS)
def test_every_kind_of_structured_outputs_becomes_a_constraint(
    given: dict[str, Any], wanted: Constraint
) -> None:
    assert asked(structured_outputs=given) == (wanted, "structured_outputs")
    assert_documented("structured_outputs", given)


@pytest.mark.parametrize("given", [{}, {"json_object": False}, {"json": None}])
def test_structured_outputs_may_ask_for_nothing(given: Any) -> None:
    assert asked(structured_outputs=given) == (None, "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "structured_outputs: must be an object"),
        ({"json": {}, "regex": "a"}, "must have one of json, regex, choice, grammar, json_object, "
         "structural_tag; given: json and regex"),
        ({"disable_fallback": True}, "must have one of json, regex"),
        ({"jsn": {}}, "must have one of json, regex"),
        ({"json": 3}, "structured_outputs.json: must be an object or a string"),
        ({"json": True}, "structured_outputs.json: must be an object or a string"),
        ({"regex": 3}, "structured_outputs.regex: must be a string"),
        ({"choice": []}, "structured_outputs.choice: must name at least 1"),
        ({"choice": ["a", 1]}, "structured_outputs.choice: must be a string"),
        ({"choice": ["a"] * (MAX_CHOICE_OPTIONS + 1)}, "at most 1024 choices; given: 1025"),
        ({"grammar": ""}, "structured_outputs.grammar: must be a string of 1"),
        ({"json_object": 1}, "structured_outputs.json_object: must be true or false"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag: not valid JSON"),
        ({"json": {}, "disable_fallback": 1}, "structured_outputs.disable_fallback: must be true"),
        ({"json": {}, "whitespace_pattern": 1}, "whitespace_pattern: must be a string"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
         "whitespace_pattern: not together with disable_any_whitespace"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern: only for JSON"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace: only for"),
        ({"regex": "a", "disable_additional_properties": True}, "properties: only beside json"),
        ({"json_object": True, "disable_additional_properties": True}, "only beside json"),
        ({"json": {"x-guidance": {"whitespace_flexible": True}}, "disable_any_whitespace": True},
         "not beside x-guidance"),
    ],
)  # fmt: skip
def test_structured_outputs_that_are_none_are_refused_by_name(given: Any, words: str) -> None:
    error = refusal_of(structured_outputs=given)
    assert words in error.message
    assert (error.param or "").split(".")[0] == "structured_outputs"


GUIDED: list[tuple[str, Any, Constraint]] = [
    ("guided_json", SCHEMA, schema(SCHEMA)),
    ("guided_json", json.dumps(SCHEMA), schema(SCHEMA)),
    ("guided_regex", "a+", REGEX),
    ("guided_choice", ["yes", "no", ""], CHOICES),
    ("guided_grammar", 'start: "a"+', LARK),
]


@pytest.mark.parametrize(("name", "given", "wanted"), GUIDED)
def test_the_older_names_mean_the_same(name: str, given: Any, wanted: Constraint) -> None:
    assert asked(**{name: given}) == (wanted, name)
    assert asked(**{name: given}, guided_decoding_backend="outlines") == (wanted, name)
    assert_documented(name, given)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": 1}, "guided_json", "must be an object or a string"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_regex": ""}, "guided_regex", "a string of 1"),
        ({"guided_choice": "a"}, "guided_choice", "must be an array"),
        ({"guided_grammar": {}}, "guided_grammar", "must be a string"),
        ({"guided_decoding_backend": "mine"}, "guided_decoding_backend", "one of auto, xgrammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        (
            {"guided_whitespace_pattern": " ", "guided_regex": "a"},
            "guided_whitespace_pattern",
            "only for JSON",
        ),
    ],
)
def test_older_fields_that_are_none_are_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal_of(**fields)
    assert (error.param, error.message.startswith(f"{param}: ")) == (param, True)
    assert words in error.message


def test_an_older_white_space_pattern_holds_for_any_json() -> None:
    wanted = schema(SCHEMA, whitespace_pattern=" ?")
    pattern = {"guided_whitespace_pattern": " ?"}
    assert asked(guided_json=SCHEMA, **pattern) == (wanted, "guided_json")
    given = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    assert asked(response_format=given, **pattern) == (wanted, "response_format")
    given = {"type": "json_object"}
    assert asked(response_format=given, **pattern)[0] == schema(
        {"type": "object"}, whitespace_pattern=" ?"
    )


@pytest.mark.parametrize(
    "own",
    [
        {"whitespace_flexible": True},
        {"whitespace_flexible": False},
        {"whitespace_pattern": " ?"},
        {"item_separator": ", "},
        {"key_separator": ": "},
        {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
        # Which a shard refuses.
        {"nonsense": 1},
        [],
    ],
)
def test_what_a_schema_says_of_white_space_is_left_to_it(own: Any) -> None:
    given = {**SCHEMA, "x-guidance": own}
    text = json.dumps(given, separators=(",", ":"))
    wanted = Constraint(ConstraintKind.JSON_SCHEMA, text)
    assert asked(guided_json=given)[0] == wanted
    assert asked(response_format={"type": "json", "value": given})[0] == wanted
    # The schema's word counts, also where a client sends false with everything.
    also = {"json": given, "disable_any_whitespace": False}
    assert asked(structured_outputs=also)[0] == wanted


@pytest.mark.parametrize("own", [None, {}])
def test_a_schema_that_says_nothing_of_white_space_is_written_without(own: Any) -> None:
    assert asked(guided_json={**SCHEMA, "x-guidance": own})[0] == schema(SCHEMA)
    told = {"json": {**SCHEMA, "x-guidance": own}, "disable_any_whitespace": False}
    assert asked(structured_outputs=told)[0] == schema(SCHEMA, whitespace_flexible=True)


@pytest.mark.parametrize("given", [TAG, OLDER_TAG])
def test_json_in_a_structural_tag_is_written_as_the_tag_says(given: dict[str, Any]) -> None:
    assert asked(response_format=given)[0] == tag(given)


def test_saying_how_json_is_written_changes_nothing_of_the_body() -> None:
    body = {"prompt": "x", "guided_json": {"type": "object"}}
    before = json.dumps(body)
    parse_completion(body)
    assert json.dumps(body) == before


EXAMPLES: dict[str, Any] = {
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}


@pytest.mark.parametrize(
    ("first", "second"),
    [(first, second) for first in EXAMPLES for second in EXAMPLES if first < second],
)
def test_two_fields_that_ask_at_once_are_both_named(first: str, second: str) -> None:
    error = refusal_of(**{first: EXAMPLES[first], second: EXAMPLES[second]})
    assert first in error.message
    assert second in error.message
    assert error.param in (first, second)
    # One that asks for nothing is in nobody's way.
    if "response_format" in (first, second):
        other = second if first == "response_format" else first
        assert asked(**{other: EXAMPLES[other], "response_format": {"type": "text"}})[1] == other


# ---- disable_additional_properties -------------------------------------------------------------


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    copy = deepcopy(schema)
    close(copy)
    return copy


def test_objects_are_closed_wherever_a_schema_may_stand() -> None:
    lists: dict[str, Any] = {"properties": {"x": {"type": "string"}}}
    shut = {**lists, "additionalProperties": False}
    for key in ("items", "contains", "then", "else", "additionalItems"):
        assert closed({key: lists}) == {key: shut}
    for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
        assert closed({key: [lists, True]}) == {key: [shut, True]}
    for key in ("$defs", "definitions", "dependentSchemas", "dependencies"):
        assert closed({key: {"properties": lists}}) == {key: {"properties": shut}}
    within = {"properties": {"properties": lists}}
    assert closed(within) == {"properties": {"properties": shut}, "additionalProperties": False}
    assert closed({"patternProperties": {"a": lists}, "properties": {}}) == {
        "patternProperties": {"a": shut},
        "properties": {},
        "additionalProperties": False,
    }


def test_a_schema_that_speaks_of_other_properties_is_left_as_it_is() -> None:
    cases: list[dict[str, Any]] = [
        {"properties": {}, "additionalProperties": True},
        {"properties": {}, "unevaluatedProperties": {"type": "string"}},
        {"type": "object"},
        {"enum": [{"properties": {}}], "const": {"properties": {}}, "default": {"properties": {}}},
        {"not": {"properties": {"x": {}}}, "if": {"properties": {"x": {}}}},
        {"dependencies": {"x": ["properties"]}},
        {"items": True, "anyOf": {"enum": []}, "$defs": [{"properties": {}}]},
    ]
    for own in cases:
        assert closed(own) == own
    assert closed({"properties": {}, "additionalProperties": None}) == {
        "properties": {},
        "additionalProperties": False,
    }
    assert closed({"properties": None}) == {"properties": None}
    assert closed({"additionalProperties": {"properties": {}}}) == {
        "additionalProperties": {"properties": {}, "additionalProperties": False}
    }


def test_closing_a_schema_changes_nothing_of_the_body() -> None:
    body = {"prompt": "x", "structured_outputs": {
        "json": {"properties": {"x": {"properties": {}}}}, "disable_additional_properties": True,
    }}  # fmt: skip
    before = json.dumps(body)
    parse_completion(body)
    assert json.dumps(body) == before


# ---- text-generation-inference -----------------------------------------------------------------


def tgi(grammar: Any) -> CompletionRequest:
    return parse_generate({"inputs": "x", "parameters": {"grammar": grammar}})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"type": "json", "value": SCHEMA}, schema(SCHEMA)),
        ({"type": "json", "value": json.dumps(SCHEMA)}, schema(SCHEMA)),
        ({"type": "json_object", "value": SCHEMA}, schema(SCHEMA)),
        ({"type": "json_object", "value": {"type": "array"}}, schema({"type": "array"})),
        ({"type": "regex", "value": "a+"}, REGEX),
        ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, schema(SCHEMA)),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, schema(SCHEMA)),
    ],
)
def test_tgis_grammars_become_constraints(given: Any, wanted: Constraint) -> None:
    request = tgi(given)
    assert (request.constraint, request.constraint_field) == (wanted, "grammar")
    assert jsonschema_rs.is_valid(PARAMETERS["grammar"].kind.schema, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("json", "grammar: must be an object"),
        ({}, "grammar is not supported"),
        ({"type": "text"}, "grammar is not supported"),
        ({"type": "lark", "value": "x"}, "grammar is not supported"),
        ({"type": "json_object"}, "grammar is not valid: grammar.value: required"),
        ({"type": "json", "value": "{"}, "grammar is not valid: grammar.value: not valid JSON"),
        ({"type": "json", "value": 3}, "grammar is not valid: grammar.value: must be an object"),
        ({"type": "regex", "value": 3}, "grammar is not valid: grammar.value: must be a string"),
        ({"type": "json_schema", "value": SCHEMA}, "grammar is not valid: grammar.value.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "grammar is not valid: grammar.value: required",
        ),
    ],
)
def test_tgis_grammars_are_refused_in_its_words(given: Any, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        tgi(given)
    assert caught.value.message.startswith(words)
    assert caught.value.param == "grammar"


# ---- Documents, other processes, nonsense ------------------------------------------------------


def assert_documented(name: str, given: Any) -> None:
    assert jsonschema_rs.is_valid(CHAT_FIELDS[name].schema, given)


async def test_a_request_goes_to_another_process_without_its_constraint() -> None:
    asked: list[tuple[Api[Any], Any]] = [
        (COMPLETIONS, parse_completion({"prompt": "x", "guided_regex": "a"})),
        (CHATS, parse_chat({"messages": MESSAGES, "guided_json": SCHEMA})),
        (GENERATE, tgi({"type": "json", "value": SCHEMA})),
    ]
    for api, request in asked:
        assert request.constraint is not None
        there = await decode_outcome(encode_outcome(Reading(api, request))[HEADER_BYTES:])
        assert isinstance(there, Reading)
        found = there.asked
        assert (found.constraint, found.constraint_field) == (None, request.constraint_field)


VALUES: list[Any] = [
    *(None, True, 0, 1.5, "", "x", "{}", "[", '{"type": "object"}', "\x00", [], {}, [1], ["x"]),
    *(SCHEMA, TAG, OLDER_TAG, {"schema": SCHEMA}, {"format": {}}, [[]], {"name": 3}, 10**30),
]


def some_format(rng: random.Random) -> Any:
    keys = ("value", "schema", "json_schema", "format", "structures", "triggers", "strict", "name")
    given = {"type": rng.choice([*FORMATS, None, 3])}
    given |= {key: rng.choice(VALUES) for key in rng.sample(keys, rng.randrange(4))}
    return rng.choice([given, given, given, rng.choice(VALUES)])


def some_outputs(rng: random.Random) -> Any:
    keys = (
        *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
        *("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"),
    )
    return {key: rng.choice(VALUES) for key in rng.sample(keys, rng.randrange(3))}


def test_whatever_is_taken_is_documented_and_no_nonsense_raises_anything_else() -> None:
    rng = seeded("structured nonsense")
    validators = {
        entry.name: jsonschema_rs.validator_for(entry.schema) for entry in CONSTRAINT_FIELDS
    }
    taken = 0
    for _ in range(budget(20_000, 500_000)):
        fields: dict[str, Any] = rng.choice(
            [
                {rng.choice(sorted(validators)): rng.choice(VALUES)},
                {"response_format": some_format(rng)},
                {"structured_outputs": some_outputs(rng)},
            ]
        )
        try:
            request = parse_chat({"messages": MESSAGES, **fields})
        except BadRequest:
            continue
        taken += request.constraint is not None
        for name, value in fields.items():
            assert validators[name].is_valid(value), (name, value)
    assert taken > 100


def test_a_format_is_read_the_same_under_another_name() -> None:
    assert wish_of_format("text.format", {"type": "json_object"}) == ANY_OBJECT
    with pytest.raises(BadRequest, match=r"text\.format\.type"):
        wish_of_format("text.format", {"type": "x"})
