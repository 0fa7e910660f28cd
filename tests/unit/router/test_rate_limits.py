"""The limits of a key in each minute: its buckets, what a request is charged, what headers say."""

from __future__ import annotations

import random
import time

import pytest

from penstock_router.admission import rate_limits
from penstock_router.admission.rate_limits import Bucket, Charge, Rates
from penstock_router.errors import TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import RequestRecord


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(rate_limits, "time", found)
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def _rates(requests: int | None = None, tokens: int | None = None) -> Rates:
    rates = Rates()
    rates.change(requests, tokens)
    return rates


def _record() -> RequestRecord:
    return RequestRecord(request_id="r", method="POST", route="/", arrived_s=time.perf_counter())


def _refusals(metrics: Metrics, reason: str) -> float:
    return float(metrics.refused.labels(reason)._value.get())


# ---- Buckets -----------------------------------------------------------------------------------


def test_a_bucket_is_full_at_first_and_fills_again_in_a_minute() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(60, now_s=0.0)
    assert bucket.level(0.0) == 0
    assert bucket.level(1.0) == pytest.approx(1)
    assert bucket.level(59.0) == pytest.approx(59)
    assert bucket.level(1e6) == 60


def test_it_says_how_long_until_there_is_enough_or_it_is_full() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(50, now_s=0.0)
    assert bucket.wait_s(10, now_s=0.0) == 0
    assert bucket.wait_s(15, now_s=0.0) == pytest.approx(5)
    assert bucket.wait_s(1000, now_s=0.0) == pytest.approx(50)


def test_an_overdraft_is_paid_back_first() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(180, now_s=0.0)
    assert bucket.level(0.0) == -120
    assert bucket.wait_s(1, now_s=0.0) == pytest.approx(121)


def test_another_limit_keeps_what_is_used_up() -> None:
    bucket = Bucket(60, now_s=0.0)
    bucket.take(50, now_s=0.0)
    bucket.change(600, now_s=0.0)
    assert (bucket.level(0.0), bucket.per_minute) == (10, 600)
    bucket.change(5, now_s=0.0)
    assert bucket.level(0.0) == 5


def test_in_any_minute_nobody_gets_more_than_two_minutes_worth() -> None:
    rng = random.Random(7)
    bucket, now_s, taken = Bucket(100, now_s=0.0), 0.0, []
    for _ in range(5000):
        now_s += rng.expovariate(10)
        amount = rng.choice([1, 5, 20])
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            taken.append((now_s, amount))
    for begin_s, _ in taken[::50]:
        window = sum(amount for at_s, amount in taken if begin_s <= at_s < begin_s + 60)
        assert window <= 200
    assert sum(amount for _, amount in taken) <= 100 + now_s * 100 / 60 + 1


# ---- Charges -----------------------------------------------------------------------------------


def test_requests_beyond_the_limit_are_refused_until_time_has_passed(
    clock: Clock, metrics: Metrics
) -> None:
    rates = _rates(requests=3)
    for _ in range(3):
        Charge(rates, metrics).take_request()
    with pytest.raises(TooManyRequests, match="3 requests a minute") as refused:
        Charge(rates, metrics).take_request()
    assert refused.value.retry_after_s == 20
    assert refused.value.headers() == {"Retry-After": "20"}
    assert _refusals(metrics, "key_requests_per_minute") == 1
    clock.now_s += 20
    Charge(rates, metrics).take_request()


def test_prompts_are_charged_before_and_outputs_to_the_token_after(
    clock: Clock, metrics: Metrics
) -> None:
    rates = _rates(tokens=1000)
    assert rates.tokens is not None
    charge, record = Charge(rates, metrics), _record()
    charge.take_tokens(100, 50)
    assert rates.tokens.level(clock.now_s) == 850
    charge.begin(100)
    charge.follow(record)
    record.made_tokens = 7
    charge.settle()
    assert rates.tokens.level(clock.now_s) == 893
    charge.settle()
    assert rates.tokens.level(clock.now_s) == 893


def test_a_request_that_got_no_place_gets_its_tokens_back(clock: Clock, metrics: Metrics) -> None:
    rates = _rates(tokens=1000)
    assert rates.tokens is not None
    charge = Charge(rates, metrics)
    charge.follow(_record())
    charge.take_tokens(400, 50)
    charge.settle()
    assert rates.tokens.level(clock.now_s) == 1000


def test_a_prompt_longer_than_a_minutes_tokens_is_let_in_when_nothing_is_used_up(
    clock: Clock, metrics: Metrics
) -> None:
    rates = _rates(tokens=1000)
    charge = Charge(rates, metrics)
    charge.take_tokens(5000, 10)
    charge.begin(5000)
    charge.settle()
    with pytest.raises(TooManyRequests, match="1000 tokens a minute") as refused:
        Charge(rates, metrics).take_tokens(1, 1)
    assert refused.value.retry_after_s == pytest.approx(241, abs=1)
    assert _refusals(metrics, "key_tokens_per_minute") == 1


def test_of_answers_without_a_bound_only_a_few_may_overdraw_at_once(
    clock: Clock, metrics: Metrics
) -> None:
    rates = _rates(tokens=8000)
    for _ in range(7):
        Charge(rates, metrics).take_tokens(1, 10**6)
    with pytest.raises(TooManyRequests):
        Charge(rates, metrics).take_tokens(1, 10**6)


def test_every_token_counts_so_that_over_a_long_time_the_limit_holds(
    clock: Clock, metrics: Metrics
) -> None:
    rng, rates = random.Random(3), _rates(tokens=6000)
    used, begin_s, running = 0, clock.now_s, list[tuple[float, Charge, RequestRecord, int]]()
    for _ in range(4000):
        clock.now_s += rng.expovariate(5)
        for entry in [entry for entry in running if entry[0] <= clock.now_s]:
            running.remove(entry)
            entry[2].made_tokens = entry[3]
            entry[1].settle()
            used += 10 + entry[3]
        charge, record = Charge(rates, metrics), _record()
        try:
            charge.take_tokens(10, 4000)
        except TooManyRequests:
            continue
        charge.begin(10)
        charge.follow(record)
        running.append((clock.now_s + rng.uniform(1, 30), charge, record, rng.randrange(4000)))
    minutes = (clock.now_s - begin_s) / 60
    overdraft = 8 * 4000
    assert used <= 6000 * (minutes + 1) + overdraft
    assert used >= 6000 * minutes * 0.8


@pytest.mark.parametrize("rates", [None, _rates()])
def test_without_limits_nothing_is_counted(rates: Rates | None, metrics: Metrics) -> None:
    charge = Charge(rates, metrics)
    charge.take_request()
    charge.take_tokens(10**9, 10**9)
    charge.begin(10**9)
    charge.settle()


# ---- Headers -----------------------------------------------------------------------------------


def test_headers_say_what_is_left_and_when_all_of_it_is_there_again(
    clock: Clock, metrics: Metrics
) -> None:
    rates = _rates(requests=60, tokens=6000)
    charge = Charge(rates, metrics)
    charge.take_request()
    charge.take_tokens(100, 20)
    assert rates.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5880",
        "x-ratelimit-reset-tokens": "1.200s",
    }
    assert _rates().headers() == {}


def test_what_is_overdrawn_shows_as_nothing_left(clock: Clock) -> None:
    rates = _rates(tokens=60)
    assert rates.tokens is not None
    rates.tokens.take(120, clock.now_s)
    assert rates.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert rates.headers()["x-ratelimit-reset-tokens"] == "120.000s"
