"""What the command lines of routers, shards and tools share: error messages, a shard's port, the
form of a key, silencing gRPC's logs, and the flags of metrics, logs and traces. Knows argparse;
imports no gRPC, and knows nothing of what is logged or measured.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any, NoReturn

from penstock_common.logs import FORMATS
from penstock_common.trace_export import ENDPOINT_VARIABLE, TracingConfig, read_tracing

# The keys of `metric_names.SETS`, which is not imported here: that takes too long for a --help.
METRIC_NAMES = ("vllm", "tgi")

# Where a shard listens unless it is told otherwise: below the ports that systems give to outgoing
# connections (on Linux from 32768 on), any of which could be taken when a shard starts.
SHARD_PORT = 20051


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line, without the whole usage before it, and takes no shortened flag: what
    it is short for may change with every flag that is added.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def quiet_grpc() -> None:
    """To be called before gRPC is imported: by itself it writes a line for each handshake that
    fails.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def add_api_key(group: argparse._ActionsContainer, about: str) -> None:
    """--api-key; one from the environment is checked as one that is given."""
    group.add_argument(
        "--api-key",
        default=os.environ.get("PENSTOCK_API_KEY"),
        type=functools.partial(usable_key, source="a key (or PENSTOCK_API_KEY)"),
        metavar="KEY",
        help=f"{about} (default: PENSTOCK_API_KEY)",
    )


def usable_key(text: str, source: str = "a key") -> str:
    """A key that a header can carry; a wrong one is not repeated, it may be a secret.

    An empty one is a mistake: it would ask for no key at all.
    """
    if not (text and text.isascii() and text.isprintable() and text == text.strip()):
        raise argparse.ArgumentTypeError(
            f"{source} is printable ASCII, not empty, without spaces around it; "
            "leave it out to do without"
        )
    return text


def add_observing_flags(
    group: argparse._ArgumentGroup, *, log_requests: bool, log_requests_help: str
) -> None:
    """Add the flags of metrics, logs and traces that routers and shards share; `log_requests` is
    the default of that flag. `tracing_of` reads those of traces.
    """
    add = group.add_argument
    add(
        "--metrics-names",
        type=metrics_names,
        default=(),
        metavar="NAMES",
        help="show metrics under the names of other servers too: vllm, tgi or vllm,tgi",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: %(default)s)",
    )
    add(
        "--log-format",
        choices=FORMATS,
        default="auto",
        help="auto: text on a terminal, a JSON object a line elsewhere",
    )
    add(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=log_requests,
        help=log_requests_help,
    )
    add(
        "--otlp-endpoint",
        metavar="URL",
        help=f"send traces to this OpenTelemetry collector (default: {ENDPOINT_VARIABLE}, or none)",
    )


def metrics_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in METRIC_NAMES:
            known = ", ".join(METRIC_NAMES)
            raise argparse.ArgumentTypeError(f"{name[:40]!r} is none of {known}")
    return names


def tracing_of(parser: argparse.ArgumentParser, endpoint: str | None) -> TracingConfig | None:
    """Where traces go, as --otlp-endpoint and the environment say; complains, and ends, where they
    cannot.
    """
    try:
        return read_tracing(endpoint, os.environ)
    except ValueError as error:
        parser.error(str(error))
