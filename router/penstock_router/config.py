"""Command line and environment -> one frozen `RouterConfig`. Nothing else reads either."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock_router.chat_template import ChatTemplate, TemplateUnusable


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router is told at its start."""

    shards: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1

    # Asked of clients as a Bearer key on /v1, when set.
    api_key: str | None = None
    # Shown to the shards.
    shard_api_key: str | None = None

    # The text of --chat-template's file; takes precedence over the model's own.
    chat_template: str | None = None

    max_body_bytes: int = 32 * 1024 * 1024
    # Counts sequences: a request with n=4 is four. Holds over all workers.
    max_concurrent_requests: int = 2048
    request_timeout_s: float | None = None
    shutdown_timeout_s: float = 30.0
    # A client that takes nothing for so long is cut off.
    write_timeout_s: float = 60.0
    # Silence on a stream after which a comment keeps proxies from closing it.
    keep_alive_s: float = 15.0
    tokenizer_threads: int = 2
    log_level: str = "info"


def parse_config(argv: Sequence[str]) -> RouterConfig:
    """Parse a router's command line; exits with status 2 and one line on a bad value."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    _key(parser, "--api-key", args.api_key)
    _key(parser, "--shard-api-key", args.shard_api_key)
    api_key = args.api_key
    if api_key is None:
        api_key = _key(parser, "PENSTOCK_API_KEY", os.environ.get("PENSTOCK_API_KEY"))
    if args.workers > args.max_concurrent_requests:
        parser.error(
            f"--workers {args.workers}: more than --max-concurrent-requests "
            f"({args.max_concurrent_requests}), which they share out; some would serve nobody"
        )
    return RouterConfig(
        shards=_shards(parser, args.shards),
        host=args.host,
        port=args.port,
        workers=args.workers,
        api_key=api_key,
        shard_api_key=api_key if args.shard_api_key is None else args.shard_api_key,
        chat_template=_chat_template(parser, args.chat_template),
        max_body_bytes=args.max_body_bytes,
        max_concurrent_requests=args.max_concurrent_requests,
        request_timeout_s=args.request_timeout_s,
        shutdown_timeout_s=args.shutdown_timeout_s,
        write_timeout_s=args.write_timeout_s,
        keep_alive_s=args.keep_alive_s,
        tokenizer_threads=args.tokenizer_threads,
        log_level=args.log_level,
    )


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock router",
        description="Serve the OpenAI HTTP API in front of penstock shards.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    count: dict[str, Any] = {"type": _positive_int, "metavar": "N"}
    seconds: dict[str, Any] = {"type": _positive_float, "metavar": "S"}
    default = "(default: %(default)s)"
    add("--shards", required=True, action="append", metavar="HOST:PORT[,...]", help="who computes")
    add("--host", default="127.0.0.1", help=f"address to listen on {default}")
    add("--port", type=_port, default=8000, help=f"0 takes a free one {default}")
    add("--workers", default=1, help=f"processes that share the port {default}", **count)
    add("--api-key", metavar="KEY", help="asked of clients on /v1 (default: PENSTOCK_API_KEY)")
    add("--shard-api-key", metavar="KEY", help="shown to shards (default: the API key)")
    add("--chat-template", metavar="FILE", help="a jinja file instead of the models' own")
    add(
        "--max-body-bytes", default=32 * 1024 * 1024, help=f"longer ones get 413 {default}", **count
    )
    add(
        "--max-concurrent-requests",
        default=2048,
        help=f"sequences in flight over all workers; more get 429 {default}",
        **count,
    )
    add("--request-timeout-s", help="504 after this (default: no limit)", **seconds)
    add(
        "--shutdown-timeout-s",
        default=30.0,
        help=f"how long SIGTERM waits for requests in flight {default}",
        **seconds,
    )
    add(
        "--write-timeout-s",
        default=60.0,
        help=f"cut off a client that reads nothing for so long {default}",
        **seconds,
    )
    add(
        "--keep-alive-s",
        default=15.0,
        help=f"a comment on streams that are silent for so long {default}",
        **seconds,
    )
    add("--tokenizer-threads", default=2, help=f"for texts of some length {default}", **count)
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=default)
    return parser


def _shards(parser: argparse.ArgumentParser, values: Sequence[str]) -> tuple[str, ...]:
    addresses = [part.strip() for value in values for part in value.split(",") if part.strip()]
    if not addresses:
        parser.error("--shards: give at least one HOST:PORT")
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            parser.error(f"--shards: {address!r} is not HOST:PORT")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            parser.error(f"--shards: {address!r} is not HOST:PORT; write IPv6 as [::1]:50051")
    return tuple(dict.fromkeys(addresses))


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


def _key(parser: argparse.ArgumentParser, source: str, key: str | None) -> str | None:
    """A key that a header can carry. An empty one is a mistake: it would ask for no key at all."""
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        parser.error(
            f"{source}: a key is printable ASCII, not empty, without spaces around it; "
            "leave it out to serve without"
        )
    return key


# argparse names the function when it lets a ValueError through, so these let none through.


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _positive_int(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
