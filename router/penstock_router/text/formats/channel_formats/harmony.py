"""The channels of gpt-oss: `<|channel|>analysis<|message|>..<|end|>`, a message for each.

A header has the role (optional), the channel, the recipient of a tool call (after the role or the
channel), and the text's type. A tool call ends an answer. Its end mark may be missing, because the
token that ended the answer has no text.

Messages in the channel "analysis" are reasoning, those in other channels content. A message to a
function is a tool call in any channel. But it is text if the request has no tools, or if it calls
OpenAI's own tools (browser, python, container) and the request does not offer them. If a call's
text is not JSON, such as code for "python", it is the value of the function's only string argument.
Text of type code is JSON only if it begins with that argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.channel_formats.message_reader import Header, MessageReader
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.json_calls import JsonCallParser, arguments_format
from penstock_router.text.formats.reading.json_mender import mended_object
from penstock_router.text.formats.reading.reader import Misfit, Reading, TextOver
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.reasoning import ReasoningStyle
from penstock_router.text.structural_tag_builder import (
    either,
    literal,
    one_or_more,
    sequence,
    tag,
)

_START, _END, _MESSAGE, _CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
_CONSTRAIN, _CALL, _RETURN = "<|constrain|>", "<|call|>", "<|return|>"
_MARKS = (_START, _END, _MESSAGE, _CHANNEL, _CONSTRAIN, _CALL, _RETURN)
_ENDS = (_END, _CALL, _RETURN)
_AGAIN = f"{_START}assistant"
_CHANNELS = _ANALYSIS, _COMMENTARY, _FINAL = "analysis", "commentary", "final"
_NAMESPACE = "functions."
# `_NOBODY` are recipients that are not functions, `_BUILT_IN` are tools that OpenAI's servers run.
_NOBODY = ("assistant", "user", "all", "")
_BUILT_IN = ("browser", "python", "container")
# Maximum words in a header besides role, channel and recipient.
_MOST_WORDS = 4
# Maximum characters searched for an argument's name.
_MOST_BEFORE = 256
_WORD = re.compile(r"[\w./:-]*")
# Text that ends before any other message.
_TEXT: JsonObject = {"type": "any_text", "excludes": [_START, _CHANNEL]}
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
_STYLE = ReasoningStyle("harmony", f"{_CHANNEL}{_ANALYSIS}{_MESSAGE}", _END)


@dataclass(frozen=True)
class HarmonyFormat(ChannelFormat):
    name: str = "harmony"
    marks: tuple[str, ...] = _MARKS
    style: ReasoningStyle = _STYLE

    def is_of(self, template: str) -> bool:
        return all(mark in template for mark in (_START, _CHANNEL, _MESSAGE))

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return self.channels(tools, marks)

    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        return _HarmonyReader(tools, marks, begun=begun)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match a tool call, which ends the answer. If none is required, match text messages, then
        a call or the last message.
        """
        calls = [
            tag(
                f"{_CHANNEL}{_COMMENTARY} to={_NAMESPACE}{tool.name} {_CONSTRAIN}json{_MESSAGE}",
                arguments_format(tool, rule),
                _CALL,
            )
            for tool in tools
        ]
        if rule.required:
            return either(calls)
        texts = [_message(channel, _TEXT, _END) for channel in (_ANALYSIS, _COMMENTARY)]
        before = sequence(one_or_more(texts, _AGAIN, parallel=True), literal(_AGAIN))
        last = [*calls, self.said(_TEXT), _TEXT]
        return sequence(either([before, literal("")]), either(last))

    def said(self, text: JsonObject) -> JsonObject:
        return _message(_FINAL, text, "")

    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        mark = "" if begun else self.style.begin
        reasoning = tag(mark, {"type": "any_text", "excludes": [_CHANNEL]}, f"{_END}{_AGAIN}")
        return sequence(reasoning if begun else either([reasoning, literal("")]), answer)


def _message(channel: str, text: JsonObject, end: str) -> JsonObject:
    return tag(f"{_CHANNEL}{channel}{_MESSAGE}", text, end)


class _HarmonyReader(MessageReader, JsonCallParser):
    """Tolerates headers without `<|start|>`, `<|message|>` or `<|constrain|>`, repeated parts,
    parts in another order, and missing ends before the next message.
    """

    _openers = (_START, _CHANNEL)
    _closers = _ENDS
    _others = (_MESSAGE, _CONSTRAIN)
    _unmarked = (f"assistant{_CHANNEL}", "assistant to=")
    _ends = (*_ENDS, _START)
    _ends_with_answer = True

    def __init__(self, tools: Sequence[Tool], marks: Marks, *, begun: bool) -> None:
        super().__init__(tools, marks)
        if begun:
            self._next = Header(channel=_ANALYSIS)
            self._open(is_reasoning=True)

    def _message(self, header: Header) -> Reading[None]:
        name = self._function_of(header)
        if name is not None:
            yield from self._called(name, header)
            return
        self._open(is_reasoning=_is_reasoning(header))
        self._give_back()
        yield from self._repeated_mark()
        yield from self._body(self._content)
        self._drop()

    def _function_of(self, header: Header) -> str | None:
        """Return the function that the message calls; None: the message is text."""
        recipient = header.recipient
        name = recipient.removeprefix(_NAMESPACE)
        for known in (recipient, name):
            if known in self._tools:
                return known
        if not self._tools or name in _NOBODY or recipient == _NAMESPACE.rstrip("."):
            return None
        return None if recipient.split(".")[0] in _BUILT_IN else name

    # Headers.

    def _header(self, header: Header, *, is_strict: bool) -> Reading[None]:
        header.is_marked = (yield from self._any_of(_START)) is not None
        self._fits = self._fits or (header.is_marked and not is_strict)
        yield from self._space()
        if (yield from self._any_of("assistant")) is None and header.is_marked:
            if is_strict:
                raise Misfit
            if (yield from self._ahead("to=")) is None:
                yield from self._name()
        yield from self._rest(header, is_strict=is_strict)

    def _rest(self, header: Header, *, is_strict: bool) -> Reading[None]:
        """Read a header up to its mark or, if not strict, up to text that is not part of it; that
        text stays held. Raises `Misfit` if there is no header.
        """
        while True:
            yield from self._space()
            mark = yield from self._any_of(_MESSAGE, _CONSTRAIN, _CHANNEL)
            if mark is not None:
                header.is_marked = True
                self._fits = self._fits or not is_strict
            if mark == _MESSAGE:
                self._drop()
                return
            if mark is None and not (
                yield from self._recipient_or_word(header, is_strict=is_strict)
            ):
                break
            if mark == _CHANNEL:
                yield from self._channel(header)
            elif mark == _CONSTRAIN:
                yield from self._space()
                header.kind = yield from self._name()
            if mark is not None and not is_strict and _is_sure(header):
                self._drop()
        if is_strict or not _is_sure(header):
            raise Misfit

    def _channel(self, header: Header) -> Reading[None]:
        yield from self._space()
        known = yield from self._any_of(*_CHANNELS)
        header.channel = known or (yield from self._name())

    def _recipient_or_word(self, header: Header, *, is_strict: bool) -> Reading[bool]:
        """Read the recipient or an unknown word; return true if one was read. An unknown word
        without a mark after it is text.
        """
        if (yield from self._any_of("to=")) is not None:
            header.recipient = yield from self._name()
            return True
        word = yield from self._run(_WORD)
        if not word or not header.is_marked or header.num_words == _MOST_WORDS:
            return False
        header.num_words += 1
        header.kind = header.kind or word
        if not is_strict and _is_sure(header) and self._function_of(header) is None:
            self._open(is_reasoning=_is_reasoning(header))
            self._fits = False
        return True

    def _repeated_mark(self) -> Reading[None]:
        while (yield from self._any_of(_MESSAGE)) is not None:
            self._drop()

    # Calls.

    def _called(self, name: str, header: Header) -> Reading[None]:
        self._has_ended = True
        try:
            yield from self._repeated_mark()
            first = yield from self._space()
        except TextOver:
            if not self._was_cut:
                self._call(name, "{}")
            raise
        key = None if header.kind == "json" else self._offered.arguments(name).only_text
        if first == "{" and (
            key is None or header.kind != "code" or (yield from self._begins_with(key))
        ):
            self._call(name)
            yield from self._shown_value()
        elif (yield from self._ahead(*self._ends)) is not None:
            self._call(name, "{}")
        elif key is not None:
            yield from self._as_text(name, key)
            return
        else:
            yield from self._unlike(name, first)
            return
        yield from self._ended()

    def _begins_with(self, key: str) -> Reading[bool]:
        """Tell whether an object with this first argument follows; consume nothing."""
        wanted = f"{{{''.join(_ENCODE(key).split())}:"
        while True:
            there = self._text[self._at : self._at + _MOST_BEFORE]
            begun = "".join(there.split())[: len(wanted)]
            if begun == wanted:
                return True
            if not wanted.startswith(begun) or len(there) == _MOST_BEFORE or self._over:
                return False
            yield from self._more()

    def _as_text(self, name: str, key: str) -> Reading[None]:
        """Read a tool call's text as the value of its only argument."""
        spaces, self._held = "".join(self._held), []
        self._call(name)
        self._arguments(f'{{{_ENCODE(key)}: "{_escaped(spaces)}')
        try:
            yield from self._body(lambda text: self._arguments(_escaped(text)))
        except TextOver:
            if not self._was_cut:
                self._arguments('"}')
                self._end_call()
            raise
        self._arguments('"}')
        self._end_call()

    def _unlike(self, name: str, first: str) -> Reading[None]:
        """Read a tool call whose text is an object in quotes, or null; show any other text as
        content.
        """
        try:
            value = (yield from self._value()) if first in '"n' else "0"
            mended = "{}" if value == "null" else mended_object(_unquoted(value))
        except Misfit:
            mended = None
        if mended is not None:
            self._call(name, mended)
            yield from self._ended()
            return
        yield from self._text_message(is_reasoning=False)


def _is_reasoning(header: Header) -> bool:
    return header.channel == _ANALYSIS and not header.recipient.startswith(_NAMESPACE)


def _is_sure(header: Header) -> bool:
    """Tell whether this is certainly a header, even without its end mark."""
    return header.is_marked and (header.channel in _CHANNELS or header.recipient != "")


def _unquoted(value: str) -> str:
    unquoted = json.loads(value)
    return unquoted if isinstance(unquoted, str) else ""


def _escaped(text: str) -> str:
    return _ENCODE(text)[1:-1]


HARMONY = HarmonyFormat()
