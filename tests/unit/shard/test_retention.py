"""Blocks that are retained for requests that have ended: reused last, in a share, until a time."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
from support.budget import budget, seeded
from support.engines import make_sequence

from penstock_proto.engine_request import EngineRequest
from penstock_shard.engine import next_turns
from penstock_shard.engine.block_moves import BlockMoves
from penstock_shard.engine.next_turns import NextTurns
from penstock_shard.ipc.messages import Retention
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_cache.prefix_tree import Prefix
from penstock_shard.sequence import Sequence

BLOCK = 4


def manager(num_blocks: int = 16, share: float = 0.5) -> BlockManager:
    return BlockManager([num_blocks], BLOCK, retained_share=share)


def run(blocks: BlockManager, name: str, prompt: range | list[int]) -> int:
    """Compute a sequence to its end. Returns how many of its tokens were found cached."""
    sequence = make_sequence(name, prompt)
    found = blocks.acquire_prefix(sequence)
    assert blocks.grow(sequence, sequence.num_tokens)
    sequence.num_computed = sequence.num_tokens
    blocks.cache_full_blocks([sequence])
    blocks.forget(sequence)
    return found


def retain(blocks: BlockManager, name: str, until_s: float, priority: int = 50) -> None:
    """Retain the blocks of an ended request, as a hint does."""
    ended = blocks.retention.ended(name)
    if ended is not None:
        blocks.retain(ended.prefix, until_s, priority)


def fill(blocks: BlockManager, turn: int = 0) -> None:
    """Use all blocks once, for other requests one after another."""
    for start in range(0, blocks.num_blocks, 2):
        begin = 10_000 * (turn + 1) + 100 * start
        run(blocks, f"other-{turn}-{start}", range(begin, begin + 2 * BLOCK))


def test_what_is_retained_outlives_others_and_is_let_go_in_time() -> None:
    blocks = manager()
    run(blocks, "talk", range(17))
    retain(blocks, "talk", 10.0)
    assert blocks.retention.num_blocks == 4
    fill(blocks)
    blocks.retention.let_go(9.9)
    fill(blocks, 1)
    assert run(blocks, "next", range(17)) == 16
    blocks.retention.let_go(10.0)
    assert blocks.retention.num_blocks == 0
    fill(blocks, 2)
    assert run(blocks, "late", range(17)) == 0
    assert blocks.retention.taken_total == 0
    blocks.check_integrity()


def test_without_a_hint_or_a_share_nothing_is_retained() -> None:
    for blocks in (manager(), manager(share=0.0)):
        run(blocks, "talk", range(17))
        if blocks.retention._most == [0]:
            retain(blocks, "talk", 10.0)
        assert blocks.retention.num_blocks == 0
        fill(blocks)
        assert run(blocks, "next", range(17)) == 0


def test_hints_of_unknown_requests_are_none() -> None:
    blocks = manager()
    retain(blocks, "nobody", 10.0)
    run(blocks, "short", range(BLOCK - 1))
    retain(blocks, "short", 10.0)
    assert blocks.retention.num_blocks == 0


def test_running_requests_get_retained_blocks_before_they_go_without() -> None:
    blocks = manager()
    run(blocks, "talk", range(33))
    retain(blocks, "talk", 10.0)
    assert blocks.retention.num_blocks == 8
    large = make_sequence("large", range(1000, 1000 + 15 * BLOCK))
    assert blocks.grow(large, large.num_tokens)
    assert blocks.retention.taken_total == 7
    # The last were taken first: the start of the prefix is there.
    assert blocks.retention.num_blocks == 1
    blocks.forget(large)
    assert run(blocks, "next", range(33)) == BLOCK
    blocks.check_integrity()


def test_what_would_be_let_go_soonest_makes_room_within_the_share() -> None:
    blocks = manager(num_blocks=16, share=0.5)
    for name, start, until_s in (("a", 0, 30.0), ("b", 1000, 10.0), ("c", 2000, 20.0)):
        run(blocks, name, range(start, start + 4 * BLOCK + 1))
        retain(blocks, name, until_s)
    assert blocks.retention.num_blocks == 8
    fill(blocks)
    found = [run(blocks, f"{start} again", range(start, start + 17)) for start in (0, 1000, 2000)]
    assert found == [16, 0, 16]
    # What is retained for longer stays, and of the new one there is nothing.
    run(blocks, "d", range(3000, 3017))
    retain(blocks, "d", 5.0)
    assert blocks.retention.num_blocks == 8
    fill(blocks, 1)
    assert run(blocks, "d again", range(3000, 3017)) == 0


def test_within_the_share_what_has_less_priority_makes_room_however_long_it_is_retained() -> None:
    blocks = manager(num_blocks=16, share=0.5)
    for name, start, until_s, priority in (
        *(("a", 0, 10.0, 60), ("b", 1000, 30.0, 50)),
        # The second makes room for this one, and this one for none of the first.
        *(("c", 2000, 20.0, 60), ("d", 3000, 90.0, 50)),
    ):
        run(blocks, name, range(start, start + 4 * BLOCK + 1))
        retain(blocks, name, until_s, priority)
    assert blocks.retention.num_blocks == 8
    fill(blocks)
    starts = (0, 1000, 2000, 3000)
    found = [run(blocks, f"{start} again", range(start, start + 17)) for start in starts]
    assert found == [16, 0, 16, 0]


def test_a_hint_of_more_priority_does_not_shorten_one_of_less() -> None:
    blocks = manager(num_blocks=16, share=0.25)
    run(blocks, "a", range(4 * BLOCK + 1))
    retain(blocks, "a", 30.0, 50)
    retain(blocks, "a", 10.0, 80)
    blocks.retention.let_go(29.0)
    assert blocks.retention.num_blocks == 4
    run(blocks, "b", range(1000, 1000 + 4 * BLOCK + 1))
    retain(blocks, "b", 90.0, 70)
    fill(blocks)
    assert run(blocks, "a again", range(4 * BLOCK + 1)) == 16
    blocks.retention.let_go(30.0)
    assert blocks.retention.num_blocks == 0


def test_what_has_ended_leaves_the_queues_though_nothing_needs_room() -> None:
    blocks = manager(num_blocks=16, share=0.5)
    for number in range(2000):
        run(blocks, f"r{number}", range(100 * number, 100 * number + BLOCK + 1))
        retain(blocks, f"r{number}", float(number))
        blocks.retention.let_go(number - 3.0)
    assert len(blocks.retention._retained) <= 4
    assert max(len(blocks.retention._ranked), len(blocks.retention._due)) <= 80


def test_of_a_prefix_longer_than_the_share_its_start_is_retained() -> None:
    blocks = manager(num_blocks=16, share=0.25)
    run(blocks, "long", range(41))
    retain(blocks, "long", 10.0)
    assert blocks.retention.num_blocks == 4
    fill(blocks)
    assert run(blocks, "next", range(41)) == 16


def test_a_shared_start_is_retained_as_long_as_any_needs_it() -> None:
    blocks = manager(num_blocks=32)
    system = list(range(9))
    for name, until_s in (("a", 10.0), ("b", 20.0)):
        run(blocks, name, [*system[:8], *range(ord(name) * 100, ord(name) * 100 + 9)])
        retain(blocks, name, until_s)
    assert blocks.retention.num_blocks == 6
    blocks.retention.let_go(10.0)
    assert blocks.retention.num_blocks == 4
    # A later hint for the same request lasts longer, an earlier one does not shorten it.
    retain(blocks, "b", 30.0)
    retain(blocks, "b", 25.0)
    blocks.retention.let_go(29.0)
    assert blocks.retention.num_blocks == 4
    fill(blocks)
    assert run(blocks, "a again", [*system[:8], *range(9700, 9709)]) == 8
    assert run(blocks, "b again", [*system[:8], *range(9800, 9809)]) == 16
    blocks.retention.let_go(30.0)
    assert blocks.retention.num_blocks == 0


def test_retained_blocks_get_copies_in_host_memory() -> None:
    blocks = BlockManager([16], BLOCK, host_slots=[16], retained_share=0.5)
    run(blocks, "talk", range(17))
    assert not blocks.prefixes.has_wishes
    retain(blocks, "talk", 10.0)
    saves = blocks.prefixes.take_saves(16, blocks.prefixes.num_insertions)
    assert len(saves) == 4
    for save in saves:
        blocks.prefixes.leave(save.prefix)


def check_retained(blocks: BlockManager) -> None:
    """Check that prefixes count what retains them, and that all retained blocks are theirs."""
    retention = blocks.retention
    counts: Counter[Prefix] = Counter()
    for entry in retention._retained.values():
        for prefix in entry.held.chain():
            counts[prefix] += 1
            if counts[prefix] > 1:
                break
    for prefix, count in counts.items():
        assert prefix.num_retained == count
    held = {place for prefix in counts for place in retention._places(prefix)}
    for pool in blocks._pools:
        assert {(pool, block) for block in pool._retained} <= held


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "second", [None, CacheGroup(window=8, pool=1), CacheGroup(has_state=True, pool=1)]
)
def test_records_agree_whatever_is_retained(share: float, second: CacheGroup | None) -> None:
    rng = seeded(f"retention {share} {second}")
    groups = (CacheGroup(),) if second is None else (CacheGroup(), second)
    pools, slots = ([24], [8]) if second is None else ([24, 8], [8, 8])
    blocks = BlockManager(pools, BLOCK, groups=groups, retained_share=share, host_slots=slots)
    live: list[Sequence] = []
    now_s = 0.0
    for number in range(budget(800, 20_000)):
        now_s += rng.random()
        blocks.retention.let_go(now_s)
        start = 100 * rng.randrange(6)
        sequence = make_sequence(f"r{number}", range(start, start + rng.randrange(1, 40)))
        blocks.acquire_prefix(sequence)
        if blocks.grow(sequence, sequence.num_tokens):
            sequence.num_computed = sequence.num_tokens
            blocks.cache_full_blocks([sequence])
            live.append(sequence)
        else:
            blocks.forget(sequence)
        if len(live) > rng.randrange(4):
            ended = live.pop(rng.randrange(len(live)))
            blocks.forget(ended)
            if rng.random() < 0.7:
                name = f"r{max(0, number - rng.randrange(3))}"
                until_s = now_s + rng.choice([0.0, 1.0, 5.0, 20.0])
                retain(blocks, name, until_s, rng.choice([0, 50, 50, 100]))
        for save in blocks.prefixes.take_saves(8, blocks.prefixes.num_insertions):
            blocks.prefixes.leave(save.prefix)
        assert blocks.retention.num_blocks <= sum(int(share * size) for size in pools)
        check_retained(blocks)
        blocks.check_integrity()
    blocks.retention.let_go(now_s + 100.0)
    assert blocks.retention.num_blocks == 0
    assert not blocks.retention._retained


@pytest.mark.parametrize(
    ("second", "size"),
    [(CacheGroup(window=8, pool=1), 16), (CacheGroup(has_state=True, pool=1), 4)],
)
def test_nothing_stays_retained_of_branching_prompts(second: CacheGroup, size: int) -> None:
    rng = seeded(f"branches {second}")
    for _ in range(budget(40, 2000)):
        groups = (CacheGroup(), second)
        share = rng.choice([0.25, 0.5, 1.0])
        blocks = BlockManager(
            [60, size],
            BLOCK,
            groups=groups,
            max_chunk_tokens=16,
            state_spacing=16,
            retained_share=share,
        )
        prompts: list[list[int]] = [[]]
        for number in range(100):
            start = rng.choice(prompts)
            prompt = start[: rng.randrange(len(start) + 1)]
            prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.randrange(1, 25)))][:80]
            if compute(blocks, f"r{number}", prompt):
                prompts.append(prompt)
                retain(
                    blocks,
                    f"r{number}",
                    number + rng.choice([0.0, 5.0, 20.0]),
                    rng.choice([0, 50, 100]),
                )
            blocks.retention.let_go(float(number))
            check_retained(blocks)
        blocks.retention.let_go(1000.0)
        assert blocks.retention.num_blocks == 0


def compute(blocks: BlockManager, name: str, prompt: list[int]) -> bool:
    """Compute a prompt in chunks; False if there are too few blocks."""
    sequence = make_sequence(name, prompt)
    sequence.num_computed = blocks.acquire_prefix(sequence)
    enough = True
    while enough and sequence.num_computed < len(prompt):
        blocks.slide(sequence, sequence.num_computed)
        chunk = blocks.chunk_limit(sequence, min(16, len(prompt) - sequence.num_computed))
        enough = blocks.grow(sequence, sequence.num_computed + chunk)
        if enough:
            sequence.num_computed += chunk
            blocks.cache_full_blocks([sequence])
            blocks.take_state_copies()
    blocks.forget(sequence)
    return enough


# ---- odd cases ---------------------------------------------------------------------------------


def test_what_made_room_and_is_hinted_again_for_less_is_let_go_in_time() -> None:
    blocks = manager(share=0.25)
    run(blocks, "a", range(17))
    retain(blocks, "a", 100.0)
    run(blocks, "b", range(1000, 1005))
    retain(blocks, "b", 110.0)
    retain(blocks, "a", 50.0)
    blocks.retention.let_go(10_000.0)
    assert blocks.retention.num_blocks == 0


def test_of_several_groups_all_blocks_of_a_prefix_are_retained_or_none() -> None:
    groups = (CacheGroup(), CacheGroup(pool=1))
    blocks = BlockManager([16, 8], BLOCK, groups=groups, retained_share=0.25)
    run(blocks, "a", range(17))
    retain(blocks, "a", 10.0)
    assert blocks.retention.num_blocks == 4
    blocks.retention.let_go(10.0)
    assert blocks.retention.num_blocks == 0


def test_of_a_group_with_a_window_only_what_the_next_turn_sees_is_retained() -> None:
    groups = (CacheGroup(), CacheGroup(window=8, pool=1))
    blocks = BlockManager([64, 32], BLOCK, groups=groups, retained_share=0.5)
    run(blocks, "a", range(65))
    retain(blocks, "a", 10.0)
    full, window = blocks._pools
    assert full.num_retained == 16
    assert 2 <= window.num_retained <= 3


def test_blocks_that_turn_out_wrong_are_retained_no_more_and_reused_first() -> None:
    blocks = manager()
    run(blocks, "a", range(17))
    retain(blocks, "a", 10.0)
    wrong = set(blocks._pools[0]._retained)
    blocks.prefixes.uncache_those(lambda prefix: True)
    assert blocks.retention.num_blocks == 0
    assert {blocks._pools[0].take()[0] for _ in range(4)} == wrong


def test_equal_times_do_not_let_go_of_each_other() -> None:
    blocks = manager(share=0.5)
    for name, start in (("a", 0), ("b", 100)):
        run(blocks, name, [*range(17), *range(start, start + 12)])
        retain(blocks, name, 10.0)
    assert blocks.retention.num_blocks == 8
    fill(blocks)
    assert run(blocks, "a again", [*range(17), *range(12), 5]) == 28


def test_what_is_remembered_of_ended_requests_has_no_more_prefixes_than_there_are_blocks() -> None:
    blocks = manager(num_blocks=16)
    for number in range(50):
        run(blocks, f"r{number}", range(1000 * number, 1000 * number + 17))
    assert blocks.retention._num_kept == 16
    assert len(blocks.retention._ended) == 4
    assert blocks.retention.ended("r49") is not None
    assert blocks.retention.ended("r45") is None
    # Hints for what is retained as long already are nothing new.
    for _ in range(100):
        retain(blocks, "r49", 10.0)
    assert len(blocks.retention._due) == 1


# ---- next turns --------------------------------------------------------------------------------


class Moves:
    """Copies are in host memory."""

    reads = None


def copied(num_blocks: int = 32) -> tuple[BlockManager, NextTurns]:
    """End a request with copies of its three blocks. Returns the blocks, and the next turns."""
    blocks = BlockManager([num_blocks], BLOCK, host_slots=[16], retained_share=0.5)
    run(blocks, "talk", range(13))
    retain(blocks, "talk", 1.0)
    for save in blocks.prefixes.take_saves(16, blocks.prefixes.num_insertions):
        slot = blocks.prefixes.take_slot(save.group)
        blocks.prefixes.keep(save.prefix, save.group, slot)
        blocks.prefixes.leave(save.prefix)
    return blocks, NextTurns(blocks, cast(BlockMoves, Moves()))


def lose_all(blocks: BlockManager) -> None:
    large = make_sequence("large", range(1000, 1000 + BLOCK * blocks.num_blocks))
    assert blocks.grow(large, large.num_tokens)
    blocks.forget(large)


def advance(turns: NextTurns, now_s: float, may_load: bool = True) -> list[EngineRequest]:
    found = list(turns.advance(now_s, may_load=may_load))
    while turns.has_work:
        found += turns.advance(now_s, may_load=may_load)
    return found


def test_what_the_device_lost_is_loaded_when_the_next_turn_is_likely_and_retained_again() -> None:
    blocks, turns = copied()
    turns.take([Retention("talk", 500.0, 5.0), Retention("nobody", 500.0, 1.0)], 0.0)
    assert advance(turns, 0.0) == []
    assert turns.due_at_s == 5.0
    lose_all(blocks)
    assert advance(turns, 4.9) == []
    assert advance(turns, 5.0, may_load=False) == []
    (request,) = advance(turns, 5.1)
    # Then there is nothing to do until it is let go.
    assert turns.due_at_s == 500.0
    sequence = Sequence.of(request, 0)
    assert list(sequence.token_ids) == [*range(12), 0]
    blocks.acquire_copies(sequence)
    assert len(blocks.loads_of(sequence)) == 3
    blocks.finish_loads(sequence)
    assert not turns.finish("talk")
    assert turns.finish(request.request_id)
    blocks.forget(sequence)
    assert blocks.retention.num_blocks == 3
    blocks.retention.let_go(500.0)
    assert blocks.retention.num_blocks == 0


def test_what_is_there_or_has_no_room_is_not_loaded() -> None:
    blocks, turns = copied()
    turns.take([Retention("talk", 500.0, 5.0)], 0.0)
    assert advance(turns, 6.0) == []
    turns.take([Retention("talk", 500.0, 5.0)], 0.0)
    advance(turns, 0.0)
    lose_all(blocks)
    # Nine free blocks: a quarter is less than three.
    large = make_sequence("large", range(1000, 1000 + BLOCK * 23))
    assert blocks.grow(large, large.num_tokens)
    assert advance(turns, 6.0) == []


def test_one_prefix_is_loaded_at_a_time_and_none_when_the_shard_ends() -> None:
    blocks, turns = copied(64)
    lose_all(blocks)
    turns.take([Retention("talk", 500.0, 1.0)] * 3, 0.0)
    assert len(advance(turns, 2.0)) == 1
    assert advance(turns, 2.0) == []
    assert turns.finish(turns._loading[0] if turns._loading else "")
    turns.close()
    assert advance(turns, 3.0) == []
    assert turns.due_at_s == 500.0
    advance(turns, 500.0)
    assert turns.due_at_s is None
    assert blocks.retention.num_blocks == 0


def test_hints_have_bounds_and_the_furthest_turn_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_turns, "_MOST_EXPECTED", 2)
    monkeypatch.setattr(next_turns, "_MOST_HINTS", 3)
    _, turns = copied()
    turns.take([Retention("talk", 500.0, each) for each in (900.0, 800.0, 1.0, 2.0)], 0.0)
    advance(turns, 0.0)
    assert sorted(at_s for at_s, *_ in turns._expected) == [1.0, 800.0]


def test_a_salt_names_what_is_loaded_ahead_and_adapters_are_not() -> None:
    blocks = BlockManager([8], BLOCK, host_slots=[16], retained_share=0.5)
    turns = NextTurns(blocks, cast(BlockMoves, Moves()))
    for sequence in (
        make_sequence("salted", range(9), cache_salt="sea"),
        make_sequence("adapted", range(9), adapter="a"),
    ):
        assert blocks.grow(sequence, sequence.num_tokens)
        sequence.num_computed = sequence.num_tokens
        blocks.cache_full_blocks([sequence])
        blocks.forget(sequence)
        turns.take([Retention(sequence.request.request_id, 1.0, 1.0)], 0.0)
    advance(turns, 0.0)
    ((_, _, ended),) = turns._expected
    assert (ended.cache_salt, ended.prefix.index) == ("sea", 1)
