"""The order in which requests are served."""

from __future__ import annotations

from support.engines import make_request

from penstock_shard.request import Objective, Request
from penstock_shard.urgency import urgency


def _request(name: str, arrival: int, **objective: object) -> Request:
    request = make_request(name, max_tokens=10)
    request.arrival = arrival
    request.arrived_s = 100.0 + arrival
    if objective:
        request.objective = Objective(**objective)  # type: ignore[arg-type]
    return request


def _order(requests: list[Request], now_s: float = 105.0, aging_s: float = 30.0) -> list[str]:
    ordered = sorted(requests, key=lambda request: urgency(request, now_s, aging_s, 0.1))
    return [request.request_id for request in ordered]


def test_without_wishes_arrival_decides() -> None:
    assert _order([_request("b", 1), _request("a", 0), _request("c", 2)]) == ["a", "b", "c"]


def test_lower_classes_go_first_whatever_the_slack() -> None:
    hurried = _request("hurried", 0, priority=1, time_to_first_token_s=0.1)
    assert _order([hurried, _request("first class", 3, priority=-1), _request("plain", 2)]) == [
        "first class",
        "plain",
        "hurried",
    ]


def test_the_least_slack_goes_first_inside_a_class() -> None:
    requests = [
        _request("plain", 0),
        _request("soon", 2, time_to_first_token_s=1.0),
        _request("sooner", 1, time_to_first_token_s=0.5),
        _request("sensitive", 1, latency_sensitive=True),
    ]
    assert _order(requests) == ["sooner", "sensitive", "soon", "plain"]


def test_a_deadline_leaves_less_slack_to_whoever_has_more_to_generate() -> None:
    short, long = _request("short", 0, deadline_s=20.0), _request("long", 0, deadline_s=20.0)
    long.max_tokens = 100
    assert _order([short, long]) == ["long", "short"]


def test_the_next_token_is_due_after_the_last_one() -> None:
    slow = _request("slow", 0, seconds_between_tokens=0.5)
    fast = _request("fast", 1, seconds_between_tokens=0.1)
    slow.last_token_s, fast.last_token_s = 104.7, 104.9
    assert _order([slow, fast]) == ["fast", "slow"]
    slow.last_token_s = 104.4
    assert _order([slow, fast]) == ["slow", "fast"]


def test_whoever_has_waited_for_long_goes_before_every_class() -> None:
    old = _request("old", 0, priority=5)
    fresh = _request("fresh", 6, priority=-5, time_to_first_token_s=0.1)
    assert _order([old, fresh], now_s=107.0, aging_s=8.0) == ["fresh", "old"]
    assert _order([old, fresh], now_s=108.0, aging_s=8.0) == ["old", "fresh"]


def test_whoever_gets_tokens_does_not_age() -> None:
    served, fresh = _request("served", 0), _request("fresh", 50, priority=-1)
    served.last_token_s = 149.0
    assert _order([served, fresh], now_s=150.0, aging_s=30.0) == ["fresh", "served"]


def test_a_deadline_that_max_tokens_cannot_meet_moves_nobody_forward() -> None:
    generous = _request("generous", 3, deadline_s=3600.0)
    generous.max_tokens = 131_072
    assert _order([generous, _request("plain", 0)]) == ["plain", "generous"]
