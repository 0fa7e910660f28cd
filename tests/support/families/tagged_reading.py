"""Parts that tests of formats with tags share: tools, random values, and answers in which marks
are tokens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks
from support.families.family import Call, Family

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "code": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "on": {"type": "boolean"},
    "maybe": {"type": ["string", "null"]},
    "place": {"type": "object"},
    "items": {"type": "array"},
}
TOOLS = (
    Tool("write_file", {"type": "object", "properties": PROPERTIES}),
    Tool("now", {"type": "object", "properties": {}}),
    Tool("get-it", {"type": "object", "properties": PROPERTIES}),
)
_WORDS = ["def f(x):\n    return x < 3 and x > 1\n", "é😀", '"', "'", "\\", "\t", "{", "]", "&amp;"]
_WORDS += [
    "if a <b",
    "</",
    "<",
    "None",
    "[1, 2",
    "\n\n",
    "  ",
    "<div>\n</div>",
    "null",
    "<|x|>",
    "`",
]


def read(
    form: CallFormat,
    text: str,
    *,
    size: int = 0,
    was_cut: bool = False,
    marks: Marks = NO_MARKS,
    tools: Sequence[Tool] = TOOLS,
) -> list[Piece]:
    """The pieces of an answer that comes in parts of a size; 0: at once."""
    parser = form.parser(tools, marks)
    pieces: list[Piece] = []
    for at in range(0, len(text), size or len(text) or 1):
        pieces += parser.feed(text[at : at + (size or len(text))])
    return join_pieces([*pieces, *parser.flush(was_cut=was_cut)])


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, Any]]:
    """Return the name and arguments of each call. Arguments that are not JSON stay text."""
    calls = [(piece.text, "") for piece in pieces if piece.kind is PieceKind.CALL]
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            name, given = calls[piece.call]
            calls[piece.call] = name, given + piece.text
    return [(name, _parsed(given)) for name, given in calls]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def content(pieces: Sequence[Piece]) -> str:
    return content_of(pieces)


def meant(family: Family, call: Call) -> Call:
    """The call that is read: of what the family cannot write nothing is left."""
    return call if family.format != "minimax_m3" else (call[0], _without_none(call[1]))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return ["" if each is None else _without_none(each) for each in value]
    return value


def random_call(rng: random.Random, tags: Sequence[str] = (), *, is_safe: bool = True) -> Call:
    """A call of one of the tools; `tags` may stand in its strings, if safe only where ordinary text
    follows them.
    """
    tool = rng.choice(TOOLS)
    names = list((tool.parameters or {})["properties"])
    chosen = rng.sample(names, rng.randint(0, len(names)))
    return tool.name, {name: _value(rng, name, tags, is_safe) for name in chosen}


def _value(rng: random.Random, name: str, tags: Sequence[str], is_safe: bool) -> Any:
    string = _string(rng, tags, is_safe)
    plain = "w" + _string(rng, (), True)
    return {
        "text": string,
        "code": string,
        "count": rng.randint(-9, 10**6),
        "ratio": rng.choice([0.5, -1.25, 3e-7]),
        "on": rng.random() < 0.5,
        "maybe": rng.choice([None, "some words", "a < b"]),
        "place": {"a": [1, None, plain], "b": {"c": plain}},
        "items": [plain, 1, True, {"x": plain}],
    }[name]


def _string(rng: random.Random, tags: Sequence[str], is_safe: bool) -> str:
    parts = rng.choices(_WORDS, k=rng.randint(0, 6))
    for _ in range(rng.randint(0, 3) if tags else 0):
        parts.insert(rng.randint(0, len(parts)), rng.choice(tags) + (" x" if is_safe else ""))
    return "".join(parts)


def marks_of(form: CallFormat) -> Marks:
    """Marks as of a tokenizer that has a token for each, or for parts of them."""
    return Marks(dict(enumerate(getattr(form, "token_parts", ()) or form.marks)))


def written_in_tokens(family: Family, form: CallFormat, calls: Sequence[Call]) -> str:
    """Calls as the family writes them with a token for each mark, but for marks in strings."""
    strings: list[str] = []

    def hidden(value: Any) -> Any:
        if isinstance(value, str) and ("<" in value or "]" in value):
            strings.append(value)
            return f"hidden{len(strings) - 1}z"
        return value

    given = [(name, {key: hidden(each) for key, each in args.items()}) for name, args in calls]
    text = family.write(given)
    longest_first = sorted(marks_of(form).tokens.values(), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    text = pattern.sub(lambda mark: TOKEN + mark.group(), text)
    return re.sub(r"hidden(\d+)z", lambda at: strings[int(at.group(1))], text)
