"""Reads tool calls with tags around each argument.

Strings have no quotes or escapes, so the tool's schema decides a value's type (`argument_kinds`). A
tag ends a value only if the rest of a call follows; otherwise it is text, perhaps of a program.
Arguments are shown as JSON while they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock_router.argument_kinds import STRING, Kinds
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.argument_values import begun_json_of, json_of
from penstock_router.text.formats.reading.json_calls import written_as
from penstock_router.text.formats.reading.json_mender import JsonMender
from penstock_router.text.formats.reading.named_arguments import (
    Argument,
    arguments_of,
    one_after_another,
    python_words,
    text_format,
)
from penstock_router.text.formats.reading.offered_tools import AwaitedNames, KnownArguments
from penstock_router.text.formats.reading.reader import (
    SPACE,
    CallParser,
    Misfit,
    Reading,
    TextOver,
    one_of,
)
from penstock_router.text.formats.reading.tags import (
    Spaces,
    Tags,
    bare,
    is_python_rendered,
    rendered_spaces,
)
from penstock_router.text.marks import NO_MARKS, TOKEN, Marks, plain
from penstock_router.text.stop_strings import beginning
from penstock_router.text.structural_tag_builder import (
    among_text,
    either,
    json_format,
    literal,
    one_or_more,
    sequence,
    tag,
)

_KEY = re.compile(r"[^<>\n\ud800]*")
# A possible name of a function that is not in the request.
_NAME = re.compile(r"[\w.\-/:]*\w[\w.\-/:]*")
_BRACKETS = re.compile(r"[}\] \t\r\n]*")
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode
# Maximum whitespace searched for the text after a tag.
_MAX_SPACE = 64
# Words and numbers that are not strings are shorter than this.
_MAX_SCALAR = 48
_LONG: Kinds = frozenset({"object", "array"})


@dataclass(frozen=True, kw_only=True)
class TaggedFormat(CallFormat):
    writes_plain_strings = True

    name: str
    tags: Tags
    spaces: Spaces = field(default=Spaces())
    # True if the family writes `True` and `None`. JSON's words are also read.
    writes_python: bool = False
    # Tags that are also read.
    others: tuple[Tags, ...] = ()
    # Parts of tags that are tokens.
    token_parts: tuple[str, ...] = ()
    # A template of the family has all `signs`, and no `strange` text.
    signs: tuple[str, ...]
    strange: tuple[str, ...] = field(default=())

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        tags = (mark for tags in (self.tags, *self.others) for mark in tags.all)
        return tuple(dict.fromkeys([*tags, *self.token_parts]))

    def is_of(self, template: str) -> bool:
        has_signs = all(sign in template for sign in self.signs)
        return has_signs and not any(text in template for text in self.strange)

    def begins(self) -> tuple[str, ...]:
        begins = (tags.wrap[0] or bare(tags.function[0]) for tags in (self.tags, *self.others))
        return tuple(dict.fromkeys(begins))

    def for_template(self, template: str) -> CallFormat:
        spaces = rendered_spaces(template, self.tags, self.spaces)
        return replace(self, spaces=spaces, writes_python=is_python_rendered(template))

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return TaggedCallParser((self.tags, *self.others), tools, marks)

    def calls(self, tools: Sequence[Tool], rule: CallRule) -> JsonObject:
        wrap, inside = self.tags.wrap, self.spaces.inside
        around = (f"{wrap[0]}{inside}", f"{inside}{wrap[1]}") if wrap[0] else ("", "")
        between = self.spaces.between
        if self.tags.is_one_block:
            # Each call ends with this whitespace: another call or the block's end may follow.
            around, between = ("", inside), ""
        functions = [self._function_tag(tool, around, rule) for tool in tools]
        calls = one_or_more(functions, between, parallel=rule.parallel)
        trigger = self.begins()[0]
        if not self.tags.is_one_block:
            return (
                calls if rule.required else among_text(functions, trigger, parallel=rule.parallel)
            )
        opens, closes = f"{wrap[0]}{inside}", wrap[1]
        if rule.required:
            return sequence(literal(opens), calls, literal(closes))
        return among_text([tag(opens, calls, closes)], trigger, parallel=False)

    def _function_tag(self, tool: Tool, around: tuple[str, str], rule: CallRule) -> JsonObject:
        before, behind, end = self.tags.function
        begin, close = f"{around[0]}{before}{tool.name}{behind}", f"{end}{around[1]}"
        known = arguments_of(tool, required=rule.required, is_name=_is_key)
        if not known and self.spaces.nothing is not None:
            return tag(begin + self.spaces.nothing, literal(""), close)
        arguments = [(each.is_needed, self._argument_format(tool, each, rule)) for each in known]
        begin, close = begin + self.spaces.name, self.spaces.end + close
        return tag(begin, one_after_another(arguments), close)

    def _argument_format(self, tool: Tool, argument: Argument, rule: CallRule) -> JsonObject:
        before, end = self.tags.argument[0], self._argument_end(argument)
        padding = self.tags.padding
        value = self._value_format(tool, argument, rule)
        begin = f"{before}{argument.name}{self.tags.argument[1]}{self.spaces.key}"
        begin += f"{self.tags.value}{padding}"
        return tag(begin, value, f"{padding}{end}{self.spaces.argument}")

    def _value_format(self, tool: Tool, argument: Argument, rule: CallRule) -> JsonObject:
        if argument.may_be_text:
            return self._text_format(tool, argument)
        words = python_words(argument) if self.writes_python else []
        return either(words) if words else json_format(written_as(argument.schema, rule))

    def _text_format(self, tool: Tool, argument: Argument) -> JsonObject:
        return text_format(tool, argument)

    def _argument_end(self, argument: Argument) -> str:
        return self.tags.argument[2]


def _is_key(name: str) -> bool:
    return name != "" and _KEY.fullmatch(name) is not None


def _each(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


class TaggedCallParser(CallParser):
    """Tolerates missing tags around a call or at its end, repeated ends, names with any or no
    quotes, a missing `>`, and a missing end of an argument before the next one.
    """

    def __init__(self, tags: Sequence[Tags], tools: Sequence[Tool], marks: Marks) -> None:
        super().__init__(tools, marks)
        self._tags = tags[0]
        self._wraps = _each(each.wrap[0] for each in tags)
        self._block_ends = _each(each.wrap[1] for each in tags)
        self._function_begins = _each(bare(each.function[0]) for each in tags)
        self._function_ends = _each(each.function[2] for each in tags)
        self._argument_begins = _each(bare(each.argument[0]) for each in tags)
        self._argument_ends = _each(each.argument[2] for each in tags)
        self._ends = (*self._function_ends, *self._block_ends)
        # Texts that may end a value. Only those in `_argument_ends` are consumed.
        self._value_ends = (*self._argument_ends, *self._ends, *self._argument_begins)
        padding = self._tags.padding
        self._by_spelling = {marks.spelled(end): end for end in self._value_ends}
        padded = {padding + spelled: end for spelled, end in self._by_spelling.items()}
        self._look_for(padded | self._by_spelling if padding else self._by_spelling)
        # Marks that are tokens. If other tokens spell a mark, it is text, and so is a call after
        # it.
        self._spelled_out = tuple(marks.tokens.values())
        # The end of the shown content, in which such marks are searched.
        self._shown = ""
        # The current tool's arguments that were not read yet.
        self._awaited = AwaitedNames()
        # True while an argument's name is read, or may be.
        self._names_argument = False
        # True if the current value may be a string, which may contain tags.
        self._may_be_text = True

    def _look_for(self, ends: Mapping[str, str]) -> None:
        """Set the texts that end values, each with its tag."""
        self._by_padded = ends
        self._padded_ends = tuple(ends)
        self._end_pattern = one_of(self._padded_ends)

    def _read(self) -> Reading[None]:
        mark = yield from self._until(*self._wraps, *self._function_begins)
        is_token = self._marks.spelled(mark) != mark
        self._is_marked = not self._wraps or mark in self._wraps or is_token
        if not self._is_marked and self._shown.rstrip().endswith(self._spelled_out):
            raise Misfit
        yield from self._calls_behind(mark)

    def _calls_behind(self, mark: str) -> Reading[None]:
        if mark in self._wraps:
            yield from self._again(*self._wraps)
            if (yield from self._any_of(*self._function_begins)) is None:
                yield from self._block_without_tags()
                return
        while True:
            yield from self._function()
            if not (yield from self._goes_on()):
                return
            self._fits = False

    def _block_without_tags(self) -> Reading[None]:
        """Read the text after the begin mark of tool calls if it is not a function's tag."""
        yield from ()
        raise Misfit

    def _content(self, text: str) -> None:
        super()._content(text)
        if self._spelled_out:
            self._shown = plain(self._shown + text)[-_MAX_SPACE:]

    def _goes_on(self) -> Reading[bool]:
        """Consume the ends after a tool call; return true if its block has another call."""
        while True:
            yield from self._after_call()
            found = yield from self._any_of(*self._function_begins, *self._ends)
            if found is None or found in self._function_begins:
                return found is not None

    def _is_callable(self, name: object) -> bool:
        known = name in self._tools
        return known or (self._is_marked and isinstance(name, str) and _is_name(name))

    # Calls.

    def _function(self) -> Reading[None]:
        """Read a tool call from its name on."""
        name = yield from self._name_in_tag(
            self._tags.function[1], (*self._argument_begins, *self._ends)
        )
        yield from self._one_call(name)

    def _one_call(self, name: str) -> Reading[None]:
        """Read the arguments and the end of a tool call, after its name."""
        if not self._is_callable(name):
            raise Misfit
        known = self._offered.arguments(name)
        self._awaited = AwaitedNames(known)
        calls, begun = self._calls, False
        try:
            while (argument := (yield from self._argument())) is not None:
                key, kinds = argument
                self._awaited.came(key)
                kinds = kinds or self._kinds(known, key)
                yield from self._show_argument(name, key, kinds, is_first=not begun)
                begun = self._fits = True
        except TextOver:
            self._end_by_answer(name, begun=self._calls > calls)
            raise
        if begun:
            self._arguments("}")
            self._end_call()
        else:
            self._call(name, "{}")

    def _show_argument(
        self, function: str, key: str, kinds: Kinds, *, is_first: bool
    ) -> Reading[None]:
        """Show an argument after its name; before the first one, show the tool call."""
        if is_first:
            self._call(function)
        self._drop()
        self._arguments(f"{'{' if is_first else ', '}{_ENCODE(key)}: ")
        yield from self._argument_value(kinds)

    def _kinds(self, known: KnownArguments, key: str) -> Kinds:
        """Return the types of an argument whose tag states none."""
        return known.kinds(key)

    def _end_by_answer(self, name: str, *, begun: bool) -> None:
        """End the answer. End the tool call too if the model ended its answer after a whole
        argument, or after a known function's name.
        """
        if self._was_cut or (begun and not self._fits):
            return
        if begun:
            self._arguments("}")
            self._end_call()
        elif name in self._tools and self._is_marked and not self._is_in_tag():
            self._call(name, "{}")

    def _is_in_tag(self) -> bool:
        """Tell whether an argument has begun, but not its value."""
        rest = self._text[self._at :]
        begins = (self._marks.spelled(begin) for begin in self._argument_begins)
        return self._names_argument or (rest != "" and any(b.startswith(rest) for b in begins))

    def _argument(self) -> Reading[tuple[str, Kinds | None] | None]:
        """Consume the text before an argument's value; return the argument's name, and its types if
        the answer states them. Return None at the call's end; this is consumed unless it begins
        another call.
        """
        while True:
            yield from self._space()
            self._names_argument = False
            found = yield from self._any_of(
                *self._argument_begins, *self._ends, *self._argument_ends
            )
            self._names_argument = found in self._argument_begins
            if found not in self._argument_ends:
                break
        if found in self._argument_begins:
            instead = _each([self._tags.value])
            return self._described((yield from self._name_in_tag(self._tags.argument[1], instead)))
        if found is None and (yield from self._ahead(*self._wraps, *self._function_begins)) is None:
            raise Misfit
        return None

    def _described(self, name: str) -> tuple[str, Kinds | None]:
        """Return an argument's name and kinds, from the text of its tag."""
        return name, None

    def _name_in_tag(self, behind: str, instead: Sequence[str]) -> Reading[str]:
        """Consume a name and the text behind it; return the name without quotes. `behind` may be
        missing before a line break or a text in `instead`.
        """
        name = yield from self._run(_KEY)
        if (yield from self._any_of(behind.lstrip('"'))) is None:
            if self._text[self._at] == "\n" and not self._tags.padding:
                self._take(self._at + 1)
            elif self._text[self._at] != "\n" and (yield from self._ahead(*instead)) is None:
                raise Misfit
        return name.strip(f"{SPACE}\"'")

    # Values.

    def _argument_value(self, kinds: Kinds) -> Reading[None]:
        self._fits = False
        self._may_be_text = bool(kinds & STRING)
        if self._tags.padding:
            yield from self._any_of(self._tags.padding)
        self._drop()
        if kinds == STRING:
            yield from self._text_value("")
        elif kinds & STRING or (yield from self._space()) not in '{["':
            self._drop()
            yield from self._held_value(kinds)
        else:
            yield from self._json_value()

    def _text_value(self, begun: str) -> Reading[None]:
        self._arguments('"' + escaped(begun))
        while (part := (yield from self._part())) is not None:
            self._arguments(escaped(part))
        self._arguments('"')

    def _held_value(self, kinds: Kinds) -> Reading[None]:
        """Read a value whose type shows only at its end."""
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
            if size <= _MAX_SCALAR or (is_bracketed and kinds & _LONG):
                self._arguments(begun_json_of("".join(held), kinds))
            raise
        self._arguments(json_of("".join(held), kinds))

    def _json_value(self) -> Reading[None]:
        """Read an object, a list or a string in quotes, and show it as it arrives."""
        self._drop()
        mender = JsonMender()
        while not mender.complete:
            # A tag that is a token ends even an unfinished string.
            mark = self._text.find(TOKEN, self._at)
            end = len(self._text) if mark < 0 else mark
            self._at += mender.feed(self._text[self._at : end])
            self._arguments(mender.take())
            if mender.failed or (self._at == mark and not mender.complete):
                yield from self._end_of_json(mender)
            elif not mender.complete:
                if self._over:
                    self._arguments(mender.unsaid)
                yield from self._more()
        yield from self._space()
        if (yield from self._ahead(*self._value_ends)) is None:
            yield from self._run(_BRACKETS)
            if (yield from self._ahead(*self._value_ends)) is None:
                raise Misfit
        yield from self._any_of(*self._argument_ends)
        self._drop()

    def _end_of_json(self, mender: JsonMender) -> Reading[None]:
        """Complete a JSON value if a tag follows; another mark is text."""
        if (yield from self._ahead(*self._value_ends)) is not None:
            mender.close()
            self._arguments(mender.take())
        elif mender.failed:
            self._held.append(mender.unsaid)
            raise Misfit
        else:
            mender.feed(TOKEN)
            self._at += 1

    def _part(self) -> Reading[str | None]:
        """Return the next part of a text value; None at its end, which is consumed."""
        ends = self._padded_ends
        while True:
            found = self._end_pattern.search(self._text, self._at)
            end = beginning(self._text, ends, self._at) if found is None else found.start()
            if end > self._at:
                part, self._at = self._text[self._at : end], end
                return part
            if found is not None:
                text = found.group()
                break
            if self._over and end < len(self._text):
                # If the model ended its answer, the beginning of an end tag belongs to the value.
                # If the answer was cut off, its meaning is unknown.
                part, self._at = self._text[self._at :], len(self._text)
                if not self._was_cut:
                    return part
            yield from self._more()
        mark = self._by_padded[text]
        if not (yield from self._is_end(len(text), mark)):
            self._at += len(text)
            return text
        if mark in self._argument_ends:
            self._at += len(text)
        elif text not in self._by_spelling:
            self._at += len(self._tags.padding)
        return None

    def _is_end(self, size: int, end: str) -> Reading[bool]:
        """Tell whether the end here, `size` characters long, is real. In a string, more of the call
        must follow, unless the end is a token.
        """
        if not self._may_be_text or self._marks.spelled(end) != end:
            return True
        begins = (*self._wraps, *self._function_begins)
        if end in self._argument_begins:
            return (yield from self._follows(size, (), self._awaited, or_nothing=False))
        if end in self._argument_ends:
            wanted = (*self._argument_begins, *self._ends, *begins)
            return (yield from self._follows(size, wanted, self._names_behind_argument()))
        if end in self._function_ends:
            begins = (*self._block_ends, *begins)
        return (yield from self._follows(size, begins))

    def _names_behind_argument(self) -> AwaitedNames | None:
        """Names that may follow an argument's end without a tag."""
        return None

    def _follows(
        self,
        offset: int,
        wanted: Sequence[str],
        names: AwaitedNames | None = None,
        *,
        or_nothing: bool = True,
    ) -> Reading[bool]:
        """Tell whether one of the texts or names, or the answer's end, comes next, perhaps after
        whitespace.
        """
        spelled = [self._marks.spelled(text) for text in wanted]
        while True:
            start = self._at + offset
            there = self._text[start : start + _MAX_SPACE]
            at = start + len(there) - len(there.lstrip(SPACE))
            is_name = names is not None and self._is_name_at(at, names, quoted=not wanted)
            if is_name or any(self._text.startswith(text, at) for text in spelled):
                return True
            left = len(self._text) - at
            may_be = (len(text) > left and text.startswith(self._text[at:]) for text in spelled)
            if is_name is False and not any(may_be):
                return False
            if self._over:
                return or_nothing
            yield from self._more()

    def _is_name_at(self, at: int, names: AwaitedNames, *, quoted: bool) -> bool | None:
        behind = self._marks.spelled(self._tags.argument[1].lstrip('"'))
        return names.stand_at(self._text, at, behind, quoted=quoted)


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def escaped(text: str) -> str:
    return _ENCODE(text)[1:-1]
