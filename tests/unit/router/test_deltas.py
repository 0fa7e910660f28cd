"""What an answer gains, bundled."""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterable

import pytest

from penstock_client.types import Logprobs
from penstock_router.errors import BadRequest, Unavailable
from penstock_router.generation.choice import Delta
from penstock_router.generation.deltas import LOGPROB_BYTES, Deltas, bound_each, bundle, for_each
from penstock_router.request import CompletionRequest


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


def test_a_stream_ends_where_more_scores_wait_than_an_answer_may_have() -> None:
    options = CompletionRequest(prompts=([5],), logprobs=3, stream=True)
    one, three = (
        Delta(0, "a", [5], logprobs=Logprobs()),
        Delta(0, "b", [5] * 3, logprobs=Logprobs()),
    )
    taken = bound_each(_Failing([one, one, three]), options, LOGPROB_BYTES * 4 * 2)
    assert [taken.take(), taken.take()] == [one, one]
    with pytest.raises(BadRequest, match="more than 512 bytes of them wait"):
        taken.take()


def test_without_scores_no_stream_is_bound() -> None:
    deltas = _Failing([])
    assert bound_each(deltas, CompletionRequest(prompts=([5],)), 1) is deltas
