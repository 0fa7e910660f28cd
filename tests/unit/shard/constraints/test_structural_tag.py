"""Structural tags over vocabularies with and without marks of their own."""

from __future__ import annotations

import json
import re

import pytest
from support.budget import budget, seeded
from support.compilers import allows, ids_of, marked_compiler, plain_compiler
from support.walks import allowed

from penstock_proto.types import Constraint
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.refusal import ConstraintRefused

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}


def _const(text):
    return {"type": "const_string", "value": text}


def _regex(pattern):
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def _tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _triggered(*tags, triggers=("<f=",), **others):
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **others}


def _separated(*tags, **others):
    return {"type": "tags_with_separator", "tags": list(tags), "separator": "; ", **others}


F, G = _tag("<f=x>", JSON, "</f>"), _tag("<f=yy>", TEXT, "</f>")
CALL = _tag("<tool_call>\n", JSON, "\n</tool_call>")
# Each format with texts that it allows, texts that it does not, and a pattern that tells them apart
# without knowing grammars.
_JSON = r"\{\s*\"a\"\s*:\s*(0|[1-9]\d?)\s*\}"
CASES = [
    (_const("a <think> b"), ["a <think> b"], ["a", "a <think> b "], "a <think> b"),
    (JSON, ['{"a":7}', '{\n  "a": 42\n}'], ['{"a":100}', '{"a":7} '], _JSON),
    (_regex("[a-c/]{2,4}"), ["ab", "a/b/"], ["a", "abcab"], "[a-c/]{2,4}"),
    ({"type": "grammar", "grammar": 'start: "x" N\nN: /[0-9]{2}/'}, ["x12"], ["x1"], "x[0-9]{2}"),
    ({"type": "grammar", "grammar": 'root ::= "x" ("y" | "z")'}, ["xz"], ["x"], "x[yz]"),
    (TEXT, ["", "what ever\n"], [], r"(?s:.*)"),
    ({**TEXT, "excludes": ["no", "</x>"]}, ["yes"], ["n no"], r"(?s:(?!.*(no|</x>)).*)"),
    (
        {"type": "or", "elements": [JSON, _const("no"), _sequence(_const("t:"), TEXT)]},
        ['{"a":1}', "no", "t:", "t: {"],
        ["yes", "n"],
        rf"({_JSON}|no|t:(?s:.*))",
    ),
    (
        _sequence(_tag("<think>", TEXT, "</think>"), JSON),
        ['<think></think>{"a":1}', '<think> {"a":1 </think>{"a":2}'],
        ['{"a":1}', "<think>x</think>", '<think>x</think>y</think>{"a":1}'],
        rf"<think>(?s:(?!.*</think>.*</think>).*)</think>{_JSON}",
    ),
    (
        _sequence(_tag("<think>", TEXT, ["</think>\n\n", "(done)"]), _regex("[0-9]")),
        ["<think>a</think>\n\n1", "<think>a(done)1"],
        ["<think>a</think>\n1", "<think>a(done)(done)1"],
        r"<think>(?s:.*)(</think>\n\n|\(done\))[0-9]",
    ),
    (
        _sequence(TEXT, _const("##"), _regex("[0-9]{3}")),
        ["##123", "# # ##123"],
        ["##12", "####123"],
        r"(?s:(?!.*##.*##).*)##[0-9]{3}",
    ),
    (
        _triggered(CALL, triggers=["<tool_call>"]),
        ["", "hi", 'a<tool_call>\n{"a":1}\n</tool_call>b<tool_call>\n{"a":2}\n</tool_call>'],
        ["<tool_call>", '<tool_call>{"a":1}\n</tool_call>', '<tool_call>\n{"a":1}</tool_call>'],
        rf"((?!<tool_call>)(?s:.)|<tool_call>\n{_JSON}\n</tool_call>)*",
    ),
    (
        _triggered(F, G),
        ["", "a<f", 'a<f=x>{"a":1}</f>b<f=yy>{"</f>c', '<f=x>{"a":1}</f><f=x>{"a":1}</f>'],
        ["<f=", "a<f=z></f>", '<f=yy>{"a":1}', '<f=x>{"b":1}</f>'],
        rf"((?!<f=)(?s:.)|<f=x>{_JSON}</f>|<f=yy>((?!</f>)(?s:.))*</f>)*",
    ),
    (
        _triggered(F, at_least_one=True, stop_after_first=True),
        ['<f=x>{"a":1}</f>'],
        ["", '<f=x>{"a":1}</f>b', 'a<f=x>{"a":1}</f>'],
        rf"<f=x>{_JSON}</f>",
    ),
    (
        _sequence(_triggered(F, at_least_one=True, stop_after_first=True), _regex("[0-9]")),
        ['<f=x>{"a":1}</f>2'],
        ["2", '<f=x>{"a":1}</f>', '<f=x>{"a":1}</f> 2'],
        rf"<f=x>{_JSON}</f>[0-9]",
    ),
    (
        _triggered(F, stop_after_first=True, excludes=["%"]),
        ["", "a", 'a<f=x>{"a":1}</f>'],
        ['<f=x>{"a":1}</f>b', "%", '%<f=x>{"a":1}</f>'],
        rf"((?!<f=|%)(?s:.))*(<f=x>{_JSON}</f>)?",
    ),
    (
        _triggered(F, at_least_one=True),
        ['<f=x>{"a":1}</f>', '<f=x>{"a":1}</f> and <f=x>{"a":2}</f>.'],
        ["", "a"],
        rf"<f=x>{_JSON}</f>((?!<f=)(?s:.)|<f=x>{_JSON}</f>)*",
    ),
    (
        _sequence(_triggered(F), _const("##"), _regex("[0-9]")),
        ["##1", 'a<f=x>{"a":1}</f>b##1'],
        ["##1b", "a", '##<f=x>{"a":1}</f>##1'],
        rf"((?!<f=|##)(?s:.)|<f=x>{_JSON}</f>)*##[0-9]",
    ),
    (
        _separated(F, _tag("[TOOL_CALLS]", JSON, ""), at_least_one=True),
        ['<f=x>{"a":1}</f>', '<f=x>{"a":1}</f>; [TOOL_CALLS]{"a":2}; <f=x>{"a":3}</f>'],
        ["", '<f=x>{"a":1}</f>;', '<f=x>{"a":1}</f> <f=x>{"a":1}</f>'],
        rf"(<f=x>{_JSON}</f>|\[TOOL_CALLS\]{_JSON})(; (<f=x>{_JSON}</f>|\[TOOL_CALLS\]{_JSON}))*",
    ),
    (
        _separated(F, stop_after_first=True),
        ["", '<f=x>{"a":1}</f>'],
        ['<f=x>{"a":1}</f>; <f=x>{"a":1}</f>'],
        rf"(<f=x>{_JSON}</f>)?",
    ),
    (
        _sequence(_tag("<think>", TEXT, "</think>"), _triggered(CALL, triggers=["<tool_call>"])),
        ["<think>a</think>b", '<think>a</think><tool_call>\n{"a":1}\n</tool_call>'],
        ["b", "<think>a</think><tool_call>"],
        rf"<think>((?!</think>)(?s:.))*</think>((?!<tool_call>)(?s:.)|<tool_call>\n{_JSON}\n</tool_call>)*",
    ),
]


def _constraint(format_):
    return Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format_}))


@pytest.mark.parametrize("compiler", [plain_compiler, marked_compiler])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0]["type"])
def test_a_format_allows_what_it_says_and_nothing_else(compiler, case):
    format_, yes, no, pattern = case
    for text in yes:
        assert re.fullmatch(pattern, text), f"the test's own pattern is wrong: {text!r}"
        assert allows(compiler(), _constraint(format_), text), text
    for text in no:
        assert not allows(compiler(), _constraint(format_), text), text


@pytest.mark.parametrize("compiler", [plain_compiler, marked_compiler])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0]["type"])
def test_walks_through_a_format_are_of_its_pattern(compiler, case):
    format_, yes, _, pattern = case
    rng = seeded("structural tags")
    matcher = compiler().compile(_constraint(format_))
    for _ in range(budget(6, 100)):
        text = _led_walk(compiler(), matcher.deep_copy(), rng, rng.choice(yes))
        assert text is None or re.fullmatch(pattern, text), text


def _led_walk(compiler: Compiler, matcher, rng, lead: str) -> str | None:
    """Walk mostly along `lead`, a text that is allowed, but often beside it: free text does not end
    by chance. Returns the text; None if it does not end.
    """
    token_ids: list[int] = []
    wanted = ids_of(compiler, lead)
    for _ in range(100):
        choices = allowed(matcher, compiler.tokenizer.vocab_size)
        assert choices, matcher.get_error()
        led = [token for token in wanted[:3] if token in choices]
        if led and rng.random() < 0.9:
            token = led[0]
            del wanted[: wanted.index(token) + 1]
        else:
            token = rng.choice(choices)
        if 2 in choices and (not led or rng.random() < 0.3):
            token = 2
        if token == 2:
            return compiler.tokenizer.decode_str(token_ids)
        assert matcher.consume_token(token)
        token_ids.append(token)
    return None


def test_marks_are_tokens_of_their_own_and_no_free_text_holds_them_or_their_letters():
    compiler = marked_compiler()
    constraint = _constraint(_sequence(_tag("<think>", TEXT, "</think>"), _regex("[0-9]")))
    begin, end = (compiler.special_tokens[mark] for mark in ("<think>", "</think>"))
    matcher = compiler.compile(constraint)
    assert allowed(matcher, compiler.tokenizer.vocab_size) == [begin]
    spelled = compiler.tokenizer.tokenize_bytes(b"</thin") + compiler.tokenizer.tokenize_bytes(
        b"k>"
    )
    assert end not in spelled
    assert not matcher.consume_tokens([begin, *spelled])


def test_the_older_form_is_triggered_tags():
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}],
        "triggers": ["<f="],
    }
    constraint = Constraint("structural_tag", json.dumps(older))
    assert allows(plain_compiler(), constraint, 'a<f=x>{"a":1}</f>b')
    assert not allows(plain_compiler(), constraint, 'a<f=x>{"a":"1"}</f>b')


def _deep(depth):
    return {"type": "or", "elements": [_deep(depth - 1), TEXT]} if depth else TEXT


@pytest.mark.parametrize(
    ("format_", "told"),
    [
        ({"type": "qwen"}, "'qwen' - at `$.format.type`, which must be one of const_string,"),
        ({"type": "any_text", "exclude": []}, "unknown field `exclude` - at `$.format`"),
        ({"type": "const_string"}, "missing required field `value` - at `$.format`"),
        (
            _sequence({"type": "regex", "pattern": ""}),
            "Expected `str` of length >= 1 - at `$.format.elements[0].pattern`",
        ),
        (_sequence(), "Expected `array` of length >= 1 - at `$.format.elements`"),
        (_tag("a", TEXT, None), "Expected `str | array`, got `null` - at `$.format.end`"),
        (_triggered(F, triggers=["<g"]), "no trigger begins '<f=x>' - at `$.format`"),
        (
            _triggered(F, triggers=[""]),
            "Expected `str` of length >= 1 - at `$.format.triggers[0]`",
        ),
        (
            _triggered(F, at_least_one="yes"),
            "Expected `bool`, got `str` - at `$.format.at_least_one`",
        ),
        (_sequence(TEXT, JSON), "any_text must be followed by a text that ends it"),
        ({"type": "json_schema", "json_schema": {"typ": 1, "tpye": "null"}}, "no keyword 'tpye'"),
        (_deep(300), "structural_tag: nests too deep"),
        ({"type": "regex", "pattern": "a\ud800"}, "structural_tag: it holds half a character"),
        ({"type": "const_string", "value": "\udc00"}, "structural_tag: it holds half a character"),
        (None, "Expected `object`, got `null` - at `$.format`"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(format_, told):
    with pytest.raises(ConstraintRefused, match=re.escape(told)):
        plain_compiler().compile(_constraint(format_))
