"""Admission of requests: who is let in, who waits and for how long, without sockets, routes or a
fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from support.budget import budget, seeded

from penstock_router.admission.admission import Admission, QueuePace, Ticket
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, TimedOut, TooManyRequests, Unavailable
from penstock_router.observe.metrics import Metrics


def admission(limit: int, **bounds: Any) -> Admission:
    config = RouterConfig("a:1", max_concurrent_requests=limit, **bounds)
    return Admission(config, Metrics())


def refusals(of: Admission, reason: str) -> float:
    found: float = of._metrics.refused.labels(reason)._value.get()
    return found


@pytest.fixture
def scope() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Crowd:
    """Requests that run until they are told to end, and how each of them ended."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.started: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def send(
        self, name: str, key: str = "", sequences: int = 1, tokens: int = 1, **more: Any
    ) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, key, sequences, tokens, more))
        await settle()

    async def _run(
        self, name: str, key: str, sequences: int, tokens: int, more: dict[str, Any]
    ) -> None:
        with self.admission.enter(key, sequences, **more) as ticket:
            await ticket.start(tokens)
            self.started.append(name)
            async with ticket.limit.scope():
                await self._ends[name].wait()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await settle()

    def refusal(self, name: str) -> TooManyRequests:
        error = self.tasks[name].exception()
        assert isinstance(error, TooManyRequests), error
        return error


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def crowd(limit: int, **bounds: Any) -> AsyncIterator[Crowd]:
    """Fails where anything is left behind when all of them have ended."""
    made = Crowd(admission(limit, **bounds))
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    check_empty(made.admission)


def check_empty(admission: Admission) -> None:
    left = (admission.in_flight, admission.queued, admission.queued_tokens, admission.num_keys)
    assert left == (0, 0, 0, 0)
    assert admission._queue.first() is None
    assert admission._metrics.sequences_queued._value.get() == 0


# ---- Places and the queue ----------------------------------------------------------------------


async def test_a_request_is_queued_while_it_is_prepared_and_then_in_flight() -> None:
    doors = admission(3)
    with doors.enter("", 2) as ticket:
        assert (doors.in_flight, doors.queued) == (0, 2)
        await ticket.start(100)
        assert (doors.in_flight, doors.queued, doors.queued_tokens) == (2, 0, 0)
    check_empty(doors)


async def test_what_finds_no_place_waits_for_one_in_the_order_of_arrival() -> None:
    async with crowd(2) as them:
        for name in "abcd":
            await them.send(name, tokens=5)
        assert (them.started, them.admission.queued_tokens) == (["a", "b"], 10)
        await them.end("b")
        await them.end("a")
        assert them.started == ["a", "b", "c", "d"]


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    async with crowd(2, max_queued_requests=3) as them:
        for name in "abcdef":
            await them.send(name)
        refused = them.refusal("f")
        assert "this server has no room: 2 sequences run and 3 are queued" in refused.message
        assert refused.headers() == {"Retry-After": str(refused.retry_after_s)}
        assert 1 <= (refused.retry_after_s or 0) <= 60
        assert refusals(them.admission, "queue_full") == 1
        await them.end("a")
        await them.send("g")
        assert not them.tasks["g"].done()


async def test_without_a_queue_there_are_places_or_a_refusal() -> None:
    async with crowd(3, max_queued_requests=0) as them:
        await them.send("a", sequences=2)
        await them.send("b", sequences=2)
        assert isinstance(them.refusal("b"), TooManyRequests)
        await them.send("c")
        assert them.started == ["a", "c"]


async def test_what_is_being_prepared_counts_so_that_all_of_it_finds_places(
    scope: ExitStack,
) -> None:
    doors = admission(3, max_queued_requests=1)
    tickets = [scope.enter_context(doors.enter("", 2)), scope.enter_context(doors.enter("", 2))]
    with pytest.raises(TooManyRequests):
        doors.enter("", 1).__enter__()
    await tickets[1].start(1)
    assert doors.in_flight == 2


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({}, "n: the request asks for 4 sequences; this server runs 3 at most"),
        ({"workers": 2}, "each of this server's 2 workers runs 3 at most"),
        ({"max_concurrent_requests_per_key": 2}, "this server runs 3 at most"),
    ],
)
async def test_a_request_that_never_fits_is_told_the_bound(
    bounds: dict[str, int], words: str
) -> None:
    doors = admission(3, **bounds)
    with pytest.raises(BadRequest) as refused, doors.enter("", 4):
        pass
    assert words in refused.value.message
    assert refused.value.param == "n"
    check_empty(doors)


async def test_a_request_too_wide_for_a_key_is_told_that_bound() -> None:
    doors = admission(3, max_concurrent_requests_per_key=2)
    with pytest.raises(BadRequest, match=r"2 of a key at most \(--max-concurrent-requests-per-key"):
        doors.enter("", 3, "best_of").__enter__()


async def test_a_wide_request_gets_its_turn_among_narrow_ones() -> None:
    async with crowd(4) as them:
        for name in "abcd":
            await them.send(name, key=name)
        await them.send("wide", key="w", sequences=4)
        for name in "efgh":
            await them.send(name, key=name)
        for name in "abc":
            await them.end(name)
        assert them.started == ["a", "b", "c", "d"], "a narrow one slipped past"
        await them.end("d")
        assert them.started[4:] == ["wide"]
        await them.end("wide")
        assert them.started[5:] == ["e", "f", "g", "h"]


# ---- Keys --------------------------------------------------------------------------------------


async def test_places_go_to_the_key_that_has_fewest() -> None:
    async with crowd(4) as them:
        for number in range(8):
            await them.send(f"greedy{number}", key="greedy")
        await them.send("polite0", key="polite")
        await them.send("polite1", key="polite")
        await them.end("greedy0")
        await them.end("greedy1")
        assert them.started[4:] == ["polite0", "polite1"]
        await them.end("greedy2")
        assert them.started[6:] == ["greedy4"]


async def test_a_greedy_key_cannot_fill_the_queue_against_others() -> None:
    async with crowd(2, max_queued_requests=4) as them:
        for number in range(6):
            await them.send(f"greedy{number}", key="greedy")
        for number in range(4):
            await them.send(f"polite{number}", key="polite")
        for number in (5, 4, 3):
            assert "other keys have less" in them.refusal(f"greedy{number}").message
        assert refusals(them.admission, "pushed_out") == 3
        assert "are queued" in them.refusal("polite3").message, "now it has as much itself"
        await them.send("greedy6", key="greedy")
        assert "are queued" in them.refusal("greedy6").message
        await them.end("greedy0")
        await them.end("greedy1")
        assert them.started[2:] == ["polite0", "greedy2"]


async def test_who_is_pushed_out_while_it_is_prepared_is_told_at_once() -> None:
    doors = admission(1, max_queued_requests=1)

    async def prepare() -> None:
        with doors.enter("greedy", 1) as ticket:
            async with ticket.limit.scope():
                await asyncio.sleep(60)

    preparing = [asyncio.create_task(prepare()) for _ in range(2)]
    await settle()
    with doors.enter("polite", 1):
        await asyncio.wait(preparing, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in preparing] == [False, True]
        assert isinstance(preparing[1].exception(), TooManyRequests)
        preparing[0].cancel()
        await asyncio.gather(*preparing, return_exceptions=True)
    check_empty(doors)


async def test_who_is_pushed_out_between_preparing_and_waiting_is_told_when_it_starts(
    scope: ExitStack,
) -> None:
    doors = admission(1, max_queued_requests=1)
    scope.enter_context(doors.enter("greedy", 1))
    second = scope.enter_context(doors.enter("greedy", 1))
    scope.enter_context(doors.enter("polite", 1))
    with pytest.raises(TooManyRequests, match="other keys have less"):
        await second.start(1)
    assert (doors.in_flight, doors.queued) == (0, 2)


async def test_who_is_pushed_out_as_its_waiting_ends_gets_no_place(scope: ExitStack) -> None:
    doors = admission(1, max_queued_requests=1, queue_timeout_s=0.02)
    await scope.enter_context(doors.enter("greedy", 1)).start(1)
    starting = asyncio.create_task(scope.enter_context(doors.enter("greedy", 1)).start(1))
    await settle()
    push = functools.partial(scope.enter_context, doors.enter("polite", 1))
    asyncio.get_running_loop().call_later(0.02, push)
    # Both are due by then, and happen in one turn of the event loop.
    time.sleep(0.05)  # noqa: ASYNC251 - nothing may happen before
    with pytest.raises(TooManyRequests, match="other keys have less"):
        await starting
    assert (doors.in_flight, doors.queued) == (1, 1)


async def test_nothing_of_who_is_pushed_out_stays_until_garbage_is_collected() -> None:
    class Prompt:
        """A stand-in for a large prompt."""

    prompts: list[weakref.ref[Prompt]] = []

    async def run(doors: Admission, key: str) -> None:
        prompt = Prompt()
        prompts.append(weakref.ref(prompt))
        with contextlib.suppress(TooManyRequests), doors.enter(key, 1) as ticket:
            await ticket.start(1)
            await asyncio.sleep(0.01)

    gc.disable()
    try:
        doors = admission(1, max_queued_requests=1)
        await asyncio.gather(*(run(doors, key) for key in ("greedy", "greedy", "polite")))
        assert refusals(doors, "pushed_out") == 1
        assert [prompt() for prompt in prompts] == [None] * 3
    finally:
        gc.enable()


async def test_a_wide_request_is_not_pushed_out_where_its_key_would_have_less_than_the_other(
    scope: ExitStack,
) -> None:
    doors = admission(4, max_queued_requests=4)
    await scope.enter_context(doors.enter("other", 4)).start(1)
    wide = scope.enter_context(doors.enter("wide", 4))
    with pytest.raises(TooManyRequests, match="4 sequences run and 4 are queued"):
        doors.enter("narrow", 1).__enter__()
    wide.limit.check()
    assert (doors.in_flight, doors.queued) == (4, 4)


async def test_bounds_of_a_key_hold_for_each() -> None:
    bounds = {"max_concurrent_requests_per_key": 2, "max_queued_requests_per_key": 1}
    async with crowd(10, **bounds) as them:
        for number in range(4):
            await them.send(f"a{number}", key="a")
        assert them.started == ["a0", "a1"]
        assert "of this key run and 1 are queued" in them.refusal("a3").message
        assert refusals(them.admission, "key_queue_full") == 1
        await them.send("b0", key="b")
        assert them.started[2:] == ["b0"], "another key waits for nobody"
        await them.end("a0")
        assert them.started[3:] == ["a2"]


async def test_a_bound_of_a_key_s_queue_holds_where_others_have_the_places() -> None:
    async with crowd(2, max_queued_requests_per_key=1) as them:
        for name in ("a0", "a1", "b0", "b1"):
            await them.send(name, key=name[0])
        assert "of this key run and 1 are queued" in them.refusal("b1").message


async def test_nothing_is_kept_of_a_key_that_has_nothing_here() -> None:
    async with crowd(2) as them:
        for number in range(100):
            await them.send(f"{number}", key=f"key{number}")
            await them.end(f"{number}")
        assert them.admission.num_keys == 0


# ---- Tokens ------------------------------------------------------------------------------------


async def test_prompts_that_wait_have_so_many_tokens_at_most() -> None:
    async with crowd(1, max_queued_tokens=100) as them:
        await them.send("running", tokens=1000)
        await them.send("a", tokens=60)
        await them.send("b", tokens=41)
        assert "prompts with 60 tokens are queued" in them.refusal("b").message
        assert refusals(them.admission, "queued_tokens") == 1
        await them.send("c", tokens=40)
        assert them.admission.queued_tokens == 100
        await them.end("running")
        assert them.admission.queued_tokens == 40


async def test_one_request_may_wait_however_long_its_prompt_is() -> None:
    async with crowd(1, max_queued_tokens=100, max_queued_tokens_per_key=50) as them:
        await them.send("running")
        await them.send("long", tokens=1000)
        await them.end("running")
        assert them.started == ["running", "long"]


async def test_tokens_of_a_key_are_bounded_too() -> None:
    async with crowd(1, max_queued_tokens_per_key=50) as them:
        await them.send("running")
        await them.send("a0", key="a", tokens=30)
        await them.send("a1", key="a", tokens=30)
        await them.send("b0", key="b", tokens=30)
        assert "prompts of this key with 30 tokens" in them.refusal("a1").message
        assert refusals(them.admission, "key_queued_tokens") == 1
        assert not them.tasks["b0"].done()


async def test_a_key_with_many_tokens_makes_room_for_one_with_few() -> None:
    async with crowd(1, max_queued_tokens=100) as them:
        await them.send("running")
        await them.send("greedy0", key="greedy", tokens=50)
        await them.send("greedy1", key="greedy", tokens=50)
        await them.send("polite", key="polite", tokens=20)
        assert "other keys have less" in them.refusal("greedy1").message
        assert them.admission.queued_tokens == 70


# ---- Time --------------------------------------------------------------------------------------


async def test_who_waits_too_long_is_refused() -> None:
    async with crowd(1, queue_timeout_s=0.02) as them:
        await them.send("running")
        await them.send("waits")
        await asyncio.wait([them.tasks["waits"]], timeout=5)
        assert (
            "no place came free within 0.02 s (--queue-timeout-s)" in them.refusal("waits").message
        )
        assert refusals(them.admission, "queue_timeout") == 1
        assert them.admission.queued == 0


@pytest.mark.parametrize("whose", ["own", "server's"])
async def test_a_request_s_time_counts_from_its_arrival_and_ends_its_waiting(whose: str) -> None:
    bounds = {"request_timeout_s": 600.0 if whose == "own" else 60.0}
    own_s = 60.0 if whose == "own" else 600.0
    async with crowd(1, **bounds) as them:
        await them.send("running", timeout_s=None)
        await them.send("waits", timeout_s=own_s, waited_s=59.9)
        await asyncio.wait([them.tasks["waits"]], timeout=20)
        assert isinstance(them.tasks["waits"].exception(), TimedOut)


async def test_the_end_of_a_request_s_time_is_known() -> None:
    doors, loop = admission(1), asyncio.get_running_loop()
    with doors.enter("", 1, timeout_s=10.0, waited_s=4.0) as ticket:
        assert 5.9 < (ticket.limit.at_s or 0) - loop.time() <= 6.0
    with doors.enter("", 1) as ticket:
        assert ticket.limit.at_s is None


async def test_stopping_refuses_what_comes_and_ends_what_waits_and_runs_at_the_limit() -> None:
    async with crowd(1) as them:
        await them.send("runs")
        await them.send("waits")
        stopping = asyncio.create_task(them.admission.stop(0.05))
        await them.send("late")
        assert isinstance(them.tasks["late"].exception(), Unavailable)
        await stopping
        await asyncio.wait(them.tasks.values(), timeout=5)
        for name in ("runs", "waits"):
            assert isinstance(them.tasks[name].exception(), Unavailable)


async def test_stopping_is_over_when_all_have_ended() -> None:
    async with crowd(1) as them:
        await them.send("runs")
        await them.send("waits")
        stopping = asyncio.create_task(them.admission.stop(60))
        await them.end("runs")
        assert not stopping.done()
        await them.end("waits")
        await asyncio.wait_for(stopping, 5)


# ---- Retry-After and its cost ------------------------------------------------------------------


def test_the_pace_is_that_at_which_places_came_free_of_late() -> None:
    pace = QueuePace(0.0)
    for tenth in range(1, 301):
        pace.record_freed(2, tenth / 10)
    assert pace.seconds_until(40, 30.0) == pytest.approx(2.0, rel=0.1)
    for tenth in range(301, 601):
        pace.record_freed(1, tenth / 10)
    assert pace.seconds_until(40, 60.0) == pytest.approx(4.0, rel=0.1)


def test_a_pace_is_known_soon_and_forgotten_when_all_stands_still() -> None:
    pace = QueuePace(0.0)
    for hundredth in range(1, 101):
        pace.record_freed(1, hundredth / 100)
    assert pace.seconds_until(100, 1.0) == pytest.approx(1.0, rel=0.1)
    assert pace.seconds_until(100, 31.0) > 60
    pace.begin(100.0)
    assert pace.seconds_until(1, 100.0) < 1


async def test_retry_after_grows_with_the_queue_and_has_a_bound() -> None:
    waits_s = []
    for queued in (1, 40, 4000):
        async with crowd(2, max_queued_requests=queued) as them:
            await them.send("running")
            them.admission._pace.begin(time.monotonic() - 5.0)
            for number in range(50):
                await them.send(f"short{number}")
                await them.end(f"short{number}")
            await them.send("running too")
            with ExitStack() as tickets:
                for _ in range(queued):
                    tickets.enter_context(them.admission.enter("", 1))
                await them.send("late")
                waits_s.append(them.refusal("late").retry_after_s)
    assert waits_s[0] == 1
    assert 3 <= (waits_s[1] or 0) <= 5
    assert waits_s[2] == 60


async def test_the_pace_of_an_idle_time_is_forgotten() -> None:
    async with crowd(1, max_queued_requests=1) as them:
        them.admission._pace.begin(time.monotonic() - 1000.0)
        for name in "abc":
            await them.send(name)
        assert them.refusal("c").retry_after_s == 1


async def test_a_refusal_costs_less_than_a_millisecond_also_with_many_keys(
    scope: ExitStack,
) -> None:
    doors = admission(1000, max_queued_requests=1000)
    for number in range(2000):
        scope.enter_context(doors.enter(f"key{number}", 1))
    begin_s = time.process_time()
    for _ in range(200):
        with pytest.raises(TooManyRequests):
            doors.enter("key0", 1).__enter__()
    assert (time.process_time() - begin_s) / 200 < 1e-3


# ---- Whatever happens --------------------------------------------------------------------------


async def test_whatever_happens_bounds_hold_and_nothing_is_left() -> None:
    rng = seeded("admission")
    for _ in range(budget(15, 300)):
        limit = rng.randint(1, 8)
        bounds: dict[str, Any] = {
            "max_queued_requests": rng.choice([0, 3, 20]),
            "max_queued_tokens": rng.choice([20, 1000]),
            "queue_timeout_s": rng.choice([0.001, 60.0]),
            "max_concurrent_requests_per_key": rng.choice([None, rng.randint(1, limit)]),
        }
        doors = admission(limit, **bounds)
        tasks: list[asyncio.Task[str]] = []
        for _ in range(100):
            sequences = rng.choice([1, 1, 1, limit])
            key = f"key{rng.randrange(4)}"
            pauses = [rng.random() * 0.003 for _ in range(2)]
            timeout_s = rng.choice([None, 0.002])
            entered = _one(doors, key, sequences, rng.randint(1, 30), pauses, timeout_s)
            tasks.append(asyncio.create_task(entered))
            await asyncio.sleep(rng.choice([0, 0, 0.001]))
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
            assert doors.in_flight <= limit
            assert doors.in_flight + doors.queued <= limit + bounds["max_queued_requests"]
            first = doors._queue.first()
            assert first is None or doors.in_flight + first.places > limit, "it need not wait"
            for account in (doors._all, *doors._accounts.values()):
                assert min(account.in_flight, account.queued, account.queued_tokens) >= 0
        async with asyncio.timeout(20):
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            known = (TooManyRequests, BadRequest, TimedOut, asyncio.CancelledError)
            assert end == "done" or isinstance(end, known), end
        assert "done" in ends
        check_empty(doors)


async def _one(
    doors: Admission,
    key: str,
    sequences: int,
    tokens: int,
    pauses_s: list[float],
    timeout_s: float | None,
) -> str:
    with doors.enter(key, sequences, timeout_s=timeout_s) as ticket:
        assert isinstance(ticket, Ticket)
        async with ticket.limit.scope():
            await asyncio.sleep(pauses_s[0])
        await ticket.start(tokens)
        async with ticket.limit.scope():
            await asyncio.sleep(pauses_s[1])
    return "done"


async def test_room_is_made_all_at_once_and_no_place_is_given_in_between(
    scope: ExitStack,
) -> None:
    doors = admission(4, max_queued_requests=3)
    for _ in range(3):
        await scope.enter_context(doors.enter("greedy", 1)).start(1)
    narrow = scope.enter_context(doors.enter("greedy", 1))
    wide = scope.enter_context(doors.enter("greedy", 2))
    # The narrow one came first and is prepared last: it waits behind the wide one.
    starting = [asyncio.create_task(wide.start(1))]
    await settle()
    starting.append(asyncio.create_task(narrow.start(1)))
    await settle()
    scope.enter_context(doors.enter("other", 1))
    scope.enter_context(doors.enter("polite", 3))
    await asyncio.wait(starting, timeout=5)
    assert [type(task.exception()) for task in starting] == [TooManyRequests] * 2
    assert (doors.in_flight, doors.queued) == (3, 4)
