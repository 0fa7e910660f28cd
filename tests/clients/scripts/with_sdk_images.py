"""A script that reports how langchain-openai and litellm read answers about an image.

Arguments: the URL, the model's name, the image's file, and a link to it.
"""

from __future__ import annotations

import sys
from typing import Any

import litellm
from clients.image_asked import MAX_TOKENS, MEDIA_TYPE, QUESTION, SCHEMA, base64_of, data_url
from clients.scripts.report import report
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI


def main(url: str, model: str, path: str, link: str) -> None:
    report(
        {
            "langchain": by_langchain(url, model, path, link),
            "litellm": {
                "openai": by_litellm(url, model, data_url(path)),
                "link": by_litellm(url, model, link),
                "anthropic": by_litellm(url, model, data_url(path), "anthropic"),
            },
        }
    )


def by_langchain(url: str, model: str, path: str, link: str) -> dict[str, Any]:
    text = {"type": "text", "text": QUESTION}
    forms = {
        "image_url": {"type": "image_url", "image_url": {"url": data_url(path)}},
        "base64": {"type": "image", "base64": base64_of(path), "mime_type": MEDIA_TYPE},
        "link": {"type": "image", "url": link},
    }
    settings: dict[str, Any] = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": model,
        "temperature": 0,
        "max_retries": 0,
    }
    chat = ChatOpenAI(**settings, max_tokens=MAX_TOKENS, stream_usage=True)
    responses = ChatOpenAI(**settings, max_tokens=MAX_TOKENS, use_responses_api=True)
    asked = {form: [HumanMessage(content=[part, text])] for form, part in forms.items()}
    answers = {form: chat.invoke(messages) for form, messages in asked.items()}
    structured = ChatOpenAI(**settings, max_tokens=200).with_structured_output(
        {"title": "seen", **SCHEMA}, method="json_schema"
    )
    return {
        "texts": {form: answer.content for form, answer in answers.items()},
        "tokens": [answer.usage_metadata["input_tokens"] for answer in answers.values()],
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(asked["base64"])),
        "responses": {form: responses.invoke(each).text for form, each in asked.items()},
        "structured": structured.invoke(asked["base64"]),
    }


def by_litellm(url: str, model: str, image: str, provider: str = "openai") -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION},
    ]
    asked: dict[str, Any] = {
        "model": f"{provider}/{model}",
        "api_base": f"{url}/v1" if provider == "openai" else url,
        "api_key": "none",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "max_retries": 0,
    }
    answer = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    return {
        "text": answer.choices[0].message.content,
        "tokens": answer.usage.prompt_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    }


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    main(*sys.argv[1:])
