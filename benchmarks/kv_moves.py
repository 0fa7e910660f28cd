"""Measures moves of a request between two shards, with and without its KV blocks.

    python benchmarks/kv_moves.py --model DIR --tokens 1000 4000 16000

For each length, the first shard computes a prompt and eight tokens. Then the second shard
continues: once with the first shard as source of KV blocks; once without a source, for another
prompt of the same length; and once after it has fetched the blocks ahead, as in a drain while the
request still runs on the first shard. Prints the time to the second shard's first token, which is a
reader's pause, and the processor time of both shards for a fetched megabyte.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.processes import Shard, free_port, running

from penstock_client import GenerationRequest, SamplingParams, ShardClient
from penstock_proto import codec
from penstock_proto.shard_pb2_grpc import ShardStub
from penstock_proto.types import Attempt

_GIVEN = 8


@dataclass(frozen=True)
class _Answer:
    token_ids: list[int]
    cached_tokens: int
    first_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", default="1G", help="of each shard, for KV and for copies")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PENSTOCK_KV_PEER_KEY"] = "benchmark"
        first, second = _shards(Path(folder), args)
        with running(first, second):
            for num_tokens in args.tokens:
                asyncio.run(_measure(first, second, num_tokens, args.rounds))


def _shards(folder: Path, args: argparse.Namespace) -> list[Shard]:
    ports = [free_port(), free_port()]
    longest = max(args.tokens) + 64
    return [
        Shard(
            folder / f"{port}",
            *("--model", args.model, "--threads", str(args.threads)),
            *("--max-model-len", str(longest), "--max-num-seqs", "8"),
            *("--kv-memory", args.memory, "--kv-host-bytes", args.memory),
            *("--kv-peers", f"127.0.0.1:{other}"),
            port=port,
        )
        for port, other in zip(ports, reversed(ports), strict=True)
    ]


async def _measure(first: Shard, second: Shard, num_tokens: int, rounds: int) -> None:
    rng = random.Random(num_tokens)
    async with ShardClient(first.address) as client:
        bytes_per_token = (await client.info()).kv_bytes_per_token
    ahead, fetched, computed, per_mb = [list[float]() for _ in range(4)]
    for _ in range(rounds):
        prompts = [[rng.randrange(10, 1000) for _ in range(num_tokens)] for _ in range(3)]
        begun = [await _ask(first, prompt, []) for prompt in prompts]
        await _prefetch(second, prompts[0], begun[0].token_ids, first.address)
        answer = await _ask(second, prompts[0], begun[0].token_ids, first.address)
        ahead.append(answer.first_s)
        before_s = _cpu_s(first) + _cpu_s(second)
        answer = await _ask(second, prompts[1], begun[1].token_ids, first.address)
        used_s = _cpu_s(first) + _cpu_s(second) - before_s
        fetched.append(answer.first_s)
        assert answer.cached_tokens >= num_tokens - 48, answer
        # Ask again, with all blocks there: this processor time is not for the fetch.
        again_s = _cpu_s(first) + _cpu_s(second)
        await _ask(second, prompts[1], begun[1].token_ids)
        used_s -= _cpu_s(first) + _cpu_s(second) - again_s
        per_mb.append(1000 * used_s / (answer.cached_tokens * bytes_per_token / 1e6))
        computed.append((await _ask(second, prompts[2], begun[2].token_ids)).first_s)
    cold_s = statistics.median(computed)
    print(
        f"{num_tokens:6d} tokens: {1000 * cold_s:8.0f} ms computed; "
        f"{_told(fetched, cold_s)} fetched; {_told(ahead, cold_s)} fetched ahead; "
        f"{statistics.median(per_mb):.2f} ms of processors a MB",
        flush=True,
    )


def _told(pauses_s: list[float], cold_s: float) -> str:
    pause_s = statistics.median(pauses_s)
    return f"{1000 * pause_s:.0f} ms ({pause_s / cold_s:.3f})"


async def _prefetch(shard: Shard, prompt: list[int], output: list[int], source: str) -> None:
    request = GenerationRequest(prompt, output_token_ids=output)
    async with ShardClient(shard.address) as client:
        await client.prefetch(request, Attempt(kv_source=source))


async def _ask(shard: Shard, prompt: list[int], output: list[int], source: str = "") -> _Answer:
    request = GenerationRequest(
        prompt,
        SamplingParams(seed=3, temperature=0.0),
        output_token_ids=output,
        max_tokens=len(output) + _GIVEN,
        ignore_eos=True,
    )
    message = codec.generate_request(request, os.urandom(8).hex(), Attempt(kv_source=source))
    token_ids, cached, first_s = list[int](), 0, 0.0
    async with grpc.aio.insecure_channel(shard.address) as channel:
        await channel.channel_ready()
        began_s = time.perf_counter()
        stub = ShardStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Generate(iter([message])):
            for each in response.outputs:
                if each.token_ids and not token_ids:
                    first_s = time.perf_counter() - began_s
                token_ids += each.token_ids
                cached = each.cached_tokens or cached
    return _Answer(token_ids, cached, first_s)


def _cpu_s(shard: Shard) -> float:
    """Return the processor time of server and engine."""
    processes = [psutil.Process(shard.process.pid), shard.engine]
    return sum(times.user + times.system for times in (each.cpu_times() for each in processes))


if __name__ == "__main__":
    main()
