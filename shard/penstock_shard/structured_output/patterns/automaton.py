"""A regular language as an automaton: whether it is empty, its texts if they are few, and its
regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock_shard.structured_output.patterns.characters import Characters, atoms, characters
from penstock_shard.structured_output.patterns.languages import NOTHING, Languages, TooLarge
from penstock_shard.structured_output.patterns.reader import language_of

_MOST_STATES = 300
_LONGEST = 20_000

_Steps = list[dict[int, Characters]]


@dataclass(frozen=True, slots=True)
class Automaton:
    """`steps` has, for each state, those that follow it, with the characters that lead to them.

    State 0 is the first; texts may end in those of `ends`. Every state but the first leads to one.
    """

    steps: _Steps
    ends: frozenset[int]

    def texts(self, most: int) -> list[str] | None:
        """All texts, shorter ones first; None if they are more than `most`."""
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
        """Whether a state follows itself, so that there are texts of any length."""
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
    """The automaton without states that lead to no end, and with equal ones made one."""
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
    """What follows a state, by the kinds of states; only those that lead to an end."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for state, some in after.items():
        if state in alive:
            ranges.setdefault(kinds[state], []).extend(some)
    return frozenset((kind, characters(some)) for kind, some in ranges.items())


# ---- The regular expression: states are taken away one by one ----------------------------------

# For each state the expressions of what leads to others.
_Labels = dict[int, dict[int, str]]
_START, _END = -1, -2


def without_looking(pattern: str) -> str:
    """A pattern of the same texts without look-ahead. Raises ValueError, as `language_of`."""
    languages = Languages()
    return expression(automaton(languages, language_of(languages, pattern)))


def all_texts_but(pattern: str) -> str:
    """A pattern of the texts in which another is not found. Raises ValueError."""
    languages = Languages()
    others = languages.all_but(language_of(languages, pattern))
    return expression(automaton(languages, others))


def expression(of: Automaton) -> str:
    """A pattern of ECMA 262 that matches exactly these texts. Raises `TooLarge`."""
    labels: _Labels = {_START: {0: ""}, _END: {}}
    for state, after in enumerate(of.steps):
        labels[state] = {following: _class(some) for following, some in after.items()}
        if state in of.ends:
            labels[state][_END] = ""
    for _ in of.steps:
        _take_away(labels, min((state for state in labels if state >= 0), key=_cost(labels)))
        if sum(len(text) for after in labels.values() for text in after.values()) > _LONGEST:
            raise TooLarge("it is too complex")
    if _END not in labels[_START]:
        raise TooLarge("no text is allowed")
    return f"^(?:{labels[_START][_END]})$"


def _cost(labels: _Labels) -> Callable[[int], int]:
    """How much the expressions grow by when a state is taken away."""

    def cost(state: int) -> int:
        before = [
            after[state] for other, after in labels.items() if other != state and state in after
        ]
        behind = [text for other, text in labels[state].items() if other != state]
        lengths = sum(map(len, before)) * len(behind) + sum(map(len, behind)) * len(before)
        return lengths + len(labels[state].get(state, "")) * len(before) * len(behind)

    return cost


def _take_away(labels: _Labels, state: int) -> None:
    behind = labels.pop(state)
    loop = behind.pop(state, None)
    around = "" if loop is None else f"{_atom(loop)}*"
    for after in labels.values():
        before = after.pop(state, None)
        if before is None:
            continue
        for following, text in behind.items():
            way = _in_turn(before) + around + _in_turn(text)
            after[following] = _or(after[following], way) if following in after else way


def _or(one: str, other: str) -> str:
    if "" in (one, other):
        return f"{_atom(one + other)}?"
    return f"{one}|{other}"


def _in_turn(text: str) -> str:
    """An expression that others may be written before and behind."""
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
    return "[" + "".join(_code(low) + "-" + _code(high) for low, high in some) + "]"


def _code(code: int) -> str:
    character = chr(code)
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\u{{{code:X}}}"
