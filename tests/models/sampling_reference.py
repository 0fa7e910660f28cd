"""A reference for the sampler, written token by token in float64, and requests to compare with."""

from __future__ import annotations

import math
from collections import Counter, abc
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.engines import packed

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.sequence import Sequence

# For these and 24 ids, every kind of request draws otherwise than a plain one.
PROMPT = [3, 7, 7, 11]
OUTPUT = [7, 2, 2, 20, 2, 5]
# Biases that make bad words and rare tokens likely, so that a ban that is lost shows.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.6},
    "repetition": {"repetition_penalty": 4.0},
    "repetition_below_1": {"repetition_penalty": 0.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "repetition_window": {"repetition_penalty": 4.0, "penalty_window_tokens": 3},
    "frequency_window": {"frequency_penalty": 0.9, "penalty_window_tokens": 4},
    "negative_penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    "bias": {"logit_bias": ((4, 2.5), (9, -100.0), (0, 1.0))},
    "bad_words": {"bad_words": ((2, 5, 12), (8,), (5, 1), (2, 6), (3, 5, 9)), "temperature": 2.0},
    "allowed": {"allowed_token_ids": (1, 4, 9, 15)},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": (0, 10, 13)},
    "filters": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.2,
        "logit_bias": ((2, 1.0), (7, 2.0)),
        "top_p": 0.95,
    },
    "everything": {
        "temperature": 1.4,
        "top_k": 15,
        "top_p": 0.97,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "penalty_window_tokens": 8,
        "logit_bias": ((5, 1.5), (12, 2.0)),
        "bad_words": ((2, 5, 12), (6,)),
        "allowed_token_ids": (0, 2, 3, 5, 6, 9, 12, 15, 18, 21),
        "min_tokens": 50,
        "stop_token_ids": (18,),
    },
}


def sampling_request(
    prompt: abc.Sequence[int] = (1,),
    output: abc.Sequence[int] = (),
    *,
    min_tokens: int = 0,
    stop_token_ids: abc.Sequence[int] = (),
    logprobs: int | None = None,
    logprob_token_ids: abc.Sequence[int] = (),
    **sampling: Any,
) -> Sequence:
    request = EngineRequest(
        request_id="test",
        attempt=0,
        prompt=packed(prompt),
        output=packed(output),
        sampling=EngineSampling(**sampling),
        max_tokens=10_000,
        stop_token_ids=frozenset(stop_token_ids),
        min_tokens=min_tokens,
        logprobs=logprobs,
        logprob_token_ids=tuple(logprob_token_ids),
    )
    return Sequence.of(request)


def distribution(logits: NDArray[np.float32], sequence: Sequence) -> dict[int, float]:
    """Return the probabilities of the next token, in the order in which tokens are drawn."""
    params = sequence.request.sampling
    scores = adjusted_scores(logits, sequence)
    if params.temperature == 0.0:
        return {int(np.argmax(scores)): 1.0}
    # A token that is 29 below the best is never drawn.
    exponents = (scores - scores.max()) / params.temperature
    weights = np.where(exponents < -29.1, 0.0, np.exp(exponents))
    order = list(range(len(weights)))
    if params.top_p < 1 or 0 < params.top_k < len(weights):
        order.sort(key=lambda token: (-scores[token], token))
        if params.top_k:
            order = order[: params.top_k]
        order = _until(order, weights, params.top_p)
    order = [token for token in order if weights[token] >= max(params.min_p, 1e-30)]
    if params.typical_p < 1:
        mean = np.average(exponents[order], weights=weights[order])
        order.sort(key=lambda token: (abs(exponents[token] - mean), token))
        order = _until(order, weights, params.typical_p)
    total = sum(weights[token] for token in order)
    return {token: float(weights[token] / total) for token in order}


def _until(order: list[int], weights: NDArray[np.float64], share: float) -> list[int]:
    total = sum(weights[token] for token in order)
    mass = 0.0
    for i, token in enumerate(order):
        mass += weights[token]
        if share < 1 and mass >= share * total:
            return order[: i + 1]
    return order


def adjusted_scores(logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
    """Logits after penalties, biases and bans."""
    params = sequence.request.sampling
    scores = logits.astype(np.float64)
    prompt = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
    output = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
    size = params.penalty_window_tokens
    window = [*((token, False) for token in prompt), *((token, True) for token in output)]
    window = window if size is None else window[max(0, len(window) - size) :]
    for token in {token for token, _ in window}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(token for token, is_output in window if is_output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias:
        scores[token] += bias
    if params.allowed_token_ids:
        scores[~np.isin(np.arange(len(scores)), params.allowed_token_ids)] = -math.inf
    for *beginning, last in params.bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            scores[last] = -math.inf
    if len(output) < sequence.request.min_tokens:
        scores[list(sequence.request.stop_token_ids)] = -math.inf
    return scores
