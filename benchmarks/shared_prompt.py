"""Measures how often shards, with or without peers, compute a shared prefix.

    python benchmarks/shared_prompt.py --model DIR

When a first request has ended, many come at once. For each policy, with and without peers, prints
how often the fleet computed each shared token, and the times to first tokens. All settings have
equal shards on the same processors, and different prompts.
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
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.processes import Shard, free_port, running

from penstock_client import Fleet, GenerationRequest, SamplingParams

_OWN_TOKENS = 60
_OUTPUT_TOKENS = 8
_SETTINGS = (
    ("least-load", False),
    ("prefix-affinity", False),
    ("least-load", True),
    ("prefix-affinity", True),
)
# Wait until each shard has reported its work.
_REPORTED_S = 2.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000, help="that the prompts share")
    parser.add_argument("--requests", type=int, default=32, help="that come at once")
    parser.add_argument("--memory", default="512M", help="of each shard, for KV and for copies")
    args = parser.parse_args()
    os.environ["PENSTOCK_KV_PEER_KEY"] = "benchmark"
    print("| policy | peers | times computed | first token p50, s | max |\n|---|---|---|---|---|")
    asyncio.run(_measure_all(args))


async def _measure_all(args: argparse.Namespace) -> None:
    for are_peers in (False, True):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            shards = []
            # One after the other, because each start takes a processor for seconds.
            for shard in _start(Path(folder), args, are_peers):
                stack.enter_context(running(shard))
                shards.append(shard)
            for policy in (name for name, peers in _SETTINGS if peers == are_peers):
                await _measure(shards, policy, are_peers, args)


def _start(folder: Path, args: argparse.Namespace, are_peers: bool) -> Iterator[Shard]:
    ports = [free_port() for _ in range(args.shards)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    for port in ports:
        yield Shard(
            folder / str(port),
            *("--model", args.model, "--threads", "1", "--max-num-seqs", "8"),
            *("--max-model-len", str(args.tokens + 256), "--kv-memory", args.memory),
            *(("--kv-host-bytes", args.memory) if are_peers else ()),
            *(("--kv-peers", *addresses) if are_peers else ()),
            port=port,
        )


async def _measure(
    shards: list[Shard], policy: str, are_peers: bool, args: argparse.Namespace
) -> None:
    rng = random.Random(f"{policy} {are_peers}")
    shared = [rng.randrange(10, 1000) for _ in range(args.tokens)]
    async with Fleet([shard.address for shard in shards], policy=policy) as fleet:
        while not all(state.ready for state in fleet.shards):
            await fleet.wait_changed()
        before = _computed_tokens(fleet)
        await _first_token_s(fleet, shared, rng)
        await asyncio.sleep(_REPORTED_S)
        asked = [_first_token_s(fleet, shared, rng) for _ in range(args.requests)]
        firsts_s = await asyncio.gather(*asked)
        await asyncio.sleep(_REPORTED_S)
        own = (1 + args.requests) * (_OWN_TOKENS + _OUTPUT_TOKENS - 1)
        times = (_computed_tokens(fleet) - before - own) / args.tokens
    print(
        f"| {policy} | {'yes' if are_peers else 'no'} | {times:.2f} "
        f"| {statistics.median(firsts_s):.1f} | {max(firsts_s):.1f} |",
        flush=True,
    )


async def _first_token_s(fleet: Fleet, shared: list[int], rng: random.Random) -> float:
    """Read the whole answer; return the seconds to its first token."""
    own = [rng.randrange(10, 1000) for _ in range(_OWN_TOKENS)]
    sampling = SamplingParams(seed=3, temperature=0.0)
    request = GenerationRequest(
        [*shared, *own], sampling, max_tokens=_OUTPUT_TOKENS, ignore_eos=True
    )
    asked_s, first_s = time.perf_counter(), 0.0
    async for output in fleet.submit(request):
        if output.token_ids and not first_s:
            first_s = time.perf_counter() - asked_s
    return first_s


def _computed_tokens(fleet: Fleet) -> int:
    return sum(state.load.computed_tokens_total for state in fleet.shards)


if __name__ == "__main__":
    main()
