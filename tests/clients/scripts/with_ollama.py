"""A script that reports how ollama reads penstock's answers.

Arguments: the URLs without and with a key.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import ollama
from clients.asked import ENGINE, KEY, MAX_TOKENS, MODEL, NO_MODEL, TOO_LONG
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


def vectors(client: Client) -> dict[str, Any] | None:
    """Vectors of inputs; None where the engine has none."""
    try:
        several = list(client.embed(MODEL, ["a", "b"]).embeddings)
    except ollama.ResponseError as error:
        if "embeddings" not in error.error:
            raise
        return None
    return {"several": several, "none": list(client.embed(MODEL, "").embeddings)}


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
            "pulled": [part.status for part in client.pull(MODEL, stream=True)],
            "documented": documented(client),
            "remembered": remembered(client),
            "vectors": vectors(client),
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


# All that the documentation of /api/generate sets, but for mirostat, which Ollama dropped.
DOCUMENTED: dict[str, Any] = {
    **{"num_keep": 5, "seed": 42, "num_predict": 6, "top_k": 20, "top_p": 0.9, "min_p": 0.0},
    **{"typical_p": 0.7, "temperature": 0.8, "penalize_newline": True, "stop": ["\n", "user:"]},
    **{"numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1, "main_gpu": 0},
    **{"use_mmap": True, "num_thread": 8, "low_vram": False},
}


def documented(client: Client) -> dict[str, Any]:
    options = DOCUMENTED
    if ENGINE == "vllm":
        # It does not know this one, and the shard says so.
        options = {name: value for name, value in options.items() if name != "typical_p"}
    answer = client.generate(MODEL, "Why is the sky blue?", options=options)
    return answer.model_dump(mode="json")


def remembered(client: Client) -> dict[str, Any]:
    """The counts of a prompt, and of one after it and its answer."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Hi", "options": CHAT["options"]}
    first = client.generate(**asked)
    second = client.generate(**asked, context=first.context)
    return {
        "context": len(first.context or ()),
        "first": [first.prompt_eval_count, first.eval_count],
        "second": [second.prompt_eval_count, second.eval_count],
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
        "bad value": error(client, options={"temperature": -3.0}),
        "thinking": error(client, think=True),
        "unknown model": error(client, model=NO_MODEL),
        "too long": error(client, messages=[{"role": "user", "content": TOO_LONG}], stream=False),
        "unknown pull": error_of(ollama.ResponseError, lambda: client.pull(NO_MODEL)),
        "create": error_of(ollama.ResponseError, lambda: client.create("mine", from_=MODEL)),
        "delete": error_of(ollama.ResponseError, lambda: client.delete(MODEL)),
        "image": error(client, messages=image),
        "wrong key": error(Client(host=secured_url)),
        "right key": error(with_key),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
