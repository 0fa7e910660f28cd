"""The flags of adapters, and what their values must be. Knows argparse; knows no adapter."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from penstock_common.request_bounds import MAX_ADAPTER_NAME_CHARACTERS

_MAX_LORAS = 256
_MAX_RANK = 512


def add_adapter_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--lora",
        type=_lora,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="serve a LoRA adapter under this name: a directory or hub id; may be repeated",
    )
    group.add_argument(
        "--enable-lora",
        action="store_true",
        help="let adapters be loaded while the shard runs (default: only with --lora)",
    )
    group.add_argument(
        "--max-loras",
        type=_whole(_MAX_LORAS),
        default=8,
        metavar="N",
        help="most adapters at once, which a GPU has memory set aside for (default: %(default)s)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=_whole(_MAX_RANK),
        default=64,
        metavar="R",
        help="highest rank of an adapter (default: %(default)s)",
    )


def check_adapter_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exits with one line if the flags contradict each other."""
    names = [name for name, _ in args.lora]
    for name in names:
        if names.count(name) > 1:
            parser.error(f"--lora {name}: given twice")
        reason = name_refusal(name, args.served_model_name or [args.model or ""])
        if reason:
            parser.error(f"--lora {name[:80]}: {reason}")
    if len(names) > args.max_loras:
        parser.error(f"--lora: {len(names)} adapters are over --max-loras {args.max_loras}")


def name_refusal(name: str, model_names: Collection[str]) -> str:
    """Why an adapter cannot have this name; empty if it can."""
    if not 1 <= len(name) <= MAX_ADAPTER_NAME_CHARACTERS:
        return f"a name has 1..{MAX_ADAPTER_NAME_CHARACTERS} characters"
    if not name.isprintable() or name != name.strip():
        return "a name has no control characters, and no space around it"
    if name in model_names:
        return "the model itself has this name"
    return ""


def _lora(text: str) -> tuple[str, str]:
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise argparse.ArgumentTypeError(f"{text[:80]}: must be NAME=PATH")
    return name, source


def _whole(most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]}: must be a whole number, 1..{most}")
        return int(text)

    return read
