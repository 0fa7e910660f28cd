"""Settings of trace export.

`otlp.py` is loaded only if there is an endpoint.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_common.tracing.spans import SpanSink
from penstock_common.version import how_to_install

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_TRACES_ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """The destination of spans, and the sampled share of traces begun here."""

    url: str
    share: float = 1.0


def read_tracing(endpoint: str | None, environment: Mapping[str, str]) -> TracingConfig | None:
    """Read --otlp-endpoint and OpenTelemetry's variables; None without an endpoint. Raise
    `ValueError` with one line that names the flag or the variable.
    """
    source, url = "--otlp-endpoint", endpoint
    if url is None:
        source = _TRACES_ENDPOINT_VARIABLE
        url = environment.get(source, "")
        if not url:
            source, url = ENDPOINT_VARIABLE, environment.get(ENDPOINT_VARIABLE, "")
            if not url:
                return None
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{source}: {url[:100]!r} is not http://HOST:PORT or https://HOST:PORT")
    if source != _TRACES_ENDPOINT_VARIABLE:
        url = url.rstrip("/") + "/v1/traces"
    for variable in _PROTOCOL_VARIABLES:
        if environment.get(variable, "http/protobuf") not in ("", "http/protobuf"):
            value = environment[variable][:100]
            raise ValueError(f"{variable}: {value!r} is not spoken; http/protobuf is (port 4318)")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ValueError(f"{source}: {how_to_install('otlp')}")
    return TracingConfig(url, _share(environment.get(_SHARE_VARIABLE, "")))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The module's parent package is missing.
        return False


def _share(text: str) -> float:
    try:
        share = float(text or "1")
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{_SHARE_VARIABLE}: {text[:100]!r} is not between 0 and 1")
    return share


def open_sink(config: TracingConfig, service: str) -> SpanSink:
    """OTEL_SERVICE_NAME may rename the service."""
    from penstock_common.tracing.otlp import OtlpSink

    return OtlpSink(config.url, service)
