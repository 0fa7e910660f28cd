"""The names of prefix blocks are a contract: these vectors may never change."""

from __future__ import annotations

from penstock_proto.prefix_hash import block_hash, chain_hashes, root_hash


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
