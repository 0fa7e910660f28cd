"""A script that reports how anthropic reads given answers.

Argument: a file of [whole, stream] pairs.

An HTTP server in this script sends the answers in their order, whatever is asked.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from anthropic import Anthropic
from clients.scripts.report import report

CHAT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hello"}],
}


def main(path: str) -> None:
    answers = [text for pair in json.loads(Path(path).read_text()) for text in pair]
    left = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = next(left).encode()
            kind = "text/event-stream" if asked.get("stream") else "application/json"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        client = Anthropic(api_key="k", base_url=f"http://127.0.0.1:{server.server_port}")
        try:
            report({"read": [read(client) for _ in range(len(answers) // 2)]})
        finally:
            server.shutdown()


def read(client: Anthropic) -> list[Any]:
    """Return the next whole answer, and the message that the next stream makes."""
    whole = client.messages.create(**CHAT)
    with client.messages.stream(**CHAT) as stream:
        final = stream.get_final_message()
    return [message.model_dump(mode="json", exclude_none=True) for message in (whole, final)]


if __name__ == "__main__":
    main(*sys.argv[1:])
