"""A script that reports how huggingface_hub's InferenceClient reads penstock's answers.

Arguments: the URLs without and with a key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import Any

from clients.asked import KEY, MAX_TOKENS, MESSAGES, MODEL, PROMPT, SEED, TOO_LONG
from clients.scripts.report import error_of, report
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, TextGenerationError

SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "seed": SEED,
    "max_new_tokens": MAX_TOKENS,
    "return_full_text": False,
}
CHAT: dict[str, Any] = {"messages": MESSAGES, "seed": SEED, "max_tokens": MAX_TOKENS}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def main(url: str, secured_url: str) -> None:
    client = InferenceClient(base_url=url, timeout=60)
    report(
        {
            "generated": generated(client),
            "chat": chat(client),
            "asynchronous": asyncio.run(asynchronous(url)),
            "errors": errors(client),
            "keys": keys(secured_url),
        }
    )


def generated(client: InferenceClient) -> dict[str, Any]:
    detailed = client.text_generation(PROMPT, details=True, **SAMPLED)
    events = list(client.text_generation(PROMPT, details=True, stream=True, **SAMPLED))
    return {
        "text": client.text_generation(PROMPT, **SAMPLED),
        # TGI's route for this client puts the prompt before the text unless told otherwise.
        "default": client.text_generation(PROMPT, **{**SAMPLED, "return_full_text": None}),
        "detailed": dataclasses.asdict(detailed),
        "streamed": list(client.text_generation(PROMPT, stream=True, **SAMPLED)),
        "events": [dataclasses.asdict(event) for event in events],
    }


def chat(client: InferenceClient) -> dict[str, Any]:
    answer = client.chat_completion(**CHAT)
    named = client.chat.completions.create(model=MODEL, **CHAT)
    chunks = list(client.chat_completion(**STREAM, **CHAT))
    return {
        "text": answer.choices[0].message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "completion_tokens": answer.usage.completion_tokens,
        "named": named.choices[0].message.content,
        "streamed": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "streamed_tokens": [chunk.usage.completion_tokens for chunk in chunks if chunk.usage],
    }


async def asynchronous(url: str) -> dict[str, Any]:
    async with AsyncInferenceClient(base_url=url, timeout=60) as client:
        answer = await client.chat_completion(**CHAT)
        return {
            "generated": await client.text_generation(PROMPT, **SAMPLED),
            "chat": answer.choices[0].message.content,
        }


def errors(client: InferenceClient) -> dict[str, Any]:
    def error(prompt: str, **options: Any) -> dict[str, Any]:
        return error_of(TextGenerationError, lambda: client.text_generation(prompt, **options))

    return {
        "bad value": error(PROMPT, temperature=-1.0),
        "too long": error(TOO_LONG),
        "too long to stream": error_of(
            TextGenerationError, lambda: list(client.text_generation(TOO_LONG, stream=True))
        ),
        "a chat that is too long": error_of(
            HfHubHTTPError,
            lambda: client.chat_completion([{"role": "user", "content": TOO_LONG}]),
        ),
    }


def keys(secured_url: str) -> dict[str, Any]:
    wrong = InferenceClient(base_url=secured_url, api_key="none")
    right = InferenceClient(base_url=secured_url, api_key=KEY)
    return {
        "wrong": error_of(TextGenerationError, lambda: wrong.text_generation(PROMPT)),
        "wrong of a chat": error_of(HfHubHTTPError, lambda: wrong.chat_completion(**CHAT)),
        "right": right.text_generation(PROMPT, **SAMPLED),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
