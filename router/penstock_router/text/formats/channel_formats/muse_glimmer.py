"""The messages of Muse Glimmer have recipients: ` to=self<|message|>..<|eom|>` is reasoning.

A message to the user is content. A message to a function is a tool call, with tagged arguments:

    to=f<|message|><atem:function_calls>\\n<atem:invoke name="f">\\n<atem:parameter name="a">..

In requests without tools, tool calls are content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.channel_formats.message_reader import Header, MessageReader
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.formats.reading.tags import Tags
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.reasoning import ReasoningStyle
from penstock_router.text.structural_tag_builder import (
    either,
    literal,
    one_or_more,
    sequence,
    tag,
)

_START, _MESSAGE, _EOM, _EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_AGAIN = f"{_EOM}{_START}assistant"
_STYLE = ReasoningStyle("muse_glimmer", f" to=self{_MESSAGE}", _EOM)
_TO_USER = f" to=user{_MESSAGE}"
_TAGS = Tags(
    wrap=("<atem:function_calls>", "</atem:function_calls>"),
    function=('<atem:invoke name="', '">', "</atem:invoke>"),
    argument=('<atem:parameter name="', '">', "</atem:parameter>"),
)
# `_LAST` is the text of the last message, `_TEXT` that of earlier messages.
_LAST: JsonObject = {"type": "any_text", "excludes": [_START, _MESSAGE]}
_TEXT: JsonObject = {"type": "any_text", "excludes": [_MESSAGE]}


@dataclass(frozen=True, kw_only=True)
class MuseGlimmerFormat(TaggedFormat, ChannelFormat):
    name: str = "muse_glimmer"
    tags: Tags = _TAGS
    signs: tuple[str, ...] = field(default=("to=self", _EOM, _START))
    style: ReasoningStyle = _STYLE

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (_START, _MESSAGE, _EOM, _EOT, *self.tags.all)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return self.channels(tools, marks)

    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        return _MuseGlimmerReader(tools, marks, begun=begun)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match a message for each tool call. If none is required, match messages to the user, with
        or without tool calls after them.
        """
        opens, closes = self.tags.wrap
        space = self.spaces.inside
        functions = [
            self._function_tag(
                tool,
                (f" to={tool.name}{_MESSAGE}{opens}{space}", f"{space}{closes}"),
                rule,
            )
            for tool in tools
        ]
        calls = one_or_more(functions, _AGAIN, parallel=rule.parallel)
        if rule.required:
            return calls
        said = either([tag(_TO_USER, _TEXT, _AGAIN), literal("")])
        return sequence(said, either([calls, self.said(_LAST), _LAST]))

    def said(self, text: JsonObject) -> JsonObject:
        return sequence(literal(_TO_USER), text)

    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        reasoning = tag("" if begun else _STYLE.begin, _TEXT, _AGAIN)
        return sequence(reasoning if begun else either([reasoning, literal("")]), answer)


class _MuseGlimmerReader(TaggedCallParser, MessageReader):
    """Reads tool calls in all messages except those to `self`."""

    _openers = (_START,)
    _closers = (_EOM, _EOT)
    _others = (_MESSAGE,)
    _unmarked = ("assistant to=", " to=")

    def __init__(self, tools: Sequence[Tool], marks: Marks, *, begun: bool) -> None:
        super().__init__((_TAGS,), tools, marks)
        self._ends += self._closers
        if begun:
            self._next = Header(recipient="self")
            self._open(is_reasoning=True)

    def _read(self) -> Reading[None]:
        yield from MessageReader._read(self)

    def _header(self, header: Header, *, is_strict: bool) -> Reading[None]:
        header.is_marked = (yield from self._any_of(_START)) is not None
        self._fits = self._fits or (header.is_marked and not is_strict)
        yield from self._space()
        if (yield from self._any_of("assistant")) is None and is_strict:
            raise Misfit
        yield from self._space()
        if (yield from self._any_of("to=")) is not None:
            header.recipient = yield from self._name()
            yield from self._space()
        if (yield from self._any_of(_MESSAGE)) is None:
            # A tool call may lack this mark.
            begins = (_TAGS.wrap[0], *self._function_begins)
            if is_strict or not header.recipient or (yield from self._ahead(*begins)) is None:
                raise Misfit
        self._drop()

    def _message(self, header: Header) -> Reading[None]:
        is_reasoning = header.recipient == "self"
        self._open(is_reasoning=is_reasoning)
        self._give_back()
        while (yield from self._any_of(_MESSAGE)) is not None:
            self._drop()
        begins = () if is_reasoning or not self._tools else (_TAGS.wrap[0], *self._function_begins)
        if begins and header.recipient not in ("", "user"):
            yield from self._space()
            if (yield from self._ahead(*begins)) is not None:
                self._drop()
            self._give_back()
        while mark := (yield from self._body(self._content, *begins)):
            try:
                yield from self._calls_behind(mark)
            except Misfit:
                self._give_back()
        self._drop()


MUSE_GLIMMER = MuseGlimmerFormat()
