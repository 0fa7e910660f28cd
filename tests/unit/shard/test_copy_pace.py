"""The number of blocks that a turn copies."""

from __future__ import annotations

from penstock_shard.engine.copy_pace import CopyPace


def test_a_turn_copies_what_fits_into_its_time() -> None:
    pace = CopyPace()
    assert pace.blocks_in(0.004) == 8
    pace.learn([1.0, 1.001, 1.002, 1.003])
    assert pace.blocks_in(0.0045) == 4
    assert pace.blocks_in(0.0) == 1


def test_copies_that_become_slower_are_fewer() -> None:
    pace = CopyPace()
    pace.learn([0.0, 0.001])
    for _ in range(20):
        pace.learn([0.0, 0.002])
    assert pace.blocks_in(0.0101) == 5


def test_a_single_copy_teaches_nothing_as_it_has_waited_for_a_step() -> None:
    pace = CopyPace()
    pace.learn([5.0])
    pace.learn([])
    assert pace.blocks_in(0.004) == 8
