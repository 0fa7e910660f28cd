"""Measures a router's cost to know the prefix pieces that shards hold, and to choose by them.

    python benchmarks/block_events.py
    python benchmarks/block_events.py --blocks-per-minute 4000000 --seconds 60

A shard's server in its own process reports blocks of 16 tokens that come and go; every eighth ends
a piece. The client library follows it here, as in a router. Prints the share of a core for that,
over all threads and above an idle connection; the bytes of a piece; and the policy's time to choose
among shards that hold the prompt or do not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import cast

import grpc

from penstock_client import GenerationRequest
from penstock_client.fleet.piece_watch import PieceWatch
from penstock_client.fleet.shard_state import ShardState
from penstock_client.load_balancing.base import Candidate
from penstock_client.load_balancing.piece_index import PieceIndex
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity, prompt_pieces
from penstock_proto import codec
from penstock_proto.prefix_hash import Tier
from penstock_shard.config import ShardConfig
from penstock_shard.server.kv.held_pieces import HeldPieces
from penstock_shard.server.servicer import ShardServicer
from penstock_shard.server.supervisor import EngineSupervisor

_BLOCK_SIZE = 16
_BLOCKS_IN_PIECE = 8
_STEP_S = 0.01
# Pieces that the shard holds. A new one replaces the oldest.
_HELD = 100_000
_TRIALS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--blocks-per-minute", type=int, default=1_000_000, metavar="N",
                        help="that come; as many go (default: a million)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="default: 30")
    parser.add_argument("--serve", type=int, metavar="N", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return
    asyncio.run(measure_following(args.blocks_per_minute, args.seconds))
    measure_bytes()
    measure_choosing()


# ---- a shard that tells ----


async def serve(blocks_per_minute: int) -> None:
    """Serve until killed; print the port."""
    held = HeldPieces()
    held.begin("engine")
    engine = cast(EngineSupervisor, SimpleNamespace(pieces=held))
    server = grpc.aio.server()
    codec.add_servicer(ShardServicer(engine, ShardConfig()), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    rng, names = random.Random(0), list[int]()
    started_s, num_told = time.monotonic(), 0
    per_s = blocks_per_minute / _BLOCKS_IN_PIECE / 60
    while True:
        due = int((time.monotonic() - started_s) * per_s) + _HELD * bool(blocks_per_minute)
        changes: dict[int, int] = {}
        for _ in range(min(due - num_told, 1000)):
            num_told += 1
            names.append(rng.getrandbits(64))
            changes[names[-1]] = Tier.DEVICE
            if len(names) > _HELD:
                changes[names[num_told % _HELD]] = Tier.GONE
                names[num_told % _HELD] = names.pop()
        held.take(changes)
        await asyncio.sleep(_STEP_S if num_told >= due else 0)


async def measure_following(blocks_per_minute: int, seconds: float) -> None:
    idle = await _share_of_core(0, min(seconds, 10.0))
    busy = await _share_of_core(blocks_per_minute, seconds)
    pieces = blocks_per_minute // _BLOCKS_IN_PIECE
    print(f"{blocks_per_minute:,} blocks a minute come and go, {pieces:,} pieces:")
    print(f"  {100 * (busy - idle):.2f} % of a core; of an idle connection {100 * idle:.2f} %")


async def _share_of_core(blocks_per_minute: int, seconds: float) -> float:
    command = [sys.executable, __file__, "--serve", str(blocks_per_minute)]
    server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    shard = ShardState(f"127.0.0.1:{int(await server.stdout.readline())}")
    watch = PieceWatch(shard)
    try:
        # Wait until all pieces have come.
        async with asyncio.timeout(60):
            while blocks_per_minute and len(shard.pieces.told) < _HELD * 0.99:
                await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        started_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu_s) / (time.perf_counter() - started_s)
    finally:
        await watch.close()
        await shard.client.close()
        server.kill()
        await server.wait()


# ---- what is kept, and what it is for ----


def measure_bytes() -> None:
    rng = random.Random(0)
    print("bytes of a piece:")
    for count in (1_000, 10_000, 100_000, 1_000_000):
        index = PieceIndex()
        for _ in range(count):
            index.put(rng.getrandbits(64), Tier.DEVICE)
        buckets = index._buckets
        num_bytes = sys.getsizeof(buckets) + sum(sys.getsizeof(bucket) for bucket in buckets)
        print(f"  {num_bytes / count:.1f} of {count:,}")


def measure_choosing() -> None:
    print("microseconds to choose, medians:")
    for num_shards in (8, 200):
        for num_tokens in (1_000, 8_000, 100_000):
            for holds in (False, True):
                micros = _choosing_us(num_shards, num_tokens, holds=holds)
                what = "that hold it" if holds else "that do not"
                print(f"  {micros:.0f} of {num_shards} shards {what}, {num_tokens:,} tokens")


def _choosing_us(num_shards: int, num_tokens: int, *, holds: bool) -> float:
    policy, rng = PrefixAffinity(), random.Random(0)
    others = [rng.getrandbits(64) for _ in range(20_000)]
    candidates = [Candidate(f"s{i}", "", 100 * i, _BLOCK_SIZE) for i in range(num_shards)]
    for candidate in candidates:
        candidate.pieces.take({Tier.DEVICE: others})
    times_s = []
    for trial in range(_TRIALS if num_shards < 100 else _TRIALS // 10):
        ids = [rng.randrange(150_000) for _ in range(num_tokens)]
        request = GenerationRequest([trial, *ids])
        if holds:
            names = prompt_pieces(request, "", "", _BLOCK_SIZE)
            for candidate in candidates:
                candidate.pieces.take({Tier.DEVICE: names})
        started_s = time.perf_counter()
        policy.choose(candidates, request, "")
        times_s.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(times_s)


if __name__ == "__main__":
    main()
