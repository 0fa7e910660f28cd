"""What the command lines of routers, shards and tools have in common: how they complain, and the
flags that say what a server tells of itself. Knows argparse; nothing of what is told.
"""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from penstock_proto.logs import FORMATS
from penstock_proto.trace_export import ENDPOINT_VARIABLE, TracingConfig, read_tracing

# Of `metric_names.SETS`, which is not imported here: it takes too long for a --help.
METRIC_NAMES = ("vllm", "tgi")


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_observing_flags(
    group: argparse._ArgumentGroup, *, log_requests: bool, log_requests_help: str
) -> None:
    """Those of metrics, logs and traces that routers and shards share; `log_requests` is the
    default. `tracing_of` reads the last.
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
