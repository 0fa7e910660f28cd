"""The languages of constraints: what each allows, and what is refused."""

from __future__ import annotations

import json

import pytest
from support.compilers import allows, plain_compiler

from penstock_proto.types import Constraint
from penstock_shard.structured_output.refusal import ConstraintRefused


def _allows(constraint: Constraint, text: str) -> bool:
    return allows(plain_compiler(), constraint, text)


def _schema(schema: object) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


NAMED = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_may_be_written_as_people_write_it(indent):
    deep = {"type": "array", "items": {"$ref": "#"}}
    value: list[object] = []
    for _ in range(6):
        value = [value, []]
    assert _allows(_schema(deep), json.dumps(value, indent=indent))
    assert _allows(_schema(NAMED), json.dumps({"a": [1, 2]}, indent=indent))
    assert _allows(_schema(NAMED), '{ "a": [ 1 ] }')


@pytest.mark.parametrize("space", [" " * 3, "\n\n", "\n" + " " * 60, " " * 100])
def test_whitespace_does_not_go_on_and_on(space):
    assert not _allows(_schema(NAMED), f'{{{space}"a": [1]}}')
    assert not _allows(_schema(NAMED), f'{{"a":{space}[1]}}')
    assert not _allows(Constraint("json_object"), f'{{"a": {{{space}}}}}')


def test_a_schema_may_say_how_it_is_written():
    compact = _schema({**NAMED, "x-guidance": {"whitespace_flexible": False}})
    assert _allows(compact, '{"a":[1,2]}')
    assert not _allows(compact, '{"a": [1,2]}')
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert _allows(_schema({**NAMED, "x-guidance": spaced}), '{"a": [1, 2]}')
    pattern = _schema({**NAMED, "x-guidance": {"whitespace_pattern": r"\n{1,3}"}})
    assert _allows(pattern, '{\n\n\n"a":[1]}')
    assert not _allows(pattern, '{\n\n\n\n"a":[1]}')


@pytest.mark.parametrize(
    "options", [{"lenient": True}, {"coerce_one_of": True}, {"whitespace_flexible": "no"}, []]
)
def test_no_other_option_is_taken(options):
    with pytest.raises(ConstraintRefused, match="x-guidance"):
        _allows(_schema({**NAMED, "x-guidance": options}), "")


def test_json_object_is_any_object():
    for text in ("{}", '{"a": [1, {"b": null}]}', '{"é": "\\n"}'):
        assert _allows(Constraint("json_object"), text)
    for text in ("[]", "1", '{"a"}', "{} "):
        assert not _allows(Constraint("json_object"), text)


@pytest.mark.parametrize(
    "text", [r'{"\u0061": "x"}', r'{"a": "x"}', '{"b": 1, "a": "x"}', '{"a": 1, "a": "x"}']
)
def test_no_spelling_of_a_name_leads_around_what_is_said_of_it(text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not _allows(_schema(schema), text)


OPTIONS = ("yes", "no", 'say "it"', "a\\b", "two\nlines", "é雪😀", "\x00\x7f", "yes, please", "/x/")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_choice_is_one_of_its_options_whatever_is_in_them(option):
    assert _allows(Constraint("choice", options=OPTIONS), option)
    assert not _allows(Constraint("choice", options=OPTIONS), option + "x")
    assert not _allows(Constraint("choice", options=OPTIONS), "")


def test_nothing_may_be_an_option():
    assert _allows(Constraint("choice", options=("", "a")), "")
    assert _allows(Constraint("choice", options=("", "a")), "a")


def test_a_regex_matches_the_whole_text():
    assert _allows(Constraint("regex", "a/b|c"), "a/b")
    assert not _allows(Constraint("regex", "a/b|c"), "xc")
    assert _allows(Constraint("regex", "^a$"), "a")
    assert _allows(Constraint("regex", r"\d{2}\p{Lu}"), "12É")


def test_a_grammar_may_be_lark_or_ebnf():
    lark = 'start: item ("," item)*\nitem: /[a-z]+/\n%ignore " "'
    assert _allows(Constraint("grammar", lark), "a, b")
    ebnf = 'root ::= item ("," item)*\nitem ::= [a-z]+'
    assert _allows(Constraint("grammar", ebnf), "a,bc")
    assert not _allows(Constraint("grammar", ebnf), "a,")
    assert _allows(Constraint("grammar", r'root ::= "\U0001F600" [\u3041-\u309F]'), "😀あ")
    assert _allows(Constraint("grammar", r'root ::= "\\U0001F600"'), r"\U0001F600")


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint("choice"), "choice: no options"),
        (Constraint("regex"), "regex: it is empty"),
        (Constraint("grammar", " \n"), "grammar: it is empty"),
        (Constraint("grammar", "root ::= ("), "grammar: "),
        (Constraint("grammar", "start: missing"), "grammar: "),
        (Constraint("grammar", "root ::= missing"), "grammar: Rule 'missing' not found"),
        (Constraint("grammar", 'root ::= "a"\nb ::= ('), "grammar: Expected ')' at line 2"),
        (Constraint("json_schema", "{'a'}"), "json_schema: not JSON"),
        (Constraint("json_schema", '{"minimum": NaN}'), "json_schema: NaN is not JSON"),
        (Constraint("json_schema", "3"), "json_schema: 3 is no schema"),
        (Constraint("structural_tag", "["), "structural_tag: not JSON"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_the_reason(constraint, told):
    with pytest.raises(ConstraintRefused) as refusal:
        plain_compiler().compile(constraint)
    assert told in str(refusal.value)
