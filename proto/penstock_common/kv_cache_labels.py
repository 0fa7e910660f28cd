"""Labels of the metric of a KV cache's size, which routers and shards share."""

from __future__ import annotations

KV_CACHE_LABELS = ("block_size", "blocks", "tokens", "sequences", "dtype")
KV_CACHE_HELP = (
    "Always 1; the labels say how large the KV cache is: tokens of a block, blocks, tokens in all, "
    "sequences as long as the context (empty where not known)."
)


def kv_cache_labels(block_size: int, blocks: int, sequences: int, dtype: str) -> list[str]:
    """Return the values of `KV_CACHE_LABELS`; `sequences` is 0 if unknown."""
    known = str(sequences) if sequences else ""
    return [*map(str, (block_size, blocks, blocks * block_size)), known, dtype]
