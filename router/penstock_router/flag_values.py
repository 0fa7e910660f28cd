"""Parsers for the values of a router's flags, as argparse's `type`.

If such a function raises ValueError, argparse's message names the function; so these raise
`ArgumentTypeError` only.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from typing import Any

from penstock_client.fleet.allowed_networks import Network, parse_network
from penstock_router.request import MAX_TIMEOUT_S
from penstock_router.store.response_store import MIN_BYTES
from penstock_router.text.reasoning import AUTO, NONE, STYLES
from penstock_router.text.tool_calls.choose_format import FORMATS

# The largest count, number of processes and number of seconds (a year): larger ones overflow
# somewhere.
_MAX_COUNT = 10**15
_MAX_PROCESSES = 1024
_MIN_SECONDS, _MAX_SECONDS = 0.001, 31_536_000
_ORIGIN = re.compile(r"https?://[a-z0-9._\-\[\]:]+")


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a port")
    return int(text)


def alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (name and model):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MODEL")
    return name, model


def origin(text: str) -> str:
    """An origin as browsers write it: in lower case, and without the scheme's default port."""
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{_short(text)} is no origin: http:// or https://, a host in lower case and its port"
        )
    return text


def networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(parse_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tool_call_parser(text: str) -> str:
    return _known(text, FORMATS)


def reasoning_parser(text: str) -> str:
    return _known(text, STYLES)


def _known(text: str, names: Iterable[str]) -> str:
    """One of these names, also written with hyphens; or "auto" or "none"."""
    name, known = text.replace("-", "_"), (AUTO, NONE, *names)
    if name not in known:
        raise argparse.ArgumentTypeError(f"{_short(text)} is none of {', '.join(known)}")
    return name


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a positive integer")
    if len(text) > len(str(_MAX_COUNT)) or int(text) > _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{_short(text)} is above {_MAX_COUNT}")
    return int(text)


def positive_int(text: str) -> int:
    value = count(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def processes(text: str) -> int:
    """A number of processes or threads, up to what a machine might use."""
    value = positive_int(text)
    if value > _MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text} is above {_MAX_PROCESSES}")
    return value


def store_bytes(text: str) -> int:
    value = positive_int(text)
    if value < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is below {MIN_BYTES}")
    return value


def _number(text: str) -> float:
    """The number; NaN if the text is none."""
    try:
        # Refuse Python's own notations, such as 1_000.
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{_short(text)} is not between 0 and 1")
    return value


def seconds(text: str, at_most: int = _MAX_SECONDS) -> float:
    value = _number(text)
    if not _MIN_SECONDS <= value <= at_most:
        bounds = f"from {_MIN_SECONDS} to {at_most}"
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a number of seconds {bounds}")
    return value


def request_seconds(text: str) -> float:
    return seconds(text, MAX_TIMEOUT_S)


COUNT: dict[str, Any] = {"type": positive_int, "metavar": "N"}
COUNT_OR_NONE: dict[str, Any] = {"type": count, "metavar": "N"}
PROCESSES: dict[str, Any] = {"type": processes, "metavar": "N"}
SECONDS: dict[str, Any] = {"type": seconds, "metavar": "S"}
