"""Which files hold a model's weights. Knows names and the index; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock_shard.models.errors import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The one file, else those of the index, as transformers chooses them; [] if there is neither.

    Raises ModelError for an index that cannot be read, OSError for what the system refuses.
    """
    if (directory / WEIGHTS).exists():
        return [directory / WEIGHTS]
    if not (directory / INDEX).exists():
        return []
    weight_map = read_object(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / INDEX}: names no weights")
    return [directory / name for name in sorted(set(weight_map.values()))]


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError if the file holds none, OSError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ModelError(f"{path}: is nested too deeply") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value
