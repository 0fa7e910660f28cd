"""Bounds of the numbers in a model's configuration: far beyond every model, and near enough that
whatever is made of so many takes no memory of note before weights are looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock_shard.errors import ModelError

# What the names of counts and sizes have in them, and the most that is served; the first that fits.
_BOUNDS = (
    (re.compile(r"vocab_size"), 2**24),
    (re.compile(r"position|length|seq_len|max_seq"), 2**28),
    (re.compile(r"layers?$|depths?$|^block_count$"), 1024),
    (re.compile(r"experts|heads?(_count)?(_kv)?$"), 2**16),
    # Of these transformers makes lists, with a name for each label.
    (re.compile(r"labels?$|_types?$|_replace$"), 2**16),
    (re.compile(r"(size|dim|dims|rank|channels|n_embd|d_model|n_inner)$"), 2**24),
)
# Whatever else is a number; more is none that tensors take.
_MOST = 2**63 - 1
_SHOWN = 40


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError, naming field, value and bound, for a number that is no model's."""
    for name, value in _numbers(config):
        most = next((bound for pattern, bound in _BOUNDS if pattern.search(name)), _MOST)
        if abs(value) > most:
            raise ModelError(
                f"{path}: {name[:80]}: {str(value)[:_SHOWN]} is more than {most}, the most that is "
                "served"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All whole numbers with the names of their fields, also those within lists and objects."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif isinstance(value, int):
            yield name, value
