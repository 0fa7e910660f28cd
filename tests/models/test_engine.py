"""The whole engine on real models: scheduler, blocks and runner give what `generate` gives."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from models.driver import load, make_sequence
from models.reference import OUTPUT_TOKENS, reference
from models.runners import make_runner
from models.test_families import VOCABULARY
from support.budget import in_soak

from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits

FAMILIES = ("llama", "qwen2", "qwen3", "opt", "gemma2", "gpt2")
# Much like llama, and like gpt2.
ALIKE = ("qwen2", "qwen3", "opt")


@pytest.mark.parametrize(
    ("family", "max_steps_ahead"),
    [
        ("llama", 0),
        *((family, 1) for family in FAMILIES if family not in ALIKE),
        *(in_soak(family, 1) for family in ALIKE),
        *(in_soak(family, 0) for family in FAMILIES if family != "llama"),
    ],
)
def test_chunks_decodes_prefix_hits_and_preemptions_give_the_tokens_of_generate(
    family: str, max_steps_ahead: int, model_dir: Callable[[str], Path]
) -> None:
    directory = model_dir(family)
    rng = random.Random(11)
    start = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    prompts = [
        start[: rng.choice((0, 20, 40))]
        + [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(3, 40))]
        for _ in range(8)
    ]
    expected = reference(directory, prompts)

    # Room for the longest sequence and little more, so that requests are preempted.
    loaded = load(directory, kv_blocks=16, max_model_len=120)
    info = dataclasses.replace(loaded.info, max_steps_ahead=max_steps_ahead)
    runner = make_runner(loaded.model, info)
    blocks = BlockManager.of(runner.info, 24)
    limits = SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=24)
    scheduler = create_scheduler(limits, blocks)
    engine = Engine(runner, scheduler, blocks)
    for number, prompt in enumerate(prompts):
        made = make_sequence(prompt, max_tokens=OUTPUT_TOKENS, request_id=str(number))
        engine.submit(made.request)
    sequences = scheduler.sequences
    for _ in range(3000):
        if not engine.has_work:
            break
        engine.step()
        engine.check_integrity()

    assert not engine.has_work
    assert [one.token_ids[one.num_prompt_tokens :].tolist() for one in sequences] == expected
    assert scheduler.preemptions_total > 0
    assert any(sequence.cached_tokens for sequence in sequences)
