"""A log line for each request, with JSON fields and a text.

Logs no token ids. Prompts and outputs never reach a shard as text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock_common.logs import IN_WORDS
from penstock_proto import codec
from penstock_shard.server.observe.request_record import ShardRecord

logger = logging.getLogger("penstock.requests")


def log_request(record: ShardRecord) -> None:
    fields = fields_of(record)
    logger.info("request", extra={**fields, IN_WORDS: lambda: _words(fields)})


def _words(fields: Mapping[str, str | int | float]) -> str:
    return "request {request_id} {outcome} {prompt_tokens}+{output_tokens} tokens".format_map(
        fields
    )


def fields_of(record: ShardRecord) -> dict[str, str | int | float]:
    """Return the line's fields, without unknown values."""
    given: dict[str, str | int | float | None] = {
        "request_id": record.request_id,
        "label": record.label or None,
        "attempt": record.attempt,
        "trace_id": None if record.context is None else record.context.trace_id,
        "outcome": _outcome(record),
        # The request field at fault.
        "error_field": (record.error and record.error.field) or None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "given_tokens": record.given_tokens or None,
        "output_tokens": record.output_tokens,
        "queue_ms": None if record.queue_s is None else round(1000 * record.queue_s, 1),
        "ttft_ms": _ms(record, record.first_token_s),
        "total_ms": _ms(record, record.ended_s),
        "steps": None if record.work is None else record.work.steps,
        "preemptions": None if record.work is None else record.work.preemptions,
    }
    return {name: value for name, value in given.items() if value is not None}


def _outcome(record: ShardRecord) -> str:
    if record.error is not None:
        return codec.status(record.error).name
    return "" if record.finish is None else record.finish.value


def _ms(record: ShardRecord, monotonic_s: float | None) -> float | None:
    return None if monotonic_s is None else round(1000 * (monotonic_s - record.arrived_s), 1)
