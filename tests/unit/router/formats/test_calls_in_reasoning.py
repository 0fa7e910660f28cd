"""Calls within reasoning that a model does not end: which are calls, and which are its thoughts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from support.budget import budget, seeded
from support.families import FAMILIES
from support.random_calls import calls_of, cut, read, reader_of, same, text_of

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces

HERMES = next(each for each in FAMILIES if each.format == "hermes")
TOOLS = (
    Tool(
        "look_up",
        {
            "type": "object",
            "properties": {"word": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["word"],
        },
    ),
    Tool("now"),
)
LOOK_UP = ("look_up", {"word": "a"})
CALL = HERMES.write([LOOK_UP])
NOW = HERMES.write([("now", {})])


def told(text: str) -> tuple[str, str, list[str]]:
    """Reasoning, content and calls, which no cut changes."""
    whole = read(HERMES, [text], TOOLS)
    assert read(HERMES, list(text), TOOLS) == whole
    for at in range(len(text) + 1):
        assert read(HERMES, [text[:at], text[at:]], TOOLS) == whole, at
    reasoning = text_of(whole, PieceKind.REASONING)
    return reasoning, text_of(whole, PieceKind.CONTENT), calls_of(whole)


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        (f"<think>I look.\n\n{CALL}", "I look."),
        (f"<think>I look. {CALL}", "I look."),
        (f"<think>{CALL}", ""),
        (f"<think>\n{CALL}\n", ""),
        (f"<think>I look.\n{CALL}\nThat is all.", "I look."),
        (f'<think>A `tag`, a "word":\n```\n{NOW}\n```\nSo:\n{CALL}', None),
        (f"<think>I look.\n<tool_call>{CALL}", "I look."),
        (f"<think>I look.\n{CALL.removesuffix('</tool_call>')}", "I look."),
        (f"<think>I look.\n{CALL.removesuffix(chr(10) + '</tool_call>')}", "I look."),
    ],
)
def test_a_whole_call_is_one_if_reasoning_is_never_ended(text: str, reasoning: str | None) -> None:
    thought, content, calls = told(text)
    assert calls == same([LOOK_UP])
    assert thought == (
        reasoning if reasoning is not None else text[7 : text.rindex("\n<tool_call>")]
    )
    assert content.strip() in ("", "That is all.")


def test_several_calls_are_all_calls() -> None:
    text = f"<think>I look.\n{CALL}\n{NOW}\n{CALL}"
    assert told(text) == ("I look.", "", same([LOOK_UP, ("now", {}), LOOK_UP]))


_UNKNOWN = HERMES.write([("launch", {"word": "a"})])
_LACKING = HERMES.write([("look_up", {"most": 1})])


@pytest.mark.parametrize(
    "thought",
    [
        f"I would write `{CALL}`.",
        f'It is "{CALL}"',
        f"As in:\n```\n{CALL}\n```\n",
        f"As in:\n```xml\nso: {CALL}",
        f"I look.\n{_UNKNOWN}",
        f"I look.\n{_LACKING}",
        f"I look.\n{CALL}\n{_LACKING}",
        f"I look.\n{CALL}\n{_UNKNOWN}",
        f"I look.\n{CALL[:40]}",
        f"I look.\n{CALL[:-16]}x",
        "The mark <tool_call> begins a call, </tool_call> ends it.",
        "<tool_call> is a mark",
        f"I write {CALL} then.",
        f"I write {CALL} then.\nAnd so on",
        "Nothing.\n<tool_c",
        "Nothing. \n ",
    ],
)
def test_what_is_quoted_unknown_lacking_or_not_closed_is_reasoning(thought: str) -> None:
    assert told(f"<think>{thought}") == (thought, "", [])


@pytest.mark.parametrize(
    "thought", [CALL, f"I look.\n{CALL}", f"I write {CALL}", f"{CALL}\n\n{NOW} hm", _UNKNOWN]
)
def test_all_is_reasoning_if_that_comes_to_its_end(thought: str) -> None:
    assert told(f"<think>\n{thought}\n</think>\n\n{NOW}") == (thought, "", same([("now", {})]))
    assert told(f"<think>{thought}</think>Done.") == (thought, "Done.", [])


def shown(parts: Sequence[str]) -> str:
    """The reasoning that is shown while more may follow."""
    reader = reader_of(HERMES, TOOLS)
    return text_of(
        join_pieces([p for part in parts for p in reader.feed(part)]), PieceKind.REASONING
    )


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    assert shown(["<think>I look.\n<tool_call>\n"]) == "I look."
    assert shown([f"<think>I look.\n{CALL}"]) == "I look."
    text = "I look.\n<tool_call> or what"
    assert shown([f"<think>{text}"]) == text
    text = f"I look.\n{_UNKNOWN}"
    assert shown([f"<think>{text}"]) == text
    # Behind a call within a line more text shows that it is none.
    assert shown([f"<think>I write {CALL} x"]) == f"I write {CALL} x"
    assert shown([f"<think>I write `{CALL}"]) == f"I write `{CALL}"


def test_a_call_that_was_cut_off_is_reasoning() -> None:
    text = f"<think>I look.\n{CALL[:-16]}"
    pieces = read(HERMES, [text], TOOLS, was_cut=True)
    assert pieces == [Piece(PieceKind.REASONING, text.removeprefix("<think>"))]


def test_reasoning_that_the_prompt_has_begun_is_gone_through_too() -> None:
    reader = reader_of(HERMES, TOOLS, begun=True)
    pieces = join_pieces([*reader.feed(f"I look.\n{CALL}"), *reader.flush()])
    assert text_of(pieces, PieceKind.REASONING) == "I look."
    assert calls_of(pieces) == same([LOOK_UP])
    assert not reader.is_open


SCRAPS = (CALL, NOW, _UNKNOWN, "<tool_call>", "</tool_call>", "`", "```\n", "\n", " ", "word", '"')


def test_random_thoughts_are_read_alike_however_they_are_cut_and_none_is_lost() -> None:
    rng = seeded("thoughts")
    for _ in range(budget(300, 20_000)):
        thought = "".join(rng.choices([*SCRAPS, CALL[: rng.randint(1, 60)]], k=rng.randint(1, 8)))
        text = f"<think>{thought}" + rng.choice(["", "</think>", "</think>Done.", "</thi"])
        whole = read(HERMES, [text], TOOLS)
        assert read(HERMES, list(text), TOOLS) == whole, text
        assert read(HERMES, cut(rng, text), TOOLS) == whole, text
        reasoning = text_of(whole, PieceKind.REASONING)
        if "</think>" in text:
            assert reasoning == thought.strip(), text
            continue
        calls = calls_of(whole)
        assert text.removeprefix("<think>").lstrip().startswith(reasoning), text
        assert {json.loads(call)[0] for call in calls} <= {"look_up", "now"}, text
        if not calls:
            assert reasoning == text.removeprefix("<think>").lstrip(), text


def work(text: str) -> int:
    reader = reader_of(HERMES, TOOLS)
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for at in range(0, len(text), 4):
            reader.feed(text[at : at + 4])
        reader.flush()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "more",
    [
        "word ",
        "word\n",
        " ",
        "<",
        "<tool_call>",
        "<tool_call>x",
        "`<tool_call>",
        "```\n",
        f"{CALL}\n",
        f"{CALL} x\n",
        f"{CALL} x",
        "<tool_call>\n{",
        '<tool_call>\n{"a": [',
    ],
)
def test_work_grows_as_reasoning_does(more: str) -> None:
    size = budget(2_000, 50_000)
    text = "<think>" + more * (2 * size // len(more) + 1)
    assert work(text[: 2 * size]) < 2.5 * work(text[:size]) + 1_000
