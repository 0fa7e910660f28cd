"""Reads a pattern of ECMA 262, with look-ahead, as the language of the texts that it matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock_shard.structured_output.patterns.characters import (
    ALL,
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
        ValueError: the pattern is invalid, or of a kind that is not read; one line says why.
    """
    reader = _Reader(languages, pattern)
    part = reader.alternatives()
    if reader.at < len(pattern):
        raise ValueError(f"unexpected {pattern[reader.at]!r}")
    later = part.follow(languages.anything, False)
    some = languages.of(ALL)
    return languages.either(
        [
            part.follow(languages.anything, True),
            languages.joined([some, languages.anything, later]),
        ]
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a pattern.

    `follow` makes of the texts that may follow it those of both together, given whether it stands
    at the text's start (None: it may). `plain` are its own texts if it looks at no others.
    `not_before` and `behind` are the two halves of a part like `(?!ab).`.
    """

    follow: Callable[[int, bool | None], int]
    plain: int | None = None
    is_empty: bool = False
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
        return _Part(lambda rest, start: either(part.follow(rest, start) for part in parts))

    def _plain(self, language: int) -> _Part:
        return _Part(lambda rest, _: self._languages.joined([language, rest]), language)

    def _sequence(self) -> _Part:
        parts = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            parts.append(self._counted(self._single()))
        if len(parts) == 1:
            return parts[0]
        plain = [part.plain for part in parts if part.plain is not None]
        if len(plain) == len(parts):
            return self._plain(self._languages.joined(plain))
        if len(parts) == 2 and parts[0].not_before is not None and parts[1].plain is not None:
            behind = parts[1].plain
            return _Part(self._in_turn(parts), not_before=parts[0].not_before, behind=behind)
        return _Part(self._in_turn(parts))

    def _in_turn(self, parts: list[_Part]) -> Callable[[int, bool | None], int]:
        def follow(rest: int, start: bool | None) -> int:
            starts = [start]
            for part in parts[:-1]:
                starts.append(starts[-1] if part.is_empty else self._start_behind(part, starts[-1]))
            for part, is_start in zip(reversed(parts), reversed(starts), strict=True):
                rest = part.follow(rest, is_start)
            return rest

        return follow

    def _start_behind(self, part: _Part, start: bool | None) -> bool | None:
        """Tell whether what stands behind a part may be at the start."""
        may_be_empty = part.plain is None or self._languages.has_empty[part.plain]
        return None if may_be_empty and start is not False else False

    # ---- How often ----

    def _counted(self, part: _Part) -> _Part:
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
            return self._plain(self._languages.between(part.plain, least, most))
        return self._looking_repeated(part, least, most)

    def _looking_repeated(self, part: _Part, least: int, most: int | None) -> _Part:
        """Repeats what looks at other text: once or not at all, or `(?!ab).` up to the end."""
        if (least, most) == (0, 1):
            either = self._languages.either
            return _Part(lambda rest, start: either([part.follow(rest, start), rest]))
        if most is not None or part.not_before is None or part.behind is None:
            raise ValueError("look-around in a repetition is not served")
        languages, before = self._languages, part.not_before
        nowhere = languages.all_but(languages.joined([languages.anything, before]))
        whole = languages.both([languages.between(part.behind, least, None), nowhere])

        def follow(rest: int, _: bool | None) -> int:
            if rest != EMPTY or languages.has_empty[before]:
                raise ValueError("look-around in a repetition is not served")
            return whole

        return _Part(follow)

    # ---- One thing ----

    def _single(self) -> _Part:
        languages = self._languages
        if self._takes("^"):
            return _Part(self._at_start, is_empty=True)
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

    def _at_start(self, rest: int, start: bool | None) -> int:
        if start is None:
            raise ValueError("^ behind what may be empty is not served")
        return rest if start else NOTHING

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

        def follow(rest: int, start: bool | None) -> int:
            seen = inside.follow(languages.anything, start)
            return languages.both([rest, seen if is_met else languages.all_but(seen)])

        not_before = None if is_met else inside.follow(languages.anything, False)
        return _Part(follow, is_empty=True, not_before=not_before)

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
