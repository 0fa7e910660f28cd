"""Names of a sequence's blocks: hashes of all that keys and values depend on."""

from __future__ import annotations

from penstock_proto.prefix_hash import block_hash, image_marks, root_hash
from penstock_shard.sequence import Sequence


def root_of(sequence: Sequence, weights_hash: str) -> bytes:
    """Return the hash with which the sequence's chain of hashes begins."""
    request = sequence.request
    return root_hash(weights_hash, request.cache_salt, request.adapter_hash)


def block_tokens(sequence: Sequence, index: int, block_size: int) -> tuple[int, ...]:
    return tuple(sequence.token_ids[index * block_size : (index + 1) * block_size])


def extend_hashes(
    hashes: list[bytes], sequence: Sequence, count: int, block_size: int, weights_hash: str
) -> None:
    """Append to `hashes` until each of the sequence's first `count` blocks has a hash."""
    images = sequence.request.images
    for index in range(len(hashes), count):
        parent = hashes[index - 1] if index else root_of(sequence, weights_hash)
        start = index * block_size
        marks = image_marks(images, start, start + block_size) if images else b""
        hashes.append(block_hash(parent, block_tokens(sequence, index, block_size), marks))
