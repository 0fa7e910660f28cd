"""Answers as models of each family write them, however they are cut."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from support.budget import budget, seeded
from support.recorded_tool_calls import OFFERED, RECORDED, Recorded

from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.formats.registry import FORMATS

each_record = pytest.mark.parametrize(
    "recorded", RECORDED, ids=[f"{one.family}-{at}" for at, one in enumerate(RECORDED)]
)


def pieces_of(family: str, parts: list[str]) -> list[Piece]:
    """Return the joined pieces that a parser makes of a text that comes in these parts."""
    parser = FORMATS[family].parser(OFFERED)
    pieces = []
    for part in parts:
        pieces += parser.feed(part)
    return join_pieces([*pieces, *parser.flush()])


def calls_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Return each call's name, and its arguments as they were given."""
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    arguments = [""] * len(names)
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            arguments[piece.call] += piece.text
    return list(zip(names, arguments, strict=True))


def parsed(arguments: str) -> object:
    """The arguments; None where they were cut off."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return None


@each_record
def test_what_a_model_wrote_gives_the_calls_that_it_meant(recorded: Recorded) -> None:
    pieces = pieces_of(recorded.family, [recorded.text])
    calls = [(name, parsed(arguments)) for name, arguments in calls_of(pieces)]
    assert calls == recorded.calls
    assert content_of(pieces) == recorded.content


@each_record
def test_no_cut_changes_what_comes_out(recorded: Recorded) -> None:
    text = recorded.text
    whole = pieces_of(recorded.family, [text])
    assert pieces_of(recorded.family, list(text)) == whole
    for cut in range(len(text) + 1):
        assert pieces_of(recorded.family, [text[:cut], text[cut:]]) == whole, cut
    rng = seeded("cuts")
    for _ in range(budget(10, 300)):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 20)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert pieces_of(recorded.family, parts) == whole, cuts


@pytest.mark.parametrize("family", sorted({one.family for one in RECORDED} - {"pythonic"}))
def test_arguments_that_are_json_already_are_given_as_they_are(family: str) -> None:
    # But for those that are JSON in a string, or no JSON.
    is_mended = re.compile(r""": "\{|[{ ]'|\{city|,\}|\n\treturn|\.call\(""")
    records = [one for one in RECORDED if one.family == family and not is_mended.search(one.text)]
    assert len(records) > 8
    for recorded in records:
        for _, arguments in calls_of(pieces_of(family, [recorded.text])):
            assert arguments == "{}" or arguments in recorded.text


def test_each_of_these_families_has_a_dozen_records() -> None:
    count = Counter(one.family for one in RECORDED)
    assert min(count.values()) >= 12


def shown_early(family: str, text: str) -> list[Piece]:
    """Return what is shown of a text while more may follow."""
    return join_pieces(FORMATS[family].parser(OFFERED).feed(text))


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": "lo'),
        ("llama_json", '{"name": "now", "parameters": {"a": "lo'),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {"a": "lo'),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "lo'),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "lo'),
        ("plain_json", '{"name": "now", "arguments": {"a": "lo'),
        ("pythonic", "[now(a='lo"),
    ],
)
def test_arguments_are_shown_while_they_come(family: str, text: str) -> None:
    assert shown_early(family, text) == [
        Piece(PieceKind.CALL, "now"),
        Piece(PieceKind.ARGUMENTS, '{"a": "lo'),
    ]


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = FORMATS["hermes"].parser(OFFERED)
    assert content_of(parser.feed("a < b")) == "a < b"
    assert content_of(parser.feed(" <tool")) == ""
    assert content_of(parser.feed("s> <")) == " <tools>"
    assert content_of(parser.feed("<tool_c")) == " <"
    assert content_of(parser.feed("lass> ")) == "<tool_class>"
    assert content_of(parser.flush()) == " "


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = FORMATS["hermes"].parser(OFFERED)
    assert parser.feed('<tool_call>{"arguments": {"a": 1}, "name": "no') == []
    assert calls_of(parser.feed('w"')) == [("now", '{"a": 1}')]


def test_a_name_that_no_tool_has_is_text_at_once_where_calls_have_no_mark() -> None:
    text = '{"name": "launch"'
    assert shown_early("llama_json", text) == [Piece(PieceKind.CONTENT, text)]


def test_behind_a_mark_a_call_may_have_any_name() -> None:
    text = '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'
    assert calls_of(pieces_of("hermes", [text])) == [("launch", "{}")]


def test_a_word_of_python_that_is_cut_off_is_shown_as_far_as_it_came() -> None:
    pieces = pieces_of("pythonic", ["[now(a=12, b=Tr"])
    assert calls_of(pieces) == [("now", '{"a": 12, "b": Tr')]


def test_half_a_character_in_arguments_that_came_as_a_string_is_none() -> None:
    said = (
        '{"name": "search", "arguments": "{\\"query\\": \\"\\ud83d \\\\ud800 \\ud83d\\ude00\\"}"}'
    )
    for text in (said, said.replace('"name": "search", ', "")[:-1] + ', "name": "search"}'):
        [(name, arguments)] = calls_of(pieces_of("hermes", [f"<tool_call>{text}</tool_call>"]))
        assert name == "search"
        assert json.loads(arguments) == {"query": "\ufffd \ufffd \U0001f600"}


@pytest.mark.parametrize("none", ["null", "[]", '""', '"[]"', '"null"', "{}"])
def test_arguments_that_are_nothing_are_an_empty_object(none: str) -> None:
    for text in (f'"name": "now", "arguments": {none}', f'"arguments": {none}, "name": "now"'):
        pieces = pieces_of("hermes", [f"<tool_call>{{{text}}}</tool_call>"])
        assert calls_of(pieces) == [("now", "{}")]
