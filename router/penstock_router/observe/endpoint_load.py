"""Shows the load of a model's shards in an answer header, with vLLM's names. Gateways choose a
server by this header (ORCA).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from penstock_client import ShardState

# The request's header that names the form, and the answer's header.
ASKED = "endpoint-load-metrics-format"
ANSWERED = "endpoint-load-metrics"


def endpoint_load(form: str, shards: Iterable[ShardState], model: str, queued: int) -> str | None:
    """Return the header's value in the form TEXT or JSON; None for any other form. `queued`
    sequences wait in the router.
    """
    if form.upper() not in ("TEXT", "JSON"):
        return None
    serving = [shard for shard in shards if shard.info is not None and shard.info.model == model]
    loads = [shard.load for shard in serving if shard.ready]
    num_blocks = sum(load.num_blocks for load in loads)
    named = {
        "kv_cache_usage_perc": sum(load.referenced_blocks for load in loads) / max(1, num_blocks),
        "num_requests_waiting": float(queued + sum(load.waiting for load in loads)),
    }
    if form.upper() == "JSON":
        return f"JSON {json.dumps({'named_metrics': named})}"
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
