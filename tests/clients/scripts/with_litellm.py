"""A script that reports how litellm reads penstock's answers.

Arguments: the URLs without and with a key.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm
import openai
from clients.asked import (
    KEY,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    NO_MODEL,
    PROMPT,
    SEED,
    TOO_LONG,
)
from clients.scripts.report import error_of, report

STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def main(url: str, secured_url: str) -> None:
    report(
        {
            "chat": chat(url),
            "completion": completion(url),
            "errors": errors(url, secured_url),
        }
    )


def chat(url: str) -> dict[str, Any]:
    options = settings(url, f"openai/{MODEL}")
    answer = litellm.completion(messages=MESSAGES, **options)
    chunks = list(litellm.completion(messages=MESSAGES, **STREAM, **options))
    asynchronous = asyncio.run(litellm.acompletion(messages=MESSAGES, **options))
    return {
        "text": answer.choices[0].message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "usage": counts(answer.usage),
        "streamed": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "streamed_usage": counts(chunks[-1].usage),
        "rebuilt": litellm.stream_chunk_builder(chunks).choices[0].message.content,
        "asynchronous": asynchronous.choices[0].message.content,
    }


def completion(url: str) -> dict[str, Any]:
    options = settings(url, f"text-completion-openai/{MODEL}")
    answer = litellm.text_completion(prompt=PROMPT, **options)
    chunks = list(litellm.text_completion(prompt=PROMPT, **STREAM, **options))
    return {
        "text": answer.choices[0].text,
        "finish_reason": answer.choices[0].finish_reason,
        "usage": counts(answer.usage),
        "streamed": [chunk.choices[0].text or "" for chunk in chunks if chunk.choices],
        "streamed_usage": counts(chunks[-1].usage),
    }


def errors(url: str, secured_url: str) -> dict[str, Any]:
    def of_chat(text: str = "Hi", url: str = url, model: str = MODEL, **more: Any) -> Any:
        options = {**settings(url, f"openai/{model}"), **more}
        messages = [{"role": "user", "content": text}]
        return error_of(openai.APIError, lambda: litellm.completion(messages=messages, **options))

    def of_completion(prompt: str) -> Any:
        options = settings(url, f"text-completion-openai/{MODEL}")
        return error_of(openai.APIError, lambda: litellm.text_completion(prompt=prompt, **options))

    return {
        "bad value": of_chat(temperature=3.0),
        "unknown model": of_chat(model=NO_MODEL),
        "too long": of_chat(TOO_LONG),
        "too long a prompt": of_completion(TOO_LONG),
        "too much to generate": of_chat(max_tokens=2048),
        "wrong key": of_chat(url=secured_url),
        "right key": of_chat(url=secured_url, api_key=KEY),
    }


def settings(url: str, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "api_base": f"{url}/v1",
        "api_key": "none",
        "seed": SEED,
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "num_retries": 0,
        "max_retries": 0,
    }


def counts(usage: Any) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main(*sys.argv[1:])
