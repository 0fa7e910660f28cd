"""The parts of a structural tag as one Lark grammar.

Each part is written together with what follows it, because the rule of a free text contains the
text that ends it. A special token's text inside a text stands for that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from penstock_shard.structured_output.refusal import ConstraintRefused, shown
from penstock_shard.structured_output.structural_tag import (
    FreeText,
    Inner,
    Literal,
    OneOf,
    Part,
    Separated,
    Sequence,
    Tag,
    Triggered,
)

_MOST_RULES = 20_000
_ANYTHING = "/(?s:.)*/"


@dataclass(frozen=True, slots=True)
class _Loop:
    """Items, any number of times."""

    items: tuple[_Item, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    """One of several sequences of items."""

    cases: tuple[tuple[_Item, ...], ...]


@dataclass(frozen=True, slots=True)
class _Begun:
    """Free text up to one of these beginnings, then what follows that one."""

    beginnings: tuple[_Beginning, ...]
    excludes: tuple[str, ...]


_Piece = str | int
_Item = Part | _Loop | _Either | _Begun


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What items begin with, in pieces (texts, and ids of special tokens), and the rest of them."""

    pieces: tuple[_Piece, ...]
    rest: tuple[_Item, ...]


def written(
    part: Part,
    special_tokens: Mapping[str, int],
    json_grammar: Callable[[Any], dict[str, Any]],
    lark_grammar: Callable[[str], str],
) -> str:
    """A grammar for llguidance. `json_grammar` and `lark_grammar` translate those languages."""
    writer = _Writer(special_tokens, json_grammar, lark_grammar)
    start = writer.sequence((part,))
    lines = [f"start: {start}", *writer.rules]
    grammars = [{"lark_grammar": unforced("\n".join(lines))}, *writer.grammars]
    return json.dumps({"grammars": grammars})


class _Writer:
    """Collects rules and grammars; expressions refer to them by name."""

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        json_grammar: Callable[[Any], dict[str, Any]],
        lark_grammar: Callable[[str], str],
    ) -> None:
        self.rules: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._special_tokens = special_tokens
        # The longest first, so that of two that match at one place the longer is taken.
        ordered = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._json_grammar = json_grammar
        self._lark_grammar = lark_grammar
        self._kept: dict[str, str] = {}

    def sequence(self, items: tuple[_Item, ...]) -> str:
        """An expression for these, one after the other."""
        out: list[str] = []
        while items:
            item, rest = items[0], items[1:]
            if isinstance(item, FreeText):
                return " ".join([*out, self._free(item, rest)])
            if isinstance(item, Sequence):
                items = item.parts + rest
            elif isinstance(item, Tag):
                items = _tag_items(item) + rest
            elif isinstance(item, Triggered):
                items = self._triggered(item, rest) + rest
            elif isinstance(item, Separated):
                items = self._separated(item) + rest
            elif isinstance(item, OneOf):
                items = (_Either(tuple((part,) for part in item.parts)), *rest)
            elif isinstance(item, _Either) and rest and any(map(_open, item.cases)):
                return " ".join([*out, self._either(item, rest)])
            else:
                out.append(self._closed(item))
                items = rest
        return " ".join(filter(None, out)) or '""'

    def _closed(self, item: _Item) -> str:
        """An expression for a part that does not depend on what follows it."""
        if isinstance(item, Literal):
            return self.pieces(self.cut(item.text))
        if isinstance(item, Inner):
            return self._inner(item)
        if isinstance(item, _Either):
            return self._either(item, ())
        if isinstance(item, _Loop):
            return self._rule(self.sequence(item.items)) + "*"
        assert isinstance(item, _Begun)
        return self._up_to(item.beginnings, item.excludes)

    def _either(self, item: _Either, rest: tuple[_Item, ...]) -> str:
        return self._rule(" | ".join(self.sequence((*case, *rest)) for case in item.cases))

    def _inner(self, item: Inner) -> str:
        if item.language == "json":
            return self._rule("%json " + json.dumps(self._json_grammar(item.text)))
        if item.language == "regex":
            return self._terminal(lark_regex(item.text))
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": self._lark_grammar(item.text)})
        return "@" + name

    def _free(self, text: FreeText, rest: tuple[_Item, ...]) -> str:
        beginnings = list(self._beginnings(rest))
        up_to = [beginning for beginning in beginnings if beginning.pieces]
        out = self._up_to(tuple(up_to), text.excludes) if up_to else ""
        if len(up_to) == len(beginnings):
            return out
        # A beginning without pieces: the whole output may end here.
        excluded = (*text.excludes, *(self._text(one.pieces) for one in up_to))
        tail = self._terminal(_but(_ANYTHING, excluded))
        return self._rule(f"{out} | {tail}") if out else tail

    def _up_to(self, beginnings: tuple[_Beginning, ...], excludes: tuple[str, ...]) -> str:
        """Free text without any of the beginnings, then one of them, then what follows that one."""
        grouped: dict[tuple[_Piece, ...], list[str]] = {}
        for beginning in beginnings:
            grouped.setdefault(beginning.pieces, []).append(self.sequence(beginning.rest))
        texts = [self._text(pieces) for pieces in grouped]
        alternatives = []
        for pieces, follows in grouped.items():
            # Exclude the other beginnings, except those that this one contains.
            own = self._text(pieces)
            others = [text for text in texts if not own.startswith(text)]
            head = self._head(pieces, (*excludes, *(text for text in others if text not in own)))
            after = self._rule(" | ".join(follows)) if len(follows) > 1 else follows[0]
            alternatives.append(f"{head} {after}")
        return self._rule(" | ".join(alternatives))

    def _head(self, pieces: tuple[_Piece, ...], excludes: tuple[str, ...]) -> str:
        first = next((index for index, piece in enumerate(pieces) if isinstance(piece, int)), None)
        text = "".join(piece for piece in pieces[:first] if isinstance(piece, str))
        whole = f"/(?s:.)*{_escaped(text)}/"
        if first is None:
            return self._rule(self._terminal(_but(whole, excludes)), "[lazy]")
        # A special token ends a text. Exclude its text, which would be the same when written out.
        own = self._text(pieces)
        before = self._terminal(_but(whole, (*excludes, own)))
        return f"{before} {self.pieces(pieces[first:])}"

    def _beginnings(self, items: tuple[_Item, ...]) -> Iterator[_Beginning]:
        """How the items may begin. A beginning without pieces means that they may be empty."""
        if not items:
            yield _Beginning((), ())
            return
        item, rest = items[0], items[1:]
        if isinstance(item, Literal) and item.text:
            yield _Beginning(self.cut(item.text), rest)
        elif isinstance(item, Literal):
            yield from self._beginnings(rest)
        elif isinstance(item, OneOf):
            for part in item.parts:
                yield from self._beginnings((part, *rest))
        elif isinstance(item, _Either):
            for case in item.cases:
                yield from self._beginnings((*case, *rest))
        elif isinstance(item, _Loop):
            yield from self._beginnings((*item.items, item, *rest))
            yield from self._beginnings(rest)
        elif isinstance(item, Sequence):
            yield from self._beginnings(item.parts + rest)
        elif isinstance(item, Tag):
            yield from self._beginnings(_tag_items(item) + rest)
        elif isinstance(item, Separated):
            yield from self._beginnings(self._separated(item) + rest)
        else:
            raise ConstraintRefused(
                "structural_tag: any_text must be followed by a text that ends it, or by nothing"
            )

    def _triggered(self, item: Triggered, rest: tuple[_Item, ...]) -> tuple[_Item, ...]:
        ends = [self._text(one.pieces) for one in self._beginnings(rest) if one.pieces]
        tags = tuple(self._trigger(item.triggers, tag) for tag in item.tags)
        begun = _Begun(tags, (*item.excludes, *ends))
        none = FreeText(tuple(dict.fromkeys((*item.excludes, *item.triggers))))
        first = OneOf(item.tags)
        if not item.stop_after_first:
            return (first, _Loop((begun,)), none) if item.at_least_one else (_Loop((begun,)), none)
        return (first,) if item.at_least_one else (_Either(((begun,), (none,))),)

    def _trigger(self, triggers: tuple[str, ...], tag: Tag) -> _Beginning:
        """The beginning that a tag is recognized by: its trigger, or up to the end of the special
        token that the trigger is part of.
        """
        trigger = min((text for text in triggers if tag.begin.startswith(text)), key=len)
        pieces, reached = self.cut(tag.begin), 0
        for index, piece in enumerate(pieces):
            if isinstance(piece, int) and reached < len(trigger):
                after = "".join(map(self._name, pieces[index + 1 :]))
                return _Beginning(pieces[: index + 1], (Literal(after), *_tag_items(tag)[1:]))
            reached += len(self._name(piece))
        after = tag.begin[len(trigger) :]
        return _Beginning((trigger,), (Literal(after), *_tag_items(tag)[1:]))

    def _separated(self, item: Separated) -> tuple[_Item, ...]:
        items: tuple[_Item, ...] = (OneOf(item.tags),)
        if not item.stop_after_first:
            items += (_Loop((Literal(item.separator), OneOf(item.tags))),)
        return items if item.at_least_one else (_Either((items, ())),)

    def cut(self, text: str) -> tuple[_Piece, ...]:
        """A text in pieces: texts, and ids of special tokens."""
        pieces: list[_Piece] = []
        at = 0
        for found in self._marks.finditer(text) if self._marks else ():
            if found.start() > at:
                pieces.append(text[at : found.start()])
            pieces.append(self._special_tokens[found.group()])
            at = found.end()
        if at < len(text):
            pieces.append(text[at:])
        return tuple(pieces)

    def pieces(self, pieces: Iterable[_Piece]) -> str:
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in pieces
        )

    def _text(self, pieces: Iterable[_Piece]) -> str:
        return "".join(map(self._name, pieces))

    def _name(self, piece: _Piece) -> str:
        if isinstance(piece, str):
            return piece
        return next(text for text, token in self._special_tokens.items() if token == piece)

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


def lark_regex(pattern: str) -> str:
    """A regular expression in Lark's syntax."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        # The library would ignore it.
        raise ConstraintRefused(f"regex: {shown(pattern)} ends with a backslash")
    return f"/{regex_to_lark(pattern, '')}/"


def unforced(lark: str) -> str:
    """The same grammar, with llguidance's search for forced text switched off.

    At each mask llguidance would follow forced text to its end, and nothing bounds its length.
    """
    return lark + '\n%llguidance {"no_forcing": true}\n'


def _tag_items(tag: Tag) -> tuple[_Item, ...]:
    ends: Part = Literal(tag.ends[0])
    if len(tag.ends) > 1:
        ends = OneOf(tuple(map(Literal, tag.ends)))
    return (Literal(tag.begin), tag.content, ends)


def _open(items: tuple[_Item, ...]) -> bool:
    """Whether the items may end in free text, whose rule depends on what follows."""
    if not items:
        return False
    item = items[-1]
    if isinstance(item, FreeText):
        return True
    if isinstance(item, OneOf | Sequence):
        return any(_open((part,)) for part in item.parts)
    if isinstance(item, _Either):
        return any(map(_open, item.cases))
    if isinstance(item, Tag):
        return "" in item.ends and _open((item.content,))
    if isinstance(item, Separated):
        return any(_open((tag,)) for tag in item.tags)
    return isinstance(item, Triggered) and not (item.stop_after_first and item.at_least_one)


def _but(terminal: str, excludes: Iterable[str]) -> str:
    """A terminal of the texts that `terminal` matches and that contain none of `excludes`."""
    texts = [_escaped(text) for text in dict.fromkeys(excludes) if text]
    if not texts:
        return terminal
    return f"{terminal} & ~/(?s:.)*(?:{'|'.join(texts)})(?s:.)*/"


def _escaped(text: str) -> str:
    """A text as a regular expression that matches it literally."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
        for character in text
    )
