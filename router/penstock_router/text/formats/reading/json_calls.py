"""Calls that are JSON objects: shared by the families that write them so.

A call is `{"name": .., "arguments": {..}}`, or with `parameters`, its members in any order, perhaps
within a member "function". Once the name is known, arguments are shown as they come: valid JSON
exactly as the model writes it, other JSON mended (`JsonMender`). If they come before the name, or
as a string that holds JSON, they are held until both are known. Other members, an "id" or a "type",
are dropped unless they could have been meant as arguments: an object is not a call if such a member
holds an object or a list, or if it has an unknown member and no arguments.
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
# Other members that calls are known to have.
_BESIDES = frozenset({"id", "type", "index", "call_id", "tool_call_id"})


@dataclass(slots=True)
class Call:
    """The facts known so far of an object that may be a call."""

    name: str | None = None
    # Arguments that came before the name.
    early: str | None = None
    has_arguments: bool = False
    # Whether its CALL piece was shown.
    begun: bool = False
    has_strangers: bool = False


class JsonCallParser(CallParser):
    """Reads objects that are calls, and lists of them."""

    # Marks with which the model ends a call, also one whose JSON is not complete.
    _ends: tuple[str, ...] = ()
    # Whether the end of an answer that the model ended itself is the end of a call.
    _ends_with_answer = False

    def _value(self) -> Reading[str]:
        """Consume a JSON value and hold it; returns it, mended."""
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
        """Consume a JSON value and show it as arguments, mended; the call ends with it."""
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
        """A mark within a string is text, but for the end of the call that the answer ends with:
        there the value ends, of which the rest is shown.
        """
        if (yield from self._is_last_mark(*self._ends)):
            mender.close()
        else:
            mender.feed("".join(self._held))
        self._drop()
        self._arguments(mender.take())

    def _is_last_mark(self, *marks: str) -> Reading[bool]:
        """Consume one of these marks, and marks and white space behind it; returns whether nothing
        else follows. If it is another mark, only its beginning is consumed.
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
        """Tell whether the answer's end is the value's, of which the rest is shown."""
        if self._was_cut or not (self._ends_with_answer and mender.is_between):
            self._arguments(mender.unsaid)
            return False
        mender.close()
        self._arguments(mender.take())
        return True

    def _close(self, mender: JsonMender) -> Reading[None]:
        """Complete a value behind which the model wrote the call's end; else it is a misfit."""
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
        """An object or a list of them; returns whether it, or the last in the list, was a call."""
        if (yield from self._peek()) == "[":
            return (yield from self._list())
        return (yield from self._object())

    def _list(self) -> Reading[bool]:
        """Calls in brackets. An element that is not a call is content, and the list goes on."""
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
        # The end of the list is syntax or content, as its last element was.
        self._drop() if was_call else self._give_back()
        return was_call

    def _object(self) -> Reading[bool]:
        """Consume an object; returns whether it was a call. If not, it is content."""
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
        """Consume members up to the closing bracket, which is not consumed; returns whether the
        object may still be a call.
        """
        while (after := (yield from self._space())) != "}":
            if not (yield from self._member(call)):
                return False
            after = yield from self._space()
            if after == ",":
                self._take(self._at + 1)
            elif after != "}":
                # A call whose arguments have ended may lack its own end.
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
        """Consume a member; returns whether the object may still be a call."""
        if (yield from self._peek()) not in "\"'":
            raise Misfit
        key = json.loads((yield from self._value()))
        yield from self._space()
        yield from self._expect(":")
        return (yield from self._keyed(call, key, (yield from self._space())))

    def _keyed(self, call: Call, key: str, first: str) -> Reading[bool]:
        """The value of a member, of which the first character is known; as `_member`."""
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
        """A value that no call may have; not consumed if the call was shown already."""
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
        """The arguments: an object, a string that holds one, or null or an empty list for none."""
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
        """Drop a mark of the end behind a call, and brackets too many before it."""
        yield from self._brackets_too_many()
        yield from self._any_of(*self._ends)
        yield from self._after_call()
        # The mark once more means nothing more.
        while (yield from self._any_of(*self._ends)) is not None:
            yield from self._after_call()

    def _calls_in_section(
        self, one_call: Callable[[], Reading[None]], begin: str, end: str, section_end: str
    ) -> Reading[None]:
        """Read calls that `begin` and `end` stand around, up to the end of their section."""
        while True:
            yield from one_call()
            yield from self._after_call()
            # Whatever follows, this call has ended.
            while (mark := (yield from self._any_of(begin, end, section_end))) is not None:
                if mark == begin:
                    break
                yield from self._after_call()
            if mark is None:
                return
            self._fits = False

    def _brackets_too_many(self, *marks: str) -> Reading[None]:
        """Consume brackets behind a call that stand before its end or one of these marks; others
        are content.
        """
        self._drop()
        brackets = yield from self._run(_BRACKETS)
        if brackets.strip(SPACE) and (yield from self._ahead(*self._ends, *marks)) is None:
            self._give_back()


class BareJsonParser(JsonCallParser):
    """Objects and lists one after the other, without markers between them."""

    _at_beginning = True

    def _several(self) -> Reading[bool]:
        """Objects and lists until something else comes; returns whether the last was a call."""
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
    """Arguments as JSON that obeys the tool's schema if required or strict, else any object."""
    schema = tool.parameters if rule.required or tool.strict else None
    whole: JsonObject = {"type": "object"} | (schema or {})
    return json_format(written_as(whole, rule))


def written_as(schema: JsonObject, rule: CallRule) -> JsonObject:
    """The schema of the same JSON, written in one way only."""
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
    """A call: its name in quotes after `before`, its arguments between `between` and `end`."""
    name = json.dumps(tool.name, ensure_ascii=False)
    content = arguments_format(tool, rule)
    return tag(before + name + between, content, end)


def calls_or_text(calls: JsonObject, beginnings: str) -> JsonObject:
    """Calls, or text that begins with none of the characters in `beginnings`."""
    others = beginnings.replace("[", "\\[")
    text = regex(f"[ \\t\\r\\n]*([^{others} \\t\\r\\n][\\s\\S]*)?")
    return either([calls, text])
