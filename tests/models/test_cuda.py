"""The runner on a CUDA device says what it says on cpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.driver import Driver, load, make_request
from models.sampling_reference import KINDS, OUTPUT, PROMPT, sampling_request
from models.test_families import OUTPUT_TOKENS, reference

from penstock_shard.runner.sampler import Sampler, SampleRow

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
    kinds = list(KINDS.values())
    rows = [
        SampleRow(sampling_request(PROMPT, OUTPUT, **{**kinds[i % len(kinds)], "seed": i}), 6)
        for i in range(64)
    ]
    together = Sampler().sample(logits, rows)
    alone = [Sampler().sample(logits[i : i + 1], [rows[i]])[0] for i in range(64)]
    assert [result.token_id for result in together] == [result.token_id for result in alone]
    on_cpu = Sampler().sample(logits.cpu(), rows)
    same = sum(a.token_id == b.token_id for a, b in zip(together, on_cpu, strict=True))
    # The exponential may differ in its last bit.
    assert same >= 62
