"""Requests as a shard gets them, from the names of their fields alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock_proto.types import (
    Attempt,
    GenerationRequest,
    Objective,
    SamplingParams,
    Submission,
)


def submission(*, request_id: str = "id", number: int = 0, **fields: Any) -> Submission:
    """A request of two tokens with these fields, each in the part of the request that has it."""
    parts = {
        "sampling": SamplingParams(**_of(SamplingParams, fields)),
        "objective": Objective(**_of(Objective, fields)),
    }
    # A shard reads the trace of an attempt as the request's.
    traceparent = fields.pop("traceparent", "")
    attempt = Attempt(number, **_of(Attempt, fields))
    request = GenerationRequest(
        **{"prompt_token_ids": [1, 2], "traceparent": traceparent, **parts, **fields}
    )
    return Submission(request_id, request, attempt)


def _of(part: Any, fields: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(part)}
    return {name: fields.pop(name) for name in names & fields.keys()}
