"""Puts load on an OpenAI-compatible server: sends requests, and measures their answers."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import math
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock_cli.router_errors import CUT_OFF, NOT_HTTP, no_answer, one_line, refusal

# Short, common words: a prompt of n words is about n tokens for most tokenizers.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as"),
    *("an", "we", "us", "if", "do", "my", "up", "so", "he", "go", "no", "me"),
)
# Most shared chats are short, a few are very long.
_SHAREGPT_PROMPT_SIGMA = 1.4
_SHAREGPT_OUTPUT_SIGMA = 1.0
_SHAREGPT_MIN, _SHAREGPT_MAX = 4, 1024
_READ_TIMEOUT_S = 600.0
# Fields of a chat's chunk that carry generated tokens.
_SAID = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True)
class Load:
    """The arrival of requests.

    Closed loop: `level` requests at once; the end of one starts the next. Open loop: on average
    `level` requests per second, regardless of answers, with exponential gaps (a Poisson process).
    An infinite level sends all at once.
    """

    open_loop: bool
    level: float

    @property
    def name(self) -> str:
        if not self.open_loop:
            return "1 stream" if self.level == 1 else f"{self.level:g} streams"
        return "all at once" if math.isinf(self.level) else f"{self.level:g} requests/s"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Words in a prompt and tokens in an answer.

    With `spread`, the values are medians of log-normal distributions (sigma 1.4 and 1.0, clipped to
    4 to 1024), as in ShareGPT's chats. Otherwise every request has exactly these lengths.
    """

    prompt_words: int
    output_tokens: int
    spread: bool = False

    def draw(self, rng: random.Random) -> tuple[int, int]:
        if not self.spread:
            return self.prompt_words, self.output_tokens
        return (
            _log_normal(rng, self.prompt_words, _SHAREGPT_PROMPT_SIGMA),
            _log_normal(rng, self.output_tokens, _SHAREGPT_OUTPUT_SIGMA),
        )


def _log_normal(rng: random.Random, median: int, sigma: float) -> int:
    drawn = rng.lognormvariate(math.log(median), sigma)
    return min(max(round(drawn), _SHAREGPT_MIN), _SHAREGPT_MAX)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of one load. At least one of `requests` and `duration_s` ends it. After
    `duration_s`, running requests are awaited.
    """

    load: Load
    lengths: Lengths
    requests: int | None = None
    duration_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Server:
    """The measured server, and the fields of each request besides prompt and length.

    Without `sends_done`, its streams end without [DONE].
    """

    url: str
    fields: dict[str, Any]
    api_key: str | None = None
    keepalive: bool = True
    sends_done: bool = True
    chat: bool = False

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/{'chat/completions' if self.chat else 'completions'}"

    def body(self, prompt: str, output_tokens: int) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt": prompt}
        if self.chat:
            asked = {"messages": [{"role": "user", "content": prompt}]}
        return {**asked, "max_tokens": output_tokens, "stream": True, **self.fields}


@dataclass(slots=True)
class Answer:
    """A request and its answer, as the client sees them. Times are from `time.perf_counter`."""

    # Times count from the due time: a late load generator must not flatter the server.
    due_s: float
    # Required parts of the answer that have not arrived yet.
    missing: set[str]
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    error_kind: str = ""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from the due time to the first text, or to the end of an answer without text."""
        return (self.first_s or self.ended_s) - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first; 0 with one token."""
        return (self.last_s - self.first_s) / max(self.output_tokens - 1, 1)

    @property
    def e2e_s(self) -> float:
        """Seconds from the due time to the end of the answer."""
        return self.ended_s - self.due_s

    def fail(self, kind: str, error: str) -> None:
        self.error_kind, self.error = kind, error

    def take(self, data: bytes) -> None:
        """Record an event of the answer. Raise ValueError if `data` is not an event of a
        completion.
        """
        if data == b"[DONE]":
            self.missing.discard("[DONE]")
            return
        try:
            self._take_chunk(json.loads(data))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"the answer is no completion: {data[:100]!r}") from None

    def _take_chunk(self, chunk: Any) -> None:
        if "error" in chunk:
            self.fail("error event", one_line(ValueError(chunk["error"].get("message"))))
            return
        choices, usage = chunk["choices"], chunk.get("usage")
        if any(_says(choice) for choice in choices):
            self._take_time()
        if any(choice.get("finish_reason") for choice in choices):
            self.missing.discard("finish_reason")
        # Some servers send usage with the last choice; most send it in a separate event.
        if usage or not choices:
            self.output_tokens = int(usage["completion_tokens"])
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.missing.discard("usage")

    def _take_time(self) -> None:
        now_s = time.perf_counter()
        if self.first_s:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s


def _says(choice: dict[str, Any]) -> bool:
    """True if the choice, of a completion or a chat, has generated text."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(name) for name in _SAID)


async def run(plan: Plan, server: Server, rng: random.Random, answers: list[Answer]) -> float:
    """Send the plan's requests; append answers as they end. Return the duration in seconds."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_READ_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=not server.keepalive)
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout
    ) as session:
        bodies = _bodies(plan, server, rng)

        async def send(body: dict[str, Any], due_s: float) -> None:
            answers.append(await _complete(session, server, body, due_s))

        begin_s = time.perf_counter()
        if plan.load.open_loop:
            await _open_loop(plan, bodies, send, rng, begin_s)
        else:
            await _closed_loop(plan, bodies, send, begin_s)
        return time.perf_counter() - begin_s


def _bodies(plan: Plan, server: Server, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield bodies with distinct prompts, so that no prefix is shared by accident."""
    for _ in itertools.repeat(None) if plan.requests is None else range(plan.requests):
        prompt_words, output_tokens = plan.lengths.draw(rng)
        yield server.body(" ".join(rng.choices(_WORDS, k=prompt_words)), output_tokens)


async def _closed_loop(
    plan: Plan, bodies: Iterator[dict[str, Any]], send: Callable[..., Any], begin_s: float
) -> None:
    async def worker() -> None:
        for body in bodies:
            now_s = time.perf_counter()
            if now_s - begin_s >= plan.duration_s:
                return
            await send(body, now_s)

    await asyncio.gather(*(worker() for _ in range(int(plan.load.level))))


async def _open_loop(
    plan: Plan,
    bodies: Iterator[dict[str, Any]],
    send: Callable[..., Any],
    rng: random.Random,
    begin_s: float,
) -> None:
    due_s = begin_s
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            due_s += rng.expovariate(plan.load.level)
            if due_s - begin_s >= plan.duration_s:
                return
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            group.create_task(send(body, due_s))


async def _complete(
    session: aiohttp.ClientSession, server: Server, body: dict[str, Any], due_s: float
) -> Answer:
    """Send a request and record any failure, which must not end the others."""
    answer = Answer(due_s, missing={"finish_reason"})
    if server.sends_done:
        answer.missing.add("[DONE]")
    if "stream_options" in body:
        answer.missing.add("usage")
    try:
        await _stream(session, server.endpoint, body, answer)
    except aiohttp.ClientPayloadError:
        answer.fail("cut off", CUT_OFF)
    except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError) as error:
        # Catch this before ValueError, because a certificate error is both.
        answer.fail("connection", _unanswered(error, server))
    except ValueError as error:
        answer.fail("no completion", one_line(error))
    except (aiohttp.ClientError, OSError) as error:
        # This status 400 is from aiohttp's parser; a server's own 400 raises nothing.
        unreadable = isinstance(error, aiohttp.ClientResponseError) and error.status == 400
        kind = "timeout" if isinstance(error, TimeoutError) else "connection"
        answer.fail(kind, NOT_HTTP if unreadable else _unanswered(error, server))
    answer.ended_s = time.perf_counter()
    return answer


def _unanswered(error: Exception, server: Server) -> str:
    return f"no answer from {server.url}: {no_answer(_cause(error), server.url)}"


def _cause(error: Exception) -> Exception:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return error.certificate_error
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return http.client.RemoteDisconnected(str(error))
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    # TLS errors have their own numbers, failed name lookups negative ones: neither is an errno.
    if (
        isinstance(cause, OSError)
        and not isinstance(cause, ssl.SSLError)
        and (cause.errno or 0) > 0
    ):
        # Use the system's words: asyncio's text only names the failed call.
        return OSError(cause.errno, os.strerror(cause.errno or 0))
    return cause


async def _stream(
    session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any], answer: Answer
) -> None:
    async with session.post(endpoint, json=body) as response:
        if response.status != 200:
            text = refusal(response.status, await response.read())
            answer.fail(f"status {response.status}", f"status {response.status}: {text[:200]}")
            return
        async for data in _events(response.content):
            answer.take(data)
    if answer.missing and not answer.error:
        lacks = " and no ".join(sorted(answer.missing))
        answer.fail("cut off", f"{CUT_OFF}: it has no {lacks}")
    if "stream_options" not in body and answer.first_s:
        answer.output_tokens = len(answer.gaps_s) + 1


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of events. Events that arrive together wake this task once."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
