"""Upper bounds on numbers in a model's configuration. No known model comes near them, and objects
of these sizes still take little memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock_shard.errors import ModelError

# Patterns in names of counts and sizes, with an upper bound. The first matching pattern applies.
_BOUNDS = (
    (re.compile(r"vocab_size"), 2**24),
    (re.compile(r"position|length|seq_len|max_seq"), 2**28),
    (re.compile(r"layers?$|depths?$|^block_count$"), 1024),
    (re.compile(r"experts|heads?(_count)?(_kv)?$"), 2**16),
    # transformers makes a list of this length, with a name for each label.
    (re.compile(r"labels?$|_types?$|_replace$"), 2**16),
    (re.compile(r"(size|dim|dims|rank|channels|n_embd|d_model|n_inner)$"), 2**24),
)
# The bound of all other numbers, because tensors take no larger ones.
_MOST = 2**63 - 1
_SHOWN = 40


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError, with field, value and bound, for a number that no model has."""
    for name, value in _numbers(config):
        most = next((bound for pattern, bound in _BOUNDS if pattern.search(name)), _MOST)
        if abs(value) > most:
            raise ModelError(
                f"{path}: {name[:80]}: {str(value)[:_SHOWN]} is more than {most}, the most that is "
                "served"
            )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield all whole numbers with their fields' names, also from lists and objects."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif isinstance(value, int):
            yield name, value
