"""A script that reports how huggingface_hub's client reads answers about an image.

Arguments: the URL, the model's name, the image's file, and a link to it.
"""

from __future__ import annotations

import sys
from typing import Any

from clients.image_asked import MAX_TOKENS, QUESTION, data_url
from clients.scripts.report import report
from huggingface_hub import InferenceClient


def main(url: str, model: str, path: str, link: str) -> None:
    client = InferenceClient(base_url=url, timeout=60)
    report(
        {
            "data": chat(client, data_url(path)),
            "link": chat(client, link),
            "generated": client.text_generation(
                f"![]({data_url(path)}){QUESTION}",
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                return_full_text=False,
            ),
        }
    )


def chat(client: InferenceClient, image: str) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION},
    ]
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
    }
    answer = client.chat_completion(**asked)
    chunks = list(client.chat_completion(**asked, stream=True))
    return {
        "text": answer.choices[0].message.content,
        "tokens": answer.usage.prompt_tokens,
        "streamed": "".join(each.choices[0].delta.content or "" for each in chunks),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
