"""A script that reports how anthropic reads penstock's answers.

Arguments: the URLs without and with a key.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from clients.asked import KEY, MAX_TOKENS, MODEL, NO_MODEL, TOO_LONG
from clients.scripts.report import error_of, report

SYSTEM = "Be brief."
CHAT: dict[str, Any] = {
    "model": MODEL,
    "system": SYSTEM,
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": MAX_TOKENS,
    # The client has no parameter for it any more.
    "extra_body": {"temperature": 0.0},
}


def main(url: str, secured_url: str) -> None:
    client = connected(url)
    whole = client.messages.create(**CHAT)
    report(
        {
            "whole": whole.model_dump(mode="json"),
            "short": client.messages.create(**{**CHAT, "max_tokens": 3}).model_dump(mode="json"),
            "stopped": stopped(client, whole.content[0].text[4:8]),
            "blocks": in_blocks(client),
            "streamed": streamed(client),
            "asynchronous": asyncio.run(asynchronous(url)),
            "tokens": counted(client),
            "errors": errors(url, secured_url),
        }
    )


def stopped(client: Anthropic, stop: str) -> dict[str, Any]:
    answer = client.messages.create(**CHAT, stop_sequences=[stop])
    return {"stop": stop, "answer": answer.model_dump(mode="json")}


def in_blocks(client: Anthropic) -> str:
    """The same chat, its texts given as blocks."""
    system = [{"type": "text", "text": SYSTEM}]
    content = [{"type": "text", "text": CHAT["messages"][0]["content"]}]
    messages = [{"role": "user", "content": content}]
    answer: Any = client.messages.create(**{**CHAT, "system": system, "messages": messages})
    text: str = answer.content[0].text
    return text


def streamed(client: Anthropic) -> dict[str, Any]:
    with client.messages.stream(**CHAT) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    events = list(client.messages.create(**CHAT, stream=True))
    return {
        "pieces": pieces,
        "final": final.model_dump(mode="json"),
        "events": [event.type for event in events],
    }


async def asynchronous(url: str) -> str:
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        answer: Any = await client.messages.create(**CHAT)
        text: str = answer.content[0].text
        return text


def counted(client: Anthropic) -> int:
    asked = {name: CHAT[name] for name in ("model", "system", "messages")}
    tokens: int = client.messages.count_tokens(**asked).input_tokens
    return tokens


def errors(url: str, secured_url: str) -> dict[str, Any]:
    def error(client: Anthropic, **options: Any) -> dict[str, Any]:
        return error_of(
            anthropic.APIStatusError, lambda: client.messages.create(**{**CHAT, **options})
        )

    too_long = [{"role": "user", "content": TOO_LONG}]
    client = connected(url)
    return {
        "bad value": error(client, extra_body={"temperature": 3.0}),
        "unknown model": error(client, model=NO_MODEL),
        "too long": error(client, messages=too_long),
        "wrong key": error(connected(secured_url)),
        "right key": error(connected(secured_url, KEY)),
    }


def connected(url: str, key: str = "none") -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
