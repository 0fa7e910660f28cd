"""What requests may ask of every runner, as GetInfo names it; see `server/validation.py`."""

from __future__ import annotations

from penstock_shard.ipc.request import CONSTRAINT_KINDS

CAPABILITIES = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "priority",
        "time_to_first_token_s",
        "seconds_between_tokens",
        "latency_sensitive",
        "thinking_budget",
        *CONSTRAINT_KINDS,
    }
)
