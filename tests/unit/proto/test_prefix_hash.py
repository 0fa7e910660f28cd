"""The names of prefix blocks are a contract: these vectors may never change."""

from __future__ import annotations

import pytest

from penstock_proto.prefix_hash import (
    block_hash,
    chain_hashes,
    piece_blocks,
    piece_name,
    piece_names,
    root_hash,
)


def test_the_root_covers_weights_salt_and_adapter() -> None:
    assert root_hash("").hex() == "1e138c6c21ddcf1f13744ebacf61c277"
    assert root_hash("weights", "salt", "adapter").hex() == "06d67a2bd1bd4e428398090fa6f33cbd"
    assert root_hash("ab", "c") != root_hash("a", "bc")


def test_a_chain_names_every_full_block_and_only_those() -> None:
    root = root_hash("weights", "salt", "adapter")
    assert [digest.hex() for digest in chain_hashes(root, range(40), 16)] == [
        "1a3cdecc405311d24badb4af0715755f",
        "533a8f342db24363064fe154cd8bf47d",
    ]


def test_ids_up_to_32_bits_are_hashed() -> None:
    root = root_hash("weights", "salt", "adapter")
    assert block_hash(root, [2**32 - 1]).hex() == "07d0e799bbefdd68c05a7a90342a2149"


def test_a_chain_can_be_continued_block_by_block() -> None:
    root = root_hash("w")
    first, second = chain_hashes(root, range(32), 16)
    assert block_hash(first, range(16, 32)) == second
    assert chain_hashes(root, range(15), 16) == []


def test_a_piece_is_named_by_the_hash_at_its_end() -> None:
    root = root_hash("w")
    hashes = chain_hashes(root, range(400), 16)
    names = piece_names(root, range(400), 16)
    assert names == [piece_name(hashes[7]), piece_name(hashes[15]), piece_name(hashes[23])]
    assert [f"{name:016x}" for name in names[:1]] == [hashes[7][:8][::-1].hex()]


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 128), (16, 8), (48, 2), (128, 1), (256, 1)])
def test_a_piece_has_as_many_whole_blocks_as_fit(block_size: int, blocks: int) -> None:
    assert piece_blocks(block_size) == blocks
    assert len(piece_names(b"", range(1000), block_size)) == 1000 // (blocks * block_size)
