"""A request without any client library: what clients are compared with."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def post(url: str, **body: Any) -> Any:
    """The answer's JSON. Raises urllib.error.HTTPError for an error status."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
