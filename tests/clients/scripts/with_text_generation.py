"""A script that reports how text-generation, TGI's own client, reads penstock's answers.

Argument: the URL.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import text_generation.errors
from clients.asked import MAX_TOKENS, PROMPT, SEED, TOO_LONG
from clients.scripts.report import error_of, report
from text_generation import AsyncClient, Client
from text_generation.types import Message

SAMPLED: dict[str, Any] = {"do_sample": True, "seed": SEED, "max_new_tokens": MAX_TOKENS}


def main(url: str) -> None:
    client = Client(url, timeout=60)
    report(
        {
            "generated": generated(client),
            "streamed": [event.model_dump() for event in client.generate_stream(PROMPT, **SAMPLED)],
            "asynchronous": asyncio.run(asynchronous(url)),
            "chat": chat(client),
            "errors": errors(client),
        }
    )


def generated(client: Client) -> dict[str, Any]:
    whole = client.generate(PROMPT, **SAMPLED, decoder_input_details=True, top_n_tokens=2)
    # The middle of an answer, so that it ends there.
    stop = whole.generated_text[4:8]
    best = client.generate(PROMPT, do_sample=True, best_of=2, max_new_tokens=MAX_TOKENS)
    return {
        "whole": whole.model_dump(),
        "stop": stop,
        "stopped": client.generate(PROMPT, **SAMPLED, stop_sequences=[stop]).model_dump(),
        "with its prompt": client.generate(PROMPT, **SAMPLED, return_full_text=True).generated_text,
        "best of two": best.model_dump(),
        "default": client.generate(PROMPT).model_dump(),
    }


async def asynchronous(url: str) -> dict[str, Any]:
    client = AsyncClient(url, timeout=60)
    answers = await asyncio.gather(*(client.generate(PROMPT, **SAMPLED) for _ in range(4)))
    events = [event async for event in client.generate_stream(PROMPT, **SAMPLED)]
    return {
        "texts": [answer.generated_text for answer in answers],
        "streamed": "".join(event.token.text for event in events if not event.token.special),
    }


def chat(client: Client) -> Any:
    messages = [Message(role="user", content=PROMPT)]
    return client.chat(messages, seed=SEED, max_tokens=MAX_TOKENS).model_dump()


def errors(client: Client) -> dict[str, Any]:
    def error(prompt: str, **options: Any) -> dict[str, Any]:
        return error_of(
            text_generation.errors.ValidationError, lambda: client.generate(prompt, **options)
        )

    def streamed(prompt: str) -> dict[str, Any]:
        return error_of(
            text_generation.errors.ValidationError, lambda: list(client.generate_stream(prompt))
        )

    return {
        "too many stops": error(PROMPT, stop_sequences=["a", "b", "c", "d", "e"]),
        "too much to generate": error(PROMPT, max_new_tokens=5000),
        "too long": error(TOO_LONG),
        "too long to stream": streamed(TOO_LONG),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
