"""Waits between tries."""

from __future__ import annotations

from penstock_common.back_off import BackOff


def test_each_wait_is_twice_the_last_up_to_the_longest() -> None:
    back_off = BackOff(0.5, 3.0)
    waits = []
    for _ in range(5):
        waits.append(back_off.wait_s)
        back_off.lengthen()
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_success_the_first_wait_is_the_next() -> None:
    back_off = BackOff(0.5, 3.0)
    back_off.lengthen()
    back_off.lengthen()
    back_off.reset()
    assert back_off.wait_s == 0.5
    back_off.lengthen()
    assert back_off.wait_s == 1.0


def test_no_wait_stays_none() -> None:
    back_off = BackOff(0.0, 3.0)
    back_off.lengthen()
    assert back_off.wait_s == 0.0
