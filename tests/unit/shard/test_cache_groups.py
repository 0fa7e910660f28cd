"""Layers that see less than all keys: what is kept for them, given back, and found again."""

from __future__ import annotations

import dataclasses

import pytest
from support.budget import budget, seeded
from support.engines import CACHE_GROUPS, make_engine, make_request, make_sequence, runner_info

from penstock_proto.prefix_hash import block_hash, root_hash
from penstock_shard.ipc.runner_info import CacheGroup, blocks_each, pools_for
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.sequence import Sequence

WINDOW = CacheGroup(window=64)
CHUNK_TOKENS = 32


def manager(num_blocks: int, *groups: CacheGroup) -> BlockManager:
    pools = pools_for(num_blocks, groups)
    return BlockManager(pools, 16, groups=groups, max_chunk_tokens=CHUNK_TOKENS)


def compute(blocks: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    """Compute the sequence up to `num_tokens`, chunk by chunk, as the scheduler does."""
    while sequence.num_computed < num_tokens:
        start = sequence.num_computed
        blocks.slide(sequence, start)
        assert blocks.grow(sequence, num_tokens)
        sequence.num_computed = min(num_tokens, start + CHUNK_TOKENS)
        blocks.cache_full_blocks((sequence,))
        blocks.check_integrity()


def use_up(blocks: BlockManager, num_blocks: int) -> None:
    """Overwrite so many of the free blocks, those that were freed first."""
    filler = make_sequence("filler", range(7000, 7000 + 16 * num_blocks))
    assert blocks.grow(filler, filler.num_tokens)
    blocks.forget(filler)


def test_a_long_context_holds_a_window_a_chunk_and_a_block_of_layers_with_a_window() -> None:
    group, chunk = CacheGroup(window=1024), 512
    blocks = BlockManager([4096], 16, groups=(group,), max_chunk_tokens=chunk)
    sequence = make_sequence(prompt=range(32_000))
    most = 0
    while sequence.num_computed < sequence.num_tokens:
        blocks.slide(sequence, sequence.num_computed)
        assert blocks.grow(sequence, sequence.num_tokens)
        most = max(most, len(blocks.blocks_of(sequence)))
        sequence.num_computed = min(sequence.num_tokens, sequence.num_computed + chunk)
        blocks.cache_full_blocks((sequence,))
    assert most * 16 <= 1024 + chunk + 16
    # And a chunk less while it decodes.
    for position in range(32_000, 33_000):
        blocks.slide(sequence, position)
        assert blocks.grow(sequence, position + 1)
    assert len(blocks.blocks_of(sequence)) * 16 <= 1024 + 16


def test_an_admitted_prompt_never_lacks_blocks_where_only_it_has_a_window() -> None:
    blocks = manager(7, WINDOW)
    sequence = make_sequence(prompt=range(640))
    assert blocks.grow(sequence, 640)
    assert blocks.num_free == 0
    compute(blocks, sequence, 640)


def test_a_prefix_is_found_where_its_last_blocks_are_though_its_first_are_gone() -> None:
    blocks = manager(12, WINDOW)
    first = make_sequence("first", range(160))
    compute(blocks, first, 160)
    blocks.forget(first)
    # Two that were never used, and the first four of the prompt.
    use_up(blocks, 6)
    again = make_sequence("again", range(200))
    assert blocks.acquire_prefix(again) == 160
    assert len(blocks.blocks_of(again)) == 4
    compute(blocks, again, 200)


def test_a_prefix_ends_where_every_group_has_what_the_next_token_sees() -> None:
    blocks = manager(40, WINDOW, CacheGroup(pool=1))
    first = make_sequence("first", range(321))
    compute(blocks, first, 321)
    blocks.forget(first)
    pool = blocks._pools[0]
    # Of the layers with a window all but the blocks of tokens 96 to 160 are gone.
    for block_id, (prefix, _, _) in list(pool.cached.items()):
        if prefix.token_ids[-1] not in range(96, 160):
            del pool.cached[block_id]
            prefix.block_ids[0] = -1
    assert blocks.acquire_prefix(make_sequence("again", range(400))) == 160


def test_a_block_that_others_see_too_stays_theirs() -> None:
    blocks = manager(30, WINDOW)
    first = make_sequence("first", range(80))
    compute(blocks, first, 80)
    second = make_sequence("second", range(400))
    second.num_computed = blocks.acquire_prefix(second)
    shared = set(blocks.blocks_of(second))
    compute(blocks, second, 400)
    assert shared <= set(blocks.blocks_of(first))
    assert not shared & set(blocks.blocks_of(second))
    blocks.check_integrity()


def test_layers_with_chunks_begin_anew_at_each() -> None:
    blocks = manager(20, CacheGroup(chunk=64))
    sequence = make_sequence(prompt=range(200))
    compute(blocks, sequence, 192)
    blocks.slide(sequence, 192)
    assert list(blocks.blocks_of(sequence)) == []
    blocks.forget(sequence)
    # At the start of a chunk nothing is seen, so nothing is needed, but the names of the tokens.
    again = make_sequence("again", range(193))
    assert blocks.acquire_prefix(again) == 192
    assert list(blocks.blocks_of(again)) == []


def test_names_of_prefixes_are_forgotten_with_the_last_block_that_needs_them() -> None:
    blocks = manager(8, WINDOW)
    for number in range(20):
        sequence = make_sequence(str(number), range(100 * number, 100 * number + 300))
        compute(blocks, sequence, 300)
        blocks.forget(sequence)
    # One alone has no more than seven at once.
    for number in range(2):
        assert blocks.grow(
            make_sequence(f"filler {number}", range(7000, 7096)), 16 * (7, 1)[number]
        )
    assert blocks.num_free == 0
    assert len(blocks.prefixes._tree) == 0


def test_groups_of_one_pool_never_have_the_same_block() -> None:
    blocks = manager(10, WINDOW, CacheGroup(), CacheGroup())
    first, second = make_sequence("first", range(80)), make_sequence("second", range(100, 180))
    for sequence in (first, second):
        compute(blocks, sequence, 80)
    held = [
        block_id
        for sequence in (first, second)
        for group in range(3)
        for block_id in blocks.blocks_of(sequence, group)
    ]
    assert len(held) == len(set(held)) == 30


def test_what_is_free_is_told_of_the_scarcest_pool() -> None:
    blocks = BlockManager(
        [12, 40], 16, groups=(WINDOW, CacheGroup(pool=1)), max_chunk_tokens=CHUNK_TOKENS
    )
    assert (blocks.num_blocks, blocks.num_free) == (12, 12)
    sequence = make_sequence(prompt=range(320))
    assert blocks.grow(sequence, 320)
    # 7 of 12 blocks for the window, 20 of 40 for the others.
    assert (blocks.num_free, blocks.num_referenced) == (5, 7)
    assert blocks.shortage(make_sequence("other", range(320)), 320) == (0, 2)


def test_a_runners_blocks_are_managed_as_it_says() -> None:
    info = dataclasses.replace(
        runner_info(num_blocks=9, cache_groups=(WINDOW, CacheGroup(pool=1))), weights_hash="other"
    )
    blocks = BlockManager.of(info, CHUNK_TOKENS)
    assert (blocks.block_size, blocks.num_blocks, blocks.free_in(1)) == (16, 9, 9)
    first = make_sequence("first", range(40))
    compute(blocks, first, 40)
    assert len(blocks.blocks_of(first, 1)) == 3
    assert blocks._tables[first].hashes[0] == block_hash(root_hash("other", "", ""), range(16))
    assert blocks.acquire_prefix(make_sequence("again", range(40))) == 32
    long, alone = make_sequence("long", range(144)), BlockManager.of(info, CHUNK_TOKENS)
    assert alone.grow(long, 144)
    # 64 and 32 tokens, and a block more.
    assert len(alone.blocks_of(long)) == 7
    forgetful = BlockManager.of(info, CHUNK_TOKENS, enable_prefix_caching=False)
    compute(forgetful, make_sequence("first", range(40)), 40)
    assert forgetful.acquire_prefix(make_sequence("again", range(40))) == 0


def test_a_sequence_has_blocks_for_so_many_tokens() -> None:
    blocks = manager(20, WINDOW, CacheGroup(pool=1))
    sequence = make_sequence(prompt=range(400))
    assert blocks.num_tokens_held(sequence) == 0
    assert blocks.grow(sequence, 300)
    # Of the window 7 blocks, of the others 19.
    assert blocks.num_tokens_held(sequence) == 7 * 16
    blocks.slide(sequence, 128)
    assert blocks.grow(sequence, 300)
    assert blocks.num_tokens_held(sequence) == (4 + 7) * 16


def test_what_others_hold_may_suffice_in_every_pool_or_not() -> None:
    groups = (WINDOW, CacheGroup(pool=1))
    blocks = BlockManager([8, 16], 16, groups=groups, max_chunk_tokens=CHUNK_TOKENS)
    first, second = make_sequence("first", range(100)), make_sequence("second", range(48))
    for sequence in (first, second):
        compute(blocks, sequence, sequence.num_tokens)
        blocks.slide(sequence, sequence.num_tokens)
    # Of the window the first has 5 blocks and the second 3, of the others 7 and 3.
    assert (blocks.free_in(0), blocks.free_in(1)) == (0, 6)
    for num_tokens, others, suffices in (
        (1, (), False),
        (48, (second,), True),
        (49, (second,), False),
        (80, (first,), True),
        (81, (first,), False),
        (200, (first,), False),
        (200, (first, second), True),
        (256, (first, second), True),
        (257, (first, second), False),
    ):
        wanted = make_sequence("wanted", range(num_tokens))
        assert blocks.suffices(wanted, others) is suffices, (num_tokens, others)


def test_a_name_is_kept_while_one_of_its_sequences_goes_on() -> None:
    blocks = manager(12, CacheGroup())
    start = range(32)
    first, second = make_sequence("first", start), make_sequence("second", range(80))
    # Both compute the same: the blocks of the first are the cached ones.
    for sequence in (first, second):
        compute(blocks, sequence, 32)
    sharing = [make_sequence(name, range(33)) for name in ("third", "fourth")]
    for sequence in sharing:
        assert blocks.acquire_prefix(sequence) == 32
        blocks.check_integrity()
    for sequence in (first, *sharing):
        blocks.forget(sequence)
        blocks.check_integrity()
    use_up(blocks, blocks.num_free)
    blocks.check_integrity()
    compute(blocks, second, 80)
    blocks.forget(second)
    use_up(blocks, blocks.num_blocks)
    assert len(blocks.prefixes._tree) == 0


def test_a_block_under_a_wrong_name_and_a_name_of_nothing_are_noticed() -> None:
    blocks = manager(8, CacheGroup())
    sequence = make_sequence(prompt=range(40))
    compute(blocks, sequence, 40)
    cached = blocks._pools[0].cached
    (block_id, entry), *_ = cached.items()
    entry.prefix.block_ids[0] = block_id + 1
    with pytest.raises(AssertionError, match="under prefixes that have others"):
        blocks.check_integrity()
    entry.prefix.block_ids[0] = block_id
    ended = blocks._tables[sequence].prefix
    assert ended is not None
    for prefix in (ended, entry.prefix):
        prefix.num_users -= 1
        with pytest.raises(AssertionError, match="1 users, 0 kept"):
            blocks.check_integrity()
        prefix.num_users += 1
    blocks.check_integrity()
    blocks.prefixes._tree.add(None, b"nobody's")
    with pytest.raises(AssertionError, match="is kept for nothing"):
        blocks.check_integrity()


@pytest.mark.parametrize("groups", CACHE_GROUPS)
def test_pools_are_as_many_blocks_as_their_groups_have(groups: tuple[CacheGroup, ...]) -> None:
    pools = pools_for(7, groups)
    assert sum(pools) == 7 * sum(not group.has_state for group in groups)
    assert blocks_each(pools, groups) == 7
    assert blocks_each([size - 1 for size in pools], groups) == 6


def test_no_pool_starves_another_under_random_traffic() -> None:
    rng = seeded("pools")
    for _ in range(budget(6, 200)):
        groups = rng.choice(CACHE_GROUPS)
        under_test = make_engine(
            num_blocks=rng.randint(10, 16),
            max_model_len=160,
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.choice((16, 64)),
            cache_groups=groups,
        )
        names = [str(number) for number in range(30)]
        for name in names:
            start = rng.choice((0, 0, 500))
            under_test.engine.submit(
                make_request(name, range(start, start + rng.randint(1, 120)), max_tokens=30)
            )
            if rng.random() < 0.4:
                under_test.step()
        under_test.run()
        assert all(len(under_test.endings(name)) == 1 for name in names)
        blocks = under_test.blocks
        assert [pool.num_free for pool in blocks._pools] == [p.num_blocks for p in blocks._pools]
        blocks.check_integrity()
