"""Readers of text do work that grows as the text does: those of `linear_readers`."""

from __future__ import annotations

import importlib
import re
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest
from unit.router.linear_readers import (
    BODIES,
    FIELDS,
    OFFERED,
    OWN_FORMATS,
    PATTERNS,
    TEXTS,
    TOOLS,
    UNITS,
    answers,
    body,
    is_linear,
    text_model,
    thread_s,
    values,
)

from penstock_common.request_bounds import MAX_BUILT_CONSTRAINT_BYTES
from penstock_router.apis.base import BodyKind
from penstock_router.errors import BadRequest
from penstock_router.offload.body_kinds import KINDS, read, work
from penstock_router.request import ChatRequest, Tool, ToolChoice
from penstock_router.text.answer_constraint import answer_constraint
from penstock_router.text.prompts import TextModel

# A pattern's: of whom the square would take a tenth of a second.
_CHARS = 4_000
# Below this time nothing that grows with the square is meant: twice the size stays short too.
_SHORT_S = 0.008


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
    slow = [
        (unit, head) for unit, head in tried if thread_s(work_of(unit, head)(2 * _CHARS)) > 0.001
    ]
    return [unit for unit, head in slow if not is_linear(work_of(unit, head), _CHARS)]


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

        if thread_s(work_of(16_000)) > _SHORT_S:
            assert is_linear(work_of, 16_000), unit


def fields_of(kind: str) -> Iterator[str]:
    found = KINDS[kind]
    if isinstance(found, BodyKind):
        yield from getattr(found, "fields", None) or FIELDS[kind]


@pytest.mark.parametrize("kind", TEXTS)
def test_every_field_of_a_body_is_read_in_linear_time(kind: str) -> None:
    size = 1_000
    # As many as `values` makes.
    for name in fields_of(kind):
        for at, value in enumerate(values(2 * size)):

            def work_of(size: int, name: str = name, at: int = at) -> Callable[[], object]:
                return reading(kind, body(kind) | {name: [*values(size)][at]})

            if thread_s(reading(kind, body(kind) | {name: value})) > _SHORT_S:
                assert is_linear(work_of, size), (name, at)


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_hard_body_is_read_and_worked_on_in_linear_time(number: int, model: TextModel) -> None:
    kind, made = BODIES[number]
    assert is_linear(lambda size: reading(kind, made(size)), 1_500)
    assert is_linear(lambda size: working(kind, made(size), model), 1_500)


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
            answer = work_of(head, unit, piece)
            if thread_s(answer(2 * size)) > _SHORT_S:
                assert is_linear(answer, size), (head, unit)


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
    for many, made in TOOLS.items():
        some, more = (constraint_of(name, made(by * size)) for by in (1, 2))
        if isinstance(more, str):
            assert isinstance(some, str)
            assert len(more) <= min(2.5 * len(some), MAX_BUILT_CONSTRAINT_BYTES), many
        else:
            assert "tools" in str(more)

        def work_of(size: int, made: Callable[[int], list[Tool]] = made) -> Callable[[], object]:
            tools = made(size)
            return lambda: constraint_of(name, tools)

        assert is_linear(work_of, size), many


@pytest.mark.parametrize("name", OWN_FORMATS)
def test_a_thousand_properties_take_little_memory_in_every_format(name: str) -> None:
    for many in ("optional", "lists", "definitions"):
        tools = TOOLS[many](1_000)
        tracemalloc.start()
        try:
            constraint_of(name, tools)
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**20, many
        finally:
            tracemalloc.stop()


def test_a_constraint_that_is_too_long_names_its_tools_and_the_bound() -> None:
    made = constraint_of("pythonic", TOOLS["definitions"](1_000))
    assert isinstance(made, BadRequest)
    assert (made.status, made.param) == (400, "tools")
    assert made.message == (
        "tools: the constraint with the schemas of f0 has over 1048576 bytes, which is the most"
    )
