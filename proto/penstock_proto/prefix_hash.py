"""How a block of token ids is named, so that equal prefixes are found again.

Part of the contract: shards file KV blocks under these hashes, and routers may predict them. A
hash covers the block and everything before it. Little-endian unsigned 32-bit ids throughout.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

DIGEST_BYTES = 16


def root_hash(weights_hash: str, cache_salt: str = "", adapter: str = "") -> bytes:
    """The parent of a sequence's first block: blocks are shared within equal roots only."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"penstock-root")
    for part in (weights_hash, cache_salt, adapter):
        data = part.encode()
        # The length first, so that no two triples run together into the same bytes.
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block that follows `parent`."""
    digest = hashlib.blake2b(parent, digest_size=DIGEST_BYTES, person=b"penstock-block")
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    return digest.digest()


def chain_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of all full blocks of a sequence."""
    hashes = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
