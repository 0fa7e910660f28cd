"""Parsers of router flags, as argparse's `type`. They raise `ArgumentTypeError`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from penstock_client.fleet.allowed_networks import Network, parse_network
from penstock_common.flags import one_of, short
from penstock_router.text.chat_template import ChatTemplate, TemplateUnusable
from penstock_router.text.formats.registry import CHANNELS, FORMATS
from penstock_router.text.reasoning import AUTO, NONE, STYLES

_DOMAIN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f]*:[0-9a-f:.]*")
_ORIGIN = re.compile(r"https?://[a-z0-9._\-\[\]:]+")


def alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (name and model):
        raise argparse.ArgumentTypeError(f"must be NAME=MODEL, not {short(text)}")
    return name, model


def origin(text: str) -> str:
    """Check an origin in the form that browsers send: lower case, without the scheme's default
    port.
    """
    if text != "*" and not _ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{short(text)} is no origin: http:// or https://, a host in lower case and its port"
        )
    return text


def media_domains(text: str) -> tuple[str, ...]:
    """Parse host names; `*.HOST` means all hosts below HOST."""
    domains = tuple(part.strip().lower() for part in text.split(","))
    for domain in domains:
        if not _DOMAIN.fullmatch(domain):
            raise argparse.ArgumentTypeError(
                f"{short(domain)} is no host such as images.example.com or *.example.com, "
                "without scheme and port"
            )
    return domains


def networks(text: str) -> tuple[Network, ...]:
    try:
        return tuple(parse_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tool_call_parser(text: str) -> str:
    """Accept names with hyphens too, because other servers use them."""
    return one_of((AUTO, NONE, *FORMATS))(text.replace("-", "_"))


def reasoning_parser(text: str) -> str:
    return one_of((AUTO, NONE, *STYLES, *CHANNELS))(text.replace("-", "_"))


def chat_template(path: str) -> str:
    """Read a template file, and compile it: an error must stop the start, not fail each request."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ChatTemplate({"default": text}, {})
    except TemplateUnusable as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{path}: not UTF-8 text") from None
    return text
