"""Command line and environment -> one frozen `RouterConfig`. Nothing else reads either."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from penstock_client.audit_log import read_key
from penstock_client.fleet.allowed_networks import PRIVATE_NETWORKS
from penstock_client.fleet.discovery import parse_source
from penstock_client.load_balancing.policies import DEFAULT_POLICY, POLICIES
from penstock_common import key_file_format
from penstock_common.flags import OneLineParser, add_observing_flags, tracing_of, usable_key
from penstock_common.key_file_format import KeyFileError
from penstock_common.tls import Tls, TlsFilesUnusable
from penstock_router import flag_values as values
from penstock_router.config import RouterConfig
from penstock_router.server.https import HttpsFiles
from penstock_router.text.chat_template import ChatTemplate, TemplateUnusable
from penstock_router.text.reasoning import AUTO, STYLES
from penstock_router.text.tool_calls.choose_format import FORMATS

_REPORTS_EVERY_S = 1.0


def parse_config(argv: Sequence[str]) -> RouterConfig:
    """Parse a router's command line; exits with status 2 and one line on a bad value."""
    parser = build_parser()
    args = parser.parse_args(argv)
    api_key = _key(parser, "--api-key", args.api_key, "PENSTOCK_API_KEY")
    resume_key = _key(parser, "--resume-key", args.resume_key, "PENSTOCK_RESUME_KEY")
    shard_api_key = _key(parser, "--shard-api-key", args.shard_api_key, "PENSTOCK_SHARD_API_KEY")
    admin_key = _key(parser, "--admin-key", args.admin_key, "PENSTOCK_ADMIN_KEY")
    if args.max_queued_requests is None:
        # Then a request waits at most a quarter of an answer's duration, on average.
        args.max_queued_requests = math.ceil(args.max_concurrent_requests / 4)
    _check_shares(parser, args)
    if args.stall_timeout_s <= _REPORTS_EVERY_S:
        parser.error(
            f"--stall-timeout-s {args.stall_timeout_s:g}: must be above {_REPORTS_EVERY_S:g}, "
            "as a shard with nothing to do says so once a second"
        )
    # Each flag has the name of its config field.
    given = vars(args) | {
        "shards": _shards(parser, args.shards),
        "api_key": api_key,
        "api_keys_file": _keys_file(parser, args),
        "admin_key": admin_key,
        "shard_api_key": api_key if shard_api_key is None else shard_api_key,
        "cors_origins": tuple(args.cors_origins),
        "shard_tls": _shard_tls(parser, args),
        "resume_key": resume_key or "",
        "audit_key": _audit_key(parser, args),
        "chat_template": _chat_template(parser, args.chat_template),
        "model_aliases": tuple(args.model_aliases),
        "expected_models": tuple(args.expected_models),
        "tracing": tracing_of(parser, args.otlp_endpoint),
    }
    del given["audit_key_file"], given["otlp_endpoint"]
    _check_tls(parser, args)
    for name in _SHARD_TLS:
        del given[name]
    return RouterConfig(**given)


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="penstock router",
        description="Serve the HTTP API in front of penstock shards.",
    )
    _add_serving_flags(parser.add_argument_group("serving"))
    observing = parser.add_argument_group("metrics, logs and traces")
    add_observing_flags(
        observing,
        log_requests=True,
        log_requests_help="a line for each request, without its texts",
    )
    _add_key_flags(parser.add_argument_group("keys, and who else may call"))
    _add_fleet_flags(parser.add_argument_group("shards"))
    _add_recording_flags(parser.add_argument_group("resuming, recording and verifying answers"))
    _add_storing_flags(parser.add_argument_group("keeping responses"))
    limits = parser.add_argument_group("limits")
    _add_connection_limits(limits)
    _add_limits(limits)
    return parser


_DEFAULT = "(default: %(default)s)"


def _add_serving_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help=f"address to listen on {_DEFAULT}")
    add("--port", type=values.port, default=8000, help=f"0 takes a free one {_DEFAULT}")
    add(
        "--workers", default=1, help=f"processes that share the port {_DEFAULT}", **values.PROCESSES
    )
    add(
        "--tls-cert-file",
        "--ssl-certfile",
        metavar="FILE",
        help="serve HTTPS with this certificate, read again when it changes",
    )
    add("--tls-key-file", "--ssl-keyfile", metavar="FILE", help="and its key")
    add("--chat-template", metavar="FILE", help="a jinja file instead of the models' own")
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="take a chat_template of a request; it runs in a sandbox, in a process for such "
        "templates, for five seconds at most",
    )
    add(
        "--tool-call-parser",
        default=AUTO,
        type=values.tool_call_parser,
        metavar="NAME",
        help="how answers write calls of tools: auto goes by the chat template, none reads no "
        f"calls; {', '.join(FORMATS)} {_DEFAULT}",
    )
    add(
        "--reasoning-parser",
        default=AUTO,
        type=values.reasoning_parser,
        metavar="NAME",
        help="how they mark reasoning: auto goes by the chat template, none leaves it in the text; "
        f"{', '.join(STYLES)} {_DEFAULT}",
    )
    add(
        "--model-alias",
        dest="model_aliases",
        type=values.alias,
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="serve MODEL under NAME too, and under `default` to requests that name none; may be "
        "given several times",
    )
    add(
        "--expect-model",
        dest="expected_models",
        action="append",
        default=[],
        metavar="NAME",
        help="a model that may have no shard: requests for it get 503, or are held "
        "(--shard-wait-s), even if none was ever seen; may be given several times",
    )
    add(
        "--tokenizer-threads",
        default=2,
        help=f"threads of each worker that tokenize texts of some length {_DEFAULT}",
        **values.PROCESSES,
    )
    add(
        "--text-processes",
        default=1,
        help="processes of each worker that tokenize bodies over 64 kB, started with the first "
        f"one {_DEFAULT}",
        **values.PROCESSES,
    )
    add(
        "--no-console",
        dest="console",
        action="store_false",
        help="do not serve the console at /, nor its live data",
    )


def _add_key_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api-key",
        metavar="KEY",
        help="key that clients must send; probes need none (default: PENSTOCK_API_KEY)",
    )
    add(
        "--admin-key",
        metavar="KEY",
        help="key for /admin, which is closed without one (default: PENSTOCK_ADMIN_KEY)",
    )
    add(
        "--api-keys-file",
        metavar="FILE",
        help="keys with names, scopes, limits and expiry dates, as `penstock keys` makes them; "
        "read again when it changes (default: PENSTOCK_API_KEYS_FILE)",
    )
    add(
        "--cors-origin",
        dest="cors_origins",
        type=values.origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let pages of this origin call the API from a browser, as https://chat.example.com; "
        "* for any origin; may be given several times (default: none)",
    )


def _add_fleet_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--shards",
        required=True,
        action="append",
        metavar="WHERE[,...]",
        help="HOST:PORT of a shard, dns://NAME:PORT for all that a name resolves to, or "
        "file:///PATH of a file with a HOST:PORT a line, which is watched",
    )
    add(
        "--shard-api-key",
        metavar="KEY",
        help="key to send to shards (default: PENSTOCK_SHARD_API_KEY, or the API key)",
    )
    add(
        "--shard-tls-ca-file",
        metavar="FILE",
        help="use TLS to shards, whose certificates must come from these authorities",
    )
    add("--shard-tls-cert-file", metavar="FILE", help="client certificate, for mutual TLS")
    add("--shard-tls-key-file", metavar="FILE", help="and its key")
    add(
        "--shard-tls-server-name",
        metavar="NAME",
        help="name in the certificates of shards, if not their address: dns:// gives IP addresses",
    )
    add(
        "--shard-networks",
        type=values.networks,
        default=PRIVATE_NETWORKS,
        metavar="NETWORK[,...]",
        help="where shards may be that are added over /admin, as in 10.0.0.0/8,fd00::/8 (default: "
        "this machine and private networks); link-local addresses never",
    )
    add(
        "--policy",
        choices=tuple(POLICIES),
        default=DEFAULT_POLICY,
        help=f"which shard takes a request {_DEFAULT}",
    )
    add(
        "--stall-timeout-s",
        default=3.0,
        help="move the requests of a shard that has reported nothing for so long to others "
        f"{_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--failover-timeout-s",
        default=60.0,
        help=f"how long a request waits for a shard that can take it {_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--shard-wait-s",
        help="hold requests for a model that no shard serves for so long, as when shards are "
        "started on demand; the router counts as ready meanwhile (default: refuse them at once)",
        **values.SECONDS,
    )


def _add_recording_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--resume-key",
        metavar="KEY",
        help="signs event ids; routers with the same key can resume each other's streams "
        "(default: PENSTOCK_RESUME_KEY, or one of this router's own)",
    )
    add(
        "--resume-grace-s",
        default=10.0,
        help=f"how long a resumable stream continues without its client {_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--audit-log",
        metavar="FILE",
        help="record each sequence in this file, of several workers in FILE-worker0 and so on; "
        "see `penstock replay`",
    )
    add("--audit-prompts", action="store_true", help="record prompts too, not only their hashes")
    add("--audit-key-file", metavar="FILE", help="holds a key for its hashes, 16 to 64 bytes")
    add(
        "--verify-share",
        type=values.share,
        default=0.0,
        metavar="P",
        help=f"share of sequences to compute again on another shard and compare {_DEFAULT}",
    )


def _add_storing_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--response-store",
        default="",
        metavar="FILE",
        help="where answers of /v1/responses are kept, also after this router ends "
        "(default: in a temporary file)",
    )
    add(
        "--response-store-bytes",
        type=values.store_bytes,
        default=256 * 1024 * 1024,
        metavar="N",
        help=f"beyond this the oldest of the key that holds most are dropped {_DEFAULT}",
    )
    add(
        "--response-ttl-s",
        default=86400.0,
        help=f"how long a response is kept {_DEFAULT}",
        **values.SECONDS,
    )


def _add_connection_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-connections",
        default=16384,
        help="over all workers; beyond them 503 at once. One address gets no more than it leaves "
        f"free: alone, half of them {_DEFAULT}",
        **values.COUNT,
    )
    add(
        "--header-timeout-s",
        default=10.0,
        help="close connections that take longer for a TLS handshake, or to send a request's "
        f"headers {_DEFAULT}",
        **values.SECONDS,
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    largest = 32 * 1024 * 1024
    add("--max-body-bytes", default=largest, help=f"longer ones get 413 {_DEFAULT}", **values.COUNT)
    add(
        "--max-answer-bytes",
        default=256 * 1024 * 1024,
        help=f"size of log-probabilities and embeddings in an answer; more get 400 {_DEFAULT}",
        **values.COUNT,
    )
    add(
        "--max-concurrent-requests",
        default=2048,
        help=f"sequences in flight over all workers; more wait {_DEFAULT}",
        **values.COUNT,
    )
    add(
        "--max-queued-requests",
        help="sequences that wait for others to end, more get 429; 0: none (default: a quarter of "
        "--max-concurrent-requests)",
        **values.COUNT_OR_NONE,
    )
    add(
        "--max-queued-tokens",
        default=1_000_000,
        help=f"tokens of the prompts that wait; more get 429 {_DEFAULT}",
        **values.COUNT,
    )
    each = "the same for each API key, or each address without a known key (default: no bound)"
    add("--max-concurrent-requests-per-key", help=each, **values.COUNT)
    add("--max-queued-requests-per-key", help=each, **values.COUNT_OR_NONE)
    add("--max-queued-tokens-per-key", help=each, **values.COUNT)
    add(
        "--queue-timeout-s",
        default=10.0,
        help=f"429 after waiting so long {_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--request-timeout-s",
        type=values.request_seconds,
        metavar="S",
        help="504 for requests that take longer (default: no limit)",
    )
    add(
        "--shutdown-timeout-s",
        default=30.0,
        help=f"how long SIGTERM waits for requests in flight {_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--write-timeout-s",
        default=60.0,
        help="cut off a client that reads nothing for so long, or less than 1 kB/s for longer "
        f"{_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--keep-alive-s",
        default=15.0,
        help=f"send a comment on streams that are silent for so long {_DEFAULT}",
        **values.SECONDS,
    )
    add(
        "--silence-timeout-s",
        default=600.0,
        help="504 when shards say nothing of a request for so long, also while it waits there or "
        f"for one {_DEFAULT}",
        **values.SECONDS,
    )


# Each bound of one key, and the bound over all keys that it must not exceed.
_BOUNDS_OF_KEYS = {
    "max_concurrent_requests_per_key": "max_concurrent_requests",
    "max_queued_requests_per_key": "max_queued_requests",
    "max_queued_tokens_per_key": "max_queued_tokens",
}
# Bounds that are split between the workers: each worker needs at least one.
_PLACES = ("max_concurrent_requests", "max_concurrent_requests_per_key", "max_connections")


def _check_shares(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Each worker must get a part of every bound, and no bound of a key may exceed the total."""
    for name in _PLACES:
        value = getattr(args, name)
        if value is not None and args.workers > value:
            parser.error(
                f"--workers {args.workers}: more than {_flag(name)} ({value}), which they share "
                "out; some would serve nobody"
            )
    for name, whole in _BOUNDS_OF_KEYS.items():
        value, limit = getattr(args, name), getattr(args, whole)
        if value is not None and value > limit:
            parser.error(f"{_flag(name)} {value}: more than {_flag(whole)} ({limit})")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shards(parser: argparse.ArgumentParser, values: Sequence[str]) -> str:
    where = ",".join(values)
    try:
        parse_source(where)
    except ValueError as error:
        parser.error(f"--shards: {error}")
    return where


_SHARD_TLS = (
    *("shard_tls_ca_file", "shard_tls_cert_file", "shard_tls_key_file"),
    "shard_tls_server_name",
)


def _shard_tls(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Tls | None:
    values = [getattr(args, name) for name in _SHARD_TLS]
    if values[0] is None:
        for name in _SHARD_TLS[1:]:
            if getattr(args, name) is not None:
                parser.error(
                    f"{_flag(name)}: without --shard-tls-ca-file there is no TLS to shards"
                )
        return None
    if (args.shard_tls_cert_file is None) != (args.shard_tls_key_file is None):
        parser.error("--shard-tls-cert-file and --shard-tls-key-file: give both or neither")
    tls = Tls(*values)
    try:
        tls.check()
    except TlsFilesUnusable as error:
        parser.error(f"TLS to shards: {error}")
    return tls


def _check_tls(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check at the start that the files can be used."""
    if (args.tls_cert_file is None) != (args.tls_key_file is None):
        parser.error("--tls-cert-file and --tls-key-file: give both or neither")
    if args.tls_cert_file is None:
        return
    try:
        HttpsFiles(args.tls_cert_file, args.tls_key_file)
    except TlsFilesUnusable as error:
        parser.error(f"--tls-cert-file and --tls-key-file: {error}")


def _chat_template(parser: argparse.ArgumentParser, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Compiled here, so that a mistake in it fails the start and not each request.
        ChatTemplate({"default": text}, {})
    except TemplateUnusable as error:
        parser.error(f"--chat-template: {path}: {error}")
    except OSError as error:
        parser.error(f"--chat-template: {path}: {error.strerror}")
    except UnicodeDecodeError:
        parser.error(f"--chat-template: {path}: not UTF-8 text")
    return text


def _audit_key(parser: argparse.ArgumentParser, args: argparse.Namespace) -> bytes | None:
    path = args.audit_key_file
    if args.audit_log is None and (path is not None or args.audit_prompts):
        flag = "--audit-prompts" if path is None else "--audit-key-file"
        parser.error(f"{flag}: there is no --audit-log that it could be for")
    if path is None:
        return None
    try:
        return read_key(path)
    except OSError as error:
        parser.error(f"--audit-key-file: {path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--audit-key-file: {path}: {error}")


def _keys_file(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    path: str | None = args.api_keys_file
    if path is None:
        path = os.environ.get("PENSTOCK_API_KEYS_FILE")
    # Also an empty path: that is a mistake, and must not mean that no key is required.
    if path is not None:
        try:
            key_file_format.read(path, args.workers)
        except KeyFileError as error:
            parser.error(f"--api-keys-file {path}: {error}")
    return path


def _key(
    parser: argparse.ArgumentParser, source: str, key: str | None, variable: str = ""
) -> str | None:
    """The key that was given, or else that of the environment variable; exits if unusable."""
    if key is None and variable:
        source, key = variable, os.environ.get(variable)
    try:
        return None if key is None else usable_key(key)
    except argparse.ArgumentTypeError as error:
        parser.error(f"{source}: {error}")
