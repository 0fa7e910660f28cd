"""Answers that models of families with tags are known to write, right or nearly right."""

from __future__ import annotations

from typing import Any

import pytest
from support.families.tagged_reading import calls_of, content, read

from penstock_router.text.answer_pieces import Piece, PieceKind
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import TOKEN, Marks

Calls = list[tuple[str, Any]]
_DSML = "｜DSML｜"
_M3 = "]<]minimax[>["


def _dsml(parameters: str, name: str = "write_file") -> str:
    return f'<{_DSML}invoke name="{name}">\n{parameters}\n</{_DSML}invoke>'


def _block(inner: str, wrapper: str = "tool_calls") -> str:
    return f"<{_DSML}{wrapper}>\n{inner}\n</{_DSML}{wrapper}>"


def _parameter(key: str, value: str, kind: str = ' string="true"') -> str:
    return f'<{_DSML}parameter name="{key}"{kind}>{value}</{_DSML}parameter>'


_TEXT_X: Calls = [("write_file", {"text": "x"})]
_NOW: Calls = [("now", {})]
_OPEN = "<tool_call>\n<function=write_file>\n<parameter=text>\n"
# A format, an answer, its calls and its content.
CASES: list[tuple[str, str, Calls, str | None]] = [
    # Marks that are missing, or stand there twice.
    ("qwen_xml", "Hm.\n<function=now>\n</function>\n</tool_call>", _NOW, "Hm."),
    ("qwen_xml", "<function=nobody>\n</function>", [], "<function=nobody>\n</function>"),
    ("qwen_xml", "<tool_call>\n<function=nobody>\n</function>", [("nobody", {})], ""),
    ("qwen_xml", _OPEN + "x\n</parameter>\n</function>", _TEXT_X, ""),
    ("qwen_xml", _OPEN + "x\n</parameter>\n</fun", _TEXT_X, ""),
    ("qwen_xml", _OPEN + "x\n</function>\n</tool_call>\n", _TEXT_X, ""),
    ("qwen_xml", _OPEN + "x\n</tool_call>", _TEXT_X, ""),
    # Text that the answer ends with where a key would stand.
    *[
        (name, f"{begun}{mark}\n so ", [], f"{begun}{mark}\n so ")
        for name, begun, mark in [
            ("glm", "<tool_call>now", ""),
            ("hy_v3", "<tool_calls>\n<tool_call>now", "<tool_sep>"),
        ]
    ],
    (
        "qwen_xml",
        "<tool_call>\n<function=write_file\n<parameter=text\nx\n<parameter=count>\n3\n</function>",
        [("write_file", {"text": "x", "count": 3})],
        "",
    ),
    (
        "qwen_xml",
        "<tool_call>\n<tool_call>\n" + _OPEN + "x\n</parameter>\n</function>\n</function>\n"
        "</tool_call>\n</tool_call>\n\nSo.",
        _TEXT_X,
        "So.",
    ),
    (
        "qwen_xml",
        _OPEN + "x\n</parameter>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        _TEXT_X + _NOW,
        "",
    ),
    ("qwen_xml", "<tool_call>\n<function=now>\n", _NOW, ""),
    ("qwen_xml", "Use <tool_call> and\n<function=now> here.", [], None),
    # Values: line breaks, tags as text, types.
    (
        "qwen_xml",
        _OPEN + "\n a\n\n</parameter>\n</function>",
        [("write_file", {"text": "\n a\n"})],
        "",
    ),
    ("qwen_xml", _OPEN + "</parameter>\n</function>", [("write_file", {"text": ""})], ""),
    (
        "qwen_xml",
        _OPEN + "if x </parameter> y:\n</function> z <parameter=no>\n</parameter>\n</function>",
        [("write_file", {"text": "if x </parameter> y:\n</function> z <parameter=no>"})],
        "",
    ),
    (
        "qwen_xml",
        _OPEN + "a</parameter>" + "\n" * 100 + "b\n</parameter>\n</function>",
        [("write_file", {"text": "a</parameter>" + "\n" * 100 + "b"})],
        "",
    ),
    (
        "qwen_xml",
        "<tool_call><function=write_file><parameter=place>{'a': [1,], \"b\": None}}</parameter>"
        "<parameter=on>\nTrue\n</parameter>\n</parameter></function></tool_call>",
        [("write_file", {"place": {"a": [1], "b": None}, "on": True})],
        "",
    ),
    (
        "qwen_xml",
        '<tool_call><function=write_file><parameter=items>\n[1, "a\n</parameter></function>',
        [("write_file", '{"items": [1, "a\\n</parameter></function>')],
        "",
    ),
    (
        "mimo",
        "<function=write_file><parameter=text>\nx\n</parameter></function>",
        [("write_file", {"text": "\nx\n"})],
        "",
    ),
    # Pairs of tags.
    ("glm", "So.\n<tool_call> now \n</tool_call>", _NOW, "So."),
    ("glm", "<tool_call><tool_call>now</tool_call></tool_call>", _NOW, ""),
    ("glm", "<tool_call>now", _NOW, ""),
    ("glm", "Write <tool_call>...</tool_call> here.", [], None),
    ("glm", "Use <tool_call> for\nthis.", [], None),
    (
        "glm",
        "<tool_call>write_file\n<arg_key>text</arg_key>\nx</arg_value>\n<arg_key>count</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [("write_file", {"text": "x", "count": 3})],
        "",
    ),
    (
        "glm",
        "<tool_call>write_file\ntext</arg_key>\n<arg_value>x</arg_value>\ncount</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        [("write_file", {"text": "x", "count": 3})],
        "",
    ),
    (
        "glm",
        "<tool_call>write_filetext</arg_key><arg_value>x</arg_value></tool_call>",
        _TEXT_X,
        "",
    ),
    ("glm", "<tool_call>write_file<arg_key>text<arg_value>x</arg_value></tool_call>", _TEXT_X, ""),
    ("glm", '<tool_call>write_file>{"text": "x"}</tool_call> So.', _TEXT_X, "So."),
    ("glm", '<tool_call>write_file\n{"text": "x"}', _TEXT_X, ""),
    (
        "glm",
        "<tool_call>write_file<arg_key>text</arg_key><arg_value>x<arg_key>count</arg_key>"
        "<arg_value>3</tool_call>",
        [("write_file", {"text": "x", "count": 3})],
        "",
    ),
    (
        "glm",
        "<tool_call>write_file<arg_key>other</arg_key><arg_value>12</arg_value></tool_call>",
        [("write_file", {"other": "12"})],
        "",
    ),
    ("hy_v3", "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", _NOW, ""),
    ("hy_v3", "<tool_calls>\n<tool_call>now\n</tool_call>", _NOW, ""),
    # Types that the answer says, or does not; errors of versions.
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("count", "3", ' string="false"')), "function_calls"),
        [("write_file", {"count": 3})],
        "",
    ),
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("text", "x\n"))).replace(f"{_DSML}", f"{_DSML} "),
        [("write_file", {"text": "x\n"})],
        "",
    ),
    ("deepseek_dsml", _block(_dsml("", "now"), "toolcalls"), _NOW, ""),
    ("deepseek_dsml", _block(_dsml("", "now"), "tool"), _NOW, ""),
    ("deepseek_dsml", "Hm." + _dsml(_parameter("text", "x")), _TEXT_X, "Hm."),
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("other", "[1]", "") + _parameter("more", "a", ""))),
        [("write_file", {"other": [1], "more": "a"})],
        "",
    ),
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("text", "3", "") + _parameter("count", "x", " string='false'"))),
        [("write_file", {"text": "3", "count": "x"})],
        "",
    ),
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("arguments", '{"text": "x"}', ' string="false"'))),
        _TEXT_X,
        "",
    ),
    ("deepseek_dsml", _block(_dsml(_parameter("input", '{"text": "x",}', ""))), _TEXT_X, ""),
    (
        "deepseek_dsml",
        _block(_dsml(_parameter("input", "words", ""))),
        [("write_file", {"input": "words"})],
        "",
    ),
    ("deepseek_dsml", f"Say <{_DSML}tool_calls> and <{_DSML}invoke.", [], None),
    # Quotes.
    (
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name='write_file'><parameter name=text>x</parameter>"
        "</invoke>\n<invoke name=now>\n</invoke></minimax:tool_call>\nSo.",
        _TEXT_X + _NOW,
        "So.",
    ),
    # Elements within each other.
    (
        "minimax_m3",
        f'{_M3}<tool_call>\n{_M3}<invoke name="write_file">{_M3}<items>[1, 2]{_M3}</items>'
        f"{_M3}<place>\n{_M3}<a>{_M3}<a>x{_M3}</a>{_M3}</a>\n{_M3}</place>{_M3}<count>3",
        [("write_file", '{"items": [1, 2], "place": {"a": {"a": "x"}}, "count": 3')],
        "",
    ),
    (
        "minimax_m3",
        f'{_M3}<invoke name="write_file">{_M3}<items>{_M3}</items>{_M3}<place>{_M3}</place>'
        f"{_M3}<place>{_M3}<b>{_M3}<item>1{_M3}</item>{_M3}</invoke>",
        [("write_file", {"items": [], "place": {"b": [1]}})],
        "",
    ),
    (
        "minimax_m3",
        f'{_M3}<invoke name="write_file">{_M3}<place>{_M3}<b>{_M3}<c>x{_M3}</c>{_M3}</place>'
        f"{_M3}<count>3{_M3}</count>{_M3}</invoke>",
        [("write_file", {"place": {"b": {"c": "x"}}, "count": 3})],
        "",
    ),
    ("minimax_m3", f"The mark {_M3} is <tool_call>.", [], None),
    # A mark each for a call, which may be missing or in a line of its own.
    ("step3", '<steptml:invoke name="now"></steptml:invoke>', _NOW, ""),
    (
        "step3",
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>\n"
        '<steptml:invoke name="write_file">\n<steptml:parameter name="text">a < b'
        "</steptml:parameter>\n</steptml:invoke>\n<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        [("write_file", {"text": "a < b"})],
        "",
    ),
    # JSON in a block.
    (
        "dots",
        '<dots_function_call>\n{"name": "write_file", "parameters": {"text": "x"}}\n'
        "</dots_function_call>\n<dots_function_call>\n<invoke name=now>\n</invoke>\n"
        "</dots_function_call>",
        _TEXT_X + _NOW,
        "",
    ),
    ("dots", "<dots_function_call>hm</dots_function_call>", [], None),
    # Sections.
    (
        "minicpm5",
        '<function name="write_file"><param name="text"><![CDATA[a</param> <b> ]]> c]]></param>'
        '<param name="on">False</param></function>',
        [("write_file", {"text": "a</param> <b> ]]> c", "on": False})],
        "",
    ),
    (
        "minicpm5",
        '<function name="write_file"><param name="text"><![CDATA[a',
        [("write_file", '{"text": "a')],
        "",
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=write_file>\n<parameter=text>\nx</parameter>\n"
        "<parameter=place>{'a': [None, True]}</parameter>\n</function>\n</seed:tool_call>",
        [("write_file", {"text": "\nx", "place": {"a": [None, True]}})],
        "",
    ),
]


@pytest.mark.parametrize(("name", "text", "calls", "said"), CASES)
def test_what_a_model_wrote_gives_the_calls_that_it_meant(
    name: str, text: str, calls: Calls, said: str | None
) -> None:
    form = FORMATS[name]
    pieces = read(form, text)
    assert calls_of(pieces) == calls
    assert content(pieces) == (text if said is None else said)
    for size in (1, 2, 7):
        assert read(form, text, size=size) == pieces


def test_a_mark_that_is_spelled_is_text_where_the_tokenizer_has_a_token_for_it() -> None:
    form = FORMATS["glm"]
    marks = Marks(dict(enumerate(form.marks)))
    text = "<tool_call>now</tool_call>"
    assert content(read(form, text, marks=marks)) == text
    marked = f"{TOKEN}<tool_call>now{TOKEN}</tool_call>"
    assert calls_of(read(form, marked, marks=marks)) == _NOW


def test_a_call_behind_a_mark_that_is_spelled_is_text_too() -> None:
    form, marks = FORMATS["qwen_xml"], Marks({5: "<tool_call>", 6: "</tool_call>"})
    text = "So:\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
    for size in (0, 1, 5):
        assert content(read(form, text, marks=marks, size=size)) == text
        # One without the mark is a call, with it too.
        alone = read(form, text.replace("<tool_call>", ""), marks=marks, size=size)
        assert calls_of(alone) == _NOW
        marked = text.replace("<tool_call>", TOKEN + "<tool_call>")
        assert calls_of(read(form, marked, marks=marks, size=size)) == _NOW


def test_a_tag_of_which_a_part_is_a_token_counts_only_with_that_token() -> None:
    form, marks = FORMATS["deepseek_dsml"], Marks({7: _DSML})
    spelled = _block(_dsml("", "now"))
    assert content(read(form, spelled, marks=marks)) == spelled
    marked = spelled.replace(_DSML, TOKEN + _DSML)
    for size in (0, 1, 3):
        assert calls_of(read(form, marked, marks=marks, size=size)) == _NOW


def test_a_token_ends_a_string_whatever_follows_it() -> None:
    form = FORMATS["glm"]
    marks = Marks(dict(enumerate(form.marks)))
    text = (
        f"{TOKEN}<tool_call>write_file{TOKEN}<arg_key>text{TOKEN}</arg_key>{TOKEN}<arg_value>x"
        f"{TOKEN}</tool_call> So."
    )
    pieces = read(form, text, marks=marks)
    assert (calls_of(pieces), content(pieces)) == (_TEXT_X, "So.")
    # Spelled it is text of the string, as what follows it is.
    assert calls_of(read(form, text.replace(TOKEN, ""))) == [
        ("write_file", '{"text": "x</tool_call> So.')
    ]


def test_a_token_ends_json_that_has_no_end() -> None:
    form = FORMATS["glm"]
    marks = Marks(dict(enumerate(form.marks)))
    text = '<tool_call>write_file<arg_key>items</arg_key><arg_value>[1, "a</arg_value></tool_call>'
    for mark in ("<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"):
        text = text.replace(mark, TOKEN + mark)
    text = text.replace("</tool_call>", f"{TOKEN}</tool_call>")
    assert calls_of(read(form, text, marks=marks)) == [("write_file", {"items": [1, "a"]})]


def test_a_name_is_shown_with_the_first_argument_and_strings_as_they_come() -> None:
    parser = FORMATS["qwen_xml"].parser(())
    assert parser.feed("<tool_call>\n<function=f>\n") == []
    shown = parser.feed("<parameter=a>\nsome")
    assert shown[0] == Piece(PieceKind.CALL, "f")
    assert "".join(piece.text for piece in shown[1:]) == '{"a": "some'
    assert parser.is_open


def test_a_call_that_was_cut_off_is_not_completed() -> None:
    form, text = FORMATS["minimax_m2"], '<invoke name="write_file"><parameter name="text">x'
    pieces = read(form, text + "</parameter>\n", was_cut=True)
    assert calls_of(pieces) == [("write_file", '{"text": "x"')]
    assert calls_of(read(form, text + "</parameter>\n")) == _TEXT_X


@pytest.mark.parametrize("end", ["<", "<parame", "<parameter=", "<parameter=te"])
def test_a_call_that_ends_in_an_arguments_tag_is_none(end: str) -> None:
    text = f"<tool_call>\n<function=now>\n{end}"
    pieces = read(FORMATS["qwen_xml"], text)
    assert (calls_of(pieces), content(pieces)) == ([], text)
    assert calls_of(read(FORMATS["qwen_xml"], text.removesuffix(end))) == _NOW


def test_an_end_tag_before_any_argument_is_given_back_where_the_answer_ends() -> None:
    text = f'{_M3}<tool_call>\n{_M3}<invoke name="write_file">{_M3}</a>{_M3}<b'
    assert content(read(FORMATS["minimax_m3"], text, was_cut=True)) == text


def test_elements_may_stand_within_each_other_without_end() -> None:
    depth = 20_000
    text = f'{_M3}<invoke name="write_file">' + f"{_M3}<a>" * depth + f"{_M3}</b>" * depth
    pieces = read(FORMATS["minimax_m3"], text + f"{_M3}</invoke>")
    [(name, arguments)] = [(p.text, "") for p in pieces if p.kind is PieceKind.CALL]
    arguments = "".join(piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS)
    assert (name, arguments) == ("write_file", '{"a": ' * (depth - 1) + '{"a": ""' + "}" * depth)
