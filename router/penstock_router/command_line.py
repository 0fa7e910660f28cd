"""Command line and environment -> one frozen `RouterConfig`. Nothing else reads either."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from penstock_client.audit import read_key
from penstock_client.membership import parse_source
from penstock_client.policies import DEFAULT_POLICY, POLICIES
from penstock_router.chat_template import ChatTemplate, TemplateUnusable
from penstock_router.config import RouterConfig
from penstock_router.request import MAX_TIMEOUT_S
from penstock_router.response_store import MIN_BYTES

_REPORTS_EVERY_S = 1.0
# Of numbers that count, of processes and of seconds (a year): beyond, something overflows.
_MAX_COUNT = 10**15
_MAX_PROCESSES = 1024
_MIN_SECONDS, _MAX_SECONDS = 0.001, 31_536_000


def parse_config(argv: Sequence[str]) -> RouterConfig:
    """Parse a router's command line; exits with status 2 and one line on a bad value."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    api_key = _key(parser, "--api-key", args.api_key, "PENSTOCK_API_KEY")
    resume_key = _key(parser, "--resume-key", args.resume_key, "PENSTOCK_RESUME_KEY")
    _key(parser, "--shard-api-key", args.shard_api_key)
    _key(parser, "--admin-key", args.admin_key)
    if args.max_queued_requests is None:
        # So nobody waits for longer than a quarter of what an answer takes, on average.
        args.max_queued_requests = math.ceil(args.max_concurrent_requests / 4)
    _check_shares(parser, args)
    if args.stall_timeout_s <= _REPORTS_EVERY_S:
        parser.error(
            f"--stall-timeout-s {args.stall_timeout_s:g}: must be above {_REPORTS_EVERY_S:g}, "
            "as a shard with nothing to do says so once a second"
        )
    # Each flag is named as its field.
    given = vars(args) | {
        "shards": _shards(parser, args.shards),
        "api_key": api_key,
        "shard_api_key": api_key if args.shard_api_key is None else args.shard_api_key,
        "resume_key": resume_key or "",
        "audit_key": _audit_key(parser, args),
        "chat_template": _chat_template(parser, args.chat_template),
        "model_aliases": tuple(args.model_aliases),
    }
    del given["audit_key_file"]
    return RouterConfig(**given)


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock router",
        description="Serve the HTTP API in front of penstock shards.",
        allow_abbrev=False,
    )
    _add_serving_flags(parser.add_argument_group("serving"))
    _add_fleet_flags(parser.add_argument_group("shards"))
    _add_recording_flags(parser.add_argument_group("resuming, recording and verifying answers"))
    _add_storing_flags(parser.add_argument_group("keeping responses"))
    _add_limits(parser.add_argument_group("limits"))
    return parser


_DEFAULT = "(default: %(default)s)"


def _add_serving_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help=f"address to listen on {_DEFAULT}")
    add("--port", type=_port, default=8000, help=f"0 takes a free one {_DEFAULT}")
    add("--workers", default=1, help=f"processes that share the port {_DEFAULT}", **_PROCESSES)
    add(
        "--api-key",
        metavar="KEY",
        help="asked of clients, not of probes (default: PENSTOCK_API_KEY)",
    )
    add("--admin-key", metavar="KEY", help="asked of callers of /admin, closed without one")
    add("--chat-template", metavar="FILE", help="a jinja file instead of the models' own")
    add(
        "--trust-request-chat-template",
        action="store_true",
        help="take a chat_template of a request; it runs in a sandbox, in a text process, for a "
        "minute at most",
    )
    add(
        "--model-alias",
        dest="model_aliases",
        type=_alias,
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="serve MODEL under NAME too, and under `default` to requests that name none; may be "
        "given several times",
    )
    add(
        "--tokenizer-threads",
        default=2,
        help=f"for texts of some length {_DEFAULT}",
        **_PROCESSES,
    )
    add(
        "--text-processes",
        default=1,
        help=f"of each worker, for bodies over 64 kB; started when the first one comes {_DEFAULT}",
        **_PROCESSES,
    )
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="info", help=_DEFAULT)


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
    add("--shard-api-key", metavar="KEY", help="shown to shards (default: the API key)")
    add(
        "--policy",
        choices=tuple(POLICIES),
        default=DEFAULT_POLICY,
        help=f"which shard takes a request {_DEFAULT}",
    )
    add(
        "--stall-timeout-s",
        default=3.0,
        help=f"a shard that is silent for so long hangs: its requests go on elsewhere {_DEFAULT}",
        **_SECONDS,
    )
    add(
        "--failover-timeout-s",
        default=60.0,
        help=f"how long a request waits for a shard that can take it {_DEFAULT}",
        **_SECONDS,
    )


def _add_recording_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--resume-key",
        metavar="KEY",
        help="signs event ids; routers with the same take up each other's streams "
        "(default: PENSTOCK_RESUME_KEY, or one of this router's own)",
    )
    add(
        "--resume-grace-s",
        default=10.0,
        help=f"how long a resumable stream goes on without its client {_DEFAULT}",
        **_SECONDS,
    )
    add(
        "--audit-log",
        metavar="FILE",
        help="record each sequence there, of several workers each in FILE-worker0 and so on; see "
        "`penstock replay`",
    )
    add("--audit-prompts", action="store_true", help="record prompts too, not only their hashes")
    add("--audit-key-file", metavar="FILE", help="holds a key for its hashes, 16 to 64 bytes")
    add(
        "--verify-share",
        type=_share,
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
        help="where answers of /v1/responses are kept, also beyond this router's end "
        "(default: in a temporary file)",
    )
    add(
        "--response-store-bytes",
        type=_store_bytes,
        default=256 * 1024 * 1024,
        metavar="N",
        help=f"the oldest are dropped beyond this {_DEFAULT}",
    )
    add(
        "--response-ttl-s",
        default=86400.0,
        help=f"how long a response is kept {_DEFAULT}",
        **_SECONDS,
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    largest = 32 * 1024 * 1024
    add("--max-body-bytes", default=largest, help=f"longer ones get 413 {_DEFAULT}", **_COUNT)
    add(
        "--max-answer-bytes",
        default=256 * 1024 * 1024,
        help=f"of log-probabilities and embeddings in an answer, roughly; more get 400 {_DEFAULT}",
        **_COUNT,
    )
    add(
        "--max-concurrent-requests",
        default=2048,
        help=f"sequences in flight over all workers; more wait {_DEFAULT}",
        **_COUNT,
    )
    add(
        "--max-queued-requests",
        help="sequences that wait for others to end, more get 429; 0: none (default: a quarter of "
        "--max-concurrent-requests)",
        **_COUNT_OR_NONE,
    )
    add(
        "--max-queued-tokens",
        default=1_000_000,
        help=f"tokens of the prompts that wait; more get 429 {_DEFAULT}",
        **_COUNT,
    )
    none = "(default: no bound of its own)"
    add("--max-concurrent-requests-per-key", help=f"of each client's key {none}", **_COUNT)
    add("--max-queued-requests-per-key", help=f"of each client's key {none}", **_COUNT_OR_NONE)
    add("--max-queued-tokens-per-key", help=f"of each client's key {none}", **_COUNT)
    add("--queue-timeout-s", default=10.0, help=f"429 after waiting so long {_DEFAULT}", **_SECONDS)
    add(
        "--request-timeout-s",
        type=_request_seconds,
        metavar="S",
        help="504 so long after its arrival (default: no limit)",
    )
    add(
        "--shutdown-timeout-s",
        default=30.0,
        help=f"how long SIGTERM waits for requests in flight {_DEFAULT}",
        **_SECONDS,
    )
    add(
        "--write-timeout-s",
        default=60.0,
        help=f"cut off a client that reads nothing for so long {_DEFAULT}",
        **_SECONDS,
    )
    add(
        "--keep-alive-s",
        default=15.0,
        help=f"a comment on streams that are silent for so long {_DEFAULT}",
        **_SECONDS,
    )
    add(
        "--silence-timeout-s",
        default=600.0,
        help="504 when shards say nothing of a request for so long, also while it waits there or "
        f"for one {_DEFAULT}",
        **_SECONDS,
    )


# Each bound of a key, and the one over all keys.
_BOUNDS_OF_KEYS = {
    "max_concurrent_requests_per_key": "max_concurrent_requests",
    "max_queued_requests_per_key": "max_queued_requests",
    "max_queued_tokens_per_key": "max_queued_tokens",
}
# Of which each worker needs one.
_PLACES = ("max_concurrent_requests", "max_concurrent_requests_per_key")


def _check_shares(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Workers share bounds out, and a key's are parts of those over all."""
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


def _chat_template(parser: argparse.ArgumentParser, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
        # Here, so that a mistake in it ends the start and not each request.
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


def _key(
    parser: argparse.ArgumentParser, source: str, key: str | None, variable: str = ""
) -> str | None:
    """A key that a header can carry, given or else of a variable of the environment.

    An empty one is a mistake: it would ask for no key at all.
    """
    if key is None and variable:
        source, key = variable, os.environ.get(variable)
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        parser.error(
            f"{source}: a key is printable ASCII, not empty, without spaces around it; "
            "leave it out to serve without"
        )
    return key


# argparse names the function when it lets a ValueError through, so these let none through.


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a port")
    return int(text)


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (name and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MODEL")
    return name, model


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a positive integer")
    if len(text) > len(str(_MAX_COUNT)) or int(text) > _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{_short(text)} is above {_MAX_COUNT}")
    return int(text)


def _positive_int(text: str) -> int:
    value = _count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _processes(text: str) -> int:
    """Also threads: as many as a machine might have use for."""
    value = _positive_int(text)
    if value > _MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text} is above {_MAX_PROCESSES}")
    return value


def _store_bytes(text: str) -> int:
    value = _positive_int(text)
    if value < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is below {MIN_BYTES}")
    return value


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        # Python's own ways to write one are not a command line's.
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{_short(text)} is not between 0 and 1")
    return value


def _seconds(text: str, at_most: int = _MAX_SECONDS) -> float:
    value = _number(text)
    if not _MIN_SECONDS <= value <= at_most:
        bounds = f"from {_MIN_SECONDS} to {at_most}"
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a number of seconds {bounds}")
    return value


def _request_seconds(text: str) -> float:
    return _seconds(text, MAX_TIMEOUT_S)


_COUNT: dict[str, Any] = {"type": _positive_int, "metavar": "N"}
_COUNT_OR_NONE: dict[str, Any] = {"type": _count, "metavar": "N"}
_PROCESSES: dict[str, Any] = {"type": _processes, "metavar": "N"}
_SECONDS: dict[str, Any] = {"type": _seconds, "metavar": "S"}
