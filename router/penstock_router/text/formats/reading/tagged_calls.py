"""Calls that have each argument between tags of its own: shared by the families that write them so.

Strings stand there as they are, without quotes or escapes, so the type of a value is what the
tool's schema says (`argument_kinds`), and a value ends at a tag behind which the call goes on: the
same tag within a program that is being written is text. Arguments are shown as JSON while they
come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_router.argument_kinds import STRING, Kinds, kinds_of_argument
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import FREE_WRITING, CallFormat, ToolParser, Writing
from penstock_router.text.formats.reading.argument_values import begun_json_of, json_of
from penstock_router.text.formats.reading.json_calls import written_as
from penstock_router.text.formats.reading.json_mender import JsonMender
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    arguments_of,
    one_after_another,
    text_format,
)
from penstock_router.text.formats.reading.reader import (
    SPACE,
    CallParser,
    Misfit,
    Reading,
    TextOver,
    one_of,
)
from penstock_router.text.marks import NO_MARKS, Marks
from penstock_router.text.stop_strings import beginning
from penstock_router.text.structural_tag_builder import (
    among_text,
    json_format,
    literal,
    one_or_more,
    sequence,
    tag,
)

_KEY = re.compile(r"[^<>\n\ud800]*")
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
# White space behind a tag that is looked through for what follows it.
_MAX_SPACE = 64
_MAX_AHEAD = 512
# Longer than any word or number that is no string.
_MAX_SCALAR = 400
_LONG: Kinds = frozenset({"object", "array"})
_QUOTES = ("", '"', "'")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a family writes a call: the text around names and values."""

    # Around each call or, with `is_one_block`, around all of them; "" if there is nothing.
    wrap: tuple[str, str]
    is_one_block: bool = False
    # Before a function's name, behind it, and at the function's end.
    function: tuple[str, str, str]
    # Before an argument's name, behind it, and at the argument's end.
    argument: tuple[str, str, str]
    # The white space around values that is not part of them, and that between tags.
    padding: str = ""
    line: str = "\n"
    # What is written between two calls.
    between: str = "\n"

    @property
    def all(self) -> tuple[str, ...]:
        """All texts that may be tokens."""
        parts = (*self.wrap, *self.function, *self.argument)
        return tuple(dict.fromkeys(part for part in parts if len(part) > 1))


@dataclass(frozen=True, kw_only=True)
class TaggedFormat(CallFormat):
    """A family whose calls are written with `tags`."""

    name: str
    tags: Tags
    # Texts that a template of the family has, and texts that it has not.
    signs: tuple[str, ...]
    strange: tuple[str, ...] = field(default=())

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The tags."""
        return self.tags.all

    def is_of(self, template: str) -> bool:
        """The template has all signs and no strange texts."""
        has_signs = all(sign in template for sign in self.signs)
        return has_signs and not any(text in template for text in self.strange)

    def begins(self) -> tuple[str, ...]:
        """What begins a call, or all of them."""
        return (self.tags.wrap[0] or self.tags.function[0],)

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        """A parser for one answer."""
        return TaggedCallParser(self.tags, tools, marks)

    def calls(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        writing: Writing = FREE_WRITING,
    ) -> JsonObject:
        """Calls as the family writes them, each argument in the order of the schema."""
        tags = self.tags
        opens, closes = (f"{tags.wrap[0]}{tags.line}", tags.wrap[1]) if tags.wrap[0] else ("", "")
        functions = [
            self._function_tag(tool, opens, closes, required=required, writing=writing)
            for tool in tools
        ]
        calls = one_or_more(functions, tags.between, parallel=parallel)
        trigger = self.begins()[0]
        if not tags.is_one_block:
            return calls if required else among_text(functions, trigger, parallel=parallel)
        closes = f"{tags.line}{closes}"
        if required:
            return sequence(literal(opens), calls, literal(closes))
        return among_text([tag(opens, calls, closes)], trigger, parallel=False)

    def _function_tag(
        self, tool: Tool, opens: str, closes: str, *, required: bool, writing: Writing
    ) -> JsonObject:
        before, behind, end = self.tags.function
        begin = f"{before}{tool.name}{behind}"
        if not self.tags.is_one_block:
            begin, end = opens + begin, f"{end}{self.tags.line if end else ''}{closes}"
        arguments = [
            (each.is_needed, self._argument_format(tool, each, writing))
            for each in arguments_of(tool, required=required, is_name=_is_key)
        ]
        return tag(begin + self.tags.line, one_after_another(arguments), end)

    def _argument_format(self, tool: Tool, argument: Argument, writing: Writing) -> JsonObject:
        before, behind, end = self.tags.argument
        padding = self.tags.padding
        if argument.may_be_text:
            value = text_format(tool, argument)
        else:
            value = json_format(written_as(argument.schema, writing))
        begin = f"{before}{argument.name}{behind}{padding}"
        return tag(begin, value, f"{padding}{end}{self.tags.line}")


def _is_key(name: str) -> bool:
    return name != "" and _KEY.fullmatch(name) is not None


class TaggedCallParser(CallParser):
    """Reads calls whose arguments have tags of their own.

    Tolerates: no tag around a call or at its end, quotes of either kind or none around names, a
    missing `>` before a line break, a missing end of an argument before the next one that the tool
    has.
    """

    def __init__(self, tags: Tags, tools: Sequence[Tool], marks: Marks) -> None:
        super().__init__(tools, marks)
        self._tags = tags
        self._function_begin = tags.function[0].rstrip('"')
        self._argument_begin = tags.argument[0].rstrip('"')
        self._block_ends = tuple(filter(None, (tags.wrap[1],)))
        self._function_ends = tuple(filter(None, (tags.function[2],)))
        # Texts that may end a value: the first is consumed with it, the others are not.
        self._value_ends = (
            tags.argument[2],
            *self._function_ends,
            *self._block_ends,
            self._argument_begin,
        )
        # Of the call that is read: its tool's arguments that have not come yet.
        self._awaited: set[str] = set()
        # Whether the end of all calls was read.
        self._is_block_over = False

    def _read(self) -> Reading[None]:
        wraps = tuple(filter(None, (self._tags.wrap[0],)))
        mark = yield from self._until(*wraps, self._function_begin)
        self._is_marked = not wraps or mark in wraps
        if mark in wraps:
            yield from self._again(*wraps)
            yield from self._expect(self._function_begin)
        self._is_block_over = False
        while True:
            yield from self._one_call((yield from self._name_in_tag(self._tags.function[1])))
            if self._is_block_over:
                break
            yield from self._after_call()
            found = yield from self._any_of(*self._block_ends, self._function_begin)
            if found != self._function_begin:
                break
            self._fits = False
        yield from self._after_call()

    # Calls.

    def _one_call(self, name: str) -> Reading[None]:
        """The arguments of a call, whose name is read, and its end."""
        if not self._is_callable(name):
            raise Misfit
        tool = self._tools.get(name)
        parameters = None if tool is None else tool.parameters
        self._awaited = set((parameters or {}).get("properties") or ())
        begun = False
        try:
            while (argument := (yield from self._argument())) is not None:
                key, kinds = argument
                if not begun:
                    self._call(name)
                self._drop()
                self._arguments(f"{', ' if begun else '{'}{_ENCODE(key)}: ")
                begun = True
                self._awaited.discard(key)
                yield from self._value(kinds or kinds_of_argument(parameters, key))
                self._fits = True
        except TextOver:
            # The model ended its answer behind a whole argument.
            if begun and self._fits and not self._was_cut:
                self._arguments("}")
                self._end_call()
            raise
        if begun:
            self._arguments("}")
            self._end_call()
        else:
            self._call(name, "{}")

    def _argument(self) -> Reading[tuple[str, Kinds | None] | None]:
        """Consume all up to an argument's value: its name and, if the answer says them, its kinds.
        None: the call has ended, and its end is consumed.
        """
        yield from self._space()
        ends = (*self._function_ends, *self._block_ends)
        found = yield from self._any_of(self._argument_begin, *ends)
        if found is None:
            raise Misfit
        if found != self._argument_begin:
            self._is_block_over = found in self._block_ends
            return None
        return self._described((yield from self._name_in_tag(self._tags.argument[1])))

    def _described(self, name: str) -> tuple[str, Kinds | None]:
        """An argument's name and kinds, as its tag says them."""
        return name, None

    def _name_in_tag(self, behind: str) -> Reading[str]:
        """Consume a name and what stands behind it; quotes around the name are dropped."""
        name = yield from self._run(_KEY)
        if (yield from self._any_of(behind.lstrip('"'))) is None and self._text[self._at] != "\n":
            raise Misfit
        return name.strip(f"{SPACE}\"'")

    # Values.

    def _value(self, kinds: Kinds) -> Reading[None]:
        self._fits = False
        if self._tags.padding:
            yield from self._any_of(self._tags.padding)
        self._drop()
        if kinds == STRING:
            yield from self._text_value("")
        elif kinds & STRING or (yield from self._space()) not in "{[":
            yield from self._held_value(kinds)
        else:
            yield from self._json_value()

    def _text_value(self, begun: str) -> Reading[None]:
        """A string, of which some may be read already."""
        self._arguments('"' + _escaped(begun))
        while (part := (yield from self._part())) is not None:
            self._arguments(_escaped(part))
        self._arguments('"')

    def _held_value(self, kinds: Kinds) -> Reading[None]:
        """A value whose type shows only at its end."""
        held: list[str] = []
        size, is_bracketed = 0, (yield from self._peek()) in "{["
        try:
            while (part := (yield from self._part())) is not None:
                held.append(part)
                size += len(part)
                if size > _MAX_SCALAR and not (is_bracketed and kinds & _LONG):
                    yield from self._text_value("".join(held))
                    return
        except TextOver:
            self._arguments(begun_json_of("".join(held), kinds))
            raise
        self._arguments(json_of("".join(held), kinds))

    def _json_value(self) -> Reading[None]:
        """An object or a list, shown as it comes."""
        self._drop()
        mender = JsonMender()
        while not mender.complete:
            self._at = mender.feed(self._text, self._at)
            self._arguments(mender.take())
            if mender.failed:
                if (yield from self._ahead(*self._value_ends)) is None:
                    self._held.append(mender.unsaid)
                    raise Misfit
                mender.close()
                self._arguments(mender.take())
            elif not mender.complete:
                if self._over:
                    self._arguments(mender.unsaid)
                yield from self._more()
        yield from self._space()
        yield from self._any_of(self._value_ends[0])
        self._drop()

    def _part(self) -> Reading[str | None]:
        """The next part of a value that is text; None at its end, which is consumed."""
        padding = self._tags.padding
        spelled = {self._marks.spelled(end): end for end in self._value_ends}
        ends = (*spelled, *(padding + end for end in spelled if padding))
        pattern = one_of(ends)
        while True:
            found = pattern.search(self._text, self._at)
            end = beginning(self._text, ends, self._at) if found is None else found.start()
            if end > self._at:
                part, self._at = self._text[self._at : end], end
                return part
            if found is not None:
                text = found.group()
                break
            if self._over and end < len(self._text):
                # What looks like an end is part of the value if the model ended in it. If it was
                # cut off there, nobody knows.
                part, self._at = self._text[self._at :], len(self._text)
                if not self._was_cut:
                    return part
            yield from self._more()
        own = spelled[text.removeprefix(padding) if text not in spelled else text]
        if not (yield from self._is_end(len(text), own)):
            self._at += len(text)
            return text
        if own == self._value_ends[0]:
            self._at += len(text)
        elif text not in spelled:
            self._at += len(padding)
        return None

    def _is_end(self, size: int, end: str) -> Reading[bool]:
        """Whether the end of this size that stands here is one: something of the call must follow,
        unless it is a token.
        """
        if self._marks.spelled(end) != end:
            return True
        if end == self._argument_begin:
            behind = self._tags.argument[1].lstrip('"')
            names = [f"{quote}{key}{quote}{behind}" for key in self._awaited for quote in _QUOTES]
            return bool(names) and (yield from self._follows(size, names, or_nothing=False))
        if end in self._block_ends:
            wanted: tuple[str, ...] = ()
        elif end in self._function_ends:
            wanted = (*self._block_ends, self._function_begin)
        else:
            wanted = (self._argument_begin, *self._function_ends, *self._block_ends)
        return (yield from self._follows(size, wanted))

    def _follows(
        self, offset: int, wanted: Sequence[str], *, or_nothing: bool = True
    ) -> Reading[bool]:
        """Whether one of the texts, or perhaps the answer's end, stands behind white space."""
        spelled = [self._marks.spelled(text) for text in wanted]
        while True:
            there = self._text[self._at + offset : self._at + offset + _MAX_AHEAD]
            rest = there.lstrip(SPACE)
            if any(rest.startswith(text) for text in spelled):
                return True
            if rest and not any(text.startswith(rest) for text in spelled):
                return False
            if self._over or len(there) - len(rest) > _MAX_SPACE:
                return or_nothing and (not rest or self._was_cut)
            yield from self._more()


def _escaped(text: str) -> str:
    return _ENCODE(text)[1:-1]
