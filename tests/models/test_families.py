"""Greedy output equals transformers' `generate`, token for token, however steps are cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from models.driver import Driver, let_generate, load, make_sequence
from models.reference import OUTPUT_TOKENS, reference
from support.budget import in_soak

SERVED = (
    "llama",
    in_soak("qwen2"),
    "qwen3",
    "opt",
    in_soak("gemma2"),
    "gpt2",
    in_soak("mistral"),
    "gemma3",
    "gpt_oss",
    "mixtral",
    in_soak("qwen3_moe"),
)
VOCABULARY = 384


@pytest.mark.parametrize("family", SERVED)
def test_mixed_steps_give_the_tokens_of_generate(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    directory = model_dir(family)
    rng = random.Random(7)
    long, short, middle = (
        [rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (75, 5, 33)
    )
    sharing = long[:48] + middle[:7]
    prompts = [long, short, middle, sharing]
    expected = reference(directory, prompts)

    driver = Driver(load(directory))
    sequences = [make_sequence(prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
    first, second, third, fourth = sequences
    driver.step([(first, 50), (second, 5)])
    # The first request computed three full blocks of the fourth's prompt.
    driver.share_prefix(fourth, first, 3)
    driver.step([(second, 1), (first, 7), (third, 20), (fourth, 2)])
    for sequence in sequences:
        let_generate(sequence, OUTPUT_TOKENS // 2)
    driver.generate(sequences)
    driver.preempt(second)
    driver.preempt(third)
    for sequence in sequences:
        let_generate(sequence, OUTPUT_TOKENS)
    driver.generate(sequences)

    outputs = [sequence.token_ids[sequence.num_prompt_tokens :].tolist() for sequence in sequences]
    assert outputs == expected
    assert len({tuple(output) for output in expected}) == 4, "the model says the same to all"
    assert all(len(set(output)) > 3 for output in expected), "the model repeats itself"
