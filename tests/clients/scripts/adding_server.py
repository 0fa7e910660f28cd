"""A server of tools for agents (MCP) on standard input and output: it adds."""

from __future__ import annotations

import json
import sys
from typing import Any

_NUMBERS = {name: {"type": "number"} for name in ("a", "b")}
_ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "inputSchema": {"type": "object", "properties": _NUMBERS, "required": list(_NUMBERS)},
}


def result_of(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"name": "adding", "version": "1"}
        version = parameters["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [_ADD]}
    if method == "tools/call":
        total = sum(parameters["arguments"].values())
        return {"content": [{"type": "text", "text": f"the sum is {total}"}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = result_of(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
