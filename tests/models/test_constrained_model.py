"""Constraints beside a real model: what a mask leaves is drawn as ever, wherever it runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from models.driver import load
from support.budget import budget, seeded
from support.constrained import (
    BUILTIN,
    ConstrainedEngine,
    compiler,
    constrained,
    text,
    tokenizer,
    tokens,
)

from penstock_shard.constraints.state import MaskFiller, allowed_ids
from penstock_shard.request import Constraint, FinishReason, Request, ThinkingBudget
from penstock_shard.runner.base import Runner
from penstock_shard.runner.sampler import Sampler, SampleRow

OBJECT = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "title": {"type": "string", "maxLength": 20},
                "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
            },
            "required": ["title", "tags"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)
CODE = Constraint("regex", "[A-Z]{2,5}-[0-9]{1,4}( [a-z]+){0,3}")


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load(BUILTIN, kv_blocks=512)


def test_a_mask_draws_what_the_same_allowed_ids_draw() -> None:
    random = seeded("masks and allowed ids")
    vocab_size = tokenizer().get_vocab_size()
    masks = MaskFiller(vocab_size)
    sampler = Sampler(masks)
    for seed in range(budget(20, 400)):
        logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
        own = constrained("own", random.choice([OBJECT, CODE]), seed=seed)
        own.matcher = compiler().compile(own.constraint) if own.constraint else None
        sampling = dataclasses.replace(
            own.sampling,
            temperature=random.choice([0.0, 0.7, 1.5]),
            top_k=random.choice([0, 5]),
            top_p=random.choice([0.6, 1.0]),
        )
        own.sampling = sampling
        mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        assert own.matcher is not None
        own.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        same = dataclasses.replace(own, constraint=None, matcher=None)
        same.sampling = dataclasses.replace(
            sampling, allowed_token_ids=tuple(int(i) for i in allowed_ids(mask[0]))
        )
        logits[1] = logits[0]
        first, second = sampler.sample(logits, [SampleRow(own, 0), SampleRow(same, 0)])
        assert first.token_id == second.token_id
        assert first.error is None


def test_a_row_whose_constraint_failed_says_why_and_leaves_the_rest_alone() -> None:
    vocab_size = tokenizer().get_vocab_size()
    sampler = Sampler(MaskFiller(vocab_size))
    broken, fine = constrained("broken", CODE), constrained("fine", CODE)
    for request in (broken, fine):
        request.matcher = compiler().compile(CODE)
    assert broken.matcher is not None
    broken.matcher.consume_token(600)
    logits = torch.zeros(2, vocab_size)
    bad, good = sampler.sample(logits, [SampleRow(broken, 0), SampleRow(fine, 0)])
    assert bad.error is not None
    assert bad.error.startswith("regex: cannot be followed any further")
    assert bad.is_callers
    assert good.error is None


def test_constrained_outputs_are_whole_and_the_same_beside_others(runner: Runner) -> None:
    def requests() -> list[Request]:
        made = [constrained(f"o{i}", OBJECT, seed=i) for i in range(4)]
        made += [constrained(f"c{i}", CODE, seed=i) for i in range(4)]
        return made + [constrained(f"n{i}", None, seed=i, max_tokens=20) for i in range(4)]

    together = ConstrainedEngine(lambda: runner).run(*requests())
    for request in requests():
        [alone] = ConstrainedEngine(lambda: runner).run(request).values()
        assert tokens(together[request.request_id]) == tokens(alone)
    for name, outputs in together.items():
        if name.startswith("o") and outputs[-1].finish is FinishReason.STOP:
            assert set(json.loads(text(outputs))) == {"title", "tags"}


def test_the_real_model_goes_on_anywhere_in_a_constraint(runner: Runner) -> None:
    random = seeded("cuts in the real model's constrained outputs")
    for seed in range(budget(2, 20)):
        constraint = random.choice([OBJECT, CODE])
        engine = ConstrainedEngine(lambda: runner)
        [outputs] = engine.run(constrained("r", constraint, seed=seed)).values()
        whole = tokens(outputs)
        for cut in {1, len(whole) - 1, random.randrange(1, len(whole))}:
            rest = ConstrainedEngine(lambda: runner).run(
                constrained("r", constraint, seed=seed, output=whole[:cut])
            )
            assert whole[:cut] + tokens(rest["r"]) == whole


def test_the_real_model_is_made_to_end_its_reasoning(runner: Runner) -> None:
    request = constrained("r", None, max_tokens=20)
    request.thinking_budget = ThinkingBudget(6, 600, 601, begun=True)
    [outputs] = ConstrainedEngine(lambda: runner).run(request).values()
    assert tokens(outputs)[6] == 601
