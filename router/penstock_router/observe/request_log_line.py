"""Logs a line for each request: fields as JSON, or words as text.

A line comes from the request's record, which has no texts, token ids or keys.
"""

from __future__ import annotations

import logging
from typing import Any

from penstock_common.logs import IN_WORDS
from penstock_router.observe.request_record import RequestRecord

logger = logging.getLogger("penstock.requests")

# The most characters of a logged value that a client chose.
_MAX_CHARACTERS = 256
# Logged characters of a request's id: enough to find the request, in a line that fits a terminal.
_ID_CHARACTERS = 12

Fields = dict[str, Any]


def log_request(record: RequestRecord) -> None:
    if logger.isEnabledFor(logging.INFO):
        fields = fields_of(record)
        logger.info("request", extra={**fields, IN_WORDS: lambda: _words(record, fields)})


def fields_of(record: RequestRecord) -> Fields:
    """Return the record's fields, without unknown and empty ones."""
    usage, attempts = record.usage, list(record.attempts)
    fields: Fields = {
        "request_id": record.request_id[:_MAX_CHARACTERS],
        "trace_id": record.traceparent[3:35],
        "key": record.key_name,
        "client": record.client,
        "method": record.method[:_MAX_CHARACTERS],
        "route": record.route,
        "model": record.model[:_MAX_CHARACTERS],
        "adapter": record.adapter[:_MAX_CHARACTERS],
        "session": record.session[:_MAX_CHARACTERS],
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error[:_MAX_CHARACTERS],
        "sequences": len(record.sequences),
        "shards": list(dict.fromkeys(attempt.shard for attempt in attempts)),
        "attempts": len(attempts),
        "failovers": [each.ended_because for each in attempts if each.ended_because],
    }
    if usage is not None:
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["output_tokens"] = usage.completion_tokens
        fields["shard_queue_ms"] = None if usage.queue_s is None else round(1000 * usage.queue_s, 1)
    fields.update(_times(record))
    return {name: value for name, value in fields.items() if value not in (None, "", [])}


def _times(record: RequestRecord) -> Fields:
    arrived_s, first_s, ended_s = record.arrived_s, record.first_token_s, record.ended_s
    times: Fields = {
        "prepare_ms": _ms(arrived_s, record.prepared_s),
        "queue_ms": _ms(record.prepared_s, record.placed_s),
        "ttft_ms": _ms(arrived_s, first_s),
        "total_ms": _ms(arrived_s, ended_s),
    }
    if first_s is not None and ended_s is not None and ended_s > first_s:
        times["tokens_per_s"] = round(record.output_tokens / (ended_s - first_s), 1)
    if record.failover_gaps_s:
        times["failover_gap_ms"] = round(1000 * max(record.failover_gaps_s), 1)
    return times


def _ms(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else round(1000 * (end_s - begin_s), 1)


def _words(record: RequestRecord, fields: Fields) -> str:
    """Write at most 160 columns with the time before them, unless names are long."""
    parts = [f"{fields['method']} {record.route} {record.status} {record.outcome}"]
    if record.error and record.outcome in ("refused", "error"):
        parts.append(f"({fields['error']})")
        if record.model:
            parts.append(f"model {fields['model']}")
    if record.usage is not None:
        parts.append(f"{fields['prompt_tokens']}+{fields['output_tokens']} tokens")
    parts.append(f"{fields['total_ms']:.0f} ms")
    if record.first_token_s is not None:
        parts.append(f"ttft {fields['ttft_ms']:.0f} ms")
    parts.extend(_places(record))
    if record.client:
        parts.append(f"client {record.client}")
    request_id = record.request_id
    cut = "..." if len(request_id) > _ID_CHARACTERS else ""
    parts.append(f"request {request_id[:_ID_CHARACTERS]}{cut}")
    return " ".join(parts)


def _places(record: RequestRecord) -> list[str]:
    """Say which shard answered; after failovers, the last shard and the causes."""
    attempts = list(record.attempts)
    because = dict.fromkeys(each.ended_because for each in attempts if each.ended_because)
    if not attempts:
        return []
    if because:
        return [f"shard {attempts[-1].shard} after {' then '.join(because)}"]
    return [f"shard {' and '.join(dict.fromkeys(each.shard for each in attempts))}"]
