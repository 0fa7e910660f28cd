"""What ollama makes of penstock's answers. Arguments: the URLs without and with a key."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import ollama
from clients.asked import KEY, MAX_TOKENS, MODEL, NO_MODEL, TOO_LONG
from clients.scripts.report import error_of, report
from ollama import AsyncClient, Client

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ],
    "options": {"temperature": 0, "num_predict": MAX_TOKENS},
}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def main(url: str, secured_url: str) -> None:
    client = Client(host=url)
    whole = client.chat(**CHAT)
    report(
        {
            "whole": whole.model_dump(mode="json"),
            "latest": client.chat(**{**CHAT, "model": f"{MODEL}:latest"}).message.content,
            "stopped": stopped(client, (whole.message.content or "")[4:8]),
            "streamed": [part.model_dump(mode="json") for part in client.chat(**CHAT, stream=True)],
            "asynchronous": asyncio.run(asynchronous(url)),
            "generated": generated(client),
            "schema": constrained(client, SCHEMA),
            "scored": client.chat(**CHAT, logprobs=True, top_logprobs=2).model_dump(mode="json"),
            "loaded": client.generate(MODEL).model_dump(mode="json"),
            "unloaded": client.chat(MODEL, keep_alive=0).model_dump(mode="json"),
            "tags": client.list().model_dump(mode="json"),
            "running": client.ps().model_dump(mode="json"),
            "shown": client.show(MODEL).model_dump(mode="json"),
            "errors": errors(client, secured_url),
        }
    )


def stopped(client: Client, stop: str) -> dict[str, Any]:
    options = {**CHAT["options"], "stop": [stop]}
    answer = client.chat(**{**CHAT, "options": options})
    return {"stop": stop, "answer": answer.model_dump(mode="json")}


async def asynchronous(url: str) -> str:
    answer = await AsyncClient(host=url).chat(**CHAT)
    return answer.message.content or ""


def generated(client: Client) -> dict[str, Any]:
    """The same chat as a prompt; the prompt alone; and its lines."""
    system, prompt = (message["content"] for message in CHAT["messages"])
    asked = {"model": MODEL, "prompt": prompt, "options": CHAT["options"]}
    return {
        "templated": client.generate(system=system, **asked).model_dump(mode="json"),
        "raw": client.generate(raw=True, **asked).response,
        "lines": [part.response for part in client.generate(system=system, stream=True, **asked)],
    }


def constrained(client: Client, schema: dict[str, Any]) -> str:
    options = {"seed": 3, "num_predict": 60, "temperature": 0}
    answer = client.chat(MODEL, CHAT["messages"], format=schema, options=options)
    return answer.message.content or ""


def errors(client: Client, secured_url: str) -> dict[str, Any]:
    def error(client: Client, **changes: Any) -> dict[str, Any]:
        return error_of(ollama.ResponseError, lambda: client.chat(**{**CHAT, **changes}))

    image = [{"role": "user", "content": "What is it?", "images": ["aGVsbG8="]}]
    with_key = Client(host=secured_url, headers={"Authorization": f"Bearer {KEY}"})
    return {
        "bad value": error(client, options={"temperature": 3.0}),
        "unknown model": error(client, model=NO_MODEL),
        "too long": error(client, messages=[{"role": "user", "content": TOO_LONG}]),
        "image": error(client, messages=image),
        "wrong key": error(Client(host=secured_url)),
        "right key": error(with_key),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
