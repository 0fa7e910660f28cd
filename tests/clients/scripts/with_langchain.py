"""A script that reports how langchain-openai reads penstock's answers.

Arguments: the URLs without and with a key.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from clients.asked import (
    KEY,
    MAX_TOKENS,
    MESSAGES,
    MODEL,
    NO_MODEL,
    PROMPT,
    PROMPTS,
    SEED,
    TOO_LONG,
)
from clients.scripts.report import error_of, report
from langchain_openai import ChatOpenAI, OpenAI


def main(url: str, secured_url: str) -> None:
    report(
        {
            "chat": chat(url),
            "completion": completion(url),
            "errors": errors(url, secured_url),
        }
    )


def chat(url: str) -> dict[str, Any]:
    model = chat_model(url)
    answer = model.invoke(MESSAGES)
    chunks = list(model.stream(MESSAGES))
    asynchronous = asyncio.run(model.ainvoke(MESSAGES))
    scored = model.bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    return {
        "text": answer.content,
        "usage": answer.usage_metadata,
        "finish_reason": answer.response_metadata["finish_reason"],
        "model": answer.response_metadata["model_name"],
        "streamed": [chunk.content for chunk in chunks],
        "streamed_usage": [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata],
        "asynchronous": asynchronous.content,
        "batch": [answer.content for answer in model.batch([MESSAGES] * 3)],
        "logprobs": scored.response_metadata["logprobs"]["content"],
    }


def completion(url: str) -> dict[str, Any]:
    model = completion_model(url)
    batch = completion_model(url, n=2, best_of=3, batch_size=2).generate(PROMPTS)
    return {
        "text": model.invoke(PROMPT),
        "streamed": list(model.stream(PROMPT)),
        "batch": [[choice.text for choice in choices] for choices in batch.generations],
        "batch_usage": (batch.llm_output or {})["token_usage"],
    }


def errors(url: str, secured_url: str) -> dict[str, Any]:
    def error(model: ChatOpenAI, text: str = "Hi") -> dict[str, Any]:
        return error_of(openai.APIStatusError, lambda: model.invoke(text))

    return {
        "bad value": error(chat_model(url, temperature=3.0)),
        "unknown model": error(chat_model(url, model=NO_MODEL)),
        "too long": error(chat_model(url), TOO_LONG),
        "wrong key": error(chat_model(secured_url)),
        "right key": error(chat_model(secured_url, api_key=KEY)),
    }


def chat_model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(**settings(url, options), stream_usage=True)


def completion_model(url: str, **options: Any) -> OpenAI:
    return OpenAI(**settings(url, options))


def settings(url: str, options: dict[str, Any]) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": MODEL,
        "seed": SEED,
        "temperature": 1.0,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
    }
    return {**usual, **options}


if __name__ == "__main__":
    main(*sys.argv[1:])
