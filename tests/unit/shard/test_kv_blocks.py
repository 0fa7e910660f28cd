"""The block manager: what is given out, shared, found again and taken back."""

from __future__ import annotations

import sys
from collections import abc

import pytest
from support.budget import budget, seeded
from support.engines import make_sequence

from penstock_proto.prefix_hash import block_hash, chain_hashes, root_hash
from penstock_proto.types import PromptImage
from penstock_shard.kv_cache import block_names
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.sequence import Sequence


def _compute(blocks: BlockManager, sequence, num_tokens: int) -> None:
    assert blocks.grow(sequence, num_tokens)
    sequence.num_computed = num_tokens
    blocks.cache_full_blocks((sequence,))


def test_growing_gives_just_the_blocks_that_the_tokens_need() -> None:
    blocks = BlockManager([8], 16)
    sequence = make_sequence(prompt=range(40))
    assert blocks.grow(sequence, 33)
    assert len(blocks.blocks_of(sequence)) == 3
    assert blocks.grow(sequence, 48)
    assert len(blocks.blocks_of(sequence)) == 3
    assert blocks.num_free == 5


def test_growing_beyond_what_is_free_changes_nothing() -> None:
    blocks = BlockManager([2], 16)
    sequence = make_sequence(prompt=range(40))
    assert not blocks.grow(sequence, 33)
    assert not blocks.blocks_of(sequence)
    assert blocks.num_free == 2


def test_a_sequence_that_is_not_known_has_no_blocks() -> None:
    assert list(BlockManager([2], 16).blocks_of(make_sequence())) == []


def test_each_block_that_a_sequence_gets_is_told_once() -> None:
    blocks = BlockManager([8], 16)
    first, second = make_sequence("a", range(40)), make_sequence("b", range(40))
    assert blocks.take_new([first, second]) == [[(), ()]]
    _compute(blocks, first, 33)
    # It has enough.
    assert blocks.grow(second, 0)
    own = list(blocks.blocks_of(first))
    assert blocks.take_new([second, first]) == [[(), own]]
    assert blocks.take_new([second, first]) == [[(), ()]]
    assert blocks.acquire_prefix(second) == 32
    # Of a step without it nothing is told.
    assert blocks.take_new([first]) == [[()]]
    assert blocks.grow(second, 64)
    assert blocks.take_new([first, second]) == [[(), [*own[:2], *blocks.blocks_of(second)[2:]]]]
    assert blocks.grow(second, 65)
    assert blocks.grow(second, 81)
    assert blocks.take_new([first, second]) == [[(), blocks.blocks_of(second)[4:]]]


def test_blocks_that_were_taken_back_are_not_told() -> None:
    blocks = BlockManager([8], 16)
    stays, goes = make_sequence("a"), make_sequence("b")
    for sequence in (stays, goes):
        assert blocks.grow(sequence, 16)
    blocks.release(goes)
    assert blocks.take_new([stays, goes]) == [[blocks.blocks_of(stays), ()]]


def test_nothing_is_kept_of_a_sequence_that_is_forgotten() -> None:
    blocks = BlockManager([8], 16)
    sequence = make_sequence(prompt=range(40))
    references = sys.getrefcount(sequence)
    _compute(blocks, sequence, 40)
    blocks.forget(sequence)
    assert (blocks.num_referenced, list(blocks.blocks_of(sequence))) == (0, [])
    assert sys.getrefcount(sequence) == references
    blocks.check_integrity()


def test_a_sequence_that_never_had_blocks_may_be_forgotten() -> None:
    blocks = BlockManager([8], 16)
    blocks.forget(make_sequence())
    assert blocks.num_free == 8


def test_an_equal_prompt_finds_the_full_blocks_but_never_the_last_token() -> None:
    blocks = BlockManager([16], 16)
    first = make_sequence("a", range(48))
    _compute(blocks, first, 48)
    second = make_sequence("b", range(48))
    assert blocks.acquire_prefix(second) == 32
    assert blocks.blocks_of(second) == blocks.blocks_of(first)[:2]
    blocks.check_integrity()


def test_a_freed_prefix_is_found_until_its_memory_is_reused() -> None:
    blocks = BlockManager([4], 16)
    first = make_sequence("a", range(40))
    _compute(blocks, first, 40)
    blocks.release(first)
    again = make_sequence("b", range(40))
    assert blocks.acquire_prefix(again) == 32
    blocks.release(again)
    other = make_sequence("c", range(500, 564))
    _compute(blocks, other, 64)
    blocks.release(other)
    assert blocks.acquire_prefix(make_sequence("d", range(40))) == 0


def test_the_start_of_a_prefix_outlives_its_end() -> None:
    blocks = BlockManager([4], 16)
    first = make_sequence("a", range(64))
    _compute(blocks, first, 64)
    blocks.release(first)
    assert blocks.grow(make_sequence("b", range(500, 516)), 16)
    assert blocks.acquire_prefix(make_sequence("c", range(64))) == 48


def test_a_cache_salt_separates_equal_prompts() -> None:
    blocks = BlockManager([16], 16)
    _compute(blocks, make_sequence("a", range(40), cache_salt="one"), 40)
    assert blocks.acquire_prefix(make_sequence("b", range(40), cache_salt="two")) == 0
    assert blocks.acquire_prefix(make_sequence("c", range(40), cache_salt="one")) == 32


def test_a_prefix_is_not_found_after_a_different_start() -> None:
    blocks = BlockManager([16], 16)
    _compute(blocks, make_sequence("a", [*range(16), *range(100, 132)]), 48)
    assert blocks.acquire_prefix(make_sequence("b", [*range(50, 66), *range(100, 132)])) == 0


def test_a_forged_hash_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_names, "block_hash", lambda parent, ids, marks: b"same for all")
    blocks = BlockManager([16], 16)
    _compute(blocks, make_sequence("a", range(40)), 40)
    assert blocks.acquire_prefix(make_sequence("b", range(500, 540))) == 0


def test_what_follows_a_block_is_not_found_behind_a_forged_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, forged, child = range(16), range(100, 116), range(50, 66)

    def forge(parent: bytes, ids: abc.Sequence[int], marks: bytes) -> bytes:
        return block_hash(parent, honest if tuple(ids) == tuple(forged) else ids)

    monkeypatch.setattr(block_names, "block_hash", forge)
    blocks = BlockManager([8], 16)
    first = make_sequence("first", [*honest, 1])
    second = make_sequence("second", [*honest, *child, 1])
    # Both were computed at once: the second's own copy of the first block is not the cached one.
    for sequence in (first, second):
        _compute(blocks, sequence, sequence.num_tokens)
    blocks.release(first)
    # All that is free is used, and what was cached there goes.
    filler = make_sequence("filler", range(300, 300 + 16 * blocks.num_free))
    assert blocks.grow(filler, filler.num_tokens)
    blocks.release(filler)
    _compute(blocks, make_sequence("forged", [*forged, 1]), 17)
    assert blocks.acquire_prefix(make_sequence("victim", [*forged, *child, 1, 2])) == 16


def test_a_prefix_that_was_computed_twice_is_found_whole_again_after_one_copy_is_gone() -> None:
    blocks = BlockManager([20], 16)
    start, longer = [*range(48), 1], [*range(48), *range(100, 132), 2]
    first, second = make_sequence("first", start), make_sequence("second", longer)
    # Both were computed at once: the end of the second is cached behind the start of the first.
    for sequence in (first, second):
        _compute(blocks, sequence, sequence.num_tokens)
    blocks.release(first)
    filler = make_sequence("filler", range(300, 300 + 16 * blocks.num_free))
    assert blocks.grow(filler, filler.num_tokens)
    blocks.release(filler)
    third, fourth = make_sequence("third", [*longer, 3]), make_sequence("fourth", [*longer, 4])
    assert blocks.acquire_prefix(third) == 0
    _compute(blocks, third, third.num_tokens)
    assert blocks.acquire_prefix(fourth) == 80
    blocks.check_integrity()


def test_hashes_are_the_chain_that_routers_compute_too() -> None:
    blocks = BlockManager([16], 16, weights_hash="weights")
    sequence = make_sequence(prompt=range(70), cache_salt="salt", adapter_hash="adapter")
    for num_tokens in (16, 20, 64):
        _compute(blocks, sequence, num_tokens)
    root = root_hash("weights", "salt", "adapter")
    assert blocks._tables[sequence].hashes == chain_hashes(root, range(64), 16)


@pytest.mark.parametrize("num_tokens", [16, 17, 31, 32, 33, 47])
def test_a_prompt_of_any_length_finds_the_full_blocks_before_its_last_token(
    num_tokens: int,
) -> None:
    blocks = BlockManager([16], 16)
    first = make_sequence("a", range(64))
    for known in (16, 32, 48):
        _compute(blocks, first, known)
    second = make_sequence("b", range(64))
    del second.token_ids[num_tokens:]
    assert blocks.acquire_prefix(second) == (num_tokens - 1) // 16 * 16
    # It goes on, and what it computed is found in its turn.
    blocks.release(first)
    filler = make_sequence("filler", range(300, 300 + 16 * blocks.num_free))
    assert blocks.grow(filler, filler.num_tokens)
    blocks.release(filler)
    second.token_ids.extend(range(num_tokens, 64))
    _compute(blocks, second, 64)
    assert blocks.acquire_prefix(make_sequence("c", [*range(64), 1])) == 64


def test_a_block_is_found_as_soon_as_it_is_full() -> None:
    blocks = BlockManager([8], 16)
    _compute(blocks, make_sequence("a", range(16)), 16)
    assert blocks.acquire_prefix(make_sequence("b", range(17))) == 16


def test_what_follows_a_block_that_was_computed_twice_is_found() -> None:
    blocks = BlockManager([8], 16)
    _compute(blocks, make_sequence("a", range(16)), 16)
    _compute(blocks, make_sequence("b", range(32)), 32)
    assert blocks.acquire_prefix(make_sequence("c", range(33))) == 32


def test_a_request_whose_blocks_were_taken_begins_anew() -> None:
    blocks = BlockManager([8], 16)
    sequence = make_sequence("a", range(40))
    _compute(blocks, sequence, 40)
    blocks.release(sequence)
    assert not blocks.blocks_of(sequence)
    assert blocks.num_free == 8
    assert blocks.acquire_prefix(sequence) == 32


def test_what_was_cached_since_a_step_that_failed_is_found_no_more() -> None:
    blocks = BlockManager([8], 16)
    sequence = make_sequence("a", range(64))
    _compute(blocks, sequence, 16)
    before = blocks.num_insertions
    _compute(blocks, sequence, 48)
    assert (before, blocks.num_insertions) == (1, 3)
    blocks.prefixes.uncache_since(before)
    blocks.check_integrity()
    assert blocks.acquire_prefix(make_sequence("b", range(64))) == 16


def test_without_prefix_caching_nothing_is_ever_found() -> None:
    blocks = BlockManager([16], 16, enable_prefix_caching=False)
    _compute(blocks, make_sequence("a", range(40)), 40)
    assert blocks.acquire_prefix(make_sequence("b", range(40))) == 0


def test_a_lost_reference_is_noticed() -> None:
    blocks = BlockManager([4], 16)
    sequence = make_sequence(prompt=range(20))
    _compute(blocks, sequence, 20)
    blocks._tables[sequence].groups[0].ids.pop()
    with pytest.raises(AssertionError, match="counted"):
        blocks.check_integrity()


def test_random_traffic_keeps_the_accounts_exact() -> None:
    rng = seeded("kv blocks")
    for _ in range(budget(20, 400)):
        blocks = BlockManager([rng.randint(4, 40)], rng.choice((16, 32)))
        live: list[Sequence] = []
        for number in range(rng.randint(20, 120)):
            if live and rng.random() < 0.4:
                blocks.release(live.pop(rng.randrange(len(live))))
            else:
                start = rng.choice((0, 0, 7))
                sequence = make_sequence(str(number), range(start, start + rng.randint(1, 200)))
                sequence.num_computed = blocks.acquire_prefix(sequence)
                if blocks.grow(sequence, sequence.num_tokens):
                    sequence.num_computed = rng.randint(sequence.num_computed, sequence.num_tokens)
                    blocks.cache_full_blocks((sequence,))
                    live.append(sequence)
                else:
                    blocks.release(sequence)
            blocks.check_integrity()
        for sequence in live:
            blocks.release(sequence)
        assert blocks.num_referenced == 0


def _with_image(name: str, digest: bytes, offset: int = 20, num_tokens: int = 30) -> Sequence:
    image = PromptImage(digest.hex(), 8, 8, offset, num_tokens)
    return make_sequence(name, range(80), images=(image,))


def test_blocks_that_an_image_touches_are_found_for_the_same_image_in_the_same_place() -> None:
    blocks = BlockManager([16], 16)
    _compute(blocks, _with_image("first", b"a" * 32), 80)
    # The image stands for tokens 20 to 49: the first block has none of them.
    assert blocks.acquire_prefix(_with_image("same", b"a" * 32)) == 64
    assert blocks.acquire_prefix(_with_image("another", b"b" * 32)) == 16
    assert blocks.acquire_prefix(_with_image("elsewhere", b"a" * 32, offset=21)) == 16
    assert blocks.acquire_prefix(_with_image("before", b"a" * 32, offset=15)) == 0
    assert blocks.acquire_prefix(make_sequence("none", range(80))) == 16


def test_a_router_names_blocks_with_images_as_a_shard_does() -> None:
    blocks = BlockManager([16], 16, weights_hash="weights")
    sequence = _with_image("first", b"a" * 32)
    _compute(blocks, sequence, 80)
    root = root_hash("weights")
    names = chain_hashes(root, range(80), 16, sequence.request.images)
    assert [digest for digest, _ in blocks.names_of(sequence)] == names[:4]
    assert names[:1] == chain_hashes(root, range(16), 16)
