"""Regular languages as expressions, with intersection and complement.

The derivative of a language by a character has the texts that may follow the character (Brzozowski,
1964). Equal expressions share a number, so derivatives are cheap to compare, and few differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_shard.structured_output.patterns.characters import ALL, Characters, atoms, has

# The language without texts, and the language of only the empty text.
NOTHING, EMPTY = 0, 1
_MOST_EXPRESSIONS = 20_000


class TooLarge(ValueError):
    """A language takes too much to compute; the message is one line."""


class Languages:
    """Makes languages: numbers that have a meaning only in this object."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._made: list[tuple[object, ...]] = []
        # By language, true if it has the empty text.
        self.has_empty: list[bool] = []
        self._derivatives: dict[tuple[int, int], int] = {}
        self._characters: dict[Characters, None] = {}
        self._new(False, "of", ())
        self._new(True, "empty")
        self.anything = NOTHING
        self.anything = self.repeated(self.of(ALL))

    @property
    def characters(self) -> list[Characters]:
        return list(self._characters)

    def _new(self, has_empty: bool, *key: object) -> int:
        number = self._numbers.get(key)
        if number is None:
            if len(self._made) >= _MOST_EXPRESSIONS:
                raise TooLarge("it is too complex")
            number = self._numbers[key] = len(self._made)
            self._made.append(key)
            self.has_empty.append(has_empty)
        return number

    def of(self, characters: Characters) -> int:
        """The texts that consist of one of these characters."""
        self._characters[characters] = None
        return self._new(False, "of", characters)

    def text(self, text: str) -> int:
        return self.joined(self.of(((ord(each), ord(each)),)) for each in text)

    def joined(self, parts: Iterable[int]) -> int:
        out = EMPTY
        for part in reversed(list(parts)):
            out = self._before(part, out)
        return out

    def _before(self, first: int, rest: int) -> int:
        if NOTHING in (first, rest):
            return NOTHING
        if EMPTY in (first, rest):
            return first if rest == EMPTY else rest
        if rest == self.anything and self.has_empty[first]:
            return rest
        made = self._made[first]
        if made[0] == "joined":
            return self._before(_number(made[1]), self._before(_number(made[2]), rest))
        return self._new(self.has_empty[first] and self.has_empty[rest], "joined", first, rest)

    def repeated(self, of: int) -> int:
        """Return the language of any number of texts of the language `of` in a row."""
        if of in (NOTHING, EMPTY):
            return EMPTY
        return of if self._made[of][0] == "repeated" else self._new(True, "repeated", of)

    def between(self, of: int, least: int, most: int | None) -> int:
        """Return the language of `least` to `most` (None: no bound) texts of `of` in a row."""
        out = self.repeated(of) if most is None else EMPTY
        for _ in range((most or least) - least):
            out = self.either([EMPTY, self._before(of, out)])
        for _ in range(least):
            out = self._before(of, out)
        return out

    def either(self, some: Iterable[int]) -> int:
        kept = self._flat("either", some) - {NOTHING}
        if self.anything in kept:
            return self.anything
        if len(kept) < 2:
            return next(iter(kept), NOTHING)
        return self._new(any(self.has_empty[each] for each in kept), "either", frozenset(kept))

    def both(self, some: Iterable[int]) -> int:
        kept = self._flat("both", some) - {self.anything}
        if NOTHING in kept:
            return NOTHING
        if len(kept) < 2:
            return next(iter(kept), self.anything)
        return self._new(all(self.has_empty[each] for each in kept), "both", frozenset(kept))

    def _flat(self, kind: str, some: Iterable[int]) -> set[int]:
        out: set[int] = set()
        for each in some:
            made = self._made[each]
            out |= _numbers(made[1]) if made[0] == kind else {each}
        return out

    def all_but(self, of: int) -> int:
        made = self._made[of]
        if of in (NOTHING, self.anything):
            return self.anything if of == NOTHING else NOTHING
        if made[0] == "all_but":
            return _number(made[1])
        return self._new(not self.has_empty[of], "all_but", of)

    def derivative(self, of: int, code: int) -> int:
        """The language of texts that may follow this code point."""
        key = of, code
        if key not in self._derivatives:
            try:
                self._derivatives[key] = self._derived(of, code)
            except RecursionError:
                raise TooLarge("it nests too deep") from None
        return self._derivatives[key]

    def is_one_character(self, of: int) -> bool:
        return self._made[of][0] == "of"

    def is_nothing(self, of: int) -> bool:
        """True if the language has no texts. Raises `TooLarge`."""
        codes = [part[0][0] for part in atoms(self._characters)]
        seen, left = {of}, [of]
        while left:
            language = left.pop()
            if self.has_empty[language]:
                return False
            following = {self.derivative(language, code) for code in codes} - seen - {NOTHING}
            seen |= following
            left += following
        return True

    def has(self, of: int, text: str) -> bool:
        for character in text:
            of = self.derivative(of, ord(character))
        return self.has_empty[of]

    def _derived(self, of: int, code: int) -> int:
        kind, *inside = self._made[of]
        if kind == "of":
            return EMPTY if has(_characters(inside[0]), code) else NOTHING
        if kind == "joined":
            first, rest = map(_number, inside)
            then = [self._before(self.derivative(first, code), rest)]
            then += [self.derivative(rest, code)] if self.has_empty[first] else []
            return self.either(then)
        if kind == "repeated":
            return self._before(self.derivative(_number(inside[0]), code), of)
        if kind == "all_but":
            return self.all_but(self.derivative(_number(inside[0]), code))
        if kind == "empty":
            return NOTHING
        derived = [self.derivative(each, code) for each in _numbers(inside[0])]
        return self.either(derived) if kind == "either" else self.both(derived)


def _number(part: object) -> int:
    assert isinstance(part, int)
    return part


def _numbers(part: object) -> frozenset[int]:
    assert isinstance(part, frozenset)
    return part


def _characters(part: object) -> Characters:
    assert isinstance(part, tuple)
    return part
