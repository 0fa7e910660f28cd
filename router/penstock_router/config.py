"""A router's configuration: one frozen object whose fields are the router's flags.

Fields have the order and groups of `penstock router --help`. A field without `flag(...)` is derived
from other fields, or set by the code that starts a process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from penstock_client.fleet.allowed_networks import PRIVATE_NETWORKS, Network
from penstock_client.fleet.placement.roles import PREFILL_TOKENS
from penstock_client.load_balancing.policies import DEFAULT_POLICY, POLICIES
from penstock_common.flags import flag, required
from penstock_common.shared_flags import (
    OBSERVING,
    SERVING,
    ListeningConfig,
    ObservingConfig,
    key,
    processes,
    seconds,
)
from penstock_common.tls import Tls
from penstock_router import flag_values as values
from penstock_router.request import MAX_TIMEOUT_S
from penstock_router.store.response_store import MIN_BYTES
from penstock_router.text.formats.registry import CHANNELS, FORMATS
from penstock_router.text.reasoning import AUTO, STYLES

# Larger counts would overflow.
_count = functools.partial(flag, at_least=1, at_most=10**15)
_count_or_none = functools.partial(flag, at_least=0, at_most=10**15)

_EACH_KEY = "bound for each API key, or each address without a known key (default: none)"


@dataclass(frozen=True, slots=True)
class RouterConfig(ObservingConfig, ListeningConfig):
    shards: str = required(
        "HOST:PORT of a shard, dns://NAME:PORT for all that a name resolves to, or "
        "file:///PATH of a watched file with one HOST:PORT a line",
        group="shards",
        metavar="WHERE[,...]",
        gather=",".join,
    )
    # If None, `cli.py` sets it to `api_key`.
    shard_api_key: str | None = key(
        "PENSTOCK_SHARD_API_KEY",
        "key to send to shards (default: PENSTOCK_SHARD_API_KEY, or the API key)",
    )
    shard_tls_ca_file: str | None = flag(
        None, "use TLS to shards, with certificates from these authorities"
    )
    shard_tls_cert_file: str | None = flag(None, "client certificate, for mutual TLS")
    shard_tls_key_file: str | None = flag(None, "private key")
    shard_tls_server_name: str | None = flag(
        None,
        "name in the certificates of shards, if not their address: dns:// gives IP addresses",
        metavar="NAME",
    )
    shard_networks: tuple[Network, ...] = flag(
        PRIVATE_NETWORKS,
        "networks for shards added over /admin, as 10.0.0.0/8,fd00::/8 (default: this machine "
        "and private networks); link-local addresses never",
        metavar="NETWORK[,...]",
        read=values.networks,
    )
    policy: str = flag(DEFAULT_POLICY, "choice of a shard", choices=tuple(POLICIES))
    first_token_allowance_s: float = seconds(
        2.0,
        "longest wait of a turn for earlier prompts at the shard of its session, by its "
        "measured rate; beyond that, load decides (policies prefix-affinity and session)",
    )
    stall_timeout_s: float = seconds(
        3.0, "move requests away from a shard after this time without a report"
    )
    failover_timeout_s: float = seconds(60.0, "longest wait for a shard that can take a request")
    tool_pause_s: float | None = flag(
        None,
        "time for which a shard retains KV blocks after an answer that calls tools; 0: none "
        "(default: twice the longest recent pause of the session, 10 s to 10 minutes)",
        at_least=0,
        at_most=86_400,
        metavar="S",
    )
    shard_wait_s: float | None = seconds(
        None,
        "hold requests this long for a model without a shard, as when shards are started on "
        "demand; the router counts as ready meanwhile (default: refuse them at once)",
    )

    # The template's text, not its path.
    chat_template: str | None = flag(
        None,
        "a jinja file instead of the models' own",
        group=SERVING,
        metavar="FILE",
        read=values.chat_template,
    )
    trust_request_chat_template: bool = flag(
        False,
        "accept requests' chat_template; it runs in a sandbox, in a process for such "
        "templates, for at most five seconds",
    )
    tool_call_parser: str = flag(
        AUTO,
        "how answers write calls of tools: auto goes by the chat template, none reads no calls; "
        f"{', '.join(FORMATS)}",
        metavar="NAME",
        read=values.tool_call_parser,
    )
    reasoning_parser: str = flag(
        AUTO,
        "how they mark reasoning: auto goes by the chat template, none leaves it in the text; "
        f"{', '.join((*STYLES, *CHANNELS))}",
        metavar="NAME",
        read=values.reasoning_parser,
    )
    # (name, model)
    model_aliases: tuple[tuple[str, str], ...] = flag(
        (),
        "serve MODEL under NAME too; NAME `default` is for requests that name none; may be "
        "given several times",
        name="--model-alias",
        metavar="NAME=MODEL",
        read=values.alias,
        gather=tuple,
    )
    expected_models: tuple[str, ...] = flag(
        (),
        "a model that may have no shard: requests for it get 503, or are held (--shard-wait-s), "
        "even if none was ever seen; may be given several times",
        name="--expect-model",
        metavar="NAME",
        gather=tuple,
    )
    tokenizer_threads: int = processes(
        2, "threads of each worker that tokenize texts of some length"
    )
    text_processes: int = processes(
        1,
        "processes of each worker that tokenize bodies over 16 kB, started with the first one",
    )
    console: bool = flag(
        True, "do not serve the console at /, nor its live data", name="--no-console"
    )

    log_requests: bool = flag(
        True, "log each request in a line, without texts", group=OBSERVING, negatable=True
    )
    log_clients: bool = flag(
        False,
        "log the address that a request came from: personal data in many places; behind a "
        "proxy, the proxy's",
        group=OBSERVING,
    )
    metrics_by_key: bool = flag(
        False,
        "show tokens and requests of each API key by its name in /metrics, which all who reach "
        "the router may read; /admin/usage has them without this",
    )

    api_key: str | None = key(
        "PENSTOCK_API_KEY",
        "key that clients must send; probes need none",
        group="keys, and who else may call",
    )
    # None: only admin keys in `api_keys_file` open /admin.
    admin_key: str | None = key("PENSTOCK_ADMIN_KEY", "key for /admin, which is closed without one")
    api_keys_file: str | None = flag(
        None,
        "keys with names, scopes, limits and expiry dates, as `penstock keys` makes them; read "
        "again when it changes (default: PENSTOCK_API_KEYS_FILE)",
        read=str,
        variables=("PENSTOCK_API_KEYS_FILE",),
    )
    cors_origins: tuple[str, ...] = flag(
        (),
        "let pages of this origin call the API from a browser, as https://chat.example.com; * for "
        "any origin; may be given several times (default: none)",
        name="--cors-origin",
        metavar="ORIGIN",
        read=values.origin,
        gather=tuple,
    )

    # "": use a random key.
    resume_key: str = key(
        "PENSTOCK_RESUME_KEY",
        "signs event ids; routers with the same key can resume each other's streams "
        "(default: PENSTOCK_RESUME_KEY, or one of this router's own)",
        default="",
        group="resuming, recording and verifying answers",
    )
    resume_grace_s: float = seconds(10.0, "time a resumable stream continues without its client")
    audit_log: str | None = flag(
        None,
        "record each sequence in this file (several workers: FILE-worker0 and so on); see "
        "`penstock replay`",
        metavar="FILE",
    )
    audit_prompts: bool = flag(False, "record prompts too, not only their hashes")
    audit_key_file: str | None = flag(None, "key for the log's hashes, 16 to 64 bytes")
    audit_key: bytes | None = field(default=None, repr=False)
    verify_share: float = flag(
        0.0,
        "share of sequences to compute again on another shard and compare",
        at_least=0,
        at_most=1,
        metavar="P",
    )

    prefill_tokens: int = flag(
        PREFILL_TOKENS,
        "shortest prompt, in tokens, to send to shards of --role prefill, if there are any",
        at_least=1,
        metavar="TOKENS",
    )

    # "": use a temporary file, made by the workers' parent process.
    response_store: str = flag(
        "",
        "file for answers of /v1/responses, kept after this router ends (default: a temporary "
        "file)",
        group="keeping responses",
        metavar="FILE",
    )
    response_store_bytes: int = flag(
        256 * 1024 * 1024,
        "size; beyond it, drop the oldest of the key that holds most",
        at_least=MIN_BYTES,
        at_most=10**15,
    )
    response_ttl_s: float = seconds(86400.0, "time to keep a response")

    max_images: int = _count(16, "images in a request; more get 400", group="images")
    max_image_bytes: int = _count(20 * 1024 * 1024, "image size as sent or fetched")
    max_image_pixels: int = flag(
        2**25,
        "pixels of an image, sides up to 16384; decoding takes up to 24 bytes a pixel",
        at_least=1,
        at_most=2**28,
    )
    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "fetch images by https:// and http:// from these hosts, as in images.example.com or "
        "*.example.com, where they have public addresses (default: from none)",
        metavar="HOST[,...]",
        read=values.media_domains,
    )
    allowed_media_networks: tuple[Network, ...] = flag(
        (),
        "networks where those hosts may have addresses that are not public; never link-local "
        "ones (default: none)",
        metavar="NETWORK[,...]",
        read=values.networks,
    )
    allowed_media_folder: str | None = flag(
        None, "take images by file: from below this folder", metavar="FOLDER"
    )
    image_processes: int = processes(
        1, "processes of each worker that decode images, started with the first one"
    )

    max_connections: int = _count(
        16384,
        "most in all workers; beyond, 503 at once. One address gets no more than it leaves "
        "free: alone, half of them",
        group="limits",
    )
    header_timeout_s: float = seconds(
        10.0,
        "close connections that take longer for a TLS handshake, or to send a request's headers",
    )
    max_body_bytes: int = _count(32 * 1024 * 1024, "larger ones get 413")
    bound_max_tokens: bool = flag(
        False,
        "cut a max_tokens that exceeds the context to what fits (default: 400); messages and "
        "Ollama's routes always do",
    )
    max_answer_bytes: int = _count(
        256 * 1024 * 1024,
        "size of log-probabilities and embeddings in an answer; more get 400",
    )
    # These bounds count sequences (a request with n=4 counts as 4), over all workers.
    max_concurrent_requests: int = _count(2048, "sequences in flight over all workers; more wait")
    max_queued_requests: int = _count_or_none(
        512,
        "sequences that wait for others to end, more get 429; 0: none (default: a quarter of "
        "--max-concurrent-requests)",
    )
    max_queued_tokens: int = _count(1_000_000, "tokens of the prompts that wait; more get 429")
    max_concurrent_requests_per_key: int | None = _count(None, _EACH_KEY)
    max_queued_requests_per_key: int | None = _count_or_none(None, _EACH_KEY)
    max_queued_tokens_per_key: int | None = _count(None, _EACH_KEY)
    queue_timeout_s: float = seconds(10.0, "429 after this wait")
    request_timeout_s: float | None = flag(
        None,
        "504 for requests that take longer (default: no limit)",
        at_least=0.001,
        at_most=MAX_TIMEOUT_S,
    )
    write_timeout_s: float = seconds(
        60.0,
        "cut off a client that reads nothing for this time, or under 1 kB/s for longer",
    )
    keep_alive_s: float = seconds(15.0, "send a comment on a stream after this silence")
    silence_timeout_s: float = seconds(
        600.0,
        "504 after this time without news from shards, even while a request waits there or for one",
    )

    # This worker's index, and the file by which workers share fleet changes. The parent sets both.
    worker: int = 0
    changes_file: str = ""

    @property
    def shard_tls(self) -> Tls | None:
        """TLS to the shards; None: plaintext."""
        if self.shard_tls_ca_file is None:
            return None
        return Tls(
            self.shard_tls_ca_file,
            self.shard_tls_cert_file,
            self.shard_tls_key_file,
            self.shard_tls_server_name,
        )

    def part_of(self, whole: int) -> int:
        """Return this worker's part of a bound."""
        part, rest = divmod(whole, self.workers)
        return part + (self.worker < rest)
