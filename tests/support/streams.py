"""Requests of every kind, and what came of them whole: to compare one run with another."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from penstock_client import (
    Constraint,
    ConstraintKind,
    FinishReason,
    Fleet,
    GenerationRequest,
    Logprobs,
    Output,
    SamplingParams,
    ShardClient,
    ThinkingBudget,
)

_ROWS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"type": "integer"},
            "kind": {"enum": ["router", "shard", None]},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
_CALLS = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": _ROWS["items"], "end": "</call>"}],
    "triggers": ["<call>"],
}
CONSTRAINTS = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(_ROWS)),
    Constraint(ConstraintKind.JSON_OBJECT),
    Constraint(ConstraintKind.REGEX, "([a-z]{2,6} ?){5,60}[.]"),
    Constraint(ConstraintKind.CHOICE, options=("a short one", "and one that is longer" * 5)),
    Constraint(ConstraintKind.GRAMMAR, 'start: (/[a-z]+/ "=" /[0-9]+/ ";")+'),
    Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(_CALLS)),
)


@dataclass
class Whole:
    """Everything a request gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


async def read_whole(stream: AsyncIterable[Output]) -> Whole:
    """Read a stream to its end."""
    whole = Whole()
    async for output in stream:
        assert output.first_position == len(whole.token_ids)
        whole.token_ids += output.token_ids
        if output.logprobs is not None:
            whole.logprobs = _joined(whole.logprobs, output.logprobs)
        if output.prompt_logprobs is not None:
            done = len(whole.prompt_logprobs.chosen) if whole.prompt_logprobs else 0
            assert output.prompt_logprobs_start == 1 + done
            whole.prompt_logprobs = _joined(whole.prompt_logprobs, output.prompt_logprobs)
        whole.finish_reason = output.finish_reason
        whole.stop_token_id = output.stop_token_id
    return whole


async def run_whole(client: ShardClient | Fleet, request: GenerationRequest) -> Whole:
    """Send a request and read it to its end."""
    async with client.submit(request) as stream:
        return await read_whole(stream)


def _joined(first: Logprobs | None, later: Logprobs) -> Logprobs:
    if first is None:
        return later
    first.extend(later)
    return first


def any_request(rng: random.Random, vocab_size: int, *, max_tokens: int = 120) -> GenerationRequest:
    """A request of some kind: sampled or greedy, penalised, biased, scored, stopped."""
    greedy = rng.random() < 0.25
    sampling = SamplingParams(
        temperature=0.0 if greedy else rng.choice([0.7, 1.0, 1.5]),
        top_k=rng.choice([None, 5, 40]),
        top_p=rng.choice([None, 0.5, 0.9]),
        min_p=rng.choice([None, 0.05]),
        typical_p=rng.choice([None, 0.9]),
        repetition_penalty=rng.choice([None, 1.3]),
        presence_penalty=rng.choice([None, 0.8]),
        frequency_penalty=rng.choice([None, 0.5]),
        penalty_window_tokens=rng.choice([None, 16]),
        seed=rng.getrandbits(64),
        logit_bias={rng.randrange(vocab_size): 2.0} if rng.random() < 0.3 else {},
        bad_words=[[rng.randrange(vocab_size)]] if rng.random() < 0.2 else (),
        allowed_token_ids=rng.sample(range(vocab_size), 50) if rng.random() < 0.1 else (),
    )
    return GenerationRequest(
        prompt_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 60))],
        sampling=sampling,
        max_tokens=rng.randrange(max_tokens // 2, max_tokens + 1),
        min_tokens=rng.choice([None, 10]),
        stop_token_ids=[rng.randrange(vocab_size)] if rng.random() < 0.3 else (),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        logprob_token_ids=[1, 2] if rng.random() < 0.1 else (),
    )


def constrained_request(
    rng: random.Random, vocab_size: int, *, max_tokens: int = 120
) -> GenerationRequest:
    """A request of some kind whose output must be of some language, or end its reasoning."""
    request = any_request(rng, vocab_size, max_tokens=max_tokens)
    # These might leave nothing to draw.
    sampling = dataclasses.replace(request.sampling, bad_words=(), allowed_token_ids=())
    request = dataclasses.replace(request, sampling=sampling)
    if rng.random() < 0.2:
        budget = ThinkingBudget(rng.randrange(60), 50, 51, begun=rng.random() < 0.9)
        return dataclasses.replace(request, thinking_budget=budget)
    return dataclasses.replace(request, constraint=rng.choice(CONSTRAINTS))


def mixed_request(
    rng: random.Random, vocab_size: int, *, max_tokens: int = 120
) -> GenerationRequest:
    """Return a random request, with a constraint, with a thinking budget, or with neither."""
    make = constrained_request if rng.random() < 0.4 else any_request
    return make(rng, vocab_size, max_tokens=max_tokens)
