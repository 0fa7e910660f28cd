"""`penstock chat`: a conversation in the terminal, over the router's HTTP API."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from penstock_client.arguments import add_url, parser_for, positive_int


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("chat", "Talk to a model. An empty line or Ctrl-D ends it.")
    add_url(parser)
    parser.add_argument("--model", help="default: the first the router serves")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="of each answer")
    args = parser.parse_args(arguments)
    options = {
        "model": args.model,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
    }
    key = args.api_key or os.getenv("PENSTOCK_API_KEY")
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "stream": True, **options}
        try:
            answer = _print_answer(_deltas(args.url, key, body))
        except (OSError, ValueError) as error:
            print(f"penstock chat: {_reason(error)}", file=sys.stderr)
            return 1
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _print_answer(deltas: Iterator[str]) -> str:
    """Print as it comes; Ctrl-C cuts the answer short and keeps what came."""
    answer = ""
    try:
        for delta in deltas:
            print(delta, end="", flush=True)
            answer += delta
    except KeyboardInterrupt:
        print(" [cut]", end="")
    print()
    return answer


def _deltas(url: str, key: str | None, body: dict[str, Any]) -> Iterator[str]:
    """The text of one streamed answer, piece by piece.

    Raises:
        OSError: no connection, or the router answers with an error status.
        ValueError: the router reports an error in the stream.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ValueError(chunk["error"].get("message", "the stream failed"))
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            text = error.read().decode(errors="replace")
        try:
            return str(json.loads(text)["error"]["message"])
        except (KeyError, TypeError, ValueError):
            return f"the router answers {error.code}"
    return str(error)
