"""python image.py http://HOST:PORT FILE 'a question': asks a router's first model about a picture.

Needs `pip install openai`. The file is of JPEG, PNG, WebP or GIF, and goes with the request.
"""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

import openai


def ask(url: str, file: str, question: str) -> None:
    data = base64.b64encode(Path(file).read_bytes()).decode()
    kind = mimetypes.guess_type(file)[0] or "image/png"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}},
                        {"type": "text", "text": question},
                    ],
                }
            ],
            max_tokens=64,
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python image.py http://HOST:PORT FILE 'a question'")
    try:
        ask(*sys.argv[1:4])
    except openai.OpenAIError as error:
        sys.exit(str(error))
