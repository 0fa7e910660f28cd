"""The request features that every runner supports, by their names in GetInfo (see
`server/validation.py`).
"""

from __future__ import annotations

import dataclasses

from penstock_proto.types import CONSTRAINT_KINDS, EngineSampling

CAPABILITIES = frozenset(
    {
        *(field.name for field in dataclasses.fields(EngineSampling)),
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
