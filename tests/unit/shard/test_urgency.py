"""The order in which requests are served."""

from __future__ import annotations

from support.engines import make_sequence

from penstock_proto.types import Objective
from penstock_shard.scheduler.urgency import urgency
from penstock_shard.sequence import Sequence


def _sequence(name: str, arrival: int, max_tokens: int = 10, **objective: object) -> Sequence:
    wish = Objective(**objective) if objective else None  # type: ignore[arg-type]
    sequence = make_sequence(name, max_tokens=max_tokens, objective=wish)
    sequence.arrival = arrival
    sequence.arrived_s = 100.0 + arrival
    return sequence


def _order(sequences: list[Sequence], now_s: float = 105.0, aging_s: float = 30.0) -> list[str]:
    ordered = sorted(sequences, key=lambda sequence: urgency(sequence, now_s, aging_s, 0.1))
    return [sequence.request.request_id for sequence in ordered]


def test_without_wishes_arrival_decides() -> None:
    assert _order([_sequence("b", 1), _sequence("a", 0), _sequence("c", 2)]) == ["a", "b", "c"]


def test_lower_classes_go_first_whatever_the_slack() -> None:
    hurried = _sequence("hurried", 0, priority=1, time_to_first_token_s=0.1)
    assert _order([hurried, _sequence("first class", 3, priority=-1), _sequence("plain", 2)]) == [
        "first class",
        "plain",
        "hurried",
    ]


def test_the_least_slack_goes_first_inside_a_class() -> None:
    sequences = [
        _sequence("plain", 0),
        _sequence("soon", 2, time_to_first_token_s=1.0),
        _sequence("sooner", 1, time_to_first_token_s=0.5),
        _sequence("sensitive", 1, latency_sensitive=True),
    ]
    assert _order(sequences) == ["sooner", "sensitive", "soon", "plain"]


def test_a_deadline_leaves_less_slack_to_whoever_has_more_to_generate() -> None:
    short, long = _sequence("short", 0, deadline_s=20.0), _sequence("long", 0, 100, deadline_s=20.0)
    assert _order([short, long]) == ["long", "short"]


def test_the_next_token_is_due_after_the_last_one() -> None:
    slow = _sequence("slow", 0, seconds_between_tokens=0.5)
    fast = _sequence("fast", 1, seconds_between_tokens=0.1)
    slow.last_token_s, fast.last_token_s = 104.7, 104.9
    assert _order([slow, fast]) == ["fast", "slow"]
    slow.last_token_s = 104.4
    assert _order([slow, fast]) == ["slow", "fast"]


def test_whoever_has_waited_for_long_goes_before_every_class() -> None:
    old = _sequence("old", 0, priority=5)
    fresh = _sequence("fresh", 6, priority=-5, time_to_first_token_s=0.1)
    assert _order([old, fresh], now_s=107.0, aging_s=8.0) == ["fresh", "old"]
    assert _order([old, fresh], now_s=108.0, aging_s=8.0) == ["old", "fresh"]


def test_whoever_gets_tokens_does_not_age() -> None:
    served, fresh = _sequence("served", 0), _sequence("fresh", 50, priority=-1)
    served.last_token_s = 149.0
    assert _order([served, fresh], now_s=150.0, aging_s=30.0) == ["fresh", "served"]


def test_a_deadline_that_max_tokens_cannot_meet_moves_nobody_forward() -> None:
    generous = _sequence("generous", 3, 131_072, deadline_s=3600.0)
    assert _order([generous, _sequence("plain", 0)]) == ["plain", "generous"]
