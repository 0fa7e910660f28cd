"""`penstock bench`: closed-loop streaming load on a router, measured as a user sees it.

Each of `--streams` workers sends one completion after another. Prompts are distinct, so that no
prefix is shared by accident. Prints a table, or JSON for other programs.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock_client.arguments import (
    CUT_OFF,
    NOT_HTTP,
    add_url,
    one_line,
    parser_for,
    positive_int,
    whole_number,
)

# Short, common and distinct, so that a prompt of n words is about n tokens for most tokenizers.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as"),
    *("an", "we", "us", "if", "do", "my", "up", "so", "he", "go", "no", "me"),
)


@dataclass(slots=True)
class _Request:
    """What one request looked like from outside."""

    started_s: float = field(default_factory=time.perf_counter)
    last_s: float = 0.0
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    # What a whole answer has and this one has not had yet.
    missing: set[str] = field(default_factory=lambda: {"finish_reason", "usage", "[DONE]"})

    def take(self, data: bytes) -> None:
        """One event of the answer; raises ValueError for what cannot be one."""
        if data == b"[DONE]":
            self.missing.discard("[DONE]")
            return
        try:
            self._take_chunk(json.loads(data))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"the answer is no completion: {data[:100]!r}") from None

    def _take_chunk(self, chunk: Any) -> None:
        if "error" in chunk:
            self.error = one_line(ValueError(chunk["error"].get("message")))
        elif chunk["choices"]:
            self._take_time()
            if any(choice.get("finish_reason") for choice in chunk["choices"]):
                self.missing.discard("finish_reason")
        else:
            self.output_tokens = int(chunk["usage"]["completion_tokens"])
            self.prompt_tokens = int(chunk["usage"]["prompt_tokens"])
            self.missing.discard("usage")

    def _take_time(self) -> None:
        now_s = time.perf_counter()
        if self.ttft_s:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.ttft_s = now_s - self.started_s
        self.last_s = now_s


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("bench", "Measure a router under streaming load.")
    add_url(parser)
    parser.add_argument("--model", help="default: the first the router serves")
    for name, default, text in (
        ("--streams", 16, "requests at once"),
        ("--requests", 64, "requests in all"),
        ("--prompt-words", 128, "words in a prompt, about one token each"),
        ("--output-tokens", 64, "tokens to generate, exactly"),
    ):
        parser.add_argument(
            name, type=positive_int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the prompts (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    started_s = time.perf_counter()
    requests = asyncio.run(_load(args))
    summary = _summarize(requests, time.perf_counter() - started_s)
    if args.json:
        print(json.dumps(summary))
    elif summary["requests"]:
        print(_table(summary))
    else:
        # Most often nobody is there: a table of zeros would hide it.
        print(f"penstock bench: no request succeeded: {summary['first_error']}", file=sys.stderr)
    return 1 if summary["failed"] else 0


async def _load(args: Any) -> list[_Request]:
    rng = random.Random(args.seed)
    prompts = [" ".join(rng.choices(_WORDS, k=args.prompt_words)) for _ in range(args.requests)]
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    results: list[_Request] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=600)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout
    ) as session:

        async def worker() -> None:
            while prompts:
                results.append(await _complete(session, prompts.pop(), args))

        await asyncio.gather(*(worker() for _ in range(args.streams)))
    return results


async def _complete(session: aiohttp.ClientSession, prompt: str, args: Any) -> _Request:
    """One request, whatever becomes of it: one that fails must not end the others."""
    result = _Request()
    try:
        await _stream(session, prompt, args, result)
    except aiohttp.ClientPayloadError:
        result.error = CUT_OFF
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # 400 is what aiohttp's own parser says; one from the router is an answer like others.
        unreadable = isinstance(error, aiohttp.ClientResponseError) and error.status == 400
        result.error = NOT_HTTP if unreadable else one_line(error)
    return result


async def _stream(session: aiohttp.ClientSession, prompt: str, args: Any, result: _Request) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": args.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if args.model:
        body["model"] = args.model
    async with session.post(args.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            text = one_line(ValueError(await response.text(errors="replace")))
            result.error = f"status {response.status}: {text[:200]}"
            return
        async for line in response.content:
            if line.startswith(b"data: "):
                result.take(line.removeprefix(b"data: ").strip())
    if result.missing and not result.error:
        result.error = f"{CUT_OFF}: it has no {' and no '.join(sorted(result.missing))}"


def _summarize(requests: Sequence[_Request], wall_s: float) -> dict[str, Any]:
    good = [request for request in requests if not request.error]
    gaps_s = [gap for request in good for gap in request.gaps_s]
    output_tokens = sum(request.output_tokens for request in good)
    return {
        "requests": len(good),
        "failed": len(requests) - len(good),
        "first_error": next((request.error for request in requests if request.error), ""),
        "wall_s": wall_s,
        "prompt_tokens": sum(request.prompt_tokens for request in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / wall_s,
        "ttft_ms": _percentiles_ms([request.ttft_s for request in good]),
        "inter_token_ms": _percentiles_ms(gaps_s),
    }


def _percentiles_ms(values_s: Sequence[float]) -> dict[str, float]:
    if len(values_s) < 2:
        return {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    cuts = statistics.quantiles(values_s, n=100, method="inclusive")
    return {"p50": cuts[49] * 1e3, "p90": cuts[89] * 1e3, "p99": cuts[98] * 1e3}


def _table(summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['requests']} requests in {summary['wall_s']:.1f} s, {summary['failed']} failed",
        f"{summary['output_tokens_per_s']:.1f} output tokens/s "
        f"({summary['prompt_tokens']} prompt and {summary['output_tokens']} output tokens)",
        f"{'ms':<14}{'p50':>9}{'p90':>9}{'p99':>9}",
    ]
    for name, key in (("first token", "ttft_ms"), ("inter-token", "inter_token_ms")):
        row = summary[key]
        lines.append(f"{name:<14}{row['p50']:>9.1f}{row['p90']:>9.1f}{row['p99']:>9.1f}")
    if summary["first_error"]:
        lines.append(f"first error: {summary['first_error']}")
    return "\n".join(lines)
