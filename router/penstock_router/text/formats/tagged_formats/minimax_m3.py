"""MiniMax M3: values as nested elements, with a mark before each tag.

A list's entries are elements named `item`; null members are left out. Other values are text; the
tool's schema gives their type.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock_router.argument_kinds import (
    ANY,
    STRING,
    Kinds,
    referred,
)
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule, ToolParser
from penstock_router.text.formats.reading.json_calls import written_as
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    one_after_another,
    text_format,
)
from penstock_router.text.formats.reading.reader import Misfit, Reading, TextOver
from penstock_router.text.formats.reading.tagged_calls import TaggedCallParser, TaggedFormat
from penstock_router.text.formats.reading.tags import Spaces, Tags
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.structural_tag_builder import (
    either,
    json_format,
    literal,
    one_or_more,
    tag,
)

_MARK = "]<]minimax[>["
_OPENS, _CLOSES = f"{_MARK}<", f"{_MARK}</"
_ITEM = "item"
# The keywords that can be enforced on nested elements.
_OBJECT_KEYS = frozenset({"type", "properties", "required", "additionalProperties"}) | {
    *("title", "description", "default", "$defs", "definitions"),
}
_LIST_KEYS = frozenset({"type", "items", "title", "description", "default"}) | {
    *("$defs", "definitions"),
}
_MAX_ELEMENTS = 60
_MAX_DEPTH = 5
# Nulls are not written.
_UNKNOWN: Kinds = ANY - {"null"}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Format(TaggedFormat):
    """Tool calls of nested elements. In constraints, objects and lists are JSON if their schema
    does not describe their content, or if elements cannot enforce it.
    """

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _MiniMaxM3Parser((_READ,), tools, marks)

    def _value_format(self, tool: Tool, argument: Argument, rule: CallRule) -> JsonObject:
        return _ElementFormats(tool, argument, rule).value(argument)

    def _argument_end(self, argument: Argument) -> str:
        return f"{_CLOSES}{argument.name}>"


def _tags(argument_end: str) -> Tags:
    return Tags(
        wrap=(f"{_OPENS}tool_call>", f"{_CLOSES}tool_call>"),
        is_one_block=True,
        function=(f'{_OPENS}invoke name="', '">', f"{_CLOSES}invoke>"),
        argument=(_OPENS, ">", argument_end),
    )


# An end tag has its element's name, so the reader itself handles it.
_READ = _tags("")
MINIMAX_M3 = MiniMaxM3Format(
    name="minimax_m3",
    tags=_tags(_CLOSES),
    spaces=Spaces(name="", argument=""),
    token_parts=(_MARK,),
    signs=(_MARK, "<invoke name="),
)


class _ElementFormats:
    """Makes formats of nested elements from an argument's schema."""

    def __init__(self, tool: Tool, whole: Argument, rule: CallRule) -> None:
        self._tool, self._whole, self._rule = tool, whole, rule
        # References may repeat a part of the schema endlessly.
        self._left = _MAX_ELEMENTS

    def value(self, argument: Argument, depth: int = 0) -> JsonObject:
        """Match the content between an element's tags."""
        schema = referred(argument.schema, self._whole.schema)
        if argument.may_be_text:
            return text_format(self._tool, argument)
        self._left -= 1
        may_nest = self._left > 0 and depth < _MAX_DEPTH
        if may_nest and schema.keys() <= _OBJECT_KEYS and schema.get("properties"):
            needed = set(schema.get("required") or ())
            members = schema["properties"].items()
            return one_after_another(
                [(name in needed, self._element(name, each, depth)) for name, each in members]
            )
        if may_nest and schema.keys() <= _LIST_KEYS and isinstance(schema.get("items"), dict):
            items = one_or_more([self._element(_ITEM, schema["items"], depth)], "", parallel=True)
            return either([items, literal("")])
        return json_format(written_as(argument.schema, self._rule))

    def _element(self, name: str, schema: JsonObject, depth: int) -> JsonObject:
        alone = self._whole.definitions.given_to(schema)
        argument = replace(self._whole, name=name, is_needed=True, schema=alone)
        return tag(f"{_OPENS}{name}>", self.value(argument, depth + 1), f"{_CLOSES}{name}>")


@dataclass(slots=True)
class _Element:
    """An open object or list, and its part of the tool's schema."""

    name: str
    is_list: bool
    schema: Any
    is_empty: bool = True


class _MiniMaxM3Parser(TaggedCallParser):
    def _one_call(self, name: str) -> Reading[None]:
        if not self._is_callable(name):
            raise Misfit
        self._known = self._offered.arguments(name)
        arguments = _Element("", False, self._known.root)
        self._open, self._names = [arguments], Counter[str]()
        try:
            while (yield from self._tag(name)):
                pass
        except TextOver:
            is_whole = len(self._open) == 1
            self._end_by_answer(name, begun=not arguments.is_empty and is_whole)
            raise
        if arguments.is_empty:
            self._call(name, "{}")
        else:
            self._close(0)
            self._end_call()

    def _tag(self, function: str) -> Reading[bool]:
        """Read the next tag, and the text after it; return false if the call has ended."""
        yield from self._space()
        if (yield from self._any_of(*self._ends)) is not None:
            return False
        if (yield from self._ahead(*self._wraps, *self._function_begins)) is not None:
            return False
        if (yield from self._any_of(_CLOSES)) is not None:
            name = yield from self._name_in_tag(">", ())
            if self._names[name]:
                at = len(self._open) - 1
                while self._open[at].name != name:
                    at -= 1
                self._close(at)
            self._fits = len(self._open) == 1 and not self._open[0].is_empty
            return True
        yield from self._expect(_OPENS)
        name = yield from self._name_in_tag(">", ())
        if self._open[0].is_empty:
            self._call(function)
            self._arguments("{")
        self._drop()
        yield from self._element(name)
        return True

    def _close(self, at: int) -> None:
        self._drop()
        for element in reversed(self._open[at:]):
            self._arguments("]" if element.is_list else "}")
            self._names[element.name] -= 1
        del self._open[at:]

    def _element(self, name: str) -> Reading[None]:
        """Read an element after its begin tag: its value, or the beginning of nested elements."""
        parent = self._open[-1]
        key = "" if parent.is_list else f"{json.dumps(name, ensure_ascii=False)}: "
        self._arguments(f"{'' if parent.is_empty else ', '}{key}")
        parent.is_empty = False
        schema, kinds = self._described_as(parent, name)
        self._fits = False
        may_nest = kinds != STRING or schema is None
        if may_nest and (yield from self._is_next(_OPENS)):
            yield from self._nested(name, schema, kinds)
        else:
            yield from self._argument_value(kinds)
        if self._open[-1] is parent:
            # The value has ended, so the element should end too.
            yield from self._space()
            yield from self._any_of(f"{_CLOSES}{name}>")
        self._fits = len(self._open) == 1

    def _described_as(self, parent: _Element, name: str) -> tuple[Any, Kinds]:
        """Find an element's schema and kinds; nested elements may have no schema."""
        schemas, of = self._known.schemas, parent.schema
        schema = schemas.items(of) if parent.is_list else schemas.member(of, name)
        if len(self._open) == 1:
            return schema, self._known.kinds(name)
        return schema, schemas.of(schema) or _UNKNOWN

    def _nested(self, name: str, schema: Any, kinds: Kinds) -> Reading[None]:
        """Read an element without text: it has nested elements, or nothing."""
        if (yield from self._is_next(_CLOSES)):
            empty = {"array": "[]", "object": "{}", "null": "null"}
            found = (text for kind, text in empty.items() if kind in kinds)
            if kinds & STRING:
                yield from self._argument_value(kinds)
            else:
                self._arguments(next(found, '""'))
            return
        has_items = yield from self._is_next(f"{_OPENS}{_ITEM}>")
        is_list = has_items and ("array" in kinds or "object" not in kinds)
        self._arguments("[" if is_list else "{")
        self._open.append(_Element(name, is_list, schema))
        self._names[name] += 1

    def _is_next(self, text: str) -> Reading[bool]:
        """Tell whether this text comes next, perhaps after whitespace. Raises `TextOver` if the
        answer ends before that is known.
        """
        if (yield from self._follows(0, [text], or_nothing=False)):
            return True
        if self._over and (yield from self._follows(0, [text])):
            raise TextOver
        return False

    def _is_end(self, size: int, end: str) -> Reading[bool]:
        yield from ()
        return True
