"""Functionary: the function's name, then arguments, in a tag (3.1) or after a line break (3.2).

In 3.2 the prompt ends with `>>>`, and the answer begins with its recipient: a function, or `all`
before text. So answers are read even in requests without tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser, arguments_format
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    among_text,
    either,
    literal,
    one_or_more,
    sequence,
    tag,
)

_TAG, _TAG_END = "<function=", "</function>"
_TO, _ALL = ">>>", "all"


@dataclass(frozen=True)
class FunctionaryTagFormat(CallFormat):
    """`<function=name>{..}</function>`, which Llama 3.1 can also write."""

    name: str = "functionary_v3_1"
    marks: tuple[str, ...] = (_TAG, _TAG_END)

    def is_of(self, template: str) -> bool:
        return _TAG in template and _TAG_END in template and "<parameter=" not in template

    def begins(self) -> tuple[str, ...]:
        return (_TAG,)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _TagParser(tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        tags = [
            tag(
                f"{_TAG}{tool.name}>",
                arguments_format(tool, rule),
                _TAG_END,
            )
            for tool in tools
        ]
        if rule.required:
            return one_or_more(tags, "", parallel=rule.parallel)
        return among_text(tags, _TAG, parallel=rule.parallel)


class _TagParser(JsonCallParser):
    _ends = (_TAG_END,)

    def _read(self) -> Reading[None]:
        yield from self._until(_TAG)
        name = yield from self._name()
        if not self._is_callable(name):
            raise Misfit
        yield from self._expect(">")
        if (yield from self._space()) == "{":
            self._call(name)
            yield from self._shown_value()
        elif (yield from self._ahead(_TAG_END)) is None:
            raise Misfit
        else:
            self._call(name, "{}")
        yield from self._ended()


@dataclass(frozen=True)
class FunctionaryFormat(ChannelFormat):
    """Lines with a recipient, each followed by text or arguments."""

    name: str = "functionary_v3_2"
    marks: tuple[str, ...] = ()
    style: None = None

    def is_of(self, template: str) -> bool:
        return f"{_TO}{_ALL}" in template

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _ChannelParser(tools, marks)

    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        return _ChannelParser(tools, marks)

    def said(self, text: JsonObject) -> JsonObject:
        return sequence(literal(f"{_ALL}\n"), text)

    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        return answer

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match tool calls (the prompt has begun the first), or text and perhaps tool calls, or
        nothing.
        """
        first, others = (
            [
                tag(
                    f"{to}{tool.name}\n",
                    arguments_format(tool, rule),
                    "",
                )
                for tool in tools
            ]
            for to in ("", _TO)
        )
        calls = one_or_more(first, _TO, parallel=rule.parallel)
        if rule.required:
            return calls
        said = sequence(literal(f"{_ALL}\n"), among_text(others, _TO, parallel=rule.parallel))
        return either([calls, said, literal("")])


class _ChannelParser(JsonCallParser):
    has_reasoning = in_reasoning = False
    is_over = True
    _is_begun = False

    def _read(self) -> Reading[None]:
        # Other texts may contain the mark, so only the request's functions count.
        self._is_marked = False
        if self._is_begun:
            yield from self._until(_TO)
        else:
            self._is_begun = True
            yield from self._any_of(_TO)
        name = yield from self._name()
        if name == _ALL:
            yield from self._expect("\n")
            self._drop()
            return
        if not self._is_callable(name) or (yield from self._space()) != "{":
            raise Misfit
        self._call(name)
        yield from self._shown_value()
        yield from self._brackets_too_many(_TO)
        yield from self._after_call()
