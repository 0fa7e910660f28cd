"""Reads tool calls that are JSON objects.

A tool call is `{"name": .., "arguments": {..}}`. The second key may be "parameters", members may
have any order, and all may be in a member "function". Once the name is known, arguments are shown
as they arrive: valid JSON exactly as written, other JSON mended (`JsonMender`). Arguments before
the name are held until the name is known, and arguments in a string until the string ends. Other
members, such as "id" or "type", are dropped. But an object is not a tool call if another member
holds an object or a list, which could be arguments, or if it has an unknown member and no
arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallRule
from penstock_router.text.formats.reading.json_mender import JsonMender, mended_object
from penstock_router.text.formats.reading.reader import SPACE, CallParser, Misfit, Reading, TextOver
from penstock_router.text.marks import TOKEN, plain
from penstock_router.text.structural_tag_builder import either, json_format, regex, tag

_BRACKETS = re.compile(r"[}\] \t\r\n]*")
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
# Other known members of tool calls.
_BESIDES = frozenset({"id", "type", "index", "call_id", "tool_call_id"})


@dataclass(slots=True)
class Call:
    """Facts about an object that may be a tool call."""

    name: str | None = None
    # Arguments that precede the name.
    early: str | None = None
    has_arguments: bool = False
    # True once its CALL piece was shown.
    begun: bool = False
    has_strangers: bool = False


class JsonCallParser(CallParser):
    # Marks that end a tool call, even one with incomplete JSON.
    _ends: tuple[str, ...] = ()
    # True if the end of the model's answer also ends a tool call.
    _ends_with_answer = False

    def _value(self) -> Reading[str]:
        """Consume a JSON value, hold it, and return it mended."""
        yield from self._space()
        mender = JsonMender()
        while not mender.complete:
            self._take(mender.feed(self._text, self._at))
            if mender.failed:
                raise Misfit
            if not mender.complete:
                yield from self._more()
        return plain(mender.take())

    def _shown_value(self) -> Reading[None]:
        """Consume a JSON value, show it mended as arguments, and end the tool call."""
        yield from self._space()
        self._drop()
        mender = JsonMender()
        while not mender.complete:
            if mender.is_in_string and self._text.startswith(TOKEN, self._at):
                yield from self._mark_in_string(mender)
                continue
            token = self._text.find(TOKEN, self._at + 1)
            text = self._text if token < 0 else self._text[:token]
            self._at = mender.feed(text, self._at)
            self._arguments(mender.take())
            if mender.failed:
                yield from self._close(mender)
            elif not mender.complete and self._at == len(self._text):
                if self._over and self._closes(mender):
                    break
                yield from self._more()
        self._end_call()

    def _mark_in_string(self, mender: JsonMender) -> Reading[None]:
        """Read a mark within a string. The mark is text, unless it ends the call and the answer:
        then the value's missing rest is shown.
        """
        if (yield from self._is_last_mark(*self._ends)):
            mender.close()
        else:
            mender.feed("".join(self._held))
        self._drop()
        self._arguments(mender.take())

    def _is_last_mark(self, *marks: str) -> Reading[bool]:
        """Consume one of these marks, then other marks and whitespace; return true if the answer
        ends there. If none of these marks is here, consume one character.
        """
        if (yield from self._any_of(*marks)) is None:
            self._take(self._at + 1)
            return False
        # A quote in a mark might end a string.
        others = [mark for mark in self._marks.tokens.values() if '"' not in mark]
        while True:
            self._take(len(self._text) - len(self._text[self._at :].lstrip(SPACE)))
            if self._at == len(self._text):
                if self._over and not self._was_cut:
                    return True
                yield from self._more()
            elif (yield from self._any_of(*others)) is None:
                return False

    def _closes(self, mender: JsonMender) -> bool:
        """Tell whether the answer's end also ends this value; if so, show the value's missing
        rest.
        """
        if self._was_cut or not (self._ends_with_answer and mender.is_between):
            self._arguments(mender.unsaid)
            return False
        mender.close()
        self._arguments(mender.take())
        return True

    def _close(self, mender: JsonMender) -> Reading[None]:
        """Complete a value if the tool call's end follows; else raise `Misfit`."""
        try:
            end = yield from self._ahead(*self._ends)
        except TextOver:
            self._arguments(mender.unsaid)
            raise
        if end is None:
            self._held.append(mender.unsaid)
            raise Misfit
        mender.close()
        self._arguments(mender.take())

    def _object_or_list(self) -> Reading[bool]:
        """Read an object or a list of objects; return true if the last object was a tool call."""
        if (yield from self._peek()) == "[":
            return (yield from self._list())
        return (yield from self._object())

    def _list(self) -> Reading[bool]:
        """Read a list of tool calls; other elements are content."""
        yield from self._expect("[")
        was_call = False
        while (yield from self._space()) != "]" or not was_call:
            was_call = yield from self._object()
            while (after := (yield from self._space())) == "}" and was_call:
                self._take(self._at + 1)
            if after == ",":
                self._take(self._at + 1)
            elif after != "]":
                if was_call and (yield from self._ahead(*self._ends)) is not None:
                    return True
                raise Misfit
            elif not was_call:
                break
        self._take(self._at + 1)
        # The list's end is syntax or content, like its last element.
        self._drop() if was_call else self._give_back()
        return was_call

    def _object(self) -> Reading[bool]:
        """Consume an object; return whether it was a tool call. If not, it is content."""
        self._fits = False
        yield from self._expect("{")
        call = Call()
        if not (yield from self._members(call)):
            if call.begun:
                raise Misfit
            return (yield from self._no_call())
        if call.name is None or (call.has_strangers and not call.has_arguments):
            return (yield from self._no_call())
        if not call.begun:
            self._show_call(call, "{}")
        yield from self._any_of("}")
        self._drop()
        return True

    def _members(self, call: Call) -> Reading[bool]:
        """Consume members up to the closing bracket; return whether the object may be a tool
        call.
        """
        while (after := (yield from self._space())) != "}":
            if not (yield from self._member(call)):
                return False
            after = yield from self._space()
            if after == ",":
                self._take(self._at + 1)
            elif after != "}":
                # After its arguments, a tool call may lack its own end.
                if call.begun and (yield from self._ahead("]", *self._ends)) is not None:
                    return True
                raise Misfit
        return True

    def _no_call(self) -> Reading[bool]:
        """Show the object as content, to its end."""
        rest = JsonMender(inside_object=True)
        while not rest.complete:
            end = rest.feed(self._text, self._at)
            rest.take()
            self._take(end)
            self._give_back()
            if rest.failed:
                raise Misfit
            if not rest.complete:
                yield from self._more()
        return False

    def _member(self, call: Call) -> Reading[bool]:
        """Consume a member; return whether the object may still be a tool call."""
        if (yield from self._peek()) not in "\"'":
            raise Misfit
        key = json.loads((yield from self._value()))
        yield from self._space()
        yield from self._expect(":")
        return (yield from self._keyed(call, key, (yield from self._space())))

    def _keyed(self, call: Call, key: str, first: str) -> Reading[bool]:
        """Read a member's value, which begins with `first`; return the same as `_member`."""
        if key in _NAMES or (key == "function" and first in "\"'"):
            return (yield from self._named(call))
        if key == "function" and first == "{" and call.name is None:
            yield from self._expect("{")
            return (yield from self._members(call)) and (yield from self._any_of("}")) is not None
        if key in _ARGUMENTS:
            return (yield from self._given(call, first))
        if first in "{[":
            return (yield from self._unless_begun(call))
        yield from self._value()
        call.has_strangers = call.has_strangers or key not in _BESIDES
        return True

    def _unless_begun(self, call: Call) -> Reading[bool]:
        """Refuse the object because of this value, which is read unless the call was already
        shown.
        """
        if not call.begun:
            yield from self._value()
        return False

    def _named(self, call: Call) -> Reading[bool]:
        if call.name is not None:
            return (yield from self._unless_begun(call))
        text = yield from self._value()
        name = json.loads(text) if text.startswith('"') else None
        if not self._is_callable(name):
            return False
        call.name = name
        if call.early is not None:
            self._show_call(call, call.early)
        return True

    def _given(self, call: Call, first: str) -> Reading[bool]:
        """Read the arguments: an object, perhaps in a string; null or an empty list means none."""
        if call.has_arguments:
            return (yield from self._unless_begun(call))
        call.has_arguments = True
        if first == "{" and call.name is not None:
            self._show_call(call, "")
            yield from self._shown_value()
            return True
        text = yield from self._value()
        if text.startswith('"'):
            text = json.loads(text)
        if text == "null" or text.strip(SPACE) in ("", "[]"):
            text = "{}"
        mended = mended_object(text)
        if mended is None:
            return False
        if call.name is None:
            call.early = mended
        else:
            self._show_call(call, mended)
        return True

    def _show_call(self, call: Call, arguments: str) -> None:
        call.begun = True
        self._call(call.name or "", arguments)

    def _ended(self) -> Reading[None]:
        """Drop an end mark after a tool call, and excess brackets before it."""
        yield from self._brackets_too_many()
        yield from self._any_of(*self._ends)
        yield from self._after_call()
        # A repeated mark has no effect.
        while (yield from self._any_of(*self._ends)) is not None:
            yield from self._after_call()

    def _calls_in_section(
        self, one_call: Callable[[], Reading[None]], begin: str, end: str, section_end: str
    ) -> Reading[None]:
        """Read tool calls between `begin` and `end`, up to the end of their section."""
        while True:
            yield from one_call()
            yield from self._after_call()
            # The call has ended, whatever follows.
            while (mark := (yield from self._any_of(begin, end, section_end))) is not None:
                if mark == begin:
                    break
                yield from self._after_call()
            if mark is None:
                return
            self._fits = False

    def _brackets_too_many(self, *marks: str) -> Reading[None]:
        """Consume excess brackets before a call's end or one of these marks; other brackets are
        content.
        """
        self._drop()
        brackets = yield from self._run(_BRACKETS)
        if brackets.strip(SPACE) and (yield from self._ahead(*self._ends, *marks)) is None:
            self._give_back()


class BareJsonParser(JsonCallParser):
    """Reads objects and lists one after another, without marks between them."""

    _at_beginning = True

    def _several(self) -> Reading[bool]:
        """Read objects and lists; return true if the last object was a tool call."""
        while True:
            was_call = yield from self._object_or_list()
            after = yield from self._space()
            if after in ";,":
                self._take(self._at + 1)
                after = yield from self._space()
                if after not in "{[":
                    raise Misfit
            elif after not in "{[":
                break
        if was_call:
            yield from self._brackets_too_many()
        else:
            self._give_back()
        return was_call


# Constraints on answers.


def arguments_format(tool: Tool, rule: CallRule) -> JsonObject:
    """Match arguments as JSON: by the tool's schema if required or strict, else any object."""
    schema = tool.parameters if rule.required or tool.strict else None
    whole: JsonObject = {"type": "object"} | (schema or {})
    return json_format(written_as(whole, rule))


def written_as(schema: JsonObject, rule: CallRule) -> JsonObject:
    """Restrict the JSON of a schema to the rule's separators."""
    if rule.separators is None:
        return schema
    item, key = rule.separators
    writing = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return {"x-guidance": writing} | schema


def call_tag(
    tool: Tool,
    before: str,
    between: str,
    end: str,
    rule: CallRule,
) -> JsonObject:
    """Match `before`, the tool's name in quotes, `between`, its arguments, and `end`."""
    name = json.dumps(tool.name, ensure_ascii=False)
    content = arguments_format(tool, rule)
    return tag(before + name + between, content, end)


def calls_or_text(calls: JsonObject, beginnings: str) -> JsonObject:
    """Match tool calls, or text that begins with none of the characters in `beginnings`."""
    others = beginnings.replace("[", "\\[")
    text = regex(f"[ \\t\\r\\n]*([^{others} \\t\\r\\n][\\s\\S]*)?")
    return either([calls, text])
