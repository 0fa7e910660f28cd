"""The amount that a random test tries, and its seed. The seed is printed and can be given."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest


def budget(small: int, full: int) -> int:
    """Return `small` in `make test`, `full` in `make soak`."""
    return full if os.environ.get("PENSTOCK_SOAK") else small


def in_soak(*values: Any) -> Any:
    """Return parameters of a test that runs in `make soak` only."""
    return pytest.param(*values, marks=pytest.mark.soak)


def seeded(name: str) -> random.Random:
    """Return a random generator and print its seed. PENSTOCK_SEED repeats a run."""
    seed = int(os.environ.get("PENSTOCK_SEED") or random.randrange(2**32))
    print(f"{name}: PENSTOCK_SEED={seed}")
    return random.Random(seed)
