"""Measures constraints: tokens a second, the device's time, and the gaps of other streams.

    python benchmarks/constraints.py                  # all parts
    python benchmarks/constraints.py throughput --rounds 7
    python benchmarks/constraints.py period compile

throughput: a shard with a model on the CPU serves 64 sequences; none, half or all of them must be
JSON of a schema. The three take turns on one shard. Prints medians.

period: a shard with the fake runner, with steps of exactly 20 ms as on a device stream, serves the
same. If the device waited for masks, steps would be longer.

compile: 32 sequences run, in turns with and without two requests a second that bring new schemas of
5 kB. Prints the gaps between tokens of the 32.

schemas: checks each self-contained schema of SchemaStore's catalog, and of GeoJSON, in a fork, as a
shard's server does. Prints the number of served ones, and the processor time of a check.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.compilers import plain_compiler
from support.processes import Shard, running

from penstock_client import (
    Constraint,
    ConstraintKind,
    GenerationRequest,
    SamplingParams,
    ShardClient,
)
from penstock_proto.types import Constraint as EngineConstraint
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.refusal import ConstraintRefused

_SEQUENCES = 64
_STEP_MS = 20.0
_SCHEMA_BYTES = 5000
_COMPILES_A_SECOND = 2.0


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace, Path], None]] = {
        "throughput": throughput,
        "period": period,
        "compile": compile_beside,
        "schemas": check_schemas,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {', '.join(parts)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument("--tokens", type=int, default=200, help="a sequence (default: 200)")
    parser.add_argument("--seconds", type=float, default=8.0, help="a round of `compile`")
    parser.add_argument("--model", help="of `throughput`; default: the built-in one")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    for name in args.parts or parts:
        with tempfile.TemporaryDirectory() as scratch:
            parts[name](args, Path(scratch) / "shard.log")


# ---- Requests ----------------------------------------------------------------------------------


def schema_of_rows() -> Constraint:
    """Return a schema of endless objects, so that every sequence gets all its tokens."""
    row = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["router", "shard", "client"]},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "note": {"type": ["string", "null"]},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": row, "minItems": 100_000}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def new_schema(rng: random.Random) -> Constraint:
    """Make a schema that no cache has."""
    properties: dict[str, object] = {}
    size = 0
    while size < _SCHEMA_BYTES:
        name = f"field_{rng.getrandbits(48):x}"
        kind = rng.choice(
            [
                {"type": "string", "maxLength": rng.randrange(5, 50)},
                {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 10_000)},
                {"enum": [f"choice_{rng.getrandbits(32):x}" for _ in range(5)]},
                {"type": "array", "items": {"type": "number"}, "maxItems": rng.randrange(2, 9)},
                {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-z]{2,8}$"}]},
            ]
        )
        properties[name] = kind
        size += len(json.dumps({name: kind}))
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def asked(seed: int, constraint: Constraint | None, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        [3 + (seed + i) % 2000 for i in range(32)],
        max_tokens=num_tokens,
        sampling=SamplingParams(seed=seed, temperature=1.0),
        ignore_eos=True,
        constraint=constraint,
    )


async def read(client: ShardClient, request: GenerationRequest) -> list[float]:
    """Return the times at which the request's tokens came."""
    times: list[float] = []
    async with client.submit(request) as stream:
        async for output in stream:
            times += [time.perf_counter()] * len(output.token_ids)
    return times


# ---- The three parts ---------------------------------------------------------------------------


def throughput(args: argparse.Namespace, log_file: Path) -> None:
    model = ("--model", args.model) if args.model else ()
    shard = Shard(log_file, "--runner", "model", *model, "--max-num-seqs", str(_SEQUENCES))
    shares = {"none": 0, "half": _SEQUENCES // 2, "all": _SEQUENCES}
    with running(shard), asyncio.Runner() as loop:
        rates = loop.run(_rates(shard.address, shares, args.rounds, args.tokens))
    print(f"{_SEQUENCES} sequences on the CPU, {args.tokens} tokens each, {args.rounds} rounds")
    plain = statistics.median(rates["none"])
    for name, found in rates.items():
        ratios = [mine / base for mine, base in zip(found, rates["none"], strict=True)]
        print(
            f"  {name:>4} constrained: {statistics.median(found):8.0f} tokens/s, "
            f"{statistics.median(found) / plain:6.1%} of none; of the same round "
            f"{statistics.median(ratios):6.1%}"
        )


async def _rates(
    address: str, shares: dict[str, int], rounds: int, num_tokens: int
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in shares}
    constraint = schema_of_rows()
    async with ShardClient(address) as client:
        # The first round compiles, and warms up automata.
        for number in range(-1, rounds):
            for name, share in shares.items():
                requests = [
                    asked(1000 * (number + 1) + i, constraint if i < share else None, num_tokens)
                    for i in range(_SEQUENCES)
                ]
                before = time.perf_counter()
                times = await asyncio.gather(*(read(client, request) for request in requests))
                seconds = time.perf_counter() - before
                if number >= 0:
                    rates[name].append(sum(map(len, times)) / seconds)
    return rates


def period(args: argparse.Namespace, log_file: Path) -> None:
    flags = ("--step-ms", str(_STEP_MS), "--max-num-batched-tokens", "4096")
    shard = Shard(log_file, "--runner", "fake", *flags)
    print(f"{_SEQUENCES} sequences, steps of {_STEP_MS:g} ms on a fake device")
    with running(shard), asyncio.Runner() as loop:
        for name, share in (("none", 0), ("half", _SEQUENCES // 2), ("all", _SEQUENCES)):
            found = loop.run(_period_ms(shard.address, share, args.tokens))
            print(f"  {name:>4} constrained: {found:7.3f} ms, {found / _STEP_MS - 1:6.2%} longer")


async def _period_ms(address: str, share: int, num_tokens: int) -> float:
    constraint = schema_of_rows()
    async with ShardClient(address) as client:
        requests = [
            asked(i, constraint if i < share else None, num_tokens) for i in range(_SEQUENCES)
        ]
        times = await asyncio.gather(*(read(client, request) for request in requests))
    # Leave out the first steps, which compute prompts.
    spans = [(of[-1] - of[10]) / (len(of) - 11) for of in times]
    return 1000 * statistics.median(spans)


def compile_beside(args: argparse.Namespace, log_file: Path) -> None:
    shard = Shard(log_file, "--runner", "fake", "--step-ms", str(_STEP_MS))
    gaps_ms: dict[str, list[float]] = {"without": [], "with": []}
    compiled_ms: list[float] = []
    with running(shard), asyncio.Runner() as loop:
        for number in range(args.rounds):
            for name, found in gaps_ms.items():
                compiles = name == "with"
                gaps, took = loop.run(_gaps(shard.address, args.seconds, number, compiles))
                found += gaps
                compiled_ms += took
    print(f"32 sequences, steps of {_STEP_MS:g} ms; gaps between tokens, ms")
    for name, found in gaps_ms.items():
        cuts = statistics.quantiles(found, n=1000)
        print(
            f"  {name:>7} schemas that are compiled: p50 {cuts[499]:6.2f}  p99 {cuts[989]:6.2f}  "
            f"p99.9 {cuts[998]:6.2f}  ({len(found)} gaps)"
        )
    print(
        f"  {len(compiled_ms)} schemas of {_SCHEMA_BYTES} bytes; their first token came after "
        f"{statistics.median(compiled_ms):.1f} ms (median)"
    )


async def _gaps(
    address: str, seconds: float, number: int, compiles: bool
) -> tuple[list[float], list[float]]:
    """Return the other sequences' gaps, and the times to the first tokens with new schemas, in
    ms.
    """
    rng = random.Random(number)
    took: list[float] = []

    async def send_schemas(client: ShardClient) -> None:
        while True:
            before = time.perf_counter()
            times = await read(client, asked(rng.getrandbits(32), new_schema(rng), 1))
            took.append(1000 * (times[0] - before))
            await asyncio.sleep(1 / _COMPILES_A_SECOND)

    async with ShardClient(address) as client:
        # Start the child that checks schemas.
        await read(client, asked(0, new_schema(rng), 1))
        beside = [
            asyncio.create_task(read(client, asked(i, None, int(1000 * seconds / _STEP_MS))))
            for i in range(32)
        ]
        sender = asyncio.create_task(send_schemas(client)) if compiles else None
        times = await asyncio.gather(*beside)
        if sender is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
    gaps = [1000 * (b - a) for of in times for a, b in itertools.pairwise(of[10:])]
    return gaps, took


# ---- Schemas in use ----------------------------------------------------------------------------


def check_schemas(args: argparse.Namespace, log: Path) -> None:
    """Check each schema in a new fork, so that nothing is cached."""
    from conformance.real_schemas import catalogue, geojson

    compiler = plain_compiler()
    schemas = [*catalogue().values(), *geojson().values()]
    checked = [_checked(compiler, json.dumps(schema)) for schema in schemas]
    served = sum(not reason for reason, _ in checked)
    times_s = sorted(took_s for _, took_s in checked)
    print(f"schemas: {served} of {len(schemas)} are served ({served / len(schemas):.1%})")
    shown = (
        f"p{share} {1000 * times_s[len(times_s) * share // 100]:.0f}" for share in (50, 95, 99)
    )
    print(f"  processor time of a check or refusal, ms: {', '.join(shown)}")
    print(f"  the longest: {', '.join(f'{1000 * took_s:.0f}' for took_s in times_s[-5:])}")


def _checked(compiler: Compiler, schema: str) -> tuple[str, float]:
    """Return the reason of a schema's refusal, or "", and the seconds of processor time."""
    reading, writing = os.pipe()
    process_id = os.fork()
    if not process_id:
        began_s = time.process_time()
        reason = ""
        try:
            compiler.compile(EngineConstraint("json_schema", schema))
        except ConstraintRefused as error:
            reason = str(error)
        os.write(writing, json.dumps([reason, time.process_time() - began_s]).encode())
        os._exit(0)
    os.waitpid(process_id, 0)
    reason, took_s = json.loads(os.read(reading, 4096))
    os.close(reading)
    os.close(writing)
    return reason, took_s


if __name__ == "__main__":
    main()
