"""What the blocks of a sequence are called: hashes of all that their keys and values depend on."""

from __future__ import annotations

from penstock_proto.prefix_hash import block_hash, image_marks, root_hash
from penstock_shard.sequence import Sequence


def root_of(sequence: Sequence, weights_hash: str) -> bytes:
    """Where its chain begins."""
    request = sequence.request
    return root_hash(weights_hash, request.cache_salt, request.adapter_hash)


def block_tokens(sequence: Sequence, index: int, block_size: int) -> tuple[int, ...]:
    """The tokens of a full block."""
    return tuple(sequence.token_ids[index * block_size : (index + 1) * block_size])


def extend_hashes(
    hashes: list[bytes], sequence: Sequence, count: int, block_size: int, weights_hash: str
) -> None:
    """Have hashes of its first `count` blocks; those that are there are kept."""
    images = sequence.request.images
    for index in range(len(hashes), count):
        parent = hashes[index - 1] if index else root_of(sequence, weights_hash)
        start = index * block_size
        marks = image_marks(images, start, start + block_size) if images else b""
        hashes.append(block_hash(parent, block_tokens(sequence, index, block_size), marks))
