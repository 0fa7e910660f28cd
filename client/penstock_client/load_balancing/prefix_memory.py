"""What the prefix caches of shards hold, as far as a sender can tell. Decides nothing.

A prompt is named in pieces of 128 tokens by chained hashes: a piece stands for itself and for all
before it. They need not be the shard's own block hashes, as they are compared with each other only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_client.load_balancing.base import Candidate
from penstock_client.types import GenerationRequest
from penstock_proto.prefix_hash import chain_hashes, root_hash

PIECE_TOKENS = 128
# Hashing runs on the event loop and takes half a millisecond for these. Prompts that agree so far
# count as equal.
MAX_HASHED_TOKENS = 16_384

# Pieces remembered for each shard: a million tokens, in some 1.1 MB of memory.
_MAX_PIECES = 8192
_MAX_SHARDS = 1024
# At most this many pieces are forgotten at once, which takes less than a millisecond.
_MAX_FORGOTTEN = 1024
# The most requests that are remembered while they have no output yet.
_MAX_UNANSWERED = 4096


def prompt_pieces(request: GenerationRequest) -> list[bytes]:
    """Hashes of the prompt's pieces that a shard could find cached: never that with its last token.

    Empty if the prompt's log-probabilities are asked for: those are computed, whatever is cached.
    """
    if request.prompt_logprobs is not None:
        return []
    findable = min(MAX_HASHED_TOKENS, len(request.prompt_token_ids) - 1)
    if findable < PIECE_TOKENS:
        return []
    root = root_hash("", request.cache_salt, request.adapter)
    return chain_hashes(root, request.prompt_token_ids[:findable], PIECE_TOKENS)


@dataclass(slots=True)
class _Cache:
    """One engine's cache: its pieces, least recently used first, and the turn at which each was
    last known to be there; 0 for pieces that were sent and not confirmed yet.

    A prompt uses a piece and all pieces before it, marked in reverse order: so a piece is never
    forgotten before those that follow it.
    """

    instance_id: str
    pieces: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def num_held(self, pieces: Sequence[bytes]) -> int:
        """How many of a prompt's pieces are held, counted from the first."""
        low, high = 0, len(pieces)
        while low < high:
            middle = (low + high) // 2
            if pieces[middle] in self.pieces:
                low = middle + 1
            else:
                high = middle
        return low

    def use(self, pieces: Sequence[bytes], max_pieces: int) -> None:
        for piece in reversed(pieces):
            self.pieces.setdefault(piece, 0)
            self.pieces.move_to_end(piece)
        while len(self.pieces) > max_pieces:
            self.pieces.popitem(last=False)

    def confirm(self, pieces: Sequence[bytes], turn: int) -> None:
        for piece in pieces:
            if piece in self.pieces:
                self.pieces[piece] = turn

    def forget_until(self, turn: int) -> None:
        """A piece last seen at `turn` has been evicted: forget it and all older ones."""
        for _ in range(min(len(self.pieces), _MAX_FORGOTTEN)):
            piece, seen = self.pieces.popitem(last=False)
            if seen > turn:
                self.pieces[piece] = seen
                self.pieces.move_to_end(piece, last=False)
                return


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request without an output yet, and the turns at which its pieces that the shard should
    have were last seen there.
    """

    cache: _Cache
    pieces: list[bytes]
    seen: list[int]


class PrefixMemory:
    """Which pieces were sent to which shard, corrected by the cache hits that shards report.

    Bounded; the oldest are forgotten.
    """

    def __init__(self, max_pieces: int = _MAX_PIECES) -> None:
        """`max_pieces` bounds the pieces remembered for one shard."""
        self._max_pieces = max_pieces
        self._caches: OrderedDict[str, _Cache] = OrderedDict()
        # By the request's `id`; the fleet keeps the request alive until its answer is over.
        self._unanswered: OrderedDict[int, _Sent] = OrderedDict()
        self._turn = 0

    def num_held(self, candidate: Candidate, pieces: Sequence[bytes]) -> int:
        """How many of a prompt's pieces, counted from the first, the shard should have cached."""
        cache = self._caches.get(candidate.address)
        if cache is None or cache.instance_id != candidate.instance_id:
            return 0
        return cache.num_held(pieces)

    def record_sent(
        self, candidate: Candidate, request: GenerationRequest, pieces: list[bytes]
    ) -> None:
        """The request was sent there, so its pieces will be in that cache."""
        cache = self._caches.get(candidate.address)
        if cache is None or cache.instance_id != candidate.instance_id:
            cache = self._caches[candidate.address] = _Cache(candidate.instance_id)
        self._caches.move_to_end(candidate.address)
        # If KV blocks are larger than pieces, the shard finds whole blocks only.
        held = cache.num_held(pieces) * PIECE_TOKENS
        held = held // candidate.block_size * candidate.block_size // PIECE_TOKENS
        seen = [cache.pieces[piece] for piece in pieces[:held]]
        cache.use(pieces, self._max_pieces)
        self._unanswered[id(request)] = _Sent(cache, pieces, seen)
        self._unanswered.move_to_end(id(request))
        _trim(self._caches, _MAX_SHARDS)
        _trim(self._unanswered, _MAX_UNANSWERED)

    def record_answer(
        self, instance_id: str, request: GenerationRequest, cached_tokens: int
    ) -> None:
        """The shard has computed the prompt, and found `cached_tokens` of it in its cache."""
        sent = self._unanswered.pop(id(request), None)
        if sent is None or sent.cache.instance_id != instance_id:
            return
        num_found = cached_tokens // PIECE_TOKENS
        if num_found < len(sent.seen) and sent.seen[num_found]:
            sent.cache.forget_until(sent.seen[num_found])
        self._turn += 1
        sent.cache.confirm(sent.pieces, self._turn)


def _trim(entries: OrderedDict[Any, Any], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)
