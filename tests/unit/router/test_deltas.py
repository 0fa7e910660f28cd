"""The deltas of an answer, in bundles."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterable

import pytest

from penstock_router.errors import Unavailable
from penstock_router.generation.choice import Delta
from penstock_router.generation.deltas import Deltas, bundle, for_each


class _Failing(Deltas):
    """Gives these deltas, and then fails."""

    def __init__(self, deltas: Iterable[Delta]) -> None:
        self._left = deque(deltas)

    @property
    def ended(self) -> bool:
        return False

    def take(self) -> Delta | None:
        if not self._left:
            raise Unavailable("no shard is left")
        return self._left.popleft()

    def listen(self, on_output: Callable[[], None]) -> None:
        pass


async def test_what_is_held_back_for_a_bundle_comes_before_the_error_that_ends_it() -> None:
    came: list[tuple[int, str, list[int]]] = []
    deltas = [Delta(number % 2, f"{number} ", [number]) for number in range(10)]
    with pytest.raises(Unavailable):
        await for_each(
            bundle(_Failing(deltas), 3),
            lambda delta: came.append((delta.index, delta.text, delta.token_ids)),
        )
    assert came == [
        (0, "0 ", [0]),
        (1, "1 ", [1]),
        (0, "2 4 6 ", [2, 4, 6]),
        (1, "3 5 7 ", [3, 5, 7]),
        (0, "8 ", [8]),
        (1, "9 ", [9]),
    ]


def test_an_error_that_was_held_back_leaves_no_reference_cycle() -> None:
    def fail() -> None:
        deltas = bundle(_Failing([Delta(0, "a", [1]), Delta(0, "b", [2])]), 3)
        assert [deltas.take(), deltas.take()]
        with contextlib.suppress(Unavailable):
            deltas.take()

    gc.collect()
    gc.disable()
    try:
        fail()
        assert gc.collect() == 0
    finally:
        gc.enable()
