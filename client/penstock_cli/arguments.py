"""Arguments and HTTP requests that the small tools share."""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from penstock_client.fleet.discovery import check_address
from penstock_common.flags import OneLineParser, number
from penstock_common.shared_flags import add_api_key
from penstock_common.tls import Tls, TlsFilesUnusable

DEFAULT_URL = "http://127.0.0.1:8000"
MODEL_HELP = "model to ask (default: the only one that is served)"

positive_int = number(int, at_least=1)
# At most a day, because longer times overflow elsewhere.
seconds = number(float, above=0, at_most=86400)


def parser_for(command: str, description: str) -> argparse.ArgumentParser:
    return OneLineParser(prog=f"penstock {command}", description=description)


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        type=http_url,
        metavar="URL",
        help="address of the router (default: %(default)s)",
    )
    add_api_key(parser, "API key to send")


def add_shard_tls(parser: argparse.ArgumentParser) -> None:
    for flag, about in (
        ("--tls-ca-file", "speak TLS to shards, with certificates from these authorities"),
        ("--tls-cert-file", "certificate to show to shards that ask for one"),
        ("--tls-key-file", "private key"),
    ):
        variable = f"PENSTOCK_SHARD_{flag[2:].upper().replace('-', '_')}"
        default = os.getenv(variable) or None
        help_text = f"{about} (default: {variable})"
        parser.add_argument(flag, default=default, metavar="FILE", help=help_text)
    parser.add_argument(
        "--tls-server-name",
        default=os.getenv("PENSTOCK_SHARD_TLS_SERVER_NAME") or None,
        metavar="NAME",
        help="name in the certificates of shards, if not their address "
        "(default: PENSTOCK_SHARD_TLS_SERVER_NAME)",
    )


def shard_tls(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Tls | None:
    """Return the TLS settings, if any. Exit with an error if the files cannot be used."""
    others = (args.tls_cert_file, args.tls_key_file, args.tls_server_name)
    if args.tls_ca_file is None:
        if any(other is not None for other in others):
            parser.error("--tls-ca-file: missing; without it there is no TLS to shards")
        return None
    try:
        tls = Tls(args.tls_ca_file, *others)
        tls.check()
    except (ValueError, TlsFilesUnusable) as error:
        parser.error(f"--tls-ca-file, --tls-cert-file and --tls-key-file: {error}")
    return tls


def http_url(text: str) -> str:
    """Parse an HTTP address; drop a slash at its end."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        # The brackets or the port are invalid.
        usable = False
    if not usable or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(
            f"must be http:// or https:// and a host, as in http://127.0.0.1:8000, not {text!r}"
        )
    return text.rstrip("/")


def open_url(
    url: str, key: str | None, body: bytes | None = None, timeout_s: float | None = None
) -> Any:
    """Send a GET, or a POST with a JSON body. Raise the same errors as `urllib.request.urlopen`."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=timeout_s)


def open_directly(
    url: str | urllib.request.Request, timeout_s: float, tls: ssl.SSLContext | None = None
) -> Any:
    """Send a GET like `urllib.request.urlopen`, but bypass the environment's proxies, which do not
    lead to this machine or pod.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    return urllib.request.build_opener(*handlers).open(url, timeout=timeout_s)


def is_router(target: str) -> bool:
    return "://" in target


def shard_or_router(text: str) -> str:
    return http_url(text) if is_router(text) else shard_address(text)


def shard_address(text: str) -> str:
    try:
        return check_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
