"""What the small tools' command lines have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Complains in one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def parser_for(command: str, description: str) -> argparse.ArgumentParser:
    """A parser for one `penstock` subcommand."""
    return OneLineParser(prog=f"penstock {command}", description=description)


def add_url(parser: argparse.ArgumentParser) -> None:
    """Where the router is, and the key it wants."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="address of the router (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="the router's API key (default: PENSTOCK_API_KEY)"
    )


def positive_int(text: str) -> int:
    """An argument that must be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value
