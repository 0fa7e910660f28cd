"""The two checkouts, and a shard and a router of each that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from comparison.shard_cases import ADAPTER, Questions
from comparison.stacks import Answers, ask, pair_of, questions_for
from support.adapters import make_adapter
from support.checkouts import Checkout, baseline, this_checkout
from support.processes import Router, Shard

# Answers say how many tokens were cached, which depends on when a request came.
FAKE = ("--step-ms", "1", "--no-enable-prefix-caching")


@dataclass(frozen=True)
class Side:
    """A checkout, and a shard with the fake runner and a router of it."""

    checkout: Checkout
    shard: Shard
    router: Router


@dataclass(frozen=True)
class Sides:
    """The same of the baseline, and of now."""

    before: Side
    now: Side


def fake_flags(folder: Path) -> tuple[str, ...]:
    """Return the flags of the fake runner, with the adapter that cases name."""
    return (*FAKE, "--lora", f"{ADAPTER}={make_adapter(folder / 'adapter')}")


@pytest.fixture(scope="package")
def before(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return baseline(tmp_path_factory.mktemp("before"))


@pytest.fixture(scope="package")
def now() -> Checkout:
    return this_checkout()


@pytest.fixture(scope="package")
def sides(
    tmp_path_factory: pytest.TempPathFactory, before: Checkout, now: Checkout
) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("sides")
    with ExitStack() as stack:
        started = [
            Side(
                checkout,
                *stack.enter_context(pair_of(checkout, folder / name, *fake_flags(folder))),
            )
            for name, checkout in (("before", before), ("now", now))
        ]
        yield Sides(*started)


@pytest.fixture(scope="package")
def questions(sides: Sides) -> Questions:
    return questions_for(sides.before.checkout, sides.before.shard)


@pytest.fixture(scope="package")
def answers_before(sides: Sides, questions: Questions) -> Answers:
    """The answers of the baseline's fake runner to each field's question."""
    return ask(sides.before.checkout, [sides.before.shard], questions.each_field()).answers
