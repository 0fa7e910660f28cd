"""Writes the formats of a structural tag as one Lark grammar.

Each item is written together with the items after it, because the rule of a free text contains the
text that ends it. Where a text contains a special token's text, that token must be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_shard.structured_output.json_schema.values import same
from penstock_shard.structured_output.languages import lark_of, lark_regex, schema_of, unforced
from penstock_shard.structured_output.refusal import ConstraintRefused
from penstock_shard.structured_output.structural_tag import (
    AnyText,
    ConstString,
    Format,
    Grammar,
    JsonSchema,
    Or,
    Regex,
    Sequence,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)

_MOST_RULES = 20_000
_ANYTHING = "/(?s:.)*/"


@dataclass(frozen=True, slots=True)
class _Loop:
    items: tuple[_Item, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    """Several sequences of items; a text consists of one of them."""

    cases: tuple[tuple[_Item, ...], ...]


_Item = Format | _Loop | _Either
# A possible beginning of items: pieces (plain texts, and special tokens' texts), and the items
# after them.
_Beginning = tuple[tuple[str, ...], tuple[_Item, ...]]


def written(
    format_: Format, special_tokens: Mapping[str, int]
) -> tuple[str, dict[str, dict[str, Any]]]:
    """A grammar for llguidance, and the prepared schemas of watched JSON by the name of the capture
    directly before it.
    """
    writer = _Writer(special_tokens)
    start = writer.whole(format_)
    lines = [f"start: {start}", *writer.rules]
    grammars = [{"lark_grammar": unforced("\n".join(lines))}, *writer.grammars]
    return json.dumps({"grammars": grammars}), writer.watched


class _Writer:
    """Collects rules and grammars; expressions refer to them by name."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special_tokens = special_tokens
        # Longest first, so that of two tokens at one place the longer is taken.
        ordered = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._marks = re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
        self._kept: dict[str, str] = {}
        self.watched: dict[str, dict[str, Any]] = {}
        # For each text: the schema of the first JSON after it, and the name of the text's capture.
        self._behind: dict[tuple[str, ...], tuple[Any, str]] = {}

    def whole(self, format_: Format) -> str:
        leading = _leading_json((format_,))
        if leading is None:
            return self.sequence((format_,))
        return f"{self._watched_json('', leading[0])} {self.sequence(leading[1])}"

    def sequence(self, items: tuple[_Item, ...]) -> str:
        out: list[str] = []
        while items:
            item, rest = items[0], items[1:]
            parts = _parts(item)
            if parts is not None:
                items = parts + rest
            elif isinstance(item, TriggeredTags):
                items = self._triggered(item, rest) + rest
            elif isinstance(item, AnyText):
                return " ".join([*out, self._free(item, rest)])
            elif isinstance(item, _Either) and rest and _open((item,)):
                return " ".join([*out, self._either(item, rest)])
            elif isinstance(item, ConstString) and item.value and (json_ := _leading_json(rest)):
                schema, items = json_
                out.append(self._before_json(self._cut(item.value), schema))
            else:
                out.append(self._closed(item))
                items = rest
        return " ".join(filter(None, out)) or '""'

    def _closed(self, item: _Item) -> str:
        """Write an item that does not depend on what follows it."""
        match item:
            case ConstString():
                return self._pieces(self._cut(item.value))
            case JsonSchema():
                return self._rule("%json " + json.dumps(schema_of(item.json_schema)))
            case Regex():
                return self._terminal(lark_regex(item.pattern))
            case Grammar():
                name = f"g{len(self.grammars)}"
                self.grammars.append({"name": name, "lark_grammar": lark_of(item.grammar)})
                return "@" + name
            case _Either():
                return self._either(item, ())
        assert isinstance(item, _Loop)
        return self._rule(self.sequence(item.items)) + "*"

    def _before_json(self, pieces: tuple[str, ...], schema: Any) -> str:
        """Write a text with JSON directly after it."""
        name = self._capture(pieces, schema)
        if name is None:
            return f"{self._pieces(pieces)} {self._closed(JsonSchema(schema))}"
        text = self._named("r", f'[capture="{name}"]', self._pieces(pieces))
        return f"{text} {self._watched_json(name, schema)}"

    def _capture(self, pieces: tuple[str, ...], schema: Any) -> str | None:
        """Name the capture of a text before watched JSON. None if JSON of another schema may follow
        the same text.
        """
        first, name = self._behind.setdefault(pieces, (schema, str(len(self._behind))))
        return name if same(first, schema) else None

    def _watched_json(self, name: str, schema: Any) -> str:
        """Write JSON that begins after this capture ("": at the start of the text), and capture it
        too.
        """
        if name not in self.watched:
            self.watched[name] = schema_of(schema, is_watched=True)
        json_ = self._rule("%json " + json.dumps(self.watched[name]))
        # llguidance does not report a capture equal to the last one of its name. Capturing the JSON
        # makes them differ.
        return self._named("r", f'[capture="{name}"]', json_) if name else json_

    def _either(self, item: _Either, rest: tuple[_Item, ...]) -> str:
        return self._rule(" | ".join(self.sequence((*case, *rest)) for case in item.cases))

    def _free(self, text: AnyText, rest: tuple[_Item, ...]) -> str:
        beginnings = list(self._beginnings(rest))
        up_to = [(pieces, after) for pieces, after in beginnings if pieces]
        out = self._up_to(up_to, text.excludes) if up_to else ""
        if len(up_to) == len(beginnings):
            return out
        # The items after the text may be empty, so the whole output may end here.
        excluded = (*text.excludes, *("".join(pieces) for pieces, _ in up_to))
        tail = self._terminal(_but(_ANYTHING, excluded))
        return self._rule(f"{out} | {tail}") if out else tail

    def _up_to(self, beginnings: list[_Beginning], excludes: tuple[str, ...]) -> str:
        """Write free text without the beginnings, then one beginning and the items after it."""
        grouped: dict[tuple[str, ...], list[str]] = {}
        captures: dict[tuple[str, ...], str] = {}
        for pieces, after in beginnings:
            tokens = ConstString("".join(self._split(pieces)[1]))
            follows = grouped.setdefault(pieces, [])
            leading = None if tokens.value else _leading_json(after)
            name = leading and self._capture(pieces, leading[0])
            if leading and name:
                captures[pieces] = name
                json_ = self._watched_json(name, leading[0])
                follows.append(f"{json_} {self.sequence(leading[1])}")
            else:
                follows.append(self.sequence((tokens, *after)))
        texts = ["".join(pieces) for pieces in grouped]
        alternatives = []
        for pieces, follows in grouped.items():
            # Exclude the other beginnings, except those that are part of this one.
            own = "".join(pieces)
            others = (text for text in texts if text not in own)
            head = self._head(pieces, (*excludes, *others), captures.get(pieces))
            rest = self._rule(" | ".join(follows)) if len(follows) > 1 else follows[0]
            alternatives.append(f"{head} {rest}")
        return self._rule(" | ".join(alternatives))

    def _split(self, pieces: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """Split off a leading text. The rest begins with a special token."""
        is_token = pieces[0] in self._special_tokens
        return ("", pieces) if is_token else (pieces[0], pieces[1:])

    def _head(self, pieces: tuple[str, ...], excludes: tuple[str, ...], capture: str | None) -> str:
        """Write free text up to these pieces. It includes the first piece unless that is a special
        token.
        """
        text, tokens = self._split(pieces)
        whole = f"/(?s:.)*{_escaped(text)}/"
        if not tokens:
            options = "[lazy]" if capture is None else f'[lazy, capture="{capture}"]'
            return self._rule(self._terminal(_but(whole, excludes)), options)
        # A special token ends the text. Exclude its text, which looks the same.
        return self._terminal(_but(whole, (*excludes, "".join(pieces))))

    def _beginnings(self, items: tuple[_Item, ...]) -> Iterator[_Beginning]:
        """Yield the possible beginnings. If the items may be empty, one beginning has no pieces."""
        if not items:
            yield (), ()
            return
        item, rest = items[0], items[1:]
        parts = _parts(item)
        if parts is not None:
            yield from self._beginnings(parts + rest)
        elif isinstance(item, ConstString) and item.value:
            yield self._cut(item.value), rest
        elif isinstance(item, ConstString):
            yield from self._beginnings(rest)
        elif isinstance(item, _Either):
            for case in item.cases:
                yield from self._beginnings((*case, *rest))
        elif isinstance(item, _Loop):
            yield from self._beginnings((*item.items, item, *rest))
            yield from self._beginnings(rest)
        else:
            raise ConstraintRefused(
                "structural_tag: any_text must be followed by a text that ends it, or by nothing"
            )

    def _triggered(self, item: TriggeredTags, rest: tuple[_Item, ...]) -> tuple[_Item, ...]:
        ends = ["".join(pieces) for pieces, _ in self._beginnings(rest) if pieces]
        tags = _Either(tuple(self._trigger(item.triggers, tag) for tag in item.tags))
        begun = (AnyText((*item.excludes, *ends)), tags)
        none = AnyText((*item.excludes, *item.triggers))
        if item.stop_after_first:
            return (_Either((begun, (none,))),)
        again = (_Loop(begun), none)
        return (Or(item.tags), *again) if item.at_least_one else again

    def _trigger(self, triggers: tuple[str, ...], tag: Tag) -> tuple[_Item, ...]:
        """Split a tag's beginning after its trigger, or after the special token in which the
        trigger ends.
        """
        trigger = min((text for text in triggers if tag.begin.startswith(text)), key=len)
        length, end = len(trigger), 0
        for piece in self._cut(tag.begin):
            start, end = end, end + len(piece)
            if piece in self._special_tokens and start < len(trigger):
                length = end
                break
        begin = (ConstString(tag.begin[:length]), ConstString(tag.begin[length:]))
        return (*begin, *_tag_parts(tag)[1:])

    def _cut(self, text: str) -> tuple[str, ...]:
        """Split a text into special tokens' texts and the texts between them."""
        return tuple(filter(None, self._marks.split(text) if self._marks else [text]))

    def _pieces(self, pieces: Iterable[str]) -> str:
        tokens = self._special_tokens
        return " ".join(
            f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces
        )

    def _rule(self, expression: str, options: str = "") -> str:
        return self._named("r", options, expression)

    def _terminal(self, expression: str) -> str:
        return self._named("T", "", expression)

    def _named(self, prefix: str, options: str, expression: str) -> str:
        key = f"{options}: {expression}"
        if key not in self._kept:
            if len(self.rules) >= _MOST_RULES:
                raise ConstraintRefused(f"structural_tag: comes to more than {_MOST_RULES} rules")
            self._kept[key] = f"{prefix}{len(self.rules)}"
            self.rules.append(self._kept[key] + key)
        return self._kept[key]


def _leading_json(items: tuple[_Item, ...]) -> tuple[Any, tuple[_Item, ...]] | None:
    """The schema of the first item, and the other items; None if the first item is not JSON."""
    while items and (parts := _parts(items[0])) is not None:
        items = parts + items[1:]
    if items and isinstance(items[0], JsonSchema):
        return items[0].json_schema, items[1:]
    return None


def _parts(item: _Item) -> tuple[_Item, ...] | None:
    """The items that an item stands for; None if it is basic."""
    match item:
        case Sequence():
            return item.elements
        case Or(elements=(only,)):
            return (only,)
        case Or():
            return (_Either(tuple((element,) for element in item.elements)),)
        case Tag():
            return _tag_parts(item)
        case TagsWithSeparator():
            return _separated(item)
        case TriggeredTags(at_least_one=True, stop_after_first=True):
            return (Or(item.tags),)
    return None


def _tag_parts(tag: Tag) -> tuple[_Item, ...]:
    ends = tag.end if isinstance(tag.end, tuple) else (tag.end,)
    return (ConstString(tag.begin), tag.content, Or(tuple(map(ConstString, ends))))


def _separated(item: TagsWithSeparator) -> tuple[_Item, ...]:
    items: tuple[_Item, ...] = (Or(item.tags),)
    if not item.stop_after_first:
        items += (_Loop((ConstString(item.separator), Or(item.tags))),)
    return items if item.at_least_one else (_Either((items, ())),)


def _open(items: tuple[_Item, ...]) -> bool:
    """True if the items may end in free text, whose rule depends on what follows."""
    if not items:
        return False
    before, item = items[:-1], items[-1]
    parts = _parts(item)
    if parts is not None:
        return _open(before + parts)
    if isinstance(item, _Either):
        return any(_open(before + case) for case in item.cases)
    if isinstance(item, _Loop):
        return _open(item.items) or _open(before)
    if isinstance(item, ConstString) and not item.value:
        return _open(before)
    return isinstance(item, AnyText | TriggeredTags)


def _but(terminal: str, excludes: Iterable[str]) -> str:
    """A terminal for texts of `terminal` that contain none of `excludes`."""
    texts = [_escaped(text) for text in dict.fromkeys(excludes) if text]
    if not texts:
        return terminal
    return f"{terminal} & ~/(?s:.)*(?:{'|'.join(texts)})(?s:.)*/"


def _escaped(text: str) -> str:
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
        for character in text
    )
