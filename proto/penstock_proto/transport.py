"""How penstock's gRPC connections are carried: sizes, keepalive, reconnecting, ports.

The one place for channel and server options, so that both ends always agree. Knows nothing of the
messages that pass.
"""

from __future__ import annotations

from typing import Final

# A prompt of a million ids is 4 MB; the limit leaves room for log-probabilities beside it.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

_KEEPALIVE_S: Final = 30
_KEEPALIVE_TIMEOUT_S: Final = 10
# Also how long a connection attempt may take: a peer behind a slow network must be reachable.
_CONNECT_TIMEOUT_S: Final = 5

Options = list[tuple[str, int]]

_COMMON: Final[Options] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_S * 1000),
    # gRPC's own pings have a timeout of their own, a minute unless told otherwise.
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options() -> Options:
    """Options of every channel to a shard."""
    return [
        *_COMMON,
        # A shard that comes back is found at once: the default back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_S * 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Channels of one process must not share a connection: a slow shared call would hold up
        # health probes of the same address.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> Options:
    """Options of every shard's server."""
    return [
        *_COMMON,
        # Without this a second server binds the same port without an error.
        ("grpc.so_reuseport", 0),
        # The default (5 minutes) would end clients that ping during a long prefill.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
