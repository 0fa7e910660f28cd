"""The runner on a CUDA device says what it says on cpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_request
from models.test_families import OUTPUT_TOKENS, reference

from penstock_shard.request import SamplingParams
from penstock_shard.runner.sampler import SampleRow, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "opt"])
def test_greedy_output_on_cuda_equals_generate(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    prompts = [list(range(5, 75)), list(range(200, 207)), list(range(90, 130))]
    runner = load(model_dir(family), device="cuda", dtype="float32", kv_blocks=None)
    requests = [make_request(prompt, max_tokens=OUTPUT_TOKENS) for prompt in prompts]
    Driver(runner).generate(requests)
    outputs = [request.token_ids[request.num_prompt_tokens :] for request in requests]
    assert outputs == reference(model_dir(family), prompts)


def test_tokens_drawn_on_cuda_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0)).cuda() * 2
    choices = [{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.05}, {"temperature": 0.3}]
    rows = [
        SampleRow(SamplingParams(seed=i, **choices[i % len(choices)]), 3)  # type: ignore[arg-type]
        for i in range(64)
    ]
    together = [result.token_id for result in sample(logits, rows)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0].token_id for i in range(64)]
    assert together == alone
