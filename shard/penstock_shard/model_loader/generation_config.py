"""The eos ids and sampling defaults of a model, from generation_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock_proto.limits import MAX_TOP_K, SAMPLING_RANGES, Range, out_of_bounds
from penstock_shard.checkpoint.untrusted.files import read_object
from penstock_shard.errors import ModelError, first_line


def generation_defaults(
    model_dir: Path,
    stated: tuple[int, ...] | None,
    vocab_size: int,
    progress: Callable[[str], None],
) -> tuple[tuple[int, ...], dict[str, float]]:
    """Return the model's eos ids, and its default sampling values. `stated` are the eos ids of its
    configuration, or None.

    A line of `progress` names each unsupported value. Raises ModelError if the file cannot be read.
    """
    generation = _read(model_dir)
    eos_token_ids, outside = _eos_token_ids(generation, stated, vocab_size)
    if outside:
        progress(f"eos_token_id: {outside} are not in the vocabulary; left out")
    defaults, unusable = usable_defaults(_stated_sampling(generation))
    for line in unusable:
        progress(f"generation_config.json: {line}; left out")
    return eos_token_ids, defaults


def usable_defaults(stated: Mapping[str, object]) -> tuple[dict[str, float], list[str]]:
    """Return a model's default sampling values that are in bounds, and a line about each of the
    others.
    """
    usable: dict[str, float] = {}
    unusable = []
    for name, value in stated.items():
        allowed = Range(-1, MAX_TOP_K) if name == "top_k" else SAMPLING_RANGES[name]
        is_flag = isinstance(value, bool)
        if isinstance(value, int | float) and not is_flag and allowed.holds(value):
            usable[name] = value
        else:
            unusable.append(out_of_bounds(name, value, allowed))
    return usable, unusable


def _eos_token_ids(
    generation: dict[str, Any], configured: tuple[int, ...] | None, vocab_size: int
) -> tuple[tuple[int, ...], list[int]]:
    """Return eos ids from generation_config.json, else from the configuration, else (). Return
    separately the ids outside the vocabulary, because banning them would be out of range.
    """
    stated = as_ids(generation.get("eos_token_id"))
    if stated is None:
        stated = configured or ()
    usable = tuple(token_id for token_id in stated if 0 <= token_id < vocab_size)
    return usable, [token_id for token_id in stated if token_id not in usable]


def as_ids(value: Any) -> tuple[int, ...] | None:
    """Return a configuration's ids, a list or a single value; None if there are none. Raises
    ModelError for values that are not ids.
    """
    if value is None:
        return None
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    for each in ids:
        if type(each) is not int:
            raise ModelError(f"eos_token_id: {str(each)[:80]!r} is no id of a token")
    return ids


def _stated_sampling(generation: dict[str, Any]) -> dict[str, object]:
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    return {name: generation[name] for name in names if generation.get(name) is not None}


def _read(model_dir: Path) -> dict[str, Any]:
    """Raises ModelError if the file is not a JSON object."""
    path = model_dir / "generation_config.json"
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {first_line(error)}") from error
