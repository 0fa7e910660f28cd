"""A script that reports how the clients of anthropic and ollama read answers about an image.

Arguments: the URL, the model's name, the image's file, and a link to it.
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import ollama
from clients.image_asked import MAX_TOKENS, MEDIA_TYPE, QUESTION, base64_of
from clients.scripts.report import error_of, report


def main(url: str, model: str, path: str, link: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    data = {"type": "base64", "media_type": MEDIA_TYPE, "data": base64_of(path)}
    report(
        {
            "base64": messages(client, model, data),
            "link": messages(client, model, {"type": "url", "url": link}),
            "result": in_a_result(client, model, data),
            "error": error_of(
                anthropic.BadRequestError,
                lambda: messages(client, model, {**data, "data": "aGVsbG8="}),
            ),
            "ollama": by_ollama(ollama.Client(host=url), model, path),
        }
    )


def messages(client: anthropic.Anthropic, model: str, source: Any) -> dict[str, Any]:
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": content}]}
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0.0}}
    with client.messages.stream(**asked, **options) as stream:
        pieces = list(stream.text_stream)
    answer = client.messages.create(**asked, **options)
    usage = answer.usage
    return {
        "text": answer.content[0].text,
        "streamed": "".join(pieces),
        "tokens": usage.input_tokens + usage.cache_read_input_tokens,
        "counted": client.messages.count_tokens(**asked).input_tokens,
    }


def in_a_result(client: anthropic.Anthropic, model: str, source: Any) -> str:
    """An image that a tool gives."""
    image = {"type": "image", "source": source}
    turns: Any = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}],
        },
    ]
    answer: Any = client.messages.create(
        model=model, messages=turns, max_tokens=MAX_TOKENS, extra_body={"temperature": 0.0}
    )
    return str(answer.content[0].text)


def by_ollama(client: ollama.Client, model: str, path: str) -> dict[str, Any]:
    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    asked = [{"role": "user", "content": QUESTION, "images": [path]}]
    lines = client.chat(model=model, messages=asked, options=options, stream=True)
    chat = client.chat(model=model, messages=asked, options=options)
    generated = client.generate(model=model, prompt=QUESTION, images=[path], options=options)
    return {
        "chat": chat.message.content,
        "streamed": "".join(line.message.content or "" for line in lines),
        "generated": generated.response,
        "tokens": chat.prompt_eval_count,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
