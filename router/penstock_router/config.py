"""Command line and environment -> one frozen `RouterConfig`. Nothing else reads either."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
    # Silence on a stream after which a comment keeps proxies from closing it.
    keep_alive_s: float = 15.0
    tokenizer_threads: int = 2
    log_level: str = "info"


def parse_config(argv: Sequence[str]) -> RouterConfig:
    """Parse a router's command line; exits with status 2 and one line on a bad value."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    api_key = args.api_key or os.environ.get("PENSTOCK_API_KEY") or None
    return RouterConfig(
        shards=_shards(parser, args.shards),
        host=args.host,
        port=args.port,
        workers=args.workers,
        api_key=api_key,
        shard_api_key=args.shard_api_key or api_key,
        chat_template=_chat_template(parser, args.chat_template),
        max_body_bytes=args.max_body_bytes,
        max_concurrent_requests=args.max_concurrent_requests,
        request_timeout_s=args.request_timeout_s,
        shutdown_timeout_s=args.shutdown_timeout_s,
        keep_alive_s=args.keep_alive_s,
        tokenizer_threads=args.tokenizer_threads,
        log_level=args.log_level,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock router",
        description="Serve the OpenAI HTTP API in front of penstock shards.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shards", required=True, action="append", metavar="HOST:PORT[,...]")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=_port, default=8000, help="0 takes a free one (default %(default)s)")
    add("--workers", type=_positive_int, default=1, help="processes that share the port")
    add("--api-key", help="asked of clients on /v1 (or PENSTOCK_API_KEY)")
    add("--shard-api-key", help="shown to shards (default: the API key)")
    add("--chat-template", metavar="FILE", help="a jinja file used instead of the model's own")
    add("--max-body-bytes", type=_positive_int, default=32 * 1024 * 1024)
    add(
        "--max-concurrent-requests",
        type=_positive_int,
        default=2048,
        help="sequences in flight over all workers; more are answered 429 (default %(default)s)",
    )
    add("--request-timeout-s", type=_positive_float, help="504 after this (default: no limit)")
    add(
        "--shutdown-timeout-s",
        type=_positive_float,
        default=30.0,
        help="how long SIGTERM waits for requests in flight (default %(default)s)",
    )
    add("--keep-alive-s", type=_positive_float, default=15.0)
    add("--tokenizer-threads", type=_positive_int, default=2)
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _shards(parser: argparse.ArgumentParser, values: Sequence[str]) -> tuple[str, ...]:
    addresses = [part.strip() for value in values for part in value.split(",") if part.strip()]
    if not addresses:
        parser.error("--shards: give at least one HOST:PORT")
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            parser.error(f"--shards: {address!r} is not HOST:PORT")
    return tuple(dict.fromkeys(addresses))


def _chat_template(parser: argparse.ArgumentParser, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        parser.error(f"--chat-template: {path}: {error.strerror}")
    except UnicodeDecodeError:
        parser.error(f"--chat-template: {path}: not UTF-8 text")


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is not a port")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value
