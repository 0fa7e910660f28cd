"""Compares tokens of small models with transformers' on CPU: computed step by step, replayed from
graphs, exact.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from model_maker import make_model
from models.driver import Driver, load, make_sequence
from models.reference import OUTPUT_TOKENS, reference

from benchmarks.gpu_bench.attempts import Attempts
from benchmarks.gpu_bench.goals import Row
from penstock_shard.sequence import Sequence as Tokens

_PROMPTS = (range(5, 75), range(200, 207), range(90, 130))
_WAYS: dict[str, dict[str, bool]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
    "exact": {"enforce_eager": False, "exact": True},
}


def attempts(families: Sequence[str], device: str, folder: Path) -> Attempts:
    """Return an attempt for each model and way of computing it."""
    return {
        f"{family}, {way}": partial(_compared, family, way, device, folder)
        for family in families
        for way in _WAYS
    }


@functools.cache
def _model(family: str, folder: Path) -> tuple[Path, list[list[int]]]:
    """Make a model; return its directory and transformers' tokens."""
    directory = make_model(folder / family, family)
    return directory, reference(directory, [list(prompt) for prompt in _PROMPTS])


def _compared(family: str, way: str, device: str, folder: Path) -> Row:
    directory, expected = _model(family, folder)
    limits = {"max_num_seqs": 8, "max_model_len": 128, "kv_blocks": 200}
    runner = load(directory, device=device, **limits, **_WAYS[way])
    driver = Driver(runner)
    alone = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in _PROMPTS]
    driver.generate(alone)
    together = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in _PROMPTS]
    _decode_together(driver, together)
    graphs = getattr(runner.model, "num_graphs", 0)
    row: Row = {"graphs": graphs, "backend": runner.info.attention_backend}
    wrong = [
        *_differences("in mixed steps", alone, expected),
        *_differences("together", together, expected),
        *(["no graphs"] if device == "cuda" and way != "eager" and not graphs else []),
        *(["not batch invariant"] if way == "exact" and not runner.info.batch_invariant else []),
    ]
    return {**row, "failed": "; ".join(wrong)} if wrong else {**row, "found": "equal tokens"}


def _decode_together(driver: Driver, sequences: Sequence[Tokens]) -> None:
    """Compute whole prompts, then decode all rows in each step, as with graphs."""
    for sequence in sequences:
        driver.step([(sequence, sequence.num_prompt_tokens)])
    while sequences[0].num_output_tokens < OUTPUT_TOKENS:
        driver.step([(sequence, 1) for sequence in sequences])


def _differences(
    how: str, sequences: Sequence[Tokens], expected: Sequence[Sequence[int]]
) -> list[str]:
    pairs = [
        pair
        for sequence, tokens in zip(sequences, expected, strict=True)
        for pair in zip(sequence.token_ids[sequence.num_prompt_tokens :], tokens, strict=True)
    ]
    same = sum(ours == theirs for ours, theirs in pairs)
    return [] if same == len(pairs) else [f"{how} {same} of {len(pairs)} tokens are equal"]
