"""Options of penstock's gRPC connections: sizes, keepalive, reconnecting, ports, TLS.

Both ends take their options from here, so they always agree.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Final

import grpc

from penstock_common.tls import FileReloader, OnLoad, Tls, check_server_files, read_file

# A prompt of a million ids is 4 MB; the limit leaves room for log-probabilities beside it.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
# Trailing metadata: which field a refused call of one message is refused for.
FIELD_METADATA: Final = "penstock-field"

_KEEPALIVE_S: Final = 30
_KEEPALIVE_TIMEOUT_S: Final = 10
# Also how long a connection attempt may take: a peer behind a slow network must be reachable.
_CONNECT_TIMEOUT_S: Final = 5

Options = list[tuple[str, int | str]]

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
        # http_proxy and https_proxy name proxies to the internet, say for downloading models. A
        # proxy for gRPC is set in grpc_proxy.
        ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ)),
    ]


def server_options() -> Options:
    """Options of every shard's server."""
    return [
        *_COMMON,
        # Without this a second server binds the same port without an error.
        ("grpc.so_reuseport", 0),
        # The default (5 minutes) would end clients that ping during a long prefill.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # Only what is not compressed: 60 kB must not become a message of 60 MB.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # gRPC would buffer megabytes of a call that nobody reads, as of one that is refused. A call
        # that is read is as fast without: its window is as large as its message.
        ("grpc.http2.bdp_probe", 0),
    ]


# ---- A client's end ----------------------------------------------------------------------------


Credentials = grpc.ChannelCredentials | None


class Connector:
    """Opens channels to shards, in the clear or with certificates."""

    def __init__(self, tls: Tls | None) -> None:
        """Raises `TlsFilesUnusable`."""
        self._server_name = None if tls is None else tls.server_name
        self._certificates: FileReloader[grpc.ChannelCredentials] | None = None
        if tls is not None:
            self._certificates = FileReloader(
                tls.files, lambda: _channel_credentials(tls), on_load=tls.on_load
            )
        # gRPC's targets for addresses that are not to be resolved.
        self._targets: dict[str, str] = {}

    @property
    def uses_tls(self) -> bool:
        return self._certificates is not None

    def pin(self, address: str, ips: Sequence[IPv4Address | IPv6Address]) -> None:
        """Connect to these for HOST:PORT, whatever its host name resolves to; `unpin` it later."""
        port = address.rpartition(":")[2]
        # All as IPv6, since a target has one family; gRPC opens IPv4 sockets for mapped ones.
        hosts = (f"::ffff:{ip}" if ip.version == 4 else f"{ip}" for ip in ips)
        self._targets[address] = "ipv6:" + ",".join(f"[{host}]:{port}" for host in hosts)

    def unpin(self, address: str) -> None:
        self._targets.pop(address, None)

    def credentials(self) -> Credentials:
        """The credentials to open the next channel with: a new object once the files have changed.

        A channel keeps those that it was opened with, also when it reconnects.
        """
        if self._certificates is None:
            return None
        self._certificates.renew()
        return self._certificates.value

    def open(self, address: str, credentials: Credentials) -> grpc.Channel:
        """A channel for threads."""
        target, options = self._where(address)
        if credentials is None:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, credentials, options=options)

    def open_aio(self, address: str, credentials: Credentials) -> grpc.aio.Channel:
        """A channel for the running event loop."""
        target, options = self._where(address)
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, credentials, options=options)

    def _where(self, address: str) -> tuple[str, Options]:
        """gRPC's target and options: a shard's certificate is for the host name that was asked for,
        wherever that is.
        """
        options, name = channel_options(), self._server_name
        target = self._targets.get(address)
        if target is not None:
            options.append(("grpc.default_authority", address))
            name = name or address.rpartition(":")[0]
        if name is not None and self.uses_tls:
            options.append(("grpc.ssl_target_name_override", name))
        return target or address, options


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    tls.check()
    key = None if tls.key_file is None else read_file(tls.key_file)
    chain = None if tls.cert_file is None else read_file(tls.cert_file)
    return grpc.ssl_channel_credentials(read_file(tls.ca_file), key, chain)


# What `explain` makes of a port at which nobody listens.
CONNECTION_REFUSED = "connection refused: start the shard, or correct its address"
# Of a host that is down, or is none.
HOST_SILENT = "its host does not answer: it is down, or a firewall drops what is sent to it"
HOST_UNREACHABLE = "there is no way to its host: it is down, or the network is"
HOST_UNKNOWN = "its host name cannot be resolved: correct the address"
# And where a router's port was given for a shard's.
SPEAKS_HTTP = "an HTTP server answers there, such as a router: give the address of a shard"
# All that is to be seen from here: whoever refuses a certificate tells it nobody.
CLOSES_AT_ONCE = (
    "it closes connections at once: one side alone uses TLS, or it wants a client certificate and "
    "ours is missing, expired or of another authority"
)

# What gRPC says of a failed call, and what is said in its place; the first that fits.
_CAUSES = (
    (r"Failed to connect to remote host: Connection refused", CONNECTION_REFUSED),
    (r"errors resolving|DNS resolution failed", HOST_UNKNOWN),
    (r"failed to connect.*(No route to host|Network is unreachable)", HOST_UNREACHABLE),
    # The connection did not come about in the time for it.
    (r"failed to connect.*tcp handshaker shutdown", HOST_SILENT),
    # It did, and nobody says anything on it: in the clear, or by TLS.
    (
        r"failed to connect.*(before receiving SETTINGS|Handshake read failed \(Endpoint closing)",
        "it accepts connections and does not answer: it hangs, or is stopped",
    ),
    (r"Trying to connect an http1|Failed parsing HTTP/2", SPEAKS_HTTP),
    (
        r"WRONG_VERSION_NUMBER",
        "TLS handshake failed: what answers there does not speak TLS",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED: ([^:]+)",
        r"TLS handshake failed: the shard's certificate is refused: \1",
    ),
    (
        r"Hostname Verification Check failed",
        "TLS handshake failed: the shard's certificate is for another name than the address "
        "or server name that was asked for",
    ),
    (
        r"handshake failed.*?SSL_ERROR_SSL: [^:]*:[^:]*:[^:]*:[^:]*:([^:]+)",
        r"TLS handshake failed: \1",
    ),
    (r"failed to connect to all addresses.*(Socket closed|Connection reset)", CLOSES_AT_ONCE),
)
# Of a connection that there was: they say that it ended, and not why.
_SYMPTOMS = (
    (
        r"^(Socket closed|Connection reset.*|Broken pipe|(recv|send)msg:.*|GOAWAY.*|ping timeout"
        r"|keepalive watchdog timeout)$",
        "the connection broke: its process ended, or the network failed",
    ),
    (r"^Cancelling all calls$", "its server was stopped"),
)


def explain(details: str) -> str:
    """gRPC's text for a failed call, replaced if it hides the reason."""
    known = (*_CAUSES, *_SYMPTOMS)
    found = ((re.search(pattern, details), text) for pattern, text in known)
    return next((match.expand(text) for match, text in found if match), details)


def names_cause(explained: str) -> bool:
    """Tell whether what `explain` gave says why, so that somebody can do something."""
    return any(explained.startswith(text.partition("\\")[0]) for _, text in _CAUSES)


# ---- A shard's end -----------------------------------------------------------------------------


class ServerCertificates:
    """A server's certificate and key, in files: the next connection gets what they hold by then."""

    def __init__(
        self,
        cert_file: str,
        key_file: str,
        client_ca_file: str | None = None,
        on_load: OnLoad = lambda contents: None,
    ) -> None:
        """With `client_ca_file` clients must show a certificate of those authorities. `on_load`
        gets what the files hold, in the order of the arguments.

        Raises `TlsFilesUnusable`.
        """

        def make() -> grpc.ServerCertificateConfiguration:
            check_server_files(cert_file, key_file, client_ca_file)
            return grpc.ssl_server_certificate_configuration(
                [(read_file(key_file), read_file(cert_file))],
                None if client_ca_file is None else read_file(client_ca_file),
            )

        files = [cert_file, key_file, *([] if client_ca_file is None else [client_ca_file])]
        # gRPC asks from threads of its own.
        self._lock = threading.Lock()
        self._files = FileReloader(files, make, on_load=on_load)
        self._given = self._files.value
        # None says that nothing has changed, which the stubs do not know.
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._given,
            self._changed,  # type: ignore[arg-type]
            client_ca_file is not None,
        )

    def look(self) -> None:
        """Load the files if they have changed, also while nobody connects."""
        with self._lock:
            self._files.renew()

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            self._files.renew()
            if self._files.value is self._given:
                return None
            self._given = self._files.value
            return self._given
