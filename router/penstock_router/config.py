"""What a router is told at its start, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock_client.policies import DEFAULT_POLICY
from penstock_proto.tls import Tls
from penstock_proto.trace_export import TracingConfig


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router is told at its start."""

    # Addresses, or where they are to be had; as `penstock_client.membership` reads it.
    shards: str
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    # Which of several workers this one is. Set by their parent.
    worker: int = 0
    # The page at /, what it is made of and what it is fed.
    console: bool = True

    # Asked of clients, when set, on all routes but probes and what describes the server.
    api_key: str | None = field(default=None, repr=False)
    # A file of keys, as `penstock_client.key_file` reads it: beside that one, and watched.
    api_keys_file: str | None = None
    # Pages of these origins may call the API from a browser; "*": of all.
    cors_origins: tuple[str, ...] = ()
    # Of HTTP over TLS; None: in the clear.
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    # Shown to the shards.
    shard_api_key: str | None = field(default=None, repr=False)
    # How shards are spoken to over TLS; None: in the clear.
    shard_tls: Tls | None = None
    # Asked of whoever changes the fleet; without one there is no such door.
    admin_key: str | None = field(default=None, repr=False)
    # Of several workers: where they tell each other of changes to the fleet. Set by their parent.
    changes_file: str = ""

    policy: str = DEFAULT_POLICY
    # A shard that says nothing for so long hangs: its requests go on elsewhere.
    stall_timeout_s: float = 3.0
    # How long a request waits for a shard that can take it.
    failover_timeout_s: float = 60.0
    # How long one waits, queued, where no shard serves its model; None: it is refused at once.
    shard_wait_s: float | None = None

    # Signs the ids of events; routers with the same one take up each other's streams.
    resume_key: str = field(default="", repr=False)
    # How long a stream goes on without its client.
    resume_grace_s: float = 10.0

    # Where each sequence is recorded; None: nowhere. Of several workers each has a file of its own.
    audit_log: str | None = None
    audit_prompts: bool = False
    audit_key: bytes | None = field(default=None, repr=False)
    # Of the sequences that are computed once more on another shard.
    verify_share: float = 0.0

    # The file that keeps responses, which all workers share; "": a temporary one, which their
    # parent makes.
    response_store: str = ""
    response_store_bytes: int = 256 * 1024 * 1024
    response_ttl_s: float = 86400.0

    # The text of --chat-template's file; takes precedence over the model's own.
    chat_template: str | None = None
    # How answers write calls and reasoning: by name, "none", or "auto", as chat templates show it.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    # Whether requests may bring their own: a template is a program.
    trust_request_chat_template: bool = False
    # (name, model): more names of models.
    model_aliases: tuple[tuple[str, str], ...] = ()
    # Known though no shard was seen that serves them: they are away, not unknown.
    expected_models: tuple[str, ...] = ()

    # Beyond them the door is closed at once.
    max_connections: int = 16384
    # From a connection's first byte, or its beginning, to the end of a request's headers.
    header_timeout_s: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    # Of one answer that is no stream, roughly: log-probabilities and vectors can be many.
    max_answer_bytes: int = 256 * 1024 * 1024
    # These count sequences: a request with n=4 is four. All hold over all workers.
    max_concurrent_requests: int = 2048
    # Of requests that are being prepared, or wait until some in flight are over.
    max_queued_requests: int = 512
    # Of the prompts that wait.
    max_queued_tokens: int = 1_000_000
    # The same for each key that clients show; None: only those above.
    max_concurrent_requests_per_key: int | None = None
    max_queued_requests_per_key: int | None = None
    max_queued_tokens_per_key: int | None = None
    queue_timeout_s: float = 10.0
    # From a request's arrival to its end.
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    # A client that takes nothing for so long is cut off.
    write_timeout_s: float = 60.0
    # Silence on a stream after which a comment keeps proxies from closing it.
    keep_alive_s: float = 15.0
    # Silence of a shard about a sequence that is in flight, after which its request fails.
    silence_timeout_s: float = 600.0
    # Of each worker: texts of some length, and bodies of more than that.
    tokenizer_threads: int = 2
    text_processes: int = 1
    log_level: str = "info"
    # Servers whose names metrics have besides their own.
    metrics_names: tuple[str, ...] = ()
    # Of penstock_proto.logs.FORMATS.
    log_format: str = "auto"
    # A line for each request.
    log_requests: bool = True
    # Where spans go; None: nowhere.
    tracing: TracingConfig | None = None

    def part_of(self, whole: int) -> int:
        """This worker's part of what all of them share out."""
        part, rest = divmod(whole, self.workers)
        return part + (self.worker < rest)
