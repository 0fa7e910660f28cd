"""Measures the device time that a shard loses, by the period of steps through gRPC.

    python benchmarks/step_period.py
    python benchmarks/step_period.py --step-ms 5 --sequences 256

A shard with the fake runner, with steps of exactly --step-ms as on a device stream, serves
--sequences at once over one call; a client reads every token. If the device never waited for
Python, the period would be --step-ms. Prints by how much it is longer.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import psutil
from support.processes import Shard, running

from penstock_client import GenerationRequest, SamplingParams, ShardClient

_SEQUENCES = (1, 32, 256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--step-ms", type=float, help="default: 20, and 5 at 256 sequences")
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, help="to measure (default: 10)")
    args = parser.parse_args()
    pairs = [(20.0, count) for count in _SEQUENCES] + [(5.0, 256)]
    if args.step_ms is not None or args.sequences:
        pairs = [(args.step_ms or 20.0, count) for count in args.sequences or _SEQUENCES]
    print("step ms  sequences  period ms   lost   tokens/s  CPU us/token: engine  server  client")
    for step_ms, count in pairs:
        with tempfile.TemporaryDirectory() as scratch:
            measure(Path(scratch) / "shard.log", step_ms, count, args.seconds)


def measure(log_file: Path, step_ms: float, num_sequences: int, seconds: float) -> None:
    flags = ("--runner", "fake", "--step-ms", str(step_ms), "--max-num-seqs", "1024")
    shard = Shard(log_file, *flags, "--max-num-batched-tokens", "4096", "--max-model-len", "65536")
    with running(shard):
        processes = [shard.engine, psutil.Process(shard.process.pid), psutil.Process()]
        elapsed_s, tokens, cpu_s = asyncio.run(
            _load(shard.address, num_sequences, seconds, processes)
        )
    # Every sequence gets a token in each step.
    period_ms = 1000 * elapsed_s * num_sequences / tokens
    lost = 100 * (period_ms / step_ms - 1)
    each = "  ".join(f"{1e6 * used / tokens:6.1f}" for used in cpu_s)
    print(
        f"{step_ms:7.1f}  {num_sequences:9d}  {period_ms:9.3f}  {lost:4.1f} %  "
        f"{tokens / elapsed_s:8.0f}  {each:>36}"
    )


async def _load(
    address: str, num_sequences: int, seconds: float, processes: list[psutil.Process]
) -> tuple[float, int, list[float]]:
    """Return the measured seconds, received tokens, and CPU seconds of each process."""
    received = 0

    async def read(client: ShardClient, seed: int) -> None:
        nonlocal received
        request = GenerationRequest(
            list(range(seed + 3, seed + 35)),
            max_tokens=60_000,
            sampling=SamplingParams(seed=seed),
            ignore_eos=True,
        )
        async with client.submit(request) as stream:
            async for output in stream:
                received += len(output.token_ids)

    async with ShardClient(address) as client:
        readers = [asyncio.create_task(read(client, i)) for i in range(num_sequences)]
        await asyncio.sleep(3)
        before = time.monotonic(), received, _cpu_s(processes)
        await asyncio.sleep(seconds)
        after = time.monotonic(), received, _cpu_s(processes)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    cpu_s = [b - a for a, b in zip(before[2], after[2], strict=True)]
    return after[0] - before[0], after[1] - before[1], cpu_s


def _cpu_s(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


if __name__ == "__main__":
    main()
