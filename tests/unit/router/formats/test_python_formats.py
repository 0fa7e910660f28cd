"""Calls as in Python and calls with bare keys: what models of each family are known to write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.families.family import Call, Family
from support.families.python_families import FAMILIES
from support.families.python_templates import TEMPLATES
from unit.router.formats.test_forms import accepts, compiled

from penstock_router.errors import BadRequest
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.answer_reader import make_reader
from penstock_router.text.chat_template import ChatTemplate
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks
from penstock_router.text.model_conventions import Conventions, conventions_of
from penstock_router.text.reasoning import STYLES, reasoning_begun, reasoning_over

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "what": {"type": "array"}},
                "required": ["unit"],
            },
        },
        "required": ["city"],
    },
)
TOOLS = (WEATHER, Tool("now", {"type": "object", "properties": {}}), Tool("f"))
PARIS: Call = ("get_weather", {"city": "Paris"})
OSLO: Call = ("get_weather", {"city": "Oslo"})
NOW: Call = ("now", {})
Read = tuple[str, list[Any]]


def f(**arguments: Any) -> Call:
    return "f", arguments


def read(
    name: str, text: str, *, tokens: bool = False, was_cut: bool = False, style: str = ""
) -> Read:
    """The content, with reasoning before it, and the calls; the same wherever the text is cut."""
    marks = NO_MARKS
    if tokens:
        texts = [*FORMATS[name].marks, *(STYLES[style].texts if style else ())]
        marks = Marks(dict(enumerate(texts)))
        for mark in texts:
            text = text.replace(mark, TOKEN + mark)
    at_once = _read(name, [text], marks, was_cut, style)
    assert _read(name, list(text), marks, was_cut, style) == at_once
    for cut in range(1, len(text)):
        assert _read(name, [text[:cut], text[cut:]], marks, was_cut, style) == at_once, cut
    return at_once


def _read(name: str, parts: Sequence[str], marks: Marks, was_cut: bool, style: str) -> Read:
    reasoning = STYLES[style] if style else None
    formats = Conventions(FORMATS[name], reasoning)
    reader = make_reader(formats, TOOLS, marks, begun=False)
    pieces = [piece for part in parts for piece in reader.feed(part)]
    pieces = join_pieces([*pieces, *reader.flush(was_cut=was_cut)])
    arguments = [""] * sum(piece.kind is PieceKind.CALL for piece in pieces)
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            arguments[piece.call] += piece.text
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    thoughts = [f"({piece.text})" for piece in pieces if piece.kind is PieceKind.REASONING]
    said = "".join(thoughts) + content_of(pieces)
    return said, list(zip(names, map(_value, arguments), strict=True))


def _value(arguments: str) -> Any:
    """The arguments; as text where they are not whole."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


# What models write, with tokens for marks or without, what is content of it, and the calls.
CASES: list[tuple[str, str, str, list[Any]]] = [
    ("lfm2", "S[get_weather(city='Paris'), now()]E", "", [PARIS, NOW]),
    ("lfm2", "I look.\nS[now()]E\nSo.", "I look.So.", [NOW]),
    ("lfm2", "S[a.b.c(from=True, class='x')]E", "", [("a.b.c", {"from": True, "class": "x"})]),
    ("lfm2", "[get_weather(city='Paris')]", "", [PARIS]),
    ("lfm2", "[get_weather(city='Paris')]E", "", [PARIS]),
    ("lfm2", "[launch(city='Paris')]", "[launch(city='Paris')]", []),
    ("lfm2", "Say [now()].", "Say [now()].", []),
    ("lfm2", "S[launch(city='Paris')]E", "", [("launch", {"city": "Paris"})]),
    ("lfm2", "S[now()]E[now()]E", "", [NOW]),
    ("lfm2", "S[f(a='x')]E\n[f(a='x')]E Done.", "Done.", [f(a="x")]),
    ("lfm2", "S[f(a='x')]E[f(a='y')]", "[f(a='y')]", [f(a="x")]),
    ("lfm2", "S[f(a='it's', b='print('x')')]E", "", [f(a="it's", b="print('x')")]),
    ("lfm2", "S[f(a='He said 'no', and left')]E", "", [f(a="He said 'no', and left")]),
    ("lfm2", "S[f(a=['it's', {'k': 'he's'}])]E", "", [f(a=["it's", {"k": "he's"}])]),
    ("lfm2", "S[f(a='a\nb\tc\x07', n=007, m=-01)]E", "", [f(a="a\nb\tc\x07", n=7, m=-1)]),
    ("lfm2", "S[f(a=true, b=null, c=None, d=False)]E", "", [f(a=True, b=None, c=None, d=False)]),
    ("lfm2", "SS[f(a=1,)]EE", "", [f(a=1)]),
    ("lfm2", "S[f(a='x', b=1E so", "so", [f(a="x", b=1)]),
    ("lfm2", "S[f(a='x'E", "", [f(a="x")]),
    ("lfm2", "S[f(a='x']E", "", [f(a="x")]),
    ("lfm2", "S[f(a='x'))]E", "", [f(a="x")]),
    ("lfm2", "S[f(a=['x', {'k': 1E", "", [f(a=["x", {"k": 1}])]),
    ("lfm2", "S[f(a=1, b=E", "", [f(a=1, b=None)]),
    ("lfm2", "S[f(a=1)\nnow()]E", "", [f(a=1), NOW]),
    ("lfm2", "Sf(a=1), now()E", "", [f(a=1), NOW]),
    ("lfm2", 'S[{"name": "f", "arguments": {"a": 1}}]E', "", [f(a=1)]),
    ("lfm2", "S[f(a='x')", "", [f(a="x")]),
    ("lfm2", "S[f(a=['x'], b='y'", "", [f(a=["x"], b="y")]),
    ("lfm2", "S[f(a='x', b=1", "", [("f", '{"a": "x", "b": 1')]),
    ("lfm2", "The mark S begins calls.", "The mark S begins calls.", []),
    ("olmo3", 'Cf(a="x")\nget_weather(city="Paris")D', "", [f(a="x"), PARIS]),
    ("olmo3", "Hm.\nC\nf(a=true, b=None)\nnow()\nD\nSo.", "Hm.So.", [f(a=True, b=None), NOW]),
    ("olmo3", 'C[f(a="x"), now()]D', "", [f(a="x"), NOW]),
    ("olmo3", 'Cf(a="a\n"b" c")\nnow()D', "", [f(a='a\n"b" c'), NOW]),
    ("olmo3", 'Cf(a="x"D', "", [f(a="x")]),
    ("olmo3", 'CCf(a="x",)DD', "", [f(a="x")]),
    ("olmo3", 'Cf(a="x")', "", [f(a="x")]),
    ("olmo3", 'Cf(a="x")D\nCnow()D', "", [f(a="x"), NOW]),
    ("olmo3", "C stands before calls.", "C stands before calls.", []),
    ("gemma4", "Gcall:f{a:QxQ,n:42,b:true,z:null}H", "", [f(a="x", n=42, b=True, z=None)]),
    ("gemma4", "Hm.Gcall:now{}HGcall:f{a:[1,QxQ]}H", "Hm.", [NOW, f(a=[1, "x"])]),
    ("gemma4", "Gcall:a.b-c{o:{k:{l:QxQ}}}H", "", [("a.b-c", {"o": {"k": {"l": "x"}}})]),
    ("gemma4", "Gcall:f{a:Qif x:\n  {'k': \"}\"}\\n Q}H", "", [f(a="if x:\n  {'k': \"}\"}\\n ")]),
    (
        "gemma4",
        'Gcall:f{a:QxQ,b=["y"],c=\'z\',d="\\"w\\""}H',
        "",
        [f(a="x", b=["y"], c="z", d='"w"')],
    ),
    ("gemma4", 'Gcall:f{o:{"k":"v",QlQ:1}}H', "", [f(o={"k": "v", "l": 1})]),
    ("gemma4", "Gcall:f{ a : 1 ,\n b : True, }\nH", "", [f(a=1, b=True)]),
    ("gemma4", "Gcall:f{a:QQ}H", "", [f(a="")]),
    ("gemma4", "GGcall:f{a:1}HH", "", [f(a=1)]),
    ("gemma4", "Gcall:f{a:QxQH so", "so", [f(a="x")]),
    ("gemma4", "Gcall:f{a:[QxQ}H", "", [f(a=["x"])]),
    ("gemma4", "Gcall:f{a:QxQ}}H", "", [f(a="x")]),
    ("gemma4", "Gcall:f{a:1,b:H", "", [f(a=1, b=None)]),
    ("gemma4", "Gcall:f{a:QxQ}", "", [f(a="x")]),
    ("gemma4", "Gcall:f{a:QxQ", "", [f(a="x")]),
    ("gemma4", "Gcall:f{a:QxQ}HR", "", [f(a="x")]),
    ("gemma4", "Gf{a:1}H", "", [f(a=1)]),
    ("gemma4", "G begins calls.", "G begins calls.", []),
    ("functiongemma", "Xcall:f{a:ZxZ,n:1}Y", "", [f(a="x", n=1)]),
    ("functiongemma", "Xcall:f{a:ZxZ}YXcall:now{}YW", "", [f(a="x"), NOW]),
    ("pythonic", "```tool_code\n[get_weather(city='Paris'), now()]\n```", "", [PARIS, NOW]),
    ("pythonic", "```tool_code\nget_weather(city='Oslo')\n```\nSo.", "So.", [OSLO]),
    ("pythonic", "```tool_code\nlaunch(a=1)\n```", "```tool_code\nlaunch(a=1)\n```", []),
    ("pythonic", "See ```tool_code\nnow()\n```", "See ```tool_code\nnow()\n```", []),
    ("pythonic", "I look. P[get_weather(city='Paris')]O", "I look.", [PARIS]),
    ("pythonic", 'P{"name": "f", "parameters": {"a": 1}}O', "", [f(a=1)]),
    ("pythonic", 'P[{"name": "f", "parameters": {"a": 1}}]O', "", [f(a=1)]),
    ("pythonic", 'Tf.call(a="b")', "", [f(a="b")]),
    ("pythonic", "[f(a=1, b=it)]", ", b=it)]", [("f", '{"a": 1')]),
    ("llama_json", 'Tbrave_search.call(query="x")', "", [("brave_search", {"query": "x"})]),
    ("llama_json", "Tplot(x=1)", "Tplot(x=1)", []),
    ("llama_json", "Timport math\nprint(1)", "Timport math\nprint(1)", []),
]
_MARKS = {
    "lfm2": {"S": "<|tool_call_start|>", "E": "<|tool_call_end|>"},
    "olmo3": {"C": "<function_calls>", "D": "</function_calls>"},
    "gemma4": {"G": "<|tool_call>", "H": "<tool_call|>", "Q": '<|"|>', "R": "<|tool_response>"},
    "functiongemma": {
        "X": "<start_function_call>",
        "Y": "<end_function_call>",
        "Z": "<escape>",
        "W": "<start_function_response>",
    },
    "pythonic": {"P": "<|python_start|>", "O": "<|python_end|>", "T": "<|python_tag|>"},
    "llama_json": {"T": "<|python_tag|>"},
}
_WORDS = ("Paris", "Oslo", "Say", "So.", "Hm.", "He", "True", "None", "False", "The", "Tab", "See")


def marked(name: str, text: str) -> str:
    """The text with the family's marks for their letters, which words may begin with as well."""
    parts = [text]
    for word in _WORDS:
        parts = [piece for part in parts for piece in _split(part, word)]
    letters = _MARKS[name]
    return "".join(
        part if part in _WORDS else "".join(letters.get(letter, letter) for letter in part)
        for part in parts
    )


def _split(text: str, word: str) -> list[str]:
    if text in _WORDS:
        return [text]
    head, *rest = text.split(word)
    return [head, *(piece for part in rest for piece in (word, part))]


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "content", "calls"), CASES, ids=[f"{one[0]}-{one[1]}" for one in CASES]
)
def test_what_models_write_is_read_as_it_was_meant(
    name: str, text: str, content: str, calls: list[Any], tokens: bool
) -> None:
    found = read(name, marked(name, text), tokens=tokens)
    assert found == (marked(name, content), calls)


# Where a mark is text and where it is a token, an answer means two things.
TOLD_APART: list[tuple[str, str, Read, Read]] = [
    (
        "lfm2",
        "S[f(a='x]E",
        ("", [("f", '{"a": "x]<|tool_call_end|>')]),
        ("", [f(a="x]")]),
    ),
    (
        "lfm2",
        "S[f(a=1, b=itE",
        (", b=it<|tool_call_end|>", [("f", '{"a": 1')]),
        (", b=it", [("f", '{"a": 1')]),
    ),
    ("lfm2", "So.E", ("So.<|tool_call_end|>", []), ("So.", [])),
    (
        "lfm2",
        "S[f(a='marks: S, E'), now()]E",
        ("", [f(a="marks: <|tool_call_start|>, <|tool_call_end|>"), NOW]),
        ("", [f(a="marks: <|tool_call_start|>, <|tool_call_end|>"), NOW]),
    ),
    (
        "gemma4",
        "Gcall:f{c:Qsay(Qhi, youQ)Q,d:1}H",
        ("", [f(c='say(<|"|>hi, you<|"|>)', d=1)]),
        ("", [f(c='say("hi, you")', d=1)]),
    ),
    (
        "gemma4",
        "Gcall:f{c:Qd = {QaQ: QbQ}Q}H",
        ("", [f(c='d = {<|"|>a<|"|>: <|"|>b<|"|>}')]),
        ("", [f(c='d = {"a": "b"}')]),
    ),
    ("gemma4", "So.R", ("So.<|tool_response>", []), ("So.", [])),
    ("gemma4", "Gcall:f{a:QxH", ("", [f(a="x")]), ("", [f(a="x")])),
]


@pytest.mark.parametrize(
    ("name", "text", "as_text", "as_tokens"), TOLD_APART, ids=[one[1] for one in TOLD_APART]
)
def test_marks_of_the_end_within_strings_and_marks_alone(
    name: str, text: str, as_text: Read, as_tokens: Read
) -> None:
    assert read(name, marked(name, text)) == as_text
    assert read(name, marked(name, text), tokens=True) == as_tokens


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "S[get_weather(city=Paris)]E"),
        ("olmo3", "Cget_weather(city=Paris)D"),
        ("gemma4", "Gcall:get_weather{city:Paris}H"),
        ("pythonic", "[get_weather(city=Paris)]"),
        ("pythonic", "[get_weather(city=capital(of='France'))]"),
        ("lfm2", "S[get_weather('Paris')]E"),
    ],
)
def test_a_word_without_quotes_is_no_value_and_what_has_one_is_content(
    name: str, text: str
) -> None:
    assert read(name, marked(name, text)) == (marked(name, text), [])


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("lfm2", "S[f(a='x', b='lo", '{"a": "x", "b": "lo'),
        ("lfm2", "S[f(a='x'", '{"a": "x'),
        ("lfm2", "S[f(a='x', b=[1, 'y", '{"a": "x", "b": [1, "y'),
        ("olmo3", 'Cf(a="x", b="lo', '{"a": "x", "b": "lo'),
        ("gemma4", "Gcall:f{a:QxQ,b:Qlo", '{"a": "x", "b": "lo'),
        ("gemma4", "Gcall:f{a:QxQ,b:{c:[1,Qlo<|", '{"a": "x", "b": {"c": [1, "lo'),
    ],
)
def test_a_call_that_was_cut_off_stays_as_far_as_it_came(name: str, text: str, shown: str) -> None:
    assert read(name, marked(name, text), was_cut=True) == ("", [("f", shown)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", "S[f(a='some"),
        ("olmo3", 'Cf(a="some'),
        ("gemma4", "Gcall:f{a:Qsome"),
        ("functiongemma", "Xcall:f{a:Zsome"),
        ("pythonic", "[f(a='some"),
    ],
)
def test_arguments_are_shown_while_they_come(name: str, text: str) -> None:
    pieces = FORMATS[name].parser(TOOLS).feed(marked(name, text))
    assert join_pieces(pieces) == [
        Piece(PieceKind.CALL, "f"),
        Piece(PieceKind.ARGUMENTS, '{"a": "some'),
    ]


# ---- Templates ---------------------------------------------------------------------------------

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[one.format for one in FAMILIES])
_REASONING = {"lfm2": "think", "olmo3": "think", "gemma4": "gemma4"}
_BOTH: list[Call] = [
    (
        "get_weather",
        {"city": "Paris", "days": 3, "exact": True, "more": {"unit": "C", "what": [1, "x"]}},
    ),
    ("now", {}),
]


@each_family
def test_a_template_shows_its_format_and_how_its_model_reasons(family: Family) -> None:
    template = ChatTemplate({"default": TEMPLATES[family.format]}, {})
    found = conventions_of(template, "auto", "auto").names
    assert found == (family.format, _REASONING.get(family.format, ""))


@each_family
def test_calls_as_the_template_renders_them_are_of_the_form_and_are_read(family: Family) -> None:
    text = rendered(family.format, _BOTH)
    for required in (True, False):
        form = FORMATS[family.format].calls(TOOLS, CallRule(required=required, parallel=True))
        assert accepts(compiled(form), text), text
    assert read(family.format, text) == ("", _BOTH)


def rendered(name: str, calls: Sequence[Call]) -> str:
    """The calls of a message in the conversation."""
    template = ChatTemplate({"default": TEMPLATES[name]}, {})
    said = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    shown = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters or {}}}
        for tool in TOOLS
    ]
    before, after = (
        template.render([{"role": "assistant", "content": "§", **more}], tools=shown)
        for more in ({}, {"tool_calls": said})
    )
    begin = before.rindex("§")
    text = after[begin:].removeprefix("§")
    if name == "pythonic":
        # A message has calls or text.
        text = template.render([{"role": "assistant", "tool_calls": said}], tools=shown)[begin:]
    ends = ("<|im_end|>", "<|eot_id|>")
    return next((text[: text.index(end)] for end in ends if end in text), text)


def test_calls_are_told_in_the_models_words_where_its_template_has_none() -> None:
    lfm = FORMATS["lfm2"]
    given = '{"a": "it\'s \\"so\\"", "b": [true, null, 1], "c": {"d": false}}'
    text = lfm.calls_in_words([("f", given)])
    assert text is not None
    assert text == (
        "<|tool_call_start|>"
        """[f(a='it\\'s "so"', b=[True, None, 1], c={"d": false})]"""
        "<|tool_call_end|>"
    )
    assert read("lfm2", text) == ("", [f(a='it\'s "so"', b=[True, None, 1], c={"d": False})])
    two = lfm.calls_in_words([("now", "{}"), ("f", "{}")])
    assert two == "<|tool_call_start|>[now(), f()]<|tool_call_end|>"


# ---- What calls are held to --------------------------------------------------------------------


def test_values_are_held_to_the_schema_in_the_familys_own_writing() -> None:
    form = compiled(FORMATS["gemma4"].calls(TOOLS, CallRule(required=True, parallel=False)))
    around = "<|tool_call>call:get_weather{%s}<tool_call|>"
    quoted = '<|"|>%s<|"|>'
    city = f"city:{quoted % 'Paris'}"
    for right in (
        city,
        f"{city},days:3,exact:true",
        f"{city},where:null",
        f"{city},where:{quoted % 'x'}",
        f"{city},tags:[]",
        f"{city},tags:[{quoted % 'a'},{quoted % 'b'}]",
        f"{city},more:{{unit:{quoted % 'C'},what:[1,{quoted % 'x'},null]}}",
    ):
        assert accepts(form, around % right), right
    for wrong in (
        "",
        "city:3",
        f"{city},days:{quoted % '3'}",
        f"{city},exact:True",
        f"{city},more:{{unit:{quoted % 'K'}}}",
        f"{city},more:{{}}",
        f"days:3,{city}",
        f"{city}, days:3",
    ):
        assert not accepts(form, around % wrong), wrong


def test_python_values_are_held_to_the_schema() -> None:
    form = compiled(FORMATS["lfm2"].calls(TOOLS, CallRule(required=True, parallel=False)))
    around = "<|tool_call_start|>[get_weather(%s)]<|tool_call_end|>"
    for right in (
        "city='it\\'s'",
        "city='x', days=3, exact=True, where=None, tags=['a', 'b']",
        'city=\'x\', more={"unit": "C"}',
    ):
        assert accepts(form, around % right), right
    for wrong in ("", "city=3", "city='x', exact=true", 'city=\'x\', more={"unit": "K"}'):
        assert not accepts(form, around % wrong), wrong


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma4", "Gcall:get_weather{a:{b:[QxQ]},city:1}H"),
        ("lfm2", "S[get_weather(city=['x', ['y', None]], tags={\"a\": [1]})]E"),
    ],
)
def test_values_of_a_tool_that_is_not_strict_are_any_in_the_familys_own_writing(
    name: str, text: str
) -> None:
    loose = FORMATS[name].calls(TOOLS, CallRule(required=False, parallel=True))
    assert accepts(compiled(loose), marked(name, text))
    forced = FORMATS[name].calls(TOOLS, CallRule(required=True, parallel=True))
    assert not accepts(compiled(forced), marked(name, text))


def test_a_strict_schema_that_bare_keys_cannot_be_held_to_is_refused() -> None:
    tool = Tool("f", {"type": "object", "properties": {"a b": {}}}, strict=True)
    with pytest.raises(BadRequest, match="'f' cannot be strict with the argument 'a b'"):
        FORMATS["gemma4"].calls([tool], CallRule(required=False, parallel=True))


# ---- Reasoning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|channel>thought\nHm.\nSo.\n<channel|>Gcall:now{}H", "(Hm.\nSo.)"),
        ("<|channel>thought\n<channel|>Gcall:now{}H", ""),
        ("<|channel>thoughts<channel|>Gcall:now{}H", "(thoughts)"),
        ("<|channel>thought\nthought\nx<channel|>Hm.Gcall:now{}H", "(thought\nx)Hm."),
        ("Hm.Gcall:now{}H", "Hm."),
        ("<|channel>thought\nHm.\n\nGcall:now{}H", "(Hm.)"),
    ],
)
def test_gemmas_channel_of_thought_is_reasoning(text: str, said: str, tokens: bool) -> None:
    assert read("gemma4", marked("gemma4", text), tokens=tokens, style="gemma4") == (said, [NOW])


def test_a_prompt_that_has_an_empty_thought_has_ended_reasoning() -> None:
    style = STYLES["gemma4"]
    template = ChatTemplate({"default": TEMPLATES["gemma4"]}, {})
    prompt = template.render([{"role": "user", "content": "Hi"}])
    assert reasoning_over(prompt, style)
    assert not reasoning_begun(prompt, style)
    thinking = template.render(
        [{"role": "user", "content": "Hi"}], kwargs={"enable_thinking": True}
    )
    assert not reasoning_over(thinking, style)
    assert reasoning_begun(f"{thinking}<|channel>thought\n", style)


@pytest.mark.parametrize(
    "text",
    [
        '[f(a="x (y"), b==2, c=3)]',
        '[f(a="x", b==2)]',
        '[f(a="x("Paris")]}\n</end>[/")]',
        '[f(a="x")]}',
        '[f(a="x"))]]',
    ],
)
def test_what_nearly_follows_a_string_is_judged_alike_however_it_is_cut(text: str) -> None:
    read("pythonic", text)
