"""Names of blocks of token ids, by which equal prefixes are found again.

They are part of the contract: shards file KV blocks under these hashes, and routers may predict
them. A hash covers the block and everything before it. All ids are little-endian unsigned 32-bit
integers.

Ids only say that there is an image. So the hash of each block that an image touches also covers
the image's digest and where it begins.

What shards tell of their caches is told in pieces, of several blocks each: a piece is named by the
hash at its end, and so stands for itself and for all before it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

DIGEST_BYTES = 16
# A piece has so many tokens, or as many as fit in whole blocks; or one larger block.
PIECE_TOKENS = 128
_NAME_BYTES = 8


class Tier(IntEnum):
    """The places where a shard may have a piece, fastest first."""

    DEVICE = 1
    HOST = 2
    DISK = 3
    # Nowhere.
    GONE = 4


class PlacedImage(Protocol):
    """An image in a sequence: the digest of its pixels, and which tokens stand for it."""

    @property
    def digest(self) -> bytes: ...
    @property
    def offset(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


def root_hash(weights_hash: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """The parent of a sequence's first block: blocks are shared within equal roots only."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"penstock-root")
    for part in (weights_hash, cache_salt, adapter):
        data = part.encode()
        # The length first, so that no two triples run together into the same bytes.
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int], marks: bytes = b"") -> bytes:
    """The hash of one full block that follows `parent`; `marks` are `image_marks` of it. Raises
    struct.error for what is no id.
    """
    return _chained(parent, struct.pack(f"<{len(token_ids)}I", *token_ids), marks)


def image_marks(images: Sequence[PlacedImage], start: int, end: int) -> bytes:
    """Name the images that touch the tokens [start, end): digest and distance of each."""
    return b"".join(
        image.digest + struct.pack("<q", image.offset - start)
        for image in images
        if image.offset < end and image.offset + image.num_tokens > start
    )


def _chained(parent: bytes, packed: bytes, marks: bytes) -> bytes:
    data = parent + packed + marks
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=b"penstock-block").digest()


def chain_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[PlacedImage] = ()
) -> list[bytes]:
    """The hashes of all full blocks of a sequence. Raises struct.error for what is no id."""
    hashes = []
    parent, block_bytes = root, 4 * block_size
    # Packed at once, which takes half the time.
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        first = start // 4
        marks = image_marks(images, first, first + block_size) if images else b""
        parent = _chained(parent, packed[start : start + block_bytes], marks)
        hashes.append(parent)
    return hashes


def piece_blocks(block_size: int) -> int:
    """Return the number of blocks in a piece."""
    return max(1, PIECE_TOKENS // block_size)


def piece_name(digest: bytes) -> int:
    """The name of the piece at whose end the chained hash is `digest`: 64 bits of it."""
    return int.from_bytes(digest[:_NAME_BYTES], "little")


def piece_names(
    root: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[PlacedImage] = ()
) -> list[int]:
    """The names of all full pieces of a sequence."""
    each = piece_blocks(block_size)
    num_tokens = len(token_ids) // (each * block_size) * each * block_size
    hashes = chain_hashes(root, token_ids[:num_tokens], block_size, images)
    return [piece_name(digest) for digest in hashes[each - 1 :: each]]
