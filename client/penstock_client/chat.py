"""`penstock chat`: a conversation in the terminal, over the router's HTTP API."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock_client.arguments import CUT_OFF, add_url, one_line, parser_for, positive_int


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
    messages = [{"role": "system", "content": args.system}] if args.system else []
    while text := _read_line():
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "stream": True, **options}
        try:
            answer = _print_answer(_deltas(args.url, args.api_key, body))
        except (OSError, ValueError, http.client.HTTPException) as error:
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
    finally:
        print()
    return answer


def _deltas(url: str, key: str | None, body: dict[str, Any]) -> Iterator[str]:
    """The text of one streamed answer, piece by piece.

    Raises:
        OSError: no connection, or an error status, or the stream ends before the answer does.
        ValueError: the router reports an error in the stream, or sends something else.
        http.client.HTTPException: what answers does not speak HTTP.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        for data in _events(response):
            yield _text(data)


def _events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """What each event says, up to the last, which every whole answer has."""
    try:
        for line in lines:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()
    except (ConnectionError, http.client.HTTPException) as error:
        raise ConnectionError(CUT_OFF) from error
    # A connection that ends between two chunks looks like the end of the body.
    raise ConnectionError(CUT_OFF)


def _text(data: bytes) -> str:
    try:
        chunk = json.loads(data)
        if "error" not in chunk:
            return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        message = chunk["error"].get("message", "the stream failed")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"the answer is no chat completion: {data[:100]!r}") from None
    raise ValueError(message)


def _reason(error: Exception) -> str:
    if not isinstance(error, urllib.error.HTTPError):
        return one_line(error)
    try:
        with error:
            message = json.loads(error.read())["error"]["message"]
    except (KeyError, TypeError, OSError, ValueError, http.client.HTTPException):
        return f"the router answers {error.code}"
    return one_line(ValueError(message))
