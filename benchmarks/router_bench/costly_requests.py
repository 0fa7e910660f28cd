"""Requests that cost a server far more than their sender, and the sender.

Some take long by their content. Others fill a queue in which honest clients wait for the same.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from benchmarks.router_bench.http_load import MODEL, Client, chat, client, post
from benchmarks.router_bench.loads import Window
from benchmarks.router_bench.servers import Pipe

# Arguments: the key, a salt for each window, the request's number.
MakeRequest = Callable[[str, str, int], bytes]


@dataclass(frozen=True, slots=True)
class Attack:
    """Repeated salvos of requests, of which at most `at_once` wait for answers."""

    name: str
    make: MakeRequest
    at_once: int
    in_a_salvo: int
    period_s: float
    # Honest clients also send the last request of each salvo.
    is_shared: bool = False


# ---- Requests ----------------------------------------------------------------------------------

_OPENINGS = 16_300
_AMBIGUOUS = 'start: e\ne: e e | "a" | "b" | " " | e "c" e'
_MANY_TOKENS = 1500
_NUM_PROPERTIES = 2000
_LONG_BYTES = 4_000_000
_CUT_TOKENS = 100
# Patterns with look-ahead, which take some tenths of a second in all.
_NUM_PATTERNS = 4
_SIDE_PIXELS = 4000


def _unclosed_images(key: str, salt: str, number: int) -> bytes:
    return post("/generate", {"inputs": "![](" * _OPENINGS}, key)


def _ambiguous_grammar(key: str, salt: str, number: int) -> bytes:
    body = {"model": MODEL, "prompt": "a", "max_tokens": _MANY_TOKENS, "ignore_eos": True}
    return post("/v1/completions", {**body, "structured_outputs": {"grammar": _AMBIGUOUS}}, key)


def _wide_tool(key: str, salt: str, number: int) -> bytes:
    properties: dict[str, Any] = {f"p{each}": {} for each in range(_NUM_PROPERTIES)}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "wide", "parameters": parameters}}
    return chat(key=key, tools=[tool], tool_choice="required", max_tokens=16)


def _long_text(key: str, salt: str, number: int) -> bytes:
    """Return a long text; every second is to be truncated."""
    body = {"model": MODEL, "prompt": "word and " * (_LONG_BYTES // 9), "max_tokens": 1}
    cut = {"truncate_prompt_tokens": _CUT_TOKENS} if number % 2 else {}
    return post("/v1/completions", {**body, **cut}, key)


def _slow_constraint(key: str, salt: str, number: int) -> bytes:
    properties = {
        f"{salt}{each}": {"type": "string", "pattern": f"{number}(?=.*x{each}).*[a-z]{{12}}7.*"}
        for each in range(_NUM_PATTERNS)
    }
    schema = {"type": "object", "properties": properties}
    asked = {"json": schema}
    return chat(key=key, stream=True, ignore_eos=False, max_tokens=4, structured_outputs=asked)


def _large_image(key: str, salt: str, number: int) -> bytes:
    data = base64.b64encode(picture(f"{salt}{number}")).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [image]}]
    return chat(key=key, messages=messages, stream=True, max_tokens=4)


def picture(comment: str) -> bytes:
    """Return a large PNG of few bytes, different for each comment."""
    *_, end = whole = _plain_picture()
    text = b"tEXtComment\0" + comment.encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return b"".join((*whole[:-1], chunk, end))


@functools.cache
def _plain_picture() -> tuple[bytes, bytes]:
    """Return the file without its last chunk, and that chunk."""
    out = io.BytesIO()
    Image.new("RGB", (_SIDE_PIXELS, _SIDE_PIXELS), "teal").save(out, "PNG")
    return out.getvalue()[:-12], out.getvalue()[-12:]


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("brackets", _unclosed_images, 8, 8, 0.1),
        Attack("grammars", _ambiguous_grammar, 8, 8, 0.1),
        Attack("wide-tool", _wide_tool, 4, 4, 0.1),
        Attack("long-texts", _long_text, 8, 8, 0.1),
        Attack("same-constraints", _slow_constraint, 1000, 12, 2.0, is_shared=True),
        Attack("same-images", _large_image, 1000, 8, 2.0, is_shared=True),
    )
}


# ---- Senders -----------------------------------------------------------------------------------


def send(pipe: Pipe, port: int, attack: Attack, key: str, salt: str, window: Window) -> None:
    """Attack throughout a window; send the number of answers by status."""
    # This work belongs to another machine.
    os.nice(19)
    attack.make(key, salt, 0)
    pipe.send("ready")
    pipe.send(dict(asyncio.run(_salvos(port, attack, key, salt, window))))


async def _salvos(port: int, attack: Attack, key: str, salt: str, window: Window) -> Counter[str]:
    statuses: Counter[str] = Counter()
    asking: set[asyncio.Task[None]] = set()

    async def ask(http: Client, number: int) -> None:
        answer = await http.ask(attack.make(key, salt, number))
        statuses[answer.error or str(answer.status)] += 1

    async with client(port) as http:
        salvo = 0
        while (at_s := window.begin_s + salvo * attack.period_s) < window.to_s:
            await asyncio.sleep(at_s - time.monotonic())
            first = salvo * attack.in_a_salvo
            asking = {task for task in asking if not task.done()}
            room = min(attack.in_a_salvo, attack.at_once - len(asking))
            asking |= {asyncio.create_task(ask(http, first + each)) for each in range(room)}
            salvo += 1
        statuses["unanswered"] = sum(not task.done() for task in asking)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return +statuses


def asked_too(attack: Attack, key: str, salt: str, window: Window) -> list[tuple[float, bytes]]:
    """Return honest requests, each like the last of a salvo, half a period after it."""
    if not attack.is_shared:
        return []
    length_s = window.warmup_s + window.seconds
    return [
        (
            (salvo + 0.5) * attack.period_s,
            attack.make(key, salt, (salvo + 1) * attack.in_a_salvo - 1),
        )
        for salvo in range(int(length_s / attack.period_s))
    ]
