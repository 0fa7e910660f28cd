"""The messages of Solar Open: `<|think|>..<|end|>`, `<|content|>..<|end|>`, and one message with
all calls.

A tool call has a random id, which is dropped:

    <|tool_call:begin|>ID<|tool_call:name|>f<|tool_call:args|>{..}<|tool_call:end|>

In requests without tools, tool calls are content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.channel_formats.message_reader import Header, MessageReader
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser, arguments_format
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.reasoning import ReasoningStyle
from penstock_router.text.structural_tag_builder import (
    either,
    literal,
    one_or_more,
    regex,
    sequence,
    tag,
)

_BEGIN, _END, _CALLS = "<|begin|>", "<|end|>", "<|calls|>"
_CHANNELS = _THINK, _CONTENT, _TOOL_CALLS = "<|think|>", "<|content|>", "<|tool_calls|>"
_CALL = "<|tool_call:begin|>"
_NAME, _ARGS, _CALL_END = "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
_AGAIN = f"{_END}{_BEGIN}assistant"
_STYLE = ReasoningStyle("solar_open", _THINK, _END)
# `_LAST` is the text of the last message, `_TEXT` that of earlier messages.
_LAST: JsonObject = {"type": "any_text", "excludes": [_BEGIN, *_CHANNELS]}
_TEXT: JsonObject = {"type": "any_text", "excludes": list(_CHANNELS)}


@dataclass(frozen=True)
class SolarOpenFormat(ChannelFormat):
    name: str = "solar_open"
    marks: tuple[str, ...] = (_BEGIN, _END, _CALLS, *_CHANNELS, _CALL, _NAME, _ARGS, _CALL_END)
    style: ReasoningStyle = _STYLE

    def is_of(self, template: str) -> bool:
        return all(mark in template for mark in (_BEGIN, _THINK, _CONTENT))

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return self.channels(tools, marks)

    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        return _SolarOpenReader(tools, marks, begun=begun)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match one message with all tool calls. If none is required, match content, with or
        without this message after it.
        """
        functions = [
            tag(
                _CALL,
                sequence(
                    regex("[a-z0-9]{10}"),
                    literal(f"{_NAME}{tool.name}{_ARGS}"),
                    arguments_format(tool, rule),
                ),
                _CALL_END,
            )
            for tool in tools
        ]
        listed = one_or_more(functions, "", parallel=rule.parallel)
        calls = sequence(literal(_TOOL_CALLS), listed, literal(_CALLS))
        if rule.required:
            return calls
        behind = either([sequence(literal(f"{_BEGIN}assistant"), calls), literal("")])
        return either([sequence(tag(_CONTENT, _TEXT, _END), behind), calls, _LAST])

    def said(self, text: JsonObject) -> JsonObject:
        return sequence(literal(_CONTENT), text, either([literal(_END), literal("")]))

    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        reasoning = tag("" if begun else _THINK, _TEXT, _AGAIN)
        return sequence(reasoning if begun else either([reasoning, literal("")]), answer)


class _SolarOpenReader(MessageReader, JsonCallParser):
    _openers: tuple[str, ...] = (_BEGIN, *_CHANNELS, _CALL)
    _closers = (_END, _CALLS)
    _others: tuple[str, ...] = (_NAME, _ARGS, _CALL_END)
    _unmarked = tuple(f"assistant{channel}" for channel in _CHANNELS)
    _ends = (_CALL_END, _CALLS, _END)
    _ends_with_answer = True

    def __init__(self, tools: Sequence[Tool], marks: Marks, *, begun: bool) -> None:
        super().__init__(tools, marks)
        if not tools:
            self._openers, self._others = (_BEGIN, *_CHANNELS), (_CALL, *self._others)
        if begun:
            self._next = Header(channel=_THINK)
            self._open(is_reasoning=True)

    def _header(self, header: Header, *, is_strict: bool) -> Reading[None]:
        header.is_marked = (yield from self._any_of(_BEGIN)) is not None
        self._fits = self._fits or (header.is_marked and not is_strict)
        yield from self._space()
        if (yield from self._any_of("assistant")) is None and header.is_marked and is_strict:
            raise Misfit
        yield from self._space()
        found = yield from self._any_of(*_CHANNELS)
        if found is None and (is_strict or (yield from self._ahead(_CALL)) is None):
            raise Misfit
        if is_strict and not header.is_marked:
            yield from self._again(*_CHANNELS)
            if (yield from self._ahead(_CALL)) is None:
                raise Misfit
        header.channel = found or _TOOL_CALLS
        if header.channel != _TOOL_CALLS:
            self._drop()

    def _message(self, header: Header) -> Reading[None]:
        if header.channel == _TOOL_CALLS and self._tools:
            yield from self._called()
            return
        self._open(is_reasoning=header.channel == _THINK)
        self._give_back()
        while header.channel and (yield from self._any_of(header.channel)) is not None:
            self._drop()
        yield from self._body(self._content)
        self._drop()

    def _called(self) -> Reading[None]:
        yield from self._again(_TOOL_CALLS)
        self._has_ended = True
        while (yield from self._any_of(_CALL)) is not None:
            yield from self._again(_CALL)
            yield from self._name()
            yield from self._expect(_NAME)
            yield from self._space()
            name = yield from self._name()
            yield from self._space()
            if not self._is_callable(name):
                raise Misfit
            yield from self._any_of(_ARGS)
            first = yield from self._space()
            if first == "{":
                self._call(name)
                yield from self._shown_value()
            elif (yield from self._ahead(*self._ends)) is not None:
                self._call(name, "{}")
            else:
                raise Misfit
            yield from self._ended()
        self._give_back()


SOLAR_OPEN = SolarOpenFormat()
