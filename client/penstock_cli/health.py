"""`penstock health`: checks a shard or router once, for probes. Exit status 0 means healthy."""

from __future__ import annotations

import http.client
import os
import urllib.error
from collections.abc import Sequence

from penstock_cli.arguments import (
    add_shard_tls,
    is_router,
    open_directly,
    parser_for,
    seconds,
    shard_or_router,
    shard_tls,
)
from penstock_cli.router_errors import ASK_AS_ROUTER, message_of, no_answer
from penstock_common.logs import escape
from penstock_common.tls import Tls

# The messages are encoded by hand, to save the router's image a dependency. An empty request asks
# for the whole server; SERVING is field 1 with value 1.
_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
# Request for the service `live`, which is SERVING while the server answers.
_LIVE = b"\x0a\x04live"

# Limit for reading an error's body, because any server may answer.
_MAX_TOLD_BYTES = 4096


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("health", "Ask a shard or a router whether it is healthy, and exit 0 or 1.")
    parser.add_argument(
        "target",
        nargs="?",
        default=f"http://127.0.0.1:{os.getenv('PORT', '8000')}",
        type=shard_or_router,
        metavar="TARGET",
        help="HOST:PORT of a shard, or the http:// address of a router (default: a router on this "
        "machine, at the port that PORT names, or 8000)",
    )
    parser.add_argument(
        "--live", action="store_true", help="ask if alive, not ready: also in load, drain, restart"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=2.0,
        metavar="S",
        help="seconds to wait for an answer (default: %(default)g)",
    )
    add_shard_tls(parser)
    args = parser.parse_args(arguments)
    if is_router(args.target):
        path = "/live" if args.live else "/health"
        problem = _router_problem(args.target + path, args.timeout)
    else:
        tls = shard_tls(parser, args)
        problem = shard_problem(args.target, args.timeout, tls, live=args.live)
    print(escape(f"{args.target}: {problem or 'healthy'}"))
    return 1 if problem else 0


def _router_problem(url: str, timeout_s: float) -> str:
    """Return the problem; "" if healthy."""
    try:
        with open_directly(url, timeout_s):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            message = message_of(error.read(_MAX_TOLD_BYTES))
            return f"answers {error.code}: {message}" if message else f"answers {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"no answer ({no_answer(error, url)})"


def shard_problem(
    address: str, timeout_s: float, tls: Tls | None = None, *, live: bool = False
) -> str:
    """Return the problem; "" if healthy."""
    import grpc

    from penstock_proto.transport import SPEAKS_HTTP, Connector, explain

    connector = Connector(tls)
    with connector.open(address, connector.credentials()) as channel:
        try:
            check = channel.unary_unary(_CHECK, bytes, bytes)
            answer = check(_LIVE if live else b"", timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"no answer in {timeout_s:g} s"
            details = error.details() or ""
            known = explain(details)
            if known == SPEAKS_HTTP:
                known = ASK_AS_ROUTER + address
            return f"no answer ({error.code().name if known == details else known})"
    return "" if answer == _SERVING else "not serving"
