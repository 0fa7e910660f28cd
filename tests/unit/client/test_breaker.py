"""The circuit breaker: when a shard that fails requests is asked again."""

from __future__ import annotations

from penstock_client.fleet.circuit_breaker import CircuitBreaker


def _open(now_s: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(5):
        assert breaker.allows(now_s)
        breaker.record_failure(now_s)
    return breaker


def test_five_failures_in_a_row_open_it_and_a_success_before_starts_anew() -> None:
    breaker = CircuitBreaker()
    for _ in range(4):
        breaker.record_failure(0.0)
    breaker.record_success()
    for _ in range(4):
        breaker.record_failure(0.0)
    assert breaker.allows(0.0)
    breaker.record_failure(0.0)
    assert not breaker.allows(0.4)
    assert breaker.allows(0.5)


def test_one_request_tries_it_each_time_and_each_time_is_twice_as_far_from_the_last() -> None:
    breaker = _open()
    now_s, periods = 0.5, []
    for _ in range(7):
        assert breaker.allows(now_s)
        breaker.record_sent(now_s)
        assert not breaker.allows(now_s)
        # It fails at once, as most do.
        breaker.record_failure(now_s + 0.01)
        sent_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.25
        periods.append(now_s - sent_s)
    assert periods == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_many_that_fail_together_are_one_piece_of_news() -> None:
    breaker = _open()
    for _ in range(1000):
        breaker.record_failure(0.1)
    assert breaker.allows(0.5)


def test_a_success_closes_it() -> None:
    breaker = _open()
    breaker.record_sent(0.5)
    breaker.record_success()
    assert breaker.allows(0.6)
