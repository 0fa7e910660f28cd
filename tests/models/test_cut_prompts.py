"""Wherever a prompt is cut, what follows it has the same bits, also where layers have states, and
whatever is beside it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.driver import Driver, load, make_sequence
from models.runners import make_runner
from models.tiny_families import VOCABULARY, make_family
from support.budget import budget, in_soak, seeded

from penstock_proto.types import EngineSampling
from penstock_shard.kernels.cpu import load_kernels
from penstock_shard.selfcheck.random_steps import Row, random_steps

PROMPT = random.Random(3).choices(range(3, VOCABULARY), k=70)
OUTPUT_TOKENS = 4


# Three layers of four have a state; all have; all have, and attend too.
@pytest.mark.usefixtures("whole_check")
@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", in_soak("falcon_h1")])
def test_a_prompt_may_be_cut_after_each_of_its_tokens(family: str, tmp_path: Path) -> None:
    loaded = load(make_family(tmp_path, family), max_model_len=128)
    assert loaded.info.batch_invariant

    def outputs(*counts: int) -> list[Any]:
        driver = Driver(make_runner(loaded.model, loaded.info))
        sampling = EngineSampling(temperature=1.0, seed=3)
        sequence = make_sequence(PROMPT, sampling, logprobs=3, max_tokens=OUTPUT_TOKENS)
        steps = [*counts, *[1] * (OUTPUT_TOKENS - 1)]
        results = [driver.step([(sequence, count)])[0] for count in steps][len(counts) - 1 :]
        return [(result.token_id, result.logprobs) for result in results]

    whole = outputs(len(PROMPT))
    assert len({token for token, _ in whole}) > 1
    for cut in range(1, len(PROMPT), budget(3, 1)):
        assert outputs(cut, len(PROMPT) - cut) == whole, f"cut after {cut} tokens"


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt", "mixtral"])
def test_any_cut_among_any_others_gives_the_same_bits(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    rng = seeded(f"cuts of {family}")
    runner = load(model_dir(family), dtype="auto")
    with random_steps(runner.model, runner.info.vocab_size, 16, 64, torch.float16) as steps:
        watched = steps.sequence(60)
        others = [steps.sequence(rng.randint(1, 100)) for _ in range(8)]
        expected = steps.run([(watched, 0, 60)])
        for _ in range(budget(4, 100)):
            start = 0
            while start < 60:
                count = rng.randint(1, 60 - start)
                rows: list[Row] = [
                    (other, 0, rng.randint(1, len(other.token_ids)))
                    for other in rng.sample(others, rng.randint(0, 8))
                ]
                place = rng.randint(0, len(rows))
                first = sum(row[2] for row in rows[:place])
                rows.insert(place, (watched, start, count))
                load_kernels().set_threads(rng.randint(1, 3))
                found = steps.run(rows)[first : first + count]
                assert torch.equal(found, expected[start : start + count])
                start += count
