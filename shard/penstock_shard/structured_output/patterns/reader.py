"""Reads an ECMA 262 pattern, with look-ahead, as the language of its texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock_shard.structured_output.patterns.characters import (
    LINE_ENDS,
    Characters,
    all_but,
    characters,
)
from penstock_shard.structured_output.patterns.languages import (
    EMPTY,
    NOTHING,
    Languages,
)

_MOST_REPEATS = 1000
_DIGITS: Characters = ((0x30, 0x39),)
_WORD = characters([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = characters(
    [
        *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
        *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CLASSES |= {letter.upper(): all_but(some) for letter, some in _CLASSES.items()}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_COUNT = re.compile(r"\{([0-9]{1,5})(,([0-9]{0,5}))?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")


def language_of(languages: Languages, pattern: str) -> int:
    """The whole texts in which a pattern is found.

    Raises:
        TooLarge: the language takes too much to compute.
        ValueError: the pattern is invalid or not supported, as one line says.
    """
    reader = _Reader(languages, pattern)
    part = reader.alternatives()
    if reader.at < len(pattern):
        raise ValueError(f"unexpected {pattern[reader.at]!r}")
    anything = languages.anything
    found = [part.follow(anything, _START)]
    for kind, some in _KINDS.items():
        later = part.follow(anything, kind)
        found.append(languages.joined([anything, languages.of(some), later]))
    return languages.either(found)


@functools.lru_cache(4096)
def may_match(pattern: str, text: str) -> bool:
    """True if a pattern is found in a text, or cannot be read."""
    languages = Languages()
    try:
        return languages.has(language_of(languages, pattern), text)
    except ValueError:
        return True


# What precedes a part: nothing, or a character of one of two kinds.
_START, _WORD_BEFORE, _OTHER_BEFORE = "start", "word", "other"
_KINDS = {_WORD_BEFORE: _WORD, _OTHER_BEFORE: all_but(_WORD)}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pattern.

    `follow` takes the language of texts that may follow the part, and the kind of character before
    it (None: unknown). It returns the language of the part and those texts together. `plain` is the
    part's own language, if it has no look-around. `not_before` and `behind` are the two halves of a
    part like `(?!ab).`; `behind` is one character.
    """

    follow: Callable[[int, str | None], int]
    plain: int | None = None
    is_empty: bool = False
    looks_back: bool = False
    not_before: int | None = None
    behind: int | None = None


class _Reader:
    def __init__(self, languages: Languages, pattern: str) -> None:
        self._languages = languages
        self._pattern = pattern
        self.at = 0

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def alternatives(self) -> _Part:
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        plain = [part.plain for part in parts if part.plain is not None]
        if len(plain) == len(parts):
            return self._plain(self._languages.either(plain))
        either = self._languages.either
        return _Part(
            lambda rest, before: either(part.follow(rest, before) for part in parts),
            looks_back=any(part.looks_back for part in parts),
        )

    def _plain(self, language: int) -> _Part:
        return _Part(lambda rest, _: self._languages.joined([language, rest]), language)

    def _sequence(self) -> _Part:
        parts = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            is_head = self.at == 0
            parts.append(self._counted(self._single(), is_head))
        if len(parts) == 1:
            return parts[0]
        plain = [part.plain for part in parts if part.plain is not None]
        if len(plain) == len(parts):
            return self._plain(self._languages.joined(plain))
        parts = self._joined(parts)
        back = any(part.looks_back for part in parts)
        if len(parts) == 2 and parts[0].not_before is not None and self._is_character(parts[1]):
            own, behind = parts[0].not_before, parts[1].plain
            return _Part(self._in_turn(parts), looks_back=back, not_before=own, behind=behind)
        return _Part(self._in_turn(parts), looks_back=back)

    def _joined(self, parts: list[_Part]) -> list[_Part]:
        """Merge neighbouring parts without look-around, so that few are left."""
        out: list[_Part] = []
        for part in parts:
            before = out[-1].plain if out else None
            if part.plain is not None and before is not None:
                out[-1] = self._plain(self._languages.joined([before, part.plain]))
            else:
                out.append(part)
        return out

    def _is_character(self, part: _Part) -> bool:
        return part.plain is not None and self._languages.is_one_character(part.plain)

    def _in_turn(self, parts: list[_Part]) -> Callable[[int, str | None], int]:
        def follow(rest: int, before: str | None) -> int:
            known: dict[tuple[int, str | None], int] = {}

            def behind(at: int, before: str | None) -> int:
                if at == len(parts):
                    return rest
                if (at, before) not in known:
                    known[at, before] = self._from(parts, at, before, behind)
                return known[at, before]

            return behind(0, before)

        return follow

    def _from(
        self,
        parts: list[_Part],
        at: int,
        before: str | None,
        behind: Callable[[int, str | None], int],
    ) -> int:
        """The texts of the parts from `at` on."""
        part = parts[at]
        if part.plain is None:
            return part.follow(behind(at + 1, before if part.is_empty else None), before)
        if not any(later.looks_back for later in parts[at + 1 :]):
            return self._languages.joined([part.plain, behind(at + 1, None)])
        return self._languages.either(
            self._languages.joined([own, behind(at + 1, kind)])
            for own, kind in self._by_end(part.plain, before)
        )

    def _by_end(self, plain: int, before: str | None) -> Iterator[tuple[int, str | None]]:
        """Split a language by the kind of its texts' last character."""
        languages = self._languages
        for kind, some in _KINDS.items():
            ending = languages.joined([languages.anything, languages.of(some)])
            yield languages.both([plain, ending]), kind
        if languages.has_empty[plain]:
            yield EMPTY, before

    # ---- How often ----

    def _counted(self, part: _Part, is_head: bool) -> _Part:
        """Read a quantifier. At the head any text may precede, so the smallest count suffices."""
        found = _COUNT.match(self._pattern, self.at)
        sign = self._pattern[self.at : self.at + 1]
        if found is not None:
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            self.at = found.end()
        elif sign and sign in "*+?":
            least, most = int(sign == "+"), 1 if sign == "?" else None
            self.at += 1
        else:
            return part
        self._takes("?")
        if max(least, most or 0) > _MOST_REPEATS or (most is not None and most < least):
            raise ValueError(f"a count is over {_MOST_REPEATS} or its bounds are in no order")
        if part.plain is not None:
            most = least if is_head else most
            return self._plain(self._languages.between(part.plain, least, most))
        return self._looking_repeated(part, least, most)

    def _looking_repeated(self, part: _Part, least: int, most: int | None) -> _Part:
        """Repeat a part with look-around: any part at most once; one like `(?!ab).`, at the end,
        also without bound.
        """
        if (least, most) == (0, 1):
            either = self._languages.either
            return _Part(
                lambda rest, before: either([part.follow(rest, before), rest]),
                looks_back=part.looks_back,
            )
        if most is not None or part.not_before is None or part.behind is None:
            raise ValueError("look-around in a repetition is not served")
        languages, before = self._languages, part.not_before
        nowhere = languages.all_but(languages.joined([languages.anything, before]))
        whole = languages.both([languages.between(part.behind, least, None), nowhere])

        def follow(rest: int, _: str | None) -> int:
            if rest != EMPTY or languages.has_empty[before]:
                raise ValueError("look-around in a repetition is not served")
            return whole

        return _Part(follow)

    # ---- One thing ----

    def _single(self) -> _Part:
        languages = self._languages
        if self._takes("^"):
            return _Part(self._at_start, is_empty=True, looks_back=True)
        if self._takes("\\b") or self._takes("\\B"):
            is_edge = self._pattern[self.at - 1] == "b"
            follow = functools.partial(self._at_edge, is_edge)
            return _Part(follow, is_empty=True, looks_back=True)
        if self._takes("$"):
            return _Part(
                lambda rest, _: EMPTY if languages.has_empty[rest] else NOTHING, is_empty=True
            )
        if self._takes("(?="):
            return self._looking(is_met=True)
        if self._takes("(?!"):
            return self._looking(is_met=False)
        if self._pattern.startswith("(?<", self.at) and self._takes_name():
            return self._group()
        if self._takes("(?:") or (self._takes("(") and self._pattern[self.at :][:1] != "?"):
            return self._group()
        if self._takes("["):
            return self._plain(languages.of(self._class()))
        if self._takes("."):
            return self._plain(languages.of(all_but(LINE_ENDS)))
        if self._takes("\\"):
            return self._plain(languages.of(self._escaped(in_class=False)))
        if self._pattern[self.at] in "*+?":
            raise ValueError("nothing to repeat, or look-behind, which is not served")
        self.at += 1
        return self._plain(languages.text(self._pattern[self.at - 1]))

    def _at_start(self, rest: int, before: str | None) -> int:
        if before is None:
            raise ValueError("^ behind look-around is not served")
        return rest if before == _START else NOTHING

    def _at_edge(self, is_edge: bool, rest: int, before: str | None) -> int:
        """Return the texts of `rest` that begin at a word boundary (`is_edge`), or that do not."""
        if before is None:
            raise ValueError("\\b behind look-around is not served")
        languages = self._languages
        word = languages.joined([languages.of(_WORD), languages.anything])
        is_word_next = is_edge != (before == _WORD_BEFORE)
        return languages.both([rest, word if is_word_next else languages.all_but(word)])

    def _takes_name(self) -> bool:
        found = re.compile(r"\(\?<[A-Za-z_$][\w$]*>").match(self._pattern, self.at)
        self.at = self.at if found is None else found.end()
        return found is not None

    def _group(self) -> _Part:
        part = self.alternatives()
        if not self._takes(")"):
            raise ValueError("a group is not closed")
        return part

    def _looking(self, *, is_met: bool) -> _Part:
        languages, inside = self._languages, self._group()

        def follow(rest: int, before: str | None) -> int:
            seen = inside.follow(languages.anything, before)
            return languages.both([rest, seen if is_met else languages.all_but(seen)])

        looks_back = inside.looks_back
        not_before = None if is_met or looks_back else inside.follow(languages.anything, None)
        return _Part(follow, is_empty=True, looks_back=looks_back, not_before=not_before)

    # ---- Characters ----

    def _class(self) -> Characters:
        negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            some = self._class_member()
            if self._is_range() and len(some) == 1 and some[0][0] == some[0][1]:
                self.at += 1
                last = self._class_member()
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < some[0][0]:
                    raise ValueError("a range of characters is in no order")
                some = ((some[0][0], last[0][0]),)
            ranges += some
        return all_but(characters(ranges)) if negated else characters(ranges)

    def _is_range(self) -> bool:
        return (
            self._pattern.startswith("-", self.at) and self._pattern[self.at + 1 :][:1] not in "]"
        )

    def _class_member(self) -> Characters:
        if self.at >= len(self._pattern):
            raise ValueError("a class is not closed")
        if self._takes("\\"):
            return self._escaped(in_class=True)
        self.at += 1
        code = ord(self._pattern[self.at - 1])
        return ((code, code),)

    def _escaped(self, *, in_class: bool) -> Characters:
        found = _HEX.match(self._pattern, self.at)
        if found is not None:
            self.at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            return ((code, code),)
        letter = self._pattern[self.at : self.at + 1]
        self.at += 1
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter == "b" and in_class:
            return ((0x08, 0x08),)
        if not letter or (letter.isalnum() and letter not in _CONTROLS):
            raise ValueError(f"\\{letter} is not served")
        code = _CONTROLS.get(letter, ord(letter))
        return ((code, code),)
