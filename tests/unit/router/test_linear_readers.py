"""Readers of text do work that grows as the text does: those of `linear_readers`."""

from __future__ import annotations

import functools
import importlib
import re
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.budget import budget
from unit.router.linear_readers import (
    BODIES,
    FIELDS,
    OFFERED,
    OWN_FORMATS,
    PATTERNS,
    TEXTS,
    TOOLS,
    UNITS,
    Answer,
    answers,
    body,
    is_linear,
    many,
    marks_in_reasoning,
    text_model,
    values,
)

from penstock_proto.limits import MAX_BUILT_CONSTRAINT_BYTES
from penstock_router.apis.base import BodyKind
from penstock_router.errors import BadRequest
from penstock_router.offload.body_kinds import KINDS, read, work
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.text.answer_constraint import answer_constraint
from penstock_router.text.answer_reader import AnswerReader, make_reader
from penstock_router.text.formats.base import ToolParser
from penstock_router.text.formats.reading.definitions import Definitions
from penstock_router.text.marks import NO_MARKS
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import TextModel
from penstock_router.text.reasoning import STYLES

# A pattern's: of whom the square would take a tenth of a second.
_CHARS = 8_000


@pytest.fixture(scope="module")
def model() -> TextModel:
    return text_model(OWN_FORMATS["pythonic"])


def patterns_of(name: str) -> list[re.Pattern[str]]:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    return list(found.values()) if isinstance(found, dict) else [found]


def steep(pattern: re.Pattern[str], method: str, units: tuple[str, ...]) -> list[str]:
    """The texts, by what they repeat, over which a pattern takes more than linear time."""
    is_bytes = isinstance(pattern.pattern, bytes)

    def work_of(unit: str, head: str) -> Callable[[int], Callable[[], object]]:
        def made(size: int) -> Callable[[], object]:
            text = head + unit * (size // len(unit)) + "\0"
            given = text.encode() if is_bytes else text
            return lambda: getattr(pattern, method)(given)

        return made

    tried = [(unit, head) for unit in (*UNITS, *units) for head in ("", *units)]
    return [unit for unit, head in tried if not is_linear(work_of(unit, head), _CHARS)]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_linear_time_over_any_text(name: str) -> None:
    method, *units = PATTERNS[name]
    for pattern in patterns_of(name):
        assert steep(pattern, method, tuple(units)) == []


def test_a_pattern_that_takes_the_square_is_seen() -> None:
    assert "![](" in steep(re.compile(r"!\[\]\(([^\)]*)\)"), "search", ())


# ---- Bodies ------------------------------------------------------------------------------------


def reading(kind: str, given: object) -> Callable[[], object]:
    data = msgspec.json.encode(given)

    def read_it() -> object:
        try:
            return read(KINDS[kind], data, with_digest=True)
        except BadRequest as error:
            return error

    return read_it


def working(kind: str, given: object, model: TextModel) -> Callable[[], object]:
    """Reading a body and the work on its text."""
    data = msgspec.json.encode(given)

    def read_and_work() -> object:
        found = read(KINDS[kind], data, with_digest=True)
        if found.refusal is not None:
            return found.refusal
        try:
            return work(found.kind, found.asked, model, b"")
        except BadRequest as error:
            return error

    return read_and_work


@pytest.mark.parametrize("kind", TEXTS)
def test_a_body_of_any_text_is_read_and_worked_on_in_linear_time(
    kind: str, model: TextModel
) -> None:
    for unit in UNITS:

        def work_of(size: int, unit: str = unit) -> Callable[[], object]:
            return working(kind, body(kind, unit * (size // len(unit))), model)

        assert is_linear(work_of, 16_000), unit


@functools.cache
def value(size: int, number: int) -> msgspec.Raw:
    """Return one of the values that a field may be given, as JSON."""
    return msgspec.Raw(msgspec.json.encode([*values(size)][number]))


def fields_of(kind: str) -> Iterator[str]:
    found = KINDS[kind]
    if isinstance(found, BodyKind):
        yield from getattr(found, "fields", None) or FIELDS[kind]


@pytest.mark.parametrize("kind", TEXTS)
def test_every_field_of_a_body_is_read_in_linear_time(kind: str) -> None:
    for name in fields_of(kind):
        for at in range(len([*values(1)])):

            def work_of(size: int, name: str = name, at: int = at) -> Callable[[], object]:
                return reading(kind, body(kind) | {name: value(size, at)})

            assert is_linear(work_of, 1_000), (name, at)


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_hard_body_is_read_and_worked_on_in_linear_time(number: int, model: TextModel) -> None:
    kind, made = BODIES[number]
    assert is_linear(lambda size: reading(kind, made(size)), 2_000)
    assert is_linear(lambda size: working(kind, made(size), model), 2_000)


# ---- Formats of calls --------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_an_answer_is_read_in_linear_time_in_every_format(name: str) -> None:
    format_ = OWN_FORMATS[name]

    def work_of(head: str, unit: str, piece: int) -> Callable[[int], Callable[[], object]]:
        def made(size: int) -> Callable[[], object]:
            text = head + unit * (size // len(unit))

            def read_it() -> None:
                parser = format_.parser(OFFERED)
                for begin in range(0, len(text), piece):
                    parser.feed(text[begin : begin + piece])
                parser.flush()

            return read_it

        return made

    for head, unit in answers(format_):
        # Eight characters, about two tokens, at a time; and all at once.
        for size, piece in ((2_000, 8), (8_000, 8_000_000)):
            assert is_linear(work_of(head, unit, piece), size), (head, unit)


def fed(reader: ToolParser | AnswerReader, text: str) -> None:
    """Read an answer, about two tokens at a time."""
    for begin in range(0, len(text), 8):
        reader.feed(text[begin : begin + 8])
    reader.flush()


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_an_answer_of_many_calls_and_arguments_to_many_tools_is_read_in_linear_time(
    name: str,
) -> None:
    format_ = OWN_FORMATS[name]
    for what, made in many(format_).items():

        def work_of(size: int, made: Callable[[int], Answer] = made) -> Callable[[], object]:
            tools, text = made(size)
            return lambda: fed(format_.parser(tools), text)

        assert is_linear(work_of, 500), what


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_reasoning_in_which_calls_begin_again_and_again_is_read_in_linear_time(name: str) -> None:
    conventions = Conventions(OWN_FORMATS[name], STYLES["think"])
    for what, made in marks_in_reasoning(OWN_FORMATS[name]).items():

        def work_of(size: int, made: Callable[[int], Answer] = made) -> Callable[[], object]:
            tools, text = made(size)
            return lambda: fed(make_reader(conventions, tools, NO_MARKS, begun=True), text)

        assert is_linear(work_of, 1_000), what


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", [" ", "\n", "x ", "<", "</"])
def test_long_runs_in_reasoning_and_around_answers_are_read_in_linear_time(
    style: str, text: str
) -> None:
    """Before the first mark, behind it, and between the marks of an answer."""
    conventions = Conventions(None, STYLES[style])
    marks = STYLES[style]
    begun = "".join((marks.begin, "x", marks.end, marks.answer[0], "x"))
    for before in ("", begun):

        def work_of(size: int, before: str = before) -> Callable[[], object]:
            whole = before + text * size + "y"
            return lambda: fed(make_reader(conventions, (), NO_MARKS, begun=False), whole)

        assert is_linear(work_of, 50_000), before


# ---- Constraints -------------------------------------------------------------------------------


def constraint_of(name: str, tools: list[Tool]) -> str | BadRequest:
    """The constraint on an answer in a format that must call one of these tools."""
    asked = ChatRequest(messages=[], tools=tuple(tools), tool_choice=ToolChoice("required"))
    try:
        made = answer_constraint(asked, OWN_FORMATS[name], None)
    except BadRequest as error:
        return error
    assert made is not None
    return made.value


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_a_constraint_of_tools_grows_as_they_do_or_is_refused(name: str) -> None:
    size = 160
    for what, made in TOOLS.items():
        some, more = (constraint_of(name, made(by * size)) for by in (1, 2))
        if isinstance(more, str):
            assert isinstance(some, str)
            assert len(more) <= min(2.5 * len(some), MAX_BUILT_CONSTRAINT_BYTES), what
        else:
            assert "tools" in str(more)

        def work_of(size: int, made: Callable[[int], list[Tool]] = made) -> Callable[[], object]:
            tools = made(size)
            return lambda: constraint_of(name, tools)

        assert is_linear(work_of, 2 * size, least=size), what


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_many_properties_take_little_memory_in_every_format(name: str) -> None:
    size = budget(250, 1_000)
    for what in ("optional", "lists", "definitions"):
        tools = TOOLS[what](size)
        tracemalloc.start()
        try:
            constraint_of(name, tools)
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**10 * size, what
        finally:
            tracemalloc.stop()


def test_a_constraint_that_is_too_long_names_its_tools_and_the_bound() -> None:
    made = constraint_of("pythonic", TOOLS["unions"](1_000))
    assert isinstance(made, BadRequest)
    assert (made.status, made.param) == (400, "tools")
    assert made.message == (
        "tools: the constraint with the schemas of f0 has over 1048576 bytes, which is the most"
    )


# ---- Definitions -------------------------------------------------------------------------------


def given(schema: dict[str, Any], **definitions: dict[str, Any]) -> set[str]:
    """The names of those of the definitions that a schema is given."""
    given_to = Definitions({"$defs": definitions, "definitions": {"old": {}}}).given_to(schema)
    return {name for place in ("$defs", "definitions") for name in given_to.get(place, ())}


@pytest.mark.parametrize(
    ("reference", "reached"),
    [
        ({"$ref": "#/$defs/a"}, {"a", "b"}),
        ({"items": [{"anyOf": [{"$ref": "#/$defs/a/properties/x"}]}]}, {"a", "b"}),
        ({"$ref": "#/definitions/old"}, {"old"}),
        ({"$ref": "#/$defs/c~1d%20e"}, {"c/d e"}),
        ({"$ref": "#/$defs/unknown"}, set()),
        ({"type": "string"}, set()),
        ({"$ref": "#/$defs/dynamic"}, {"a", "b", "c/d e", "dynamic", "old"}),
        *(
            (schema, {"a", "b", "c/d e", "dynamic", "old"})
            for schema in (
                {"$ref": "#"},
                {"$ref": "#anchor"},
                {"$ref": "https://example.com/schema#/$defs/a"},
                {"items": {"$dynamicRef": "#/$defs/a"}},
                {"$recursiveRef": "#"},
                {"$ref": "#/$defs"},
                {"$ref": "#/properties/x"},
            )
        ),
    ],
)
def test_a_part_is_given_the_definitions_that_it_reaches(
    reference: dict[str, Any], reached: set[str]
) -> None:
    circle: dict[str, Any] = {
        "a": {"properties": {"x": {"$ref": "#/$defs/b"}}},
        "b": {"items": {"$ref": "#/$defs/a"}},
    }
    others: dict[str, Any] = {"c/d e": {}, "dynamic": {"$dynamicRef": "#node"}}
    assert given(reference, **circle, **others) == reached


def test_definitions_are_looked_up_a_bounded_number_of_times() -> None:
    size, bound = 2_000, 2**14
    rows = {f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(size)}
    definitions = Definitions({"$defs": rows})
    sizes = [
        len(definitions.given_to({"$ref": f"#/$defs/d{at}"})["$defs"])
        for at in reversed(range(size))
    ]
    assert sizes[:3] == [1, 2, 3]
    assert sum(each for each in sizes if each < size) <= bound
    assert sizes[-1] == size


def test_250_arguments_may_refer_to_250_definitions() -> None:
    for name in OWN_FORMATS:
        made = constraint_of(name, TOOLS["definitions of each"](250))
        assert isinstance(made, str), name
        assert len(made) < 128 * 2**10, name


def test_300_optional_arguments_are_within_the_default_bound_of_shards() -> None:
    for name in OWN_FORMATS:
        made = constraint_of(name, TOOLS["optional"](300))
        assert isinstance(made, str), name
        assert len(made) < 256 * 2**10, name
