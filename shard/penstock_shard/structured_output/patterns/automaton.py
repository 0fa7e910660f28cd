"""A regular language as an automaton. It yields a regular expression, and the texts if they are
few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock_shard.structured_output.patterns.characters import (
    Characters,
    all_but,
    atoms,
    characters,
)
from penstock_shard.structured_output.patterns.languages import NOTHING, Languages, TooLarge
from penstock_shard.structured_output.patterns.reader import language_of

_MOST_STATES = 300
_LONGEST = 20_000

_Steps = list[dict[int, Characters]]


@dataclass(frozen=True, slots=True)
class Automaton:
    """`steps` has, for each state, the next states and the characters that lead to them.

    State 0 is the first; texts may end in the states of `ends`.
    """

    steps: _Steps
    ends: frozenset[int]

    def texts(self, most: int) -> list[str] | None:
        """The texts, shorter first; None if there are more than `most`."""
        if self._goes_round():
            return None
        found: list[str] = []
        level = [("", 0)]
        while level:
            found += [text for text, state in level if state in self.ends]
            level = [step for text, state in level for step in self._following(text, state, most)]
            if len(found) + len(level) > most:
                return None
        return found

    def _following(self, text: str, state: int, most: int) -> Iterator[tuple[str, int]]:
        for following, some in self.steps[state].items():
            codes = (code for low, high in some for code in range(low, min(high, low + most) + 1))
            yield from ((text + chr(code), following) for code in codes)

    def _goes_round(self) -> bool:
        """True if a state can be reached from itself: there is no longest text."""
        left = {state: set(after) for state, after in enumerate(self.steps)}
        while done := [state for state, after in left.items() if not after & left.keys()]:
            for state in done:
                del left[state]
        return bool(left)


def automaton(languages: Languages, of: int) -> Automaton:
    """The smallest automaton of a language. Raises `TooLarge`."""
    parts = atoms(languages.characters)
    states = {of: 0}
    order = [of]
    steps: _Steps = []
    while len(steps) < len(order):
        after: dict[int, list[tuple[int, int]]] = {}
        for part in parts:
            following = languages.derivative(order[len(steps)], part[0][0])
            if following != NOTHING:
                if following not in states:
                    states[following] = len(order)
                    order.append(following)
                after.setdefault(states[following], []).extend(part)
        if len(order) > _MOST_STATES:
            raise TooLarge("it is too complex")
        steps.append({state: characters(ranges) for state, ranges in after.items()})
    ends = {state for state, language in enumerate(order) if languages.has_empty[language]}
    return _smallest(steps, ends)


def _smallest(steps: _Steps, ends: set[int]) -> Automaton:
    """Merge equal states, and drop states that lead to no end."""
    alive, before = set(ends), 0
    while before < len(alive):
        before = len(alive)
        alive |= {state for state, after in enumerate(steps) if after.keys() & alive}
    kinds, count = [int(state in ends) for state in range(len(steps))], 0
    while count < len(set(kinds)):
        count = len(set(kinds))
        keys = [(kinds[state], _merged(steps[state], kinds, alive)) for state in range(len(steps))]
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(key, len(numbers)) for key in keys]
    firsts = {kind: state for state, kind in reversed(list(enumerate(kinds)))}
    merged = [dict(_merged(steps[firsts[kind]], kinds, alive)) for kind in sorted(firsts)]
    return Automaton(merged, frozenset(kinds[state] for state in ends))


def _merged(
    after: dict[int, Characters], kinds: list[int], alive: set[int]
) -> frozenset[tuple[int, Characters]]:
    """Group the characters after a state by the next state's kind; drop states without an end."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for state, some in after.items():
        if state in alive:
            ranges.setdefault(kinds[state], []).extend(some)
    return frozenset((kind, characters(some)) for kind, some in ranges.items())


# ---- The regular expression: states are eliminated one by one ----------------------------------

_START, _END = -1, -2


def without_looking(pattern: str) -> str:
    """A pattern of the same texts without look-ahead. Raises ValueError."""
    languages = Languages()
    return expression(automaton(languages, language_of(languages, pattern)))


def all_texts_but(pattern: str) -> str:
    """A pattern of the texts in which `pattern` is not found. Raises ValueError."""
    languages = Languages()
    others = languages.all_but(language_of(languages, pattern))
    return expression(automaton(languages, others))


def all_found(patterns: Iterable[str]) -> str:
    """A pattern of the texts in which all `patterns` are found. Raises ValueError."""
    languages = Languages()
    both = languages.both(language_of(languages, pattern) for pattern in patterns)
    return expression(automaton(languages, both))


def expression(of: Automaton) -> str:
    """An ECMA 262 pattern of exactly the automaton's texts. Raises `TooLarge`."""
    ways = _Ways(len(of.steps))
    ways.add(_START, 0, "")
    for state, after in enumerate(of.steps):
        for following, some in after.items():
            ways.add(state, following, _class(some))
    for state in of.ends:
        ways.add(state, _END, "")
    costs = {state: ways.cost(state) for state in range(len(of.steps))}
    while costs:
        state = min(costs, key=costs.__getitem__)
        del costs[state]
        for changed in ways.take_away(state) & costs.keys():
            costs[changed] = ways.cost(changed)
    found = ways.after[_START].get(_END)
    if found is None:
        raise TooLarge("no text is allowed")
    return f"^(?:{found})$"


class _Ways:
    def __init__(self, num_states: int) -> None:
        self.after: dict[int, dict[int, str]] = {each: {} for each in range(_END, num_states)}
        self._before: dict[int, set[int]] = {each: set() for each in range(_END, num_states)}
        self._length = 0

    def add(self, state: int, following: int, text: str) -> None:
        """Raises `TooLarge` if expressions get too long."""
        after = self.after[state]
        self._length += len(text)
        if self._length > _LONGEST:
            raise TooLarge("it is too complex")
        after[following] = _or(after[following], text) if following in after else text
        self._before[following].add(state)

    def cost(self, state: int) -> int:
        """The number of characters that eliminating a state adds to the expressions."""
        behind = [text for other, text in self.after[state].items() if other != state]
        before = [self.after[one][state] for one in self._before[state] if one != state]
        around = len(self.after[state].get(state, ""))
        lengths = sum(map(len, before)) * len(behind) + sum(map(len, behind)) * len(before)
        return lengths + around * len(before) * len(behind)

    def take_away(self, state: int) -> set[int]:
        behind, before = self.after.pop(state), self._before.pop(state) - {state}
        loop = behind.pop(state, None)
        around = "" if loop is None else f"{_atom(loop)}*"
        for following in behind:
            self._before[following].discard(state)
        for one in before:
            way = _in_turn(self.after[one].pop(state)) + around
            self._length -= len(way)
            for following, text in behind.items():
                self.add(one, following, way + _in_turn(text))
        self._length -= sum(map(len, behind.values()))
        return before | behind.keys()


def _or(one: str, other: str) -> str:
    if "" in (one, other):
        return f"{_atom(one + other)}?"
    return f"{one}|{other}"


def _in_turn(text: str) -> str:
    return f"(?:{text})" if _has_alternatives(text) else text


def _has_alternatives(text: str) -> bool:
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token == "(?:") - (token == ")")
        if token == "|" and not depth:
            return True
    return False


def _atom(text: str) -> str:
    return text if len(_TOKEN.findall(text)) == 1 else f"(?:{text})"


_TOKEN = re.compile(r"\[[^]]*\]|\(\?:|.", re.DOTALL)


def _class(some: Characters) -> str:
    """Write a character class, or the negated class of the other characters if that is shorter."""
    if len(some) == 1 and some[0][0] == some[0][1] and chr(some[0][0]).isalnum():
        return _code(some[0][0])
    others = all_but(some)
    classes = [f"[{_ranges(some)}]", *([f"[^{_ranges(others)}]"] if others else ["[^]"])]
    return min(classes, key=len)


def _ranges(some: Characters) -> str:
    return "".join(
        _code(low) + (f"-{_code(high)}" if high > low + 1 else _code(high) if high > low else "")
        for low, high in some
    )


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isprintable():
        return (
            character
            if character.isalnum() or character in " _%!,:;<>=@#'\"`"
            else f"\\{character}"
        )
    return f"\\u{{{code:X}}}"
