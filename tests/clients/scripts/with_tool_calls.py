"""A script that reports how a released client reads answers that call tools, streamed and whole.

Arguments: `openai` or `anthropic`, and a file of {"tools": [name], "asked": [[url, text, how]]}.
How: "whole", "events" as they come, or "helper", the client's own way to put a stream together.
The report on each answer is {"said": texts and calls in their order, "reason", "objects": the
arguments that the client parsed, if it parses them}; calls are [name, arguments as text].
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clients.scripts.report import report

Read = dict[str, Any]


# ---- openai ------------------------------------------------------------------------------------


@functools.cache
def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def read_openai(url: str, text: str, how: str, tools: list[str]) -> Read:
    chats = openai_client(url).chat.completions
    asked: dict[str, Any] = {
        "model": "fake-model",
        "messages": [{"role": "user", "content": text}],
        "tools": [{"type": "function", "function": {"name": name}} for name in tools],
    }
    if how == "events":
        return _openai_events(chats.create(**asked, stream=True))
    if how == "whole":
        choice = chats.create(**asked).choices[0]
    else:
        with chats.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    message = choice.message
    called = [call.to_dict()["function"] for call in message.tool_calls or ()]
    calls = [(each["name"], each["arguments"]) for each in called]
    assert len({call.id for call in message.tool_calls or ()}) == len(calls)
    return _of_chat(message.content or "", calls, choice.finish_reason)


def _openai_events(stream: Any) -> Read:
    """Put together as a program would that has nothing but the events."""
    calls: list[tuple[str, str]] = []
    content, reason = "", ""
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    assert call.id, "a call begins without its id"
                    calls.append((call.function.name, ""))
                name, arguments = calls[call.index]
                calls[call.index] = name, arguments + (call.function.arguments or "")
    return _of_chat(content, calls, reason)


def _of_chat(content: str, calls: list[tuple[str, str]], reason: str) -> Read:
    return {"said": [content, *calls], "reason": reason, "objects": []}


# ---- anthropic ---------------------------------------------------------------------------------


@functools.cache
def anthropic_client(url: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url, api_key="none", max_retries=0)


def read_anthropic(url: str, text: str, how: str, tools: list[str]) -> Read:
    messages = anthropic_client(url).messages
    asked: dict[str, Any] = {
        "model": "fake-model",
        "max_tokens": 1000,
        "messages": [{"role": "user", "content": text}],
        "tools": [{"name": name, "input_schema": {"type": "object"}} for name in tools],
    }
    if how == "whole":
        message = messages.create(**asked)
        said = [_block(block, _whole_text(block)) for block in message.content]
    elif how == "events":
        return _anthropic_events(messages.create(**asked, stream=True))
    else:
        texts: dict[int, str] = {}
        with messages.stream(**asked) as stream:
            for event in stream:
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    known = texts.get(event.index, "")
                    texts[event.index] = known + event.delta.partial_json
            message = stream.get_final_message()
        said = [_block(block, texts.get(at, "")) for at, block in enumerate(message.content)]
    objects = [block.input for block in message.content if block.type == "tool_use"]
    return {"said": said, "reason": message.stop_reason, "objects": objects}


def _anthropic_events(stream: Any) -> Read:
    said: list[Any] = []
    reason = None
    for event in stream:
        if event.type == "content_block_start":
            assert event.index == len(said)
            said.append(_block(event.content_block, ""))
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            said[event.index] += event.delta.text
        elif event.type == "content_block_delta":
            name, arguments = said[event.index]
            said[event.index] = name, arguments + event.delta.partial_json
        elif event.type == "message_delta":
            reason = event.delta.stop_reason
    return {"said": said, "reason": reason, "objects": []}


def _block(block: Any, arguments: str) -> Any:
    if block.type == "text":
        return block.text
    return block.name, arguments


def _whole_text(block: Any) -> str:
    """The arguments of a block; of what is no JSON, the text that stands for it."""
    if block.type != "tool_use":
        return ""
    broken = block.input.get("INVALID_JSON")
    return broken if isinstance(broken, str) else json.dumps(block.input)


READERS: dict[str, Callable[[str, str, str, list[str]], Read]] = {
    "openai": read_openai,
    "anthropic": read_anthropic,
}


def main(client: str, path: str) -> None:
    given = json.loads(Path(path).read_text())
    read = READERS[client]
    report({"read": [read(url, text, how, given["tools"]) for url, text, how in given["asked"]]})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
