"""Flags that routers, shards and tools share. Imports no gRPC, logging or metrics."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from penstock_common.flags import OneLineParser, first_set, flag, one_of, usable_key
from penstock_common.logs import FORMATS
from penstock_common.tracing.trace_export import ENDPOINT_VARIABLE, TracingConfig, read_tracing

# The keys of `metric_aliases.SETS`, which takes too long to import for a --help.
METRIC_NAMES = ("vllm", "tgi")

# Outgoing connections use higher ports (on Linux from 32768 on), so they cannot have taken this
# port when a shard starts.
SHARD_PORT = 20051


# The model that ships with the package.
TOY = "penstock-toy"
_CACHED = "models--"

# Exit status for unusable arguments: restarting would not help.
USAGE_STATUS = 2


def quiet_grpc() -> None:
    """Call this before gRPC is imported, or it writes a line for each failed handshake."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def model_name(model: str | None) -> str:
    """Return the name that requests use for --model: the last part of a path, or the hub id."""
    if not model:
        return TOY
    if not (model.startswith(("/", ".", "~")) or os.path.exists(model)):
        return model
    path = PurePath(os.path.abspath(os.path.expanduser(model)))
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith(_CACHED):
        # The path is a commit in the hub's cache.
        return repository.removeprefix(_CACHED).replace("--", "/")
    return path.name.removesuffix(".gguf") or model


def key(
    variables: str | Sequence[str], help: str, *, default: str | None = None, group: str = ""
) -> Any:
    """Declare a flag for a key that an environment variable may give too."""
    variables = (variables,) if isinstance(variables, str) else variables
    return flag(
        default,
        help if "default" in help else f"{help} (default: {' or '.join(variables)})",
        group=group,
        metavar="KEY",
        read=usable_key,
        variables=variables,
        secret=True,
    )


# Variables for a router's key and for the shards' key, which may be the same.
API_KEY = ("PENSTOCK_API_KEY",)
SHARD_API_KEY = ("PENSTOCK_SHARD_API_KEY", *API_KEY)


def add_api_key(
    group: argparse._ActionsContainer, about: str, variables: Sequence[str] = API_KEY
) -> None:
    """Add --api-key to a tool; a key from the environment is checked too."""
    named = " or ".join(variables)
    group.add_argument(
        "--api-key",
        default=os.environ.get(first_set(variables) or ""),
        type=functools.partial(usable_key, source=f"a key (or {named})"),
        metavar="KEY",
        help=f"{about} (default: {named})",
    )


def _metrics_names(text: str) -> tuple[str, ...]:
    return tuple(map(one_of(METRIC_NAMES), (name.strip() for name in text.split(","))))


# Larger numbers would overflow. The limit of seconds is a year.
processes = functools.partial(flag, at_least=1, at_most=1024)
seconds = functools.partial(flag, at_least=0.001, at_most=31_536_000)

SERVING = "serving"


# Without slots, because only one of several base classes may have them.
@dataclass(frozen=True, kw_only=True)
class ListeningConfig:
    """Flags for a router's address and shutdown, which `penstock serve` passes on to its router."""

    host: str = flag("127.0.0.1", "address to listen on", group=SERVING)
    port: int = flag(8000, "port; 0: any free", at_least=0, at_most=65535)
    workers: int = processes(1, "processes that share the port")
    tls_cert_file: str | None = flag(
        None,
        "serve HTTPS with this certificate, read again when it changes",
        alias="--ssl-certfile",
    )
    tls_key_file: str | None = flag(None, "private key", alias="--ssl-keyfile")
    shutdown_timeout_s: float = seconds(30.0, "wait for requests in flight after SIGTERM")


OBSERVING = "metrics, logs and traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservingConfig:
    metrics_names: tuple[str, ...] = flag(
        (),
        "show metrics under the names of other servers too: vllm, tgi or vllm,tgi",
        group=OBSERVING,
        metavar="NAMES",
        read=_metrics_names,
    )
    log_level: str = flag(
        "info", "omit lines of lower levels", choices=("debug", "info", "warning", "error")
    )
    log_format: str = flag(
        "auto", "auto: text on a terminal, a JSON object a line elsewhere", choices=FORMATS
    )
    otlp_endpoint: str | None = flag(
        None,
        f"send traces to this OpenTelemetry collector (default: {ENDPOINT_VARIABLE}, or none)",
        metavar="URL",
    )
    # From --otlp-endpoint and OpenTelemetry's variables.
    tracing: TracingConfig | None = None


def tracing_of(parser: OneLineParser, endpoint: str | None) -> TracingConfig | None:
    """Read --otlp-endpoint and the environment. Exit with an error if the destination is
    unusable.
    """
    try:
        return read_tracing(endpoint, os.environ)
    except ValueError as error:
        parser.error(str(error))
