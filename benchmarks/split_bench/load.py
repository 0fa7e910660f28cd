"""The load for all ways: streamed completions of ShareGPT-like lengths, each with a seed.

Runs in its own process, at the other end of a `Load`'s pipe. The same seed gives the same requests
at the same times.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from benchmarks.router_bench.figures import curve, percentile
from benchmarks.router_bench.http_load import MODEL, Answer, Connection, post
from benchmarks.router_bench.servers import Pipe
from penstock_cli.bench import load as bench_load
from penstock_cli.bench.load import Lengths

# As in `penstock bench --lengths sharegpt`.
_LENGTHS = Lengths(64, 128, spread=True)
# Of prompt and answer. The few longer ones do not fit into a context of 2,048.
_MAX_LENGTH = 1792

_PATH = "/v1/completions"
_TEXT = re.compile(rb'"text": *"[^"]')
# Requests before the load, to compare the ways' tokens.
_PROBES = 4
_PROBE_TOKENS = 48
_PROBE_TIMEOUT_S = 60.0
# A request of the window without text after this time has failed.
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The load. Without `rate`, each of `streams` clients sends one request after another; else
    `rate` requests a second are sent at random times.
    """

    streams: int
    rate: float
    warmup_s: float
    seed: int


def sampling_fields(number: int) -> dict[str, Any]:
    """Return fields that draw from all tokens, with a seed for each request."""
    return {"temperature": 1.0, "seed": number}


def lengths(seed: int) -> Iterator[tuple[int, int]]:
    """Yield prompt words and output tokens of requests, endlessly."""
    rng = random.Random(seed)
    while True:
        prompt_words, output_tokens = _LENGTHS.draw(rng)
        if prompt_words + output_tokens <= _MAX_LENGTH:
            yield prompt_words, output_tokens


def mean_output_tokens(count: int = 20_000) -> float:
    drawn = islice(lengths(0), count)
    return sum(output_tokens for _, output_tokens in drawn) / count


# ---- the same tokens ----------------------------------------------------------------------------


def probe_texts(port: int) -> list[str]:
    """Return the answers to a few requests with seeds. Raises OSError if they fail."""
    with ThreadPoolExecutor(_PROBES) as executor:
        return list(executor.map(lambda number: _probe(port, number), range(_PROBES)))


def _probe(port: int, number: int) -> str:
    prompt = "the quick brown fox jumps over the lazy dog " * (number + 1)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": _PROBE_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{_PATH}",
        json.dumps({**body, **sampling_fields(number)}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


# ---- the load -----------------------------------------------------------------------------------


def _bodies(seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for number, (prompt_words, output_tokens) in enumerate(lengths(seed)):
        yield {
            "model": MODEL,
            "prompt": " ".join(rng.choices(bench_load._WORDS, k=prompt_words)),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            **sampling_fields(number),
        }


class _Connection(Connection):
    """Records in `chunks` when text came."""

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is not None and not answer.ended_s and _TEXT.search(data):
            now_s = time.monotonic()
            answer.first_s = answer.first_s or now_s
            answer.chunks.append((now_s, b""))
        super().data_received(data)


class _Requests:
    """Sends completions; keeps all, in the order in which they were due."""

    def __init__(self, port: int, seed: int) -> None:
        self.answers: list[Answer] = []
        self._port = port
        self._idle: list[Connection] = []
        self._all: list[Connection] = []
        self._bodies = _bodies(seed)

    async def ask(self, due_s: float) -> None:
        """Send the next request; wait for the answer."""
        request = post(_PATH, next(self._bodies))
        connection = self._idle.pop() if self._idle else await self._connect()
        answered = connection.send(request)
        answer = connection.answer
        assert answer is not None
        answer.sent_s = due_s
        self.answers.append(answer)
        await answered
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        self._all.append(connection)
        return connection

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def send(pipe: Pipe, port: int, traffic: Traffic) -> None:
    """Send requests until the pipe gives a window; send its figures.

    Send "ready" after the warm-up.
    """
    asyncio.run(_send(pipe, port, traffic))


async def _send(pipe: Pipe, port: int, traffic: Traffic) -> None:
    requests = _Requests(port, traffic.seed)
    loop = _open_loop if traffic.rate else _closed_loop
    sending = asyncio.create_task(loop(requests, traffic))
    try:
        await asyncio.sleep(traffic.warmup_s)
        pipe.send("ready")
        from_s, to_s = await asyncio.to_thread(pipe.recv)
        give_up_s = time.monotonic() + _PATIENCE_S
        while not _all_begun(requests.answers, from_s, to_s) and time.monotonic() < give_up_s:
            await asyncio.sleep(0.05)
        if sending.done():
            # It ends only by an error.
            await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    pipe.send(_summary(requests.answers, from_s, to_s))
    requests.close()


async def _closed_loop(requests: _Requests, traffic: Traffic) -> None:
    async def worker() -> None:
        while True:
            await requests.ask(time.monotonic())

    async with asyncio.TaskGroup() as group:
        for _ in range(traffic.streams):
            group.create_task(worker())


async def _open_loop(requests: _Requests, traffic: Traffic) -> None:
    rng = random.Random(traffic.seed)
    due_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while True:
            due_s += rng.expovariate(traffic.rate)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(requests.ask(due_s))


def _all_begun(answers: Sequence[Answer], from_s: float, to_s: float) -> bool:
    due = (answer for answer in answers if from_s <= answer.sent_s < to_s)
    return all(answer.first_s or answer.ended_s for answer in due)


def _summary(answers: Sequence[Answer], from_s: float, to_s: float) -> dict[str, Any]:
    """Return the window's figures. Gaps are between reads with text in a stream."""
    due = [answer for answer in answers if from_s <= answer.sent_s < to_s]
    ttfts_s = [answer.first_s - answer.sent_s for answer in due if answer.first_s]
    gaps_s: list[float] = []
    for answer in answers:
        times = [at_s for at_s, _ in answer.chunks if from_s <= at_s < to_s]
        gaps_s += [later - earlier for earlier, later in pairwise(times)]
    good = [answer for answer in answers if answer.status in (0, 200) and not answer.error]
    found: dict[str, Any] = {
        "requests": len(due),
        "failed": len(answers) - len(good) + len(due) - len(ttfts_s),
        "reads": len(gaps_s),
        "ttfts_ms": [1e3 * value for value in curve(ttfts_s)],
        "gaps_ms": [1e3 * value for value in curve(gaps_s)],
    }
    for name, values in (("ttft", ttfts_s), ("gap", gaps_s)):
        found[f"{name}_p50_ms"] = 1e3 * percentile(values, 0.5) if values else None
        found[f"{name}_p99_ms"] = 1e3 * percentile(values, 0.99) if values else None
    return found
