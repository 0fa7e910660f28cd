"""A case for each field of a request: what sets it, and whether the answer shows that."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
# The name of the request that cases change; and of a case's own, where it has more beside.
PLAIN = "plain"
WITHOUT = ", left out"


@dataclass(frozen=True)
class Case:
    """`change` sets the field in a request that has `beside` too. Where `shows`, the answer differs
    from that of the request without the change; else it must be the same.
    """

    change: Json
    beside: Json = field(default_factory=dict)
    shows: bool = True


Cases = Mapping[str, Case]


def merge(*parts: Json) -> Json:
    """Later parts win; objects within are merged as well."""
    whole: Json = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = merge(whole[name], value) if both else copy.deepcopy(value)
    return whole


def requests_of(base: Json, cases: Cases) -> dict[str, Json]:
    """Return each case's request, and the request that it is compared with, by name."""
    found = {PLAIN: base}
    for name, case in cases.items():
        found[name] = merge(base, case.beside, case.change)
        if case.beside:
            found[name + WITHOUT] = merge(base, case.beside)
    return found


def not_as_said(cases: Cases, answers: Mapping[str, Any]) -> list[str]:
    """Cases whose answer does not show their field, or shows one that should change nothing."""
    wrong = []
    for name, case in cases.items():
        without = answers[name + WITHOUT] if case.beside else answers[PLAIN]
        if (answers[name] != without) != case.shows:
            wrong.append(f"{name}: {'shows nothing' if case.shows else 'changes the answer'}")
    return wrong


def pairs(base: Json, cases: Cases, names: Sequence[str]) -> dict[str, Json]:
    """Requests with two of the cases' fields each."""
    return {
        f"{first} and {second}": merge(base, cases[first].change, cases[second].change)
        for index, first in enumerate(names)
        for second in names[index + 1 :]
    }


def combinations(
    base: Json, cases: Cases, rng: random.Random, count: int, most: int = 6
) -> dict[str, Json]:
    """Requests with a few fields each, chosen at random. Some are refused."""
    found = {}
    for _ in range(count):
        names = rng.sample(sorted(cases), rng.randint(2, most))
        parts = [part for name in names for part in (cases[name].beside, cases[name].change)]
        found[" and ".join(names)] = merge(base, *parts)
    return found


def of_fields(cases: Cases, fields: Iterable[str]) -> dict[str, Case]:
    """Return the cases whose field is among `fields`."""
    named = set(fields)
    return {name: case for name, case in cases.items() if name in named}
