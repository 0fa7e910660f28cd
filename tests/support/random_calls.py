"""Calls at random, with arguments of every type, and readers of what families write of them.

A string may have marks of the family's own in it. They stand in calls as letters that nothing else
has (`Spelling`), so that a test can say how they are written: as text, as something that looks like
them, by tokens of their own or by others.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.answer_pieces import Piece, PieceKind, join_pieces
from penstock_router.text.answer_reader import AnswerReader, make_reader
from penstock_router.text.formats.base import CallFormat
from penstock_router.text.formats.channels import ChannelFormat
from penstock_router.text.formats.registry import FORMATS
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.reasoning import STYLES, ReasoningStyle
from support.families.family import Call, Family

_TEXT: JsonObject = {"type": "string"}
_TOKENS = re.compile(r"<[|｜][^|｜<>]*[|｜]>")
_BRACKET = re.compile(r"[>\]]|(?<![>\]])$")
# What some families have no way to write within other values.
_EMPTY: tuple[Any, ...] = (None, {}, [])
# With properties, so that families whose values have no quotes know their types.
_EXTRA: JsonObject = {
    "type": "object",
    "properties": {
        "flag": {"type": "boolean"},
        "none": {"type": "null"},
        "text": _TEXT,
        "note": _TEXT,
    },
}


def _tool(name: str, required: Sequence[str] = (), **properties: JsonObject) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return Tool(name, schema)


TOOLS = (
    _tool(
        "write_file",
        ("path", "content"),
        path=_TEXT,
        content=_TEXT,
        mode={"type": "integer"},
        executable={"type": "boolean"},
        extra=_EXTRA,
    ),
    _tool(
        "search",
        ("query",),
        query=_TEXT,
        ratio={"type": "number"},
        filter={"type": "object"},
        tags={"type": "array"},
        lang={"type": ["string", "null"]},
        kind={"enum": ["web", "news"]},
        extra=_EXTRA,
    ),
    _tool(
        "get_weather",
        ("city",),
        city=_TEXT,
        days={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        nothing={"type": "null"},
        extra=_EXTRA,
    ),
    _tool("now"),
)
_BY_NAME = {tool.name: tool for tool in TOOLS}
SCRAPS = (
    "a",
    "word",
    " ",
    "\n",
    "\n\n  ",
    "\t",
    '"',
    "'",
    "\\",
    "\\n",
    "é東🌧",
    "{",
    "}",
    "]",
    "},",
    ")",
    ", ",
    ": ",
    "</",
    "<b>bold</b>",
    "</div>\n",
    "&amp;",
    "if x < 3 and y > \"a\":\n    return {'k': [1]}\n",
    '{"name": "now", "arguments": {}}',
    "```python\nprint(1)\n```",
    "<|x|>",
    "3",
    "null",
    "§",
)


# ---- Marks within strings ----------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """The marks of a family that may stand in strings, and the letter that stands for each."""

    letters: dict[str, str]

    def texts(self) -> list[str]:
        """The letters."""
        return list(self.letters)

    def whole(self, text: str) -> str:
        """The text with the marks themselves."""
        for letter, mark in self.letters.items():
            text = text.replace(letter, mark)
        return text

    def alike(self, text: str) -> str:
        """The text with what only looks like the marks."""
        for letter, mark in self.letters.items():
            text = text.replace(letter, _BRACKET.sub(r"·\g<0>", mark))
        return text


def spelling_of(family: Family) -> Spelling:
    """The family's marks, but for those that strings cannot have as they are."""
    marks = [mark for mark in FORMATS[family.format].marks if not set('"\\\n') & set(mark)]
    return Spelling({chr(0x1681 + at): mark for at, mark in enumerate(marks)})


# ---- Calls -------------------------------------------------------------------------------------


def random_text(rng: random.Random, letters: Sequence[str] = (), most: int = 8) -> str:
    """A string of an argument."""
    scraps = rng.choices([*SCRAPS, *letters, *letters], k=rng.randint(0, most))
    return rng.choice(["", " "]).join(scraps)


def random_value(rng: random.Random, letters: Sequence[str] = (), depth: int = 0) -> Any:
    """A value of any type."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [random_value(rng, letters, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        keys = [rng.choice(["key", "k_2", "from", "ü"]) for _ in range(rng.randint(0, 3))]
        return {key: random_value(rng, letters, depth + 1) for key in keys}
    values = [None, True, False, rng.randint(-9, 999), rng.randint(-9, 9) + 0.5]
    return values[kind] if kind < len(values) else random_text(rng, letters, 4)


def _argument(rng: random.Random, schema: JsonObject, letters: Sequence[str]) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kinds = [each["type"] for each in schema.get("anyOf", ())] or schema["type"]
    kind = kinds if isinstance(kinds, str) else rng.choice(kinds)
    if kind == "string":
        # Where it might be null as well, it does not begin as null does.
        begin = "" if isinstance(kinds, str) else "w"
        return begin + random_text(rng, letters)
    made: dict[str, Callable[[], Any]] = {
        "integer": lambda: rng.randint(-9, 99_999),
        "number": lambda: rng.choice([rng.randint(-9, 9) + 0.5, rng.randint(0, 9), 1e300, -1e-7]),
        "boolean": lambda: rng.random() < 0.5,
        "null": lambda: None,
        "array": lambda: [random_value(rng, letters, 1) for _ in range(rng.randint(0, 3))],
        "object": lambda: {
            key: random_value(rng, letters, 1) for key in ("a", "b_c", "d")[: rng.randint(0, 3)]
        },
    }
    return made[kind]()


def random_call(rng: random.Random, letters: Sequence[str] = (), name: str = "") -> Call:
    """A call of one of `TOOLS`, with what that requires and some of the rest."""
    tool = _BY_NAME[name or rng.choice(TOOLS).name]
    assert tool.parameters is not None
    arguments = {
        key: _argument(rng, schema, letters)
        for key, schema in tool.parameters["properties"].items()
        if key in tool.parameters["required"] or rng.random() < 0.5
    }
    return tool.name, arguments


def random_calls(rng: random.Random, family: Family, letters: Sequence[str] = ()) -> list[Call]:
    """Return one to three random calls, or one if the family writes no parallel calls."""
    count = rng.randint(1, 3) if family.is_parallel else 1
    return as_meant(family, [random_call(rng, letters) for _ in range(count)])


def respelled(calls: Sequence[Call], spell: Any) -> list[Call]:
    """The calls with all their strings spelled so."""

    def value(given: Any) -> Any:
        if isinstance(given, str):
            return spell(given)
        if isinstance(given, list):
            return [value(each) for each in given]
        if isinstance(given, dict):
            return {key: value(each) for key, each in given.items()}
        return given

    return [(name, value(arguments)) for name, arguments in calls]


# ---- Answers -----------------------------------------------------------------------------------


def format_of(family: Family) -> CallFormat:
    """The format that reads the family's calls."""
    return FORMATS[family.format]


def omits_none(family: Family) -> bool:
    """Tell whether the family leaves out members that are None."""
    return family.write([("now", {"x": None})]) == family.write([("now", {})])


def as_meant(family: Family, calls: Sequence[Call]) -> list[Call]:
    """The calls as the family can say them: where None is left out, values within others that are
    empty or None are as well, and strings there look like nothing else.
    """

    def inner(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: made for key, each in given.items() if (made := inner(each)) not in _EMPTY}
        if isinstance(given, list):
            return [made for each in given if (made := inner(each)) not in _EMPTY]
        return f"w{given}" if isinstance(given, str) else given

    if not omits_none(family):
        return list(calls)
    return [
        (
            name,
            {
                key: inner(each) if isinstance(each, dict | list) else each
                for key, each in arguments.items()
                if each is not None
            },
        )
        for name, arguments in calls
    ]


def can_reason(family: Family) -> bool:
    """Tell whether there is a way to write reasoning."""
    return family.reasons is not None or not isinstance(format_of(family), ChannelFormat)


def style_of(family: Family) -> ReasoningStyle | None:
    """Return the style in which the family reasons; None if its format sets that."""
    if isinstance(format_of(family), ChannelFormat):
        return None
    if family.reasons is None:
        return STYLES["think"]
    said = family.reasons("x")
    return next(style for style in STYLES.values() if said.startswith(style.begin))


def token_marks(family: Family) -> set[str]:
    """The family's marks as its tokenizer may have them, each as one token: some are texts with a
    token or several in them.
    """
    tool_format, style = format_of(family), style_of(family)
    if isinstance(tool_format, ChannelFormat):
        style = tool_format.style
    marks = {*tool_format.marks, *(style.texts if style else ())}
    found = {part for mark in marks for part in _TOKENS.findall(mark) or [mark]}
    return {each for each in found if not any(other in each for other in found - {each})}


def reasoned(family: Family, text: str) -> str:
    """Reasoning as the family writes it."""
    return family.reasons(text) if family.reasons else f"<think>\n{text}\n</think>\n\n"


def reader_of(
    family: Family, tools: Sequence[Tool] = TOOLS, marks: Marks = NO_MARKS, *, begun: bool = False
) -> AnswerReader:
    """A reader of one answer, as answers get it."""
    return make_reader(Conventions(format_of(family), style_of(family)), tools, marks, begun=begun)


def read(
    family: Family, parts: Iterable[str], tools: Sequence[Tool] = TOOLS, *, was_cut: bool = False
) -> list[Piece]:
    """The joined pieces of an answer that comes in these parts."""
    reader = reader_of(family, tools)
    pieces: list[Piece] = []
    for part in parts:
        pieces += reader.feed(part)
    return join_pieces([*pieces, *reader.flush(was_cut=was_cut)])


def is_besides(family: Family, text: str, at: int) -> bool:
    """Tell whether a place is within what the family's calls have besides names and arguments."""
    found = re.finditer(family.besides, text) if family.besides else ()
    return any(each.start() < at < each.end() for each in found)


def parts_of(text: str, size: int) -> list[str]:
    """The text in pieces of this size."""
    return [text[at : at + size] for at in range(0, len(text), size)]


def cut(rng: random.Random, text: str) -> list[str]:
    """The text cut at random."""
    ends = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def text_of(pieces: Iterable[Piece], kind: PieceKind) -> str:
    """Return the joined text of the pieces of one kind."""
    return "".join([piece.text for piece in pieces if piece.kind is kind])


def written_calls(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Return the name of each call, and its arguments as they were shown."""
    names = [piece.text for piece in pieces if piece.kind is PieceKind.CALL]
    arguments = [""] * len(names)
    for piece in pieces:
        if piece.kind is PieceKind.ARGUMENTS:
            arguments[piece.call] += piece.text
    return list(zip(names, arguments, strict=True))


def same(calls: Sequence[Call]) -> list[str]:
    """The calls in a form that tells `1` from `True`, to be compared."""
    return [json.dumps(call) for call in calls]


def calls_of(pieces: Sequence[Piece]) -> list[str]:
    """The calls that were read, in the same form; the text of arguments that are no JSON."""
    return [json.dumps((name, _parsed(text))) for name, text in written_calls(pieces)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return f"no JSON: {text}"
