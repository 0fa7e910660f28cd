"""`penstock chat`: a conversation in the terminal, over the router's HTTP API.

Reasoning is shown dimmed, and each tool call on its own line. Later turns do not send them back.
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from penstock_cli.arguments import MODEL_HELP, add_url, open_url, parser_for, positive_int
from penstock_cli.router_errors import CUT_OFF, reason
from penstock_common.flags import number
from penstock_common.logs import escape

_LIST_TIMEOUT_S = 10.0
# Control characters that are printed unchanged: new lines, tabs, joiners of scripts and emoji.
_SHOWN_AS_THEY_ARE = "\n\t\u200c\u200d"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
# Kinds of pieces of an answer. "call" is the name of the called function.
_Kind = Literal["reasoning", "content", "call", "arguments"]


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("chat", "Talk to a model. An empty line or Ctrl-D ends it.")
    add_url(parser)
    parser.add_argument("--model", metavar="NAME", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--temperature", type=number(float), metavar="T", help="default: the model's"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="most tokens of an answer"
    )
    args = parser.parse_args(arguments)
    options = {
        "model": args.model,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
    }
    messages = [{"role": "system", "content": args.system}] if args.system else []
    try:
        names = _names(args.url, args.api_key)
        model = _served(args.model, names) if args.model else _only(names)
        print(_greeting(args.url, model))
        while text := _read_line():
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "stream": True, **options}
            answer = _print_answer(_deltas(args.url, args.api_key, body))
            messages.append({"role": "assistant", "content": answer})
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"penstock chat: {reason(error, args.url)}", file=sys.stderr)
        return 1
    return 0


def _greeting(url: str, model: str) -> str:
    return f"{escape(model)} at {url}. An empty line ends the chat, Ctrl-C an answer."


def _names(url: str, key: str | None) -> dict[str, str]:
    """Return served name -> model ("" for an adapter). Raise the same errors as `_deltas`."""
    with open_url(url + "/v1/models", key, timeout_s=_LIST_TIMEOUT_S) as response:
        try:
            listed = json.loads(response.read())["data"]
            # Without `root`, each name counts as a model of its own.
            return {
                str(model["id"]): "" if model.get("parent") else str(model.get("root", model["id"]))
                for model in listed
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"what answers at {url} is no router: it lists no models") from None


def _only(names: dict[str, str]) -> str:
    """Return the only model's first name. Raise ValueError if not exactly one model is served."""
    # A model may have several names; take the first.
    models: dict[str, str] = {}
    for name, model in names.items():
        if model:
            models.setdefault(model, name)
    if not models:
        raise ValueError("no model is served: start a shard, or wait until one has loaded")
    name, *others = models.values()
    if others:
        raise ValueError(
            f"several models are served; choose with --model: {', '.join([name, *others])}"
        )
    return name


def _served(name: str, names: dict[str, str]) -> str:
    if name not in names:
        raise ValueError(f"--model {name}: not served; choose one of: {', '.join(names)}")
    return name


def _read_line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""
    except KeyboardInterrupt:
        # Let the shell's prompt begin on a new line.
        print()
        raise


def _print_answer(deltas: Iterator[tuple[_Kind, str]]) -> str:
    """Print the answer as it arrives; Ctrl-C ends it. Return the content that arrived."""
    answer = ""
    last: _Kind | None = None
    dim, plain = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")
    try:
        for kind, text in deltas:
            if last is not None and kind != "arguments" and (kind != last or kind == "call"):
                print()
            last = kind
            shown = escape(f"[calls {text}] " if kind == "call" else text, _SHOWN_AS_THEY_ARE)
            print(f"{dim}{shown}{plain}" if kind == "reasoning" else shown, end="", flush=True)
            answer += text if kind == "content" else ""
    except KeyboardInterrupt:
        print(" [cut]", end="")
    finally:
        print()
    return answer


def _deltas(url: str, key: str | None, body: dict[str, Any]) -> Iterator[tuple[_Kind, str]]:
    """Stream an answer.

    Raises:
        OSError: no connection, an error status, or a stream that ends before the answer.
        ValueError: the router reports an error in the stream, or sends something else.
        http.client.HTTPException: the other side does not speak HTTP.
    """
    with open_url(url + "/v1/chat/completions", key, json.dumps(body).encode()) as response:
        for data in _events(response):
            yield from _pieces(data)


def _events(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event up to [DONE], which ends every complete answer."""
    try:
        for line in lines:
            if line.strip() == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip()
    except (ConnectionError, http.client.HTTPException) as error:
        raise ConnectionError(CUT_OFF) from error
    # If the connection is lost between two chunks, this looks like the end of the body.
    raise ConnectionError(CUT_OFF)


def _pieces(data: bytes) -> list[tuple[_Kind, str]]:
    try:
        chunk = json.loads(data)
        if "error" not in chunk:
            return [pair for choice in chunk["choices"] for pair in _said(choice["delta"])]
        message = chunk["error"].get("message", "the stream failed")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"the answer is no chat completion: {data[:100]!r}") from None
    raise ValueError(message)


def _said(delta: dict[str, Any]) -> Iterator[tuple[_Kind, str]]:
    # Servers use one of these names, or both with the same text.
    if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
        yield "reasoning", reasoning
    if content := delta.get("content"):
        yield "content", content
    for call in delta.get("tool_calls") or ():
        if name := call["function"].get("name"):
            yield "call", name
        if arguments := call["function"].get("arguments"):
            yield "arguments", arguments
