"""The channels of Kimi K3: `<|open|>think<|sep|>..<|close|>think<|sep|>`, then response and tools.

The prompt opens the first channel, so text before any mark belongs to it. Arguments of a tool call
each have their type, or are one JSON object:

    <|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1<|close|>..

In requests without tools, tool calls are content.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_router.argument_kinds import ANY, Kinds, kinds_of
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.channel_formats.channel_reader import ChannelReader
from penstock_router.text.formats.channels import ChannelFormat, ChannelParser
from penstock_router.text.formats.reading.json_calls import arguments_format, written_as
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    arguments_of,
    one_after_another,
    text_format,
)
from penstock_router.text.formats.reading.reader import Misfit, Reading
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser
from penstock_router.text.formats.reading.tags import Tags
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.reasoning import ReasoningStyle
from penstock_router.text.structural_tag_builder import (
    either,
    json_format,
    literal,
    one_or_more,
    regex,
    sequence,
    tag,
)

_OPEN, _CLOSE, _SEP, _END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_STYLE = ReasoningStyle("kimi_k3", f"{_OPEN}think{_SEP}", f"{_CLOSE}think{_SEP}")
_RESPONSE = f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"
_MESSAGE = f'{_OPEN}message role="assistant"{_SEP}', f"{_CLOSE}message{_SEP}"
_TAGS = Tags(
    wrap=(f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"),
    is_one_block=True,
    function=(f'{_OPEN}call tool="', f'"{_SEP}', f"{_CLOSE}call{_SEP}"),
    argument=(f'{_OPEN}argument key="', f'"{_SEP}', f"{_CLOSE}argument{_SEP}"),
)
_JSON = f'{_OPEN}json type="object"{_SEP}', f"{_CLOSE}json{_SEP}"
# The attribute after a name; its value must be a word, or the text belongs to the name. Matching
# starts only at the first whitespace of a run, so the time is linear.
_ATTRIBUTE = re.compile(r"""(?:["']|(?<!\s))\s+(?:type|index)\s*=\s*["']?(\w*)$""")
_TYPES: dict[str, Kinds] = {kind: frozenset({kind}) for kind in ANY} | {
    "number": frozenset({"number", "integer"})
}
# Text that ends before another channel.
_TEXT: JsonObject = {"type": "any_text", "excludes": [_OPEN]}


@dataclass(frozen=True)
class KimiK3Format(ChannelFormat):
    writes_plain_strings = True

    name: str = "kimi_k3"
    marks: tuple[str, ...] = (_OPEN, _CLOSE, _SEP, _END)
    style: ReasoningStyle = _STYLE

    def is_of(self, template: str) -> bool:
        return all(mark in template for mark in (_OPEN, _CLOSE, _END))

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return self.channels(tools, marks)

    def channels(
        self, tools: Sequence[Tool], marks: Marks = NO_MARKS, *, begun: bool = False
    ) -> ChannelParser:
        return _KimiK3Reader(tools, marks, begun=begun)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        """Match an empty response and tool calls. If none are required, match a response and
        perhaps tool calls.
        """
        functions = [_function(tool, rule) for tool in tools]
        opens, closes = _TAGS.wrap
        listed = one_or_more(functions, "", parallel=rule.parallel)
        calls = sequence(literal(opens), listed, literal(closes), _perhaps(_MESSAGE[1]))
        no_text = [literal("".join(_RESPONSE)), literal(_RESPONSE[1]), literal("")]
        if rule.required:
            return sequence(either(no_text), calls)
        response = either([tag(_RESPONSE[0], _TEXT, _RESPONSE[1]), tag("", _TEXT, _RESPONSE[1])])
        behind = either([calls, _perhaps(_MESSAGE[1])])
        return either([sequence(response, behind), calls, _TEXT])

    def said(self, text: JsonObject) -> JsonObject:
        """Match the response channel, which the prompt may have opened."""
        closes = sequence(literal(_RESPONSE[1]), _perhaps(_MESSAGE[1]))
        return sequence(_perhaps(_RESPONSE[0]), text, closes)

    def reasoned(self, answer: JsonObject, *, begun: bool) -> JsonObject:
        reasoning = tag("" if begun else _STYLE.begin, _TEXT, _STYLE.end)
        return sequence(reasoning if begun else either([reasoning, literal("")]), answer)


def _perhaps(text: str) -> JsonObject:
    return either([literal(text), literal("")])


def _function(tool: Tool, rule: CallRule) -> JsonObject:
    begin, behind, end = _TAGS.function
    number = sequence(regex("[1-9][0-9]?"), literal(behind))
    if not tool.parameters:
        whole = arguments_format(tool, rule)
        arguments = either([tag(_JSON[0], whole, _JSON[1]), literal("")])
    else:
        arguments = one_after_another(
            [
                (each.is_needed, _argument(tool, each, rule))
                for each in arguments_of(tool, required=rule.required, is_name=_is_key)
            ]
        )
    return tag(f'{begin}{_escaped(tool.name)}" index="', sequence(number, arguments), end)


def _is_key(name: str) -> bool:
    return name != "" and not set(name) & set("<>\n") and _ATTRIBUTE.search(name) is None


def _argument(tool: Tool, argument: Argument, rule: CallRule) -> JsonObject:
    """Match an argument in each type that its schema allows."""
    kinds = (argument.kinds or ANY) - {"integer"}
    if "integer" in argument.kinds:
        kinds |= {"number"}
    begin, behind, end = _TAGS.argument
    ways = []
    for kind in sorted(kinds):
        value = _value(tool, argument, kind, rule)
        if value is not None:
            opens = f'{begin}{_escaped(argument.name)}" type="{kind}{behind}'
            ways.append(tag(opens, value, end))
    return either(ways)


def _value(tool: Tool, argument: Argument, kind: str, rule: CallRule) -> JsonObject | None:
    """Return the format of a value of this type; None if the schema lists values, but none of this
    type.
    """
    schema = argument.schema
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        values = [each for each in values if kinds_of({"const": each}, {}) <= _TYPES[kind]]
        schema = {"enum": values}
        if not values:
            return None
    if kind == "string":
        return text_format(tool, dataclasses.replace(argument, schema=schema))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    alone = {key: value for key, value in schema.items() if key not in shared}
    return json_format(written_as({"allOf": [alone, {"type": kind}]} | shared, rule))


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


class _KimiK3Reader(TaggedCallParser, ChannelReader):
    """Reads channels and tool calls. A mark that opens a channel also ends the previous channel."""

    def __init__(self, tools: Sequence[Tool], marks: Marks, *, begun: bool) -> None:
        super().__init__((_TAGS,), tools, marks)
        self._open(is_reasoning=begun)

    def _read(self) -> Reading[None]:
        mark = yield from self._text_until(_OPEN, _CLOSE, _SEP, _END, show=self._content)
        if mark == _OPEN:
            yield from self._opened()
        elif mark == _CLOSE:
            yield from self._closed()
        elif mark == _END:
            yield from self._between()
        elif self._is_token(mark):
            self._drop()
        else:
            self._give_back()

    def _opened(self) -> Reading[None]:
        wrap, function = (text.removeprefix(_OPEN) for text in (_TAGS.wrap[0], _TAGS.function[0]))
        texts = [text.removeprefix(_OPEN) for text in (_STYLE.begin, _RESPONSE[0], _MESSAGE[0])]
        function = function.rstrip('"')
        found = yield from self._any_of(wrap, function, *texts)
        if found is None:
            self._give_back()
        elif found in texts:
            self._drop()
            if found != texts[-1]:
                self._open(is_reasoning=found == texts[0])
        elif not self._tools:
            self._give_back()
        else:
            yield from self._calls_behind(_OPEN + found)
            yield from self._between()

    def _closed(self) -> Reading[None]:
        ends = [_STYLE.end, _RESPONSE[1], _MESSAGE[1], _TAGS.wrap[1]]
        # A repeated end mark after a tool call has no effect.
        ends += [_TAGS.function[-1]] if self._calls else []
        found = yield from self._any_of(*(text.removeprefix(_CLOSE) for text in ends))
        if found is None:
            self._give_back()
            return
        self._open(is_reasoning=False)
        yield from self._between()

    def _between(self) -> Reading[None]:
        """Drop whitespace between channels, and at the end."""
        self._drop()
        self._fits = True
        yield from self._space()
        if (yield from self._ahead(_OPEN, _CLOSE, _END)) is not None:
            self._drop()
        self._give_back()

    # Calls.

    def _calls_behind(self, mark: str) -> Reading[None]:
        self.in_reasoning, was_reasoning = False, self.in_reasoning
        try:
            yield from super()._calls_behind(mark)
        except Misfit:
            self.in_reasoning = was_reasoning
            raise

    def _one_call(self, name: str) -> Reading[None]:
        name = _ATTRIBUTE.split(name, 1)[0]
        if '"' in name or not self._is_callable(name := _unescaped(name)):
            raise Misfit
        yield from self._space()
        if (yield from self._any_of(_JSON[0])) is None:
            yield from super()._one_call(name)
            return
        if (yield from self._space()) != "{":
            raise Misfit
        self._call(name)
        ends = self._value_ends, self._argument_ends
        self._value_ends, self._argument_ends = (_JSON[1], *ends[0]), (_JSON[1],)
        yield from self._json_value()
        self._value_ends, self._argument_ends = ends
        self._end_call()

    def _described(self, name: str) -> tuple[str, Kinds | None]:
        key, *kind = _ATTRIBUTE.split(name, 1)
        return _unescaped(key), _TYPES.get(kind[0]) if kind else None


KIMI_K3 = KimiK3Format()
