"""Reasoning told from content: by its marks, wherever the text is cut, and by no others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.budget import budget, seeded
from unit.router.chat_template_styles import STYLES as TEMPLATES

from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces
from penstock_router.text.reasoning import (
    STYLES,
    ReasoningSplitter,
    ReasoningStyle,
    reasoning_begun,
    reasoning_over,
    style_of,
)

THINK = STYLES["think"]
_KINDS = {PieceKind.REASONING: "R", PieceKind.CONTENT: "C"}


def split(
    texts: Sequence[str], begun: bool = False, style: ReasoningStyle = THINK
) -> list[tuple[str, str]]:
    splitter = ReasoningSplitter(style, begun)
    pieces = [piece for text in texts for piece in splitter.feed(text)]
    return shown([*pieces, *splitter.flush()])


def shown(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    return [(_KINDS[piece.kind], piece.text) for piece in join_pieces(pieces)]


ANSWERS = [
    ("<think>\nhm, hm\n</think>\n\nYes.\n", False, [("R", "hm, hm"), ("C", "Yes.\n")]),
    (" \n<think>hm</think>Yes.", False, [("R", "hm"), ("C", "Yes.")]),
    ("\nhm\n\n so\n</think>\nYes.", True, [("R", "hm\n\n so"), ("C", "Yes.")]),
    ("<think>\n\n</think>\n\nYes.", False, [("C", "Yes.")]),
    ("</think>Yes.", True, [("C", "Yes.")]),
    ("  Yes. <think>no</think>", False, [("C", "  Yes. <think>no</think>")]),
    ("<thin", False, [("C", "<thin")]),
    (" <thing>", False, [("C", " <thing>")]),
    (" \n", False, [("C", " \n")]),
    (
        "<think>a</think>b<think>c</think>d</think>",
        False,
        [("R", "a"), ("C", "b<think>c</think>d</think>")],
    ),
    ("<think>a <think>b</think>c", False, [("R", "a <think>b"), ("C", "c")]),
    ("<think>never done </thi", False, [("R", "never done </thi")]),
    ("<think>never done \n", False, [("R", "never done \n")]),
    ("<think> \n", False, []),
    ("<think>a </thi b< /</think> </thin>", False, [("R", "a </thi b< /"), ("C", "</thin>")]),
    ("<think>a</think> </think>\nb</think>", False, [("R", "a"), ("C", "b</think>")]),
    ("<think>\n<think>a</think>b", False, [("R", "a"), ("C", "b")]),
    ("<think> <think><thin", True, [("R", "<thin")]),
    (" </think>\nb", False, [("C", "b")]),
    ("</think></think>b", True, [("C", "b")]),
    ("<think>a</think> </thi", False, [("R", "a"), ("C", "</thi")]),
    ("a</think>  ", True, [("R", "a")]),
    ("", False, []),
    ("", True, []),
]


@pytest.mark.parametrize(("text", "begun", "wanted"), ANSWERS)
def test_reasoning_is_what_stands_between_the_marks_however_the_text_is_cut(
    text: str, begun: bool, wanted: list[tuple[str, str]]
) -> None:
    assert split([text], begun) == wanted
    assert split(list(text), begun) == wanted
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            parts = [text[:first], text[first:second], text[second:]]
            assert split(parts, begun) == wanted, parts


@pytest.mark.parametrize(
    "style", sorted({style for style in STYLES.values() if not any(style.answer)}, key=str)
)
def test_random_answers_in_every_style_are_read_alike_however_they_are_cut(
    style: ReasoningStyle,
) -> None:
    rng = seeded("reasoning")
    marks = [style.begin, style.end, style.begin[:3], style.end[:-1], style.end[0]]
    words = [*marks, " ", "\n", "word", "ü", "</", "<think>"]
    for _ in range(budget(300, 30_000)):
        text = "".join(rng.choices(words, k=rng.randrange(10)))
        begun = rng.random() < 0.5
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
        parts = [text[start:end] for start, end in ends]
        assert split(parts, begun, style) == _told(text, begun, style), (text, parts)


def _told(text: str, begun: bool, style: ReasoningStyle) -> list[tuple[str, str]]:
    """The rule, for a text that is there as a whole."""
    if not begun and not text.lstrip().startswith(style.marks):
        return [("C", text)] if text else []
    text, is_begun = _without(text, style.begin)
    if not (begun or is_begun):
        return [("C", content)] if (content := _without(text, style.end)[0]) else []
    reasoning, end, content = text.partition(style.end)
    content, _ = _without(content, style.end)
    pieces = [("R", reasoning.rstrip() if end else reasoning), ("C", content)]
    return [(kind, piece) for kind, piece in pieces if piece]


def _without(text: str, mark: str) -> tuple[str, bool]:
    """The text without the mark and white space at its beginning; whether the mark was there."""
    stripped = text.lstrip()
    while stripped.startswith(mark):
        stripped = stripped.removeprefix(mark).lstrip()
    return stripped, text.lstrip().startswith(mark)


def test_content_is_shown_as_soon_as_no_mark_can_follow() -> None:
    splitter = ReasoningSplitter(THINK, begun=False)
    assert shown(splitter.feed("\n")) == []
    assert shown(splitter.feed("<th")) == []
    assert shown(splitter.feed("e")) == [("C", "\n<the")]
    assert shown(splitter.feed(" <think>")) == [("C", " <think>")]


def test_reasoning_is_shown_up_to_what_may_be_its_end() -> None:
    splitter = ReasoningSplitter(THINK, begun=True)
    assert shown(splitter.feed("\nso ")) == [("R", "so")]
    assert shown(splitter.feed("it is\n</th")) == [("R", " it is")]
    assert shown(splitter.feed("ou")) == [("R", "\n</thou")]
    assert splitter.in_reasoning
    assert shown(splitter.feed("</think>")) == []
    assert splitter.is_over
    assert not splitter.in_reasoning


def test_whitespace_without_end_takes_no_time_that_grows_with_what_came() -> None:
    for begun in (False, True):
        splitter = ReasoningSplitter(THINK, begun)
        parts = ["\n" * 100] * 20_000
        pieces = [piece for part in parts for piece in splitter.feed(part)]
        pieces += splitter.feed("x")
        assert shown(pieces) == ([("R", "x")] if begun else [("C", "\n" * 2_000_000 + "x")])


# ---- Which style -------------------------------------------------------------------------------


def test_the_style_is_the_one_whose_end_mark_the_template_has() -> None:
    found = {name: style_of(source) for name, source in TEMPLATES.items()}
    thinking = {name for name, style in found.items() if style is THINK}
    assert thinking == {"deepseek", "qwen-tools"}
    assert set(found.values()) == {THINK, None}
    assert style_of("{{ '[/THINK]' }}") is STYLES["magistral"]
    assert style_of("'Here is my thought process:' 'Here is my response:'") is STYLES["granite"]


def test_a_template_that_only_takes_old_reasoning_off_is_of_a_model_that_reasons() -> None:
    assert style_of("{% set text = m.content.split('</think>')[-1] %}") is THINK


def test_the_operator_has_the_last_word() -> None:
    assert style_of("</think>", "none") is None
    assert style_of("", "deepseek_r1") is THINK
    assert style_of("</think>", "granite") is STYLES["granite"]


# ---- What the prompt has begun -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "continued", "wanted"),
    [
        ("<|assistant|>\n<think>\n", "", True),
        ("<|assistant|><think>", "", True),
        ("<|assistant|>\n", "", False),
        ("<think>\n\n</think>\n\n", "", False),
        ("<|user|>what is <think>?<|assistant|>", "", False),
        ("<|assistant|><think>Well", "<think>Well", True),
        ("<|assistant|><think>\nWell, ", "Well, ", True),
        ("<|assistant|><think>a</think>Well", "<think>a</think>Well", False),
        ("<|user|>what is <think>?<|assistant|>Well", "Well", False),
    ],
)
def test_a_prompt_begins_reasoning_at_its_very_end(
    prompt: str, continued: str, wanted: bool
) -> None:
    assert reasoning_begun(prompt, THINK, continued) is wanted


def test_a_prompt_may_have_ended_reasoning() -> None:
    assert reasoning_over("<think>\n\n</think>\n\n", THINK)
    assert not reasoning_over("<|user|></think><|assistant|>", THINK)
