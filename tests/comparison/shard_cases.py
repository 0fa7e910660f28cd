"""The requests that a shard is asked: a case for each field of Generate and Embed, by its name on
the wire.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.cases import (
    Case,
    Cases,
    Json,
    combinations,
    not_as_said,
    pairs,
    requests_of,
)
from support.sampling_values import SAMPLING_VALUES
from support.streams import CONSTRAINTS

from penstock_proto.types import SAMPLING_NUMBERS

ADAPTER = "tuned"
MODEL = "compared"
# Set by the library on its own: to name attempts, and to send them on.
SET_BY_LIBRARY = {
    "Generate": {
        *("request_id", "attempt", "instance_id", "hand_back", "suspect", "number", "kv_source"),
        # Their pixels go before the request: tests/models holds them to transformers.
        *(f"images.{name}" for name in ("digest", "width", "height", "offset", "num_tokens")),
    },
    "Embed": {"request_id", "instance_id"},
}
# In the order of the wire.
SAMPLING = tuple(
    f"sampling.{name}"
    for name in (
        *SAMPLING_NUMBERS,
        *("seed", "logit_bias", "bad_words.token_ids", "allowed_token_ids"),
        "penalty_window_tokens",
    )
)
_PROMPT = [7, 41, 99, 12, 50, 7, 41, 99, 12, 51, 7, 41, 99, 12, 50, 200, 7, 41, 99, 12]
GENERATE: Json = {
    "prompt_token_ids": _PROMPT,
    "sampling": {"temperature": 0.9, "seed": 7},
    "max_tokens": 24,
    "ignore_eos": True,
    "logprobs": 1,
}
EMBED: Json = {"inputs": [_PROMPT, [5, 6]], "pooling": "last", "normalize": False}


@dataclass(frozen=True)
class Vocabulary:
    """The facts about a model that cases use: the size of its vocabulary, an id that ends a
    sequence, and the output for the request that all cases change.
    """

    size: int
    eos_id: int
    output: Sequence[int]


def generate_cases(vocabulary: Vocabulary) -> Cases:
    """Return the cases of Generate by the field's name on the wire."""
    output = vocabulary.output
    ends = {"sampling": {"allowed_token_ids": [vocabulary.eos_id]}}
    thinks = _thinking(vocabulary)
    adapter = {"adapter": ADAPTER}
    return {
        "prompt_token_ids": Case({"prompt_token_ids": [*_PROMPT, 42]}),
        "output_token_ids": Case({"output_token_ids": [9, 8, 7]}),
        **_sampling_cases(output),
        "stop.max_tokens": Case({"max_tokens": 19}),
        "stop.min_tokens": Case(
            {"min_tokens": 12}, {"stop_token_ids": list(range(vocabulary.size))[::3]}
        ),
        "stop.stop_token_ids": Case({"stop_token_ids": [output[9]]}),
        "stop.ignore_eos": Case({"ignore_eos": True}, {**ends, "ignore_eos": False}),
        "output.logprobs": Case({"logprobs": 5}),
        "output.prompt_logprobs": Case({"prompt_logprobs": 2}),
        "output.logprob_token_ids": Case({"logprob_token_ids": [3, output[1], 4]}),
        **_constraint_cases(),
        **_objective_cases(),
        **thinks,
        "model": Case({"model": MODEL}, shows=False),
        "adapter": Case(adapter),
        "adapter_hash": Case({"adapter_hash": "0" * 32}, adapter),
        "cache_salt": Case({"cache_salt": "salted"}, shows=False),
        "label": Case({"label": "mine"}, shows=False),
        "traceparent": Case({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}, shows=False),
        "caller": Case({"caller": "someone"}, shows=False),
    }


def _sampling_cases(output: Sequence[int]) -> dict[str, Case]:
    values = {
        **SAMPLING_VALUES,
        "repetition_penalty": 1.7,
        "presence_penalty": 1.9,
        "frequency_penalty": 1.6,
        "seed": 2**63 + 5,
        "logit_bias": {str(output[0]): -9.0, str(output[4]): 3.0},
    }
    cases = {f"sampling.{name}": Case({"sampling": {name: values[name]}}) for name in values}
    for name, value in (
        ("bad_words.token_ids", [[output[2]], output[6:8]]),
        ("allowed_token_ids", sorted({*output[::2], 11, 12, 13})),
    ):
        cases[f"sampling.{name}"] = Case({"sampling": {name.partition(".")[0]: value}})
    cases["sampling.penalty_window_tokens"] = Case(
        {"sampling": {"penalty_window_tokens": 3}}, {"sampling": {"frequency_penalty": 1.6}}
    )
    return cases


def _constraint_cases() -> dict[str, Case]:
    cases = {}
    for constraint in CONSTRAINTS:
        kind = constraint.kind
        told = {"kind": kind, "value": constraint.value, "options": list(constraint.options)}
        name = f"constraint.{kind}.options" if kind == "choice" else f"constraint.{kind}"
        cases[name] = Case({"constraint": told})
    return cases


def _objective_cases() -> dict[str, Case]:
    """Return the cases of fields that say when a request runs. None of them changes the answer."""
    values = {
        "priority": 3,
        "deadline_s": 500.0,
        "time_to_first_token_s": 0.5,
        "seconds_between_tokens": 0.25,
        "latency_sensitive": True,
    }
    on_the_wire = {"deadline_s": "deadline_ms"}
    return {
        f"objective.{on_the_wire.get(name, name)}": Case({"objective": {name: value}}, shows=False)
        for name, value in values.items()
    }


def _thinking(vocabulary: Vocabulary) -> dict[str, Case]:
    # The output's own token begins the reasoning, so that the mark counts.
    begin, end = vocabulary.output[3], 15
    beside = {"max_tokens": 4, "begin_token_id": begin, "end_token_id": end, "begun": False}
    changes = {"max_tokens": 2, "begin_token_id": 14, "end_token_id": 16, "begun": True}
    return {
        f"thinking_budget.{name}": Case(
            {"thinking_budget": {name: value}}, {"thinking_budget": beside}
        )
        for name, value in changes.items()
    }


def embed_cases() -> Cases:
    """Return the cases of Embed by the field's name on the wire."""
    return {
        "inputs.token_ids": Case({"inputs": [_PROMPT[:9]]}),
        "pooling": Case({"pooling": "mean"}),
        "dimensions": Case({"dimensions": 8}),
        "normalize": Case({"normalize": True}),
        "label": Case({"label": "mine"}, shows=False),
    }


# Output that is drafted from itself, after a prompt that takes several steps.
_REPETITION: Json = {
    **GENERATE,
    "prompt_token_ids": _PROMPT * 6,
    "sampling": {"temperature": 0.0, "seed": 7},
    "max_tokens": 60,
    "logprobs": 2,
    "prompt_logprobs": 1,
}


@dataclass(frozen=True)
class Questions:
    """Cases of both RPCs as the client process is asked them, by names that begin with the RPC.
    `is_exact`: what the model answers does not depend on the batch.
    """

    generate: Cases
    embed: Cases
    is_exact: bool

    def each_field(self) -> dict[str, Json]:
        embeddings = requests_of(EMBED, self.embed) if self.embed else {}
        return {
            **_questions("generate", requests_of(GENERATE, self.generate)),
            **_questions("generate", {"repetition": _REPETITION}),
            **_questions("embed", embeddings),
        }

    def each_pair(self) -> dict[str, Json]:
        """Sampling parameters two by two: their order shows."""
        names = [name for name in SAMPLING if name in self.generate]
        return _questions("generate", pairs(GENERATE, self.generate, names))

    def some(self, rng: random.Random, count: int) -> dict[str, Json]:
        return _questions("generate", combinations(GENERATE, self.generate, rng, count))

    def not_as_said(self, answers: Mapping[str, Any]) -> list[str]:
        """Return what `cases.not_as_said` finds in the cases of both RPCs."""
        return [
            line
            for rpc, cases in (("generate", self.generate), ("embed", self.embed))
            for line in not_as_said(
                cases, {name.removeprefix(f"{rpc} "): answers[name] for name in answers}
            )
        ]


def _questions(rpc: str, requests: Mapping[str, Json]) -> dict[str, Json]:
    return {f"{rpc} {name}": {rpc: request} for name, request in requests.items()}
