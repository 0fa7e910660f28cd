"""Shards and routers as processes: steps while tokens go out over gRPC, and requests over HTTP.

Knows processes and their clients; nothing of models.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.processes import Router, Shard, running

from benchmarks.gpu_bench.shapes import SHAPES
from benchmarks.gpu_bench.steps import Variant, device_s, make_runner
from penstock_client import GenerationRequest, SamplingParams, ShardClient
from penstock_client.bench_load import Lengths

# Of `penstock bench --lengths sharegpt`.
LENGTHS = Lengths(64, 128, spread=True)
_START_TIMEOUT_S = 300.0
_SETTLE_S = 0.5
# Taken to find the device's own time.
_DEVICE_STEPS = 30


def _shard(variant: Variant, directory: Path) -> Shard:
    model = SHAPES[variant.shape].write(directory / variant.shape)
    flags = ["--model", str(model), "--load-format", "dummy", "--device", variant.device]
    flags += ["--max-num-seqs", str(variant.max_num_seqs)]
    flags += ["--max-model-len", str(variant.max_model_len)]
    flags += ["--max-queued-requests", "8192", "--served-model-name", "bench"]
    if variant.quantization:
        flags += ["--quantization", variant.quantization]
    return Shard(directory / "shard.log", *flags)


def steps_over_grpc(
    variant: Variant, streams: Sequence[int], context: int, seconds: float, directory: Path
) -> list[dict[str, Any]]:
    """The period of steps while so many streams are read by a client, one token a step each; and
    the device's own time for steps like them, taken afterwards.
    """
    shard = _shard(variant, directory)
    rows: list[dict[str, Any]] = []
    try:
        shard.wait_healthy(_START_TIMEOUT_S)
        for count in streams:
            found = asyncio.run(_steps(shard.address, count, context, seconds, variant))
            rows.append({"what": "served steps", "model": variant.label, "batch": count, **found})
    finally:
        shard.close()
    runner = make_runner(variant, directory)
    for row in rows:
        row["device_ms"] = 1e3 * device_s(runner, row["batch"], row["context"], _DEVICE_STEPS)
    return rows


async def _steps(
    address: str, count: int, context: int, seconds: float, variant: Variant
) -> dict[str, Any]:
    """Counted are steps, by the shard, in a window in which all streams decode."""
    room = variant.max_model_len - context - 1
    rng = random.Random(count)
    decoding = tokens = 0

    async def read(client: ShardClient) -> None:
        nonlocal decoding, tokens
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
            async for output in stream:
                tokens += len(output.token_ids)

    async with ShardClient(address) as client:
        readers = [asyncio.create_task(read(client)) for _ in range(count)]
        while decoding < count:
            await asyncio.sleep(0.05)
            if done := [reader for reader in readers if reader.done()]:
                await done[0]
                raise RuntimeError("a stream ended before all of them decoded: more context")
        await asyncio.sleep(min(_SETTLE_S, seconds))
        before, before_s = await _steps_total(client), time.perf_counter()
        earlier = tokens
        await asyncio.sleep(seconds)
        after, after_s = await _steps_total(client), time.perf_counter()
        whole = not any(reader.done() for reader in readers)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    if not whole:
        raise RuntimeError("a stream ended while it was measured: a shorter window")
    steps = max(1, after - before)
    return {
        "period_ms": 1e3 * (after_s - before_s) / steps,
        "steps": steps,
        # In the middle of the window.
        "context": context + (earlier + tokens) // (2 * count),
    }


async def _steps_total(client: ShardClient) -> int:
    async for report in client.watch_load():
        return report.steps_total
    raise RuntimeError("the shard reports no load")


def requests_over_http(variant: Variant, requests: int, directory: Path) -> list[dict[str, Any]]:
    """ShareGPT-like lengths, all sent at once: completions, then chats."""
    shard = _shard(variant, directory)
    rows = []
    try:
        shard.wait_healthy(_START_TIMEOUT_S)
        flags = ("--max-concurrent-requests", str(requests + 16), "--log-level", "warning")
        router = Router(directory / "router.log", [shard.address], *flags)
        with running(router):
            # The first loads warm up.
            for chat, count in ((False, requests // 10 + 1), (False, requests), (True, requests)):
                rows.append(_bench(router.url, count, chat=chat))
    finally:
        shard.close()
    names = ("completions", "chat")
    return [
        {"what": "requests", "model": variant.label, "api": name, "requests": requests, **row}
        for name, row in zip(names, rows[1:], strict=True)
    ]


def _bench(url: str, requests: int, *, chat: bool) -> dict[str, Any]:
    flags = ["--url", url, "--rate", "inf", "--requests", str(requests), "--lengths", "sharegpt"]
    flags += ["--seed", str(requests), "--json", *(["--chat"] if chat else [])]
    done = subprocess.run(
        [sys.executable, "-m", "penstock_client.cli", "bench", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"penstock bench: {done.stderr.strip() or done.stdout.strip()}")
    summary = json.loads(done.stdout)
    return {
        "requests_per_s": summary["requests_per_s"],
        "tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
        "tpot_p50_ms": summary["tpot_ms"]["p50"],
        "tpot_p99_ms": summary["tpot_ms"]["p99"],
    }


def transformers_requests(variant: Variant, requests: int, directory: Path) -> list[dict[str, Any]]:
    """The same lengths through transformers' continuous batching, ids to ids, without servers."""
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
    vocabulary = model.config.vocab_size
    # It has one length of answers for all: those of a batch are as long as they are on average.
    output_tokens = round(sum(tokens for _, tokens in lengths) / requests)
    prompts = [rng.choices(range(3, vocabulary), k=words) for words, _ in lengths]
    generation = GenerationConfig(
        max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(max_batch_tokens=8192 if on_gpu else 512)

    def generate(some: list[list[int]]) -> float:
        before_s = time.perf_counter()
        outputs = model.generate_batch(
            some, generation_config=generation, continuous_batching_config=batching
        )
        found = sum(len(output.generated_tokens) for output in outputs.values())
        if found != len(some) * output_tokens:
            raise RuntimeError(f"transformers gave {found} tokens")
        return time.perf_counter() - before_s

    generate(prompts[: requests // 10 + 1])
    seconds = generate(prompts)
    return [
        {
            "what": "transformers",
            "model": variant.label,
            "requests": requests,
            "requests_per_s": requests / seconds,
            "tokens_per_s": requests * output_tokens / seconds,
        }
    ]
