"""Shards that suit a request by their roles: a preference, as each serves whatever it is sent.

Long prompts are computed on shards of the role "prefill", which then are left for others once their
KV blocks are there: no stream waits in a step for the prompt of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.shard_state import ShardState

# What computes longer prompts by itself delays the streams beside it by more than a few steps.
PREFILL_TOKENS = 1024

_PREFILL, _DECODE = "prefill", "decode"


class Roles:
    """Preferences of shards for streams."""

    def __init__(self, prefill_tokens: int) -> None:
        """Prompts of at least so many tokens, with the output that is to be computed again, are for
        prefill shards.
        """
        self._prefill_tokens = prefill_tokens

    def prefer(
        self,
        stream: FleetStream,
        shards: Sequence[ShardState],
        kv_source: str,
        held_tokens: Callable[[ShardState], int],
    ) -> Sequence[ShardState]:
        """Shards among these that suit the stream; all of them if none does. Little is to be
        computed of one whose KV blocks are at `kv_source`, or that a shard holds `held_tokens` of.
        """
        decoding = [shard for shard in shards if suits_decode(shard)]
        num_tokens = stream.context_tokens
        if len(decoding) < len(shards) and num_tokens >= self._prefill_tokens and not kv_source:
            num_tokens -= max(map(held_tokens, decoding), default=0)
            if num_tokens >= self._prefill_tokens:
                return [shard for shard in shards if _role(shard) != _DECODE] or shards
        return decoding or shards


def wants_to_leave(stream: FleetStream) -> bool:
    """Tell whether the prompt of a stream was computed by a prefill shard, so that it may go on
    at another.
    """
    shard = stream.shard
    return (
        shard is not None
        and _role(shard) == _PREFILL
        and stream.attempts[-1].first_output_s is not None
    )


def suits_decode(shard: ShardState) -> bool:
    return _role(shard) != _PREFILL


def _role(shard: ShardState) -> str:
    return "" if shard.info is None else shard.info.role
