"""Benchmarks of shard and router processes: steps while tokens are streamed over gRPC, and requests
over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.processes import Router, Shard, running

from benchmarks.gpu_bench.shapes import SHAPES, Variant
from penstock_cli.bench.load import Lengths
from penstock_client import GenerationRequest, SamplingParams, ShardClient
from penstock_proto.facts import LoadReport

# The lengths of `penstock bench --lengths sharegpt`.
LENGTHS = Lengths(64, 128, spread=True)
_START_TIMEOUT_S = 300.0
_SETTLE_S = 0.5
# If steps take at least this share of the time, they count as running without gaps.
_ALL = 0.97
# The most requests in a batch of transformers, and the tokens in a block of its cache.
_MOST_AT_ONCE = 512
_PAGE = 256


def _shard(variant: Variant, directory: Path) -> Shard:
    model = SHAPES[variant.shape].write(directory / variant.shape)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", variant.device]
    flags += ["--max-num-seqs", str(variant.max_num_seqs)]
    flags += ["--max-model-len", str(variant.max_model_len)]
    flags += ["--max-queued-requests", "8192", "--served-model-name", "bench"]
    if variant.quantization:
        flags += ["--quantization", variant.quantization]
    flags += ["--kv-cache-dtype", variant.kv_cache_dtype]
    return Shard(directory / "shard.log", *flags)


def steps_over_grpc(
    variant: Variant, streams: Sequence[int], context: int, seconds: float, directory: Path
) -> Iterator[dict[str, Any]]:
    """Yield the period of steps while a client reads streams that get one token a step."""
    shard = _shard(variant, directory)
    try:
        shard.wait_healthy(_START_TIMEOUT_S)
        for count in streams:
            found = asyncio.run(_steps(shard.address, count, context, seconds, variant))
            yield {"what": "served steps", "model": variant.label, "batch": count, **found}
    finally:
        shard.close()


async def _steps(
    address: str, count: int, context: int, seconds: float, variant: Variant
) -> dict[str, Any]:
    """Return the period of steps while all streams decode."""
    room = variant.max_model_len - context - 1
    rng = random.Random(count)
    decoding = 0

    async def read(client: ShardClient) -> None:
        nonlocal decoding
        request = GenerationRequest(
            rng.choices(range(3, 200), k=context),
            max_tokens=room,
            sampling=SamplingParams(temperature=0.0),
            ignore_eos=True,
        )
        async with client.submit(request) as stream:
            async for _ in stream:
                decoding += 1
                break
            async for _ in stream:
                pass

    async with ShardClient(address) as client:
        readers = [asyncio.create_task(read(client)) for _ in range(count)]
        while decoding < count:
            await asyncio.sleep(0.05)
            if done := [reader for reader in readers if reader.done()]:
                await done[0]
                raise RuntimeError("a stream ended before all of them decoded: more context")
        await asyncio.sleep(min(_SETTLE_S, seconds))
        before, before_s = await _load(client), time.perf_counter()
        await asyncio.sleep(seconds)
        after, after_s = await _load(client), time.perf_counter()
        whole = not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    if not whole:
        raise RuntimeError("a stream ended while it was measured: a shorter window")
    if after.preemptions_total > before.preemptions_total:
        raise RuntimeError(f"{count} streams: too few KV blocks for all of them")
    return _window(before, after, after_s - before_s, count)


def _window(before: LoadReport, after: LoadReport, passed_s: float, count: int) -> dict[str, Any]:
    """Compute the period by the shard's own time in steps, which a slow client does not affect;
    with gaps between steps, by the clock.
    """
    steps = max(1, after.steps_total - before.steps_total)
    took_s = after.steps_seconds_total - before.steps_seconds_total
    return {
        "period_ms": 1e3 * (took_s if took_s > _ALL * passed_s else passed_s) / steps,
        "steps": steps,
        # The mean in the middle of the window.
        "context": (before.running_tokens + after.running_tokens) // (2 * count),
    }


async def _load(client: ShardClient) -> LoadReport:
    async for report in client.watch_load():
        return report
    raise RuntimeError("the shard reports no load")


def requests_over_http(
    variant: Variant, requests: int, directory: Path
) -> Iterator[dict[str, Any]]:
    """Send requests of ShareGPT-like lengths, all at once: completions, then chats."""
    with _router(variant, requests, directory) as url:
        for chat in (False, True):
            flags = ["--lengths", "sharegpt", *(["--chat"] if chat else [])]
            yield {
                "what": "requests",
                "model": variant.label,
                "api": "chat" if chat else "completions",
                "requests": requests,
                **_bench(url, requests, flags),
            }


def throughput_over_http(
    variant: Variant, requests: int, num_tokens: int, directory: Path
) -> Iterator[dict[str, Any]]:
    """Send completions of `num_tokens` after prompts of about as many, all at once."""
    with _router(variant, requests, directory) as url:
        flags = ["--prompt-words", str(num_tokens), "--output-tokens", str(num_tokens)]
        yield {
            "what": "throughput",
            "model": variant.label,
            "requests": requests,
            "tokens": num_tokens,
            **_bench(url, requests, flags),
        }


@contextlib.contextmanager
def _router(variant: Variant, requests: int, directory: Path) -> Iterator[str]:
    """Yield the address of a router before a shard, which takes so many requests at once."""
    shard = _shard(variant, directory)
    try:
        shard.wait_healthy(_START_TIMEOUT_S)
        flags = ("--max-concurrent-requests", str(requests + 16), "--log-level", "warning")
        router = Router(directory / "router.log", [shard.address], *flags)
        with running(router):
            yield router.url
    finally:
        shard.close()


def _bench(url: str, requests: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a load, after a tenth of it to warm up."""
    _bench_once(url, requests // 10 + 1, flags)
    summary = _bench_once(url, requests, flags)
    return {
        "requests_per_s": summary["requests_per_s"],
        "tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "tpot_p50_ms": summary["tpot_ms"]["p50"],
        "tpot_p99_ms": summary["tpot_ms"]["p99"],
    }


def _bench_once(url: str, requests: int, flags: Sequence[str]) -> dict[str, Any]:
    load = ["--url", url, "--rate", "inf", "--requests", str(requests), "--seed", str(requests)]
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cli.main", "bench", *load, *flags, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"penstock bench: {done.stderr.strip() or done.stdout.strip()}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def transformers_requests(variant: Variant, requests: int, directory: Path) -> dict[str, Any]:
    """Run the same lengths through transformers' continuous batching, from ids to ids, without
    servers. All requests are submitted at once; the cache has room for all, and is made before
    timing.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    on_gpu = variant.device == "cuda"
    path = SHAPES[variant.shape].write(directory / variant.shape)
    with torch.device(variant.device):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path),
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            attn_implementation="sdpa",
        ).eval()
    rng = random.Random(requests)
    lengths = [LENGTHS.draw(rng) for _ in range(requests)]
    # transformers takes one output length for all requests. Use the average.
    output_tokens = round(sum(tokens for _, tokens in lengths) / requests)
    prompts = [
        rng.choices(range(3, SHAPES[variant.shape].values["vocab_size"]), k=words)
        for words, _ in lengths
    ]
    generation = GenerationConfig(
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        block_size=_PAGE,
        num_blocks=sum(math.ceil((len(p) + output_tokens) / _PAGE) + 1 for p in prompts),
        # A shard's default. transformers' mask has a row for each of these tokens and a column for
        # each token of the cache: with more rows its elements would overflow 32-bit indices.
        max_batch_tokens=2048 if on_gpu else 512,
        max_requests_per_batch=min(requests, _MOST_AT_ONCE),
    )

    def generate(some: list[list[int]]) -> float:
        before_s = time.perf_counter()
        outputs = model.generate_batch(
            some,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        found = sum(len(output.generated_tokens) for output in outputs.values())
        if found != len(some) * output_tokens:
            raise RuntimeError(f"transformers gave {found} tokens")
        return time.perf_counter() - before_s

    # Make the cache and warm up.
    generate(prompts[: requests // 10 + 1])
    seconds = generate(prompts)
    return {
        "what": "transformers",
        "model": variant.label,
        "requests": requests,
        "requests_per_s": requests / seconds,
        "tokens_per_s": requests * output_tokens / seconds,
    }
