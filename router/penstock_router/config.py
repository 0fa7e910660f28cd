"""A router's configuration, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_client.fleet.allowed_networks import PRIVATE_NETWORKS, Network
from penstock_client.load_balancing.policies import DEFAULT_POLICY
from penstock_common.tls import Tls
from penstock_common.trace_export import TracingConfig


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router's whole configuration."""

    # Addresses of shards, or their source, as `penstock_client.fleet.discovery` reads it.
    shards: str
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    # Which of several workers this one is. Set by their parent.
    worker: int = 0
    # Whether to serve the console: the page at /, its files and its feed.
    console: bool = True

    # The key that clients must show, if set, on all routes but probes and documentation.
    api_key: str | None = field(default=None, repr=False)
    # A file of further keys (`penstock_common.key_file_format`); reloaded when it changes.
    api_keys_file: str | None = None
    # Origins whose pages may call the API from a browser; "*": all.
    cors_origins: tuple[str, ...] = ()
    # The certificate and key for HTTPS; None: plain HTTP.
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    # The key that this router shows to the shards.
    shard_api_key: str | None = field(default=None, repr=False)
    # TLS towards the shards; None: plaintext.
    shard_tls: Tls | None = None
    # Where shards may be that are added over /admin.
    shard_networks: tuple[Network, ...] = PRIVATE_NETWORKS
    # The key for /admin, which changes the fleet; None: /admin is closed, but to admin keys of
    # `api_keys_file`.
    admin_key: str | None = field(default=None, repr=False)
    # The file by which several workers share changes to the fleet. Set by their parent.
    changes_file: str = ""

    policy: str = DEFAULT_POLICY
    # A shard that reports nothing for this long hangs: its requests go on elsewhere.
    stall_timeout_s: float = 3.0
    # How long a request waits for a shard that can take it.
    failover_timeout_s: float = 60.0
    # How long a request waits, queued, when no shard serves its model; None: refused at once.
    shard_wait_s: float | None = None

    # Signs the ids of events; routers with the same key resume each other's streams.
    resume_key: str = field(default="", repr=False)
    # How long a stream goes on after its client disconnected.
    resume_grace_s: float = 10.0

    # The file that records each sequence; None: none. Each of several workers has its own file.
    audit_log: str | None = None
    audit_prompts: bool = False
    audit_key: bytes | None = field(default=None, repr=False)
    # The share of the sequences that is computed again on another shard, and compared.
    verify_share: float = 0.0

    # The file that keeps responses, which all workers share; "": a temporary one, which their
    # parent makes.
    response_store: str = ""
    response_store_bytes: int = 256 * 1024 * 1024
    response_ttl_s: float = 86400.0

    # The text of --chat-template's file; takes precedence over the model's own.
    chat_template: str | None = None
    # The format of calls and of reasoning in answers: a name, "none", or "auto": by chat template.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    # Whether requests may bring their own template, which is a program.
    trust_request_chat_template: bool = False
    # (name, model): more names of models.
    model_aliases: tuple[tuple[str, str], ...] = ()
    # Models that count as away, not unknown, even if no shard ever served them.
    expected_models: tuple[str, ...] = ()

    # Further connections are closed at once.
    max_connections: int = 16384
    # How long a connection, or a request from its first byte, may take to send its headers.
    header_timeout_s: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    # The rough size of an answer that is not streamed: log-probabilities and vectors can be many.
    max_answer_bytes: int = 256 * 1024 * 1024
    # These count sequences: a request with n=4 is four. All hold over all workers.
    max_concurrent_requests: int = 2048
    # Sequences of requests that are being prepared or wait for places.
    max_queued_requests: int = 512
    # Tokens of the prompts that wait for places.
    max_queued_tokens: int = 1_000_000
    # The same bounds for each client's key; None: only the bounds above.
    max_concurrent_requests_per_key: int | None = None
    max_queued_requests_per_key: int | None = None
    max_queued_tokens_per_key: int | None = None
    queue_timeout_s: float = 10.0
    # From a request's arrival to its end.
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    # A client that reads nothing for this long, or next to nothing for longer, is disconnected.
    write_timeout_s: float = 60.0
    # Silence on a stream after which a comment keeps proxies from closing it.
    keep_alive_s: float = 15.0
    # After this long without output for a sequence in flight, its request fails.
    silence_timeout_s: float = 600.0
    # For each worker: threads for texts of medium length, processes for bodies over 64 kB.
    tokenizer_threads: int = 2
    text_processes: int = 1
    log_level: str = "info"
    # Servers under whose names metrics are exported too.
    metrics_names: tuple[str, ...] = ()
    # One of `penstock_common.logs.FORMATS`.
    log_format: str = "auto"
    # Whether to log a line for each request.
    log_requests: bool = True
    # Where spans go; None: nowhere.
    tracing: TracingConfig | None = None

    def part_of(self, whole: int) -> int:
        """This worker's part of a bound over all workers."""
        part, rest = divmod(whole, self.workers)
        return part + (self.worker < rest)
