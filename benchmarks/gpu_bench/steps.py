"""Steps of a model through the runner, without servers: decode, prefill, and equal bits.

A decode step is timed in two ways. For its period, as in an engine, results of a step are collected
while the next one runs. For its device time, by the device's own clock, all steps are launched
before any is collected, so that the device never waits for Python.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from array import array
from collections import abc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_bench.machine import (
    copy_bytes_per_s,
    device_of,
    matmul_flops_per_s,
    spans_s,
    stamp,
)
from benchmarks.gpu_bench.shapes import SHAPES, Shape, Variant
from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.config import ShardConfig
from penstock_shard.scheduler.rows import Row, Rows
from penstock_shard.sequence import Sequence
from penstock_shard.worker.model_runner import ModelRunner

_GREEDY = EngineSampling(temperature=0.0)
# The expected rate of reading weights, as a share of a copy's.
_READ_SHARE = 0.9
# Steps before timed ones.
_WARM_UP = 10


def make_runner(variant: Variant, directory: Path) -> tuple[ModelRunner, dict[str, Any]]:
    """Make a runner with random weights, and a row with its progress lines, which name its kernels
    and graphs. Print these too.
    """
    from penstock_shard.model_loader.load_model_runner import load_model_runner

    said: list[str] = []

    def progress(line: str) -> None:
        said.append(line)
        print(f"  {line}", flush=True)

    begun_s = time.perf_counter()
    model = SHAPES[variant.shape].write(directory / variant.shape)
    config = ShardConfig(
        load_format="dummy",
        device=variant.device,
        quantization=variant.quantization,
        kv_cache_dtype=variant.kv_cache_dtype,
        exact=variant.exact,
        max_num_seqs=variant.max_num_seqs,
        max_model_len=variant.max_model_len,
        max_num_batched_tokens=8192 if variant.device == "cuda" else 512,
    )
    runner = load_model_runner(config, model, progress=progress)
    seconds = time.perf_counter() - begun_s
    return runner, {"what": "loaded", "model": variant.label, "seconds": seconds, "said": said}


class Sequences:
    """Sequences that look computed up to their last token. Their KV blocks have arbitrary contents,
    which does not change a step's time.
    """

    def __init__(self, runner: ModelRunner, count: int, context: int, room: int) -> None:
        info = runner.info
        rng = random.Random(count)
        blocks = -(-(context + room) // info.block_size)
        if count * blocks > info.num_blocks:
            raise RuntimeError(f"{count} sequences of {context} tokens need more KV blocks")
        self.sequences = []
        for i in range(count):
            request = EngineRequest(
                request_id=str(i),
                attempt=0,
                prompt=array("I", rng.choices(range(info.vocab_size), k=context)).tobytes(),
                sampling=_GREEDY,
                max_tokens=room,
            )
            self.sequences.append(Sequence.of(request))
            self.sequences[-1].slot = i
        self._num_blocks = blocks
        self._slots = set[int]()
        self._runner = runner
        self._next = context - 1

    def launch(self) -> None:
        """Launch a step that samples one token of each sequence."""
        start = self._next
        self._next += 1
        self.compute([Row(s, start, 1, samples=True) for s in self.sequences])

    def compute(self, rows: abc.Sequence[Row]) -> None:
        """Launch a step of these rows. Admit sequences that are new, or computed from their first
        token on.
        """
        known = self._slots
        admitted = [row.sequence for row in rows if not row.start or row.sequence.slot not in known]
        known.update(sequence.slot for sequence in admitted)
        new_blocks = [
            [self._blocks_of(row.sequence) if row.sequence in admitted else () for row in rows]
        ]
        self._runner.launch(Rows.of(rows).batch(new_blocks, admitted))

    def _blocks_of(self, sequence: Sequence) -> range:
        first = sequence.slot * self._num_blocks
        return range(first, first + self._num_blocks)

    def collect(self) -> None:
        results = self._runner.collect()
        for sequence, result in zip(self.sequences, results, strict=True):
            token_ids = result_tokens(result)
            if not token_ids:
                raise RuntimeError(result.error or "a row gave no token")
            sequence.token_ids.extend(token_ids)

    def end(self) -> None:
        for sequence in self.sequences:
            self._runner.release(sequence.slot)


def result_tokens(result: Any) -> list[int]:
    """Return the tokens of a row's result."""
    return [] if result.token_id is None else [result.token_id]


def decode(
    runner: ModelRunner, variant: Variant, batches: abc.Sequence[int], context: int, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield a row of figures for each batch size, in ms."""
    copy = copy_bytes_per_s(device_of(variant.device))
    for count in batches:
        period_s = _period_s(runner, count, context, steps)
        device_s, launch_s = device_and_launch_s(runner, count, context, steps)
        floor_s = floor_bytes(SHAPES[variant.shape], runner, count, context) / (_READ_SHARE * copy)
        yield {
            "what": "decode",
            "model": variant.label,
            "batch": count,
            "context": context,
            "backend": runner.info.attention_backend,
            "period_ms": 1e3 * period_s,
            "device_ms": 1e3 * device_s,
            "launch_ms": 1e3 * launch_s,
            "floor_ms": 1e3 * floor_s,
            "of_floor": period_s / floor_s,
            "step_over_device": period_s / device_s,
            "tokens_per_s": count / period_s,
        }


def floor_bytes(shape: Shape, runner: ModelRunner, count: int, context: int) -> float:
    """Return the bytes that a step must read: weights once, and all keys and values."""
    kv_bytes = {"float8_e4m3fn": 1, "float32": 4}.get(runner.info.kv_dtype, 2)
    weights = shape.weight_bytes(count, runner.info.dtype)
    return weights + shape.kv_elements(count * context) * kv_bytes


def _period_s(runner: ModelRunner, count: int, context: int, steps: int) -> float:
    ahead = runner.info.max_steps_ahead
    sequences = Sequences(runner, count, context, _WARM_UP + steps + ahead + 1)
    for _ in range(ahead):
        sequences.launch()
    times = []
    for _ in range(_WARM_UP + steps):
        sequences.launch()
        sequences.collect()
        times.append(time.perf_counter())
    for _ in range(ahead):
        sequences.collect()
    sequences.end()
    return statistics.median(b - a for a, b in itertools.pairwise(times[_WARM_UP:]))


def device_and_launch_s(
    runner: ModelRunner, count: int, context: int, steps: int
) -> tuple[float, float]:
    """Return the device's time for a decode step, with all steps launched before any is collected,
    and the host's time to launch one. The device's time cannot be less than the host's.
    """
    device = runner.model.device
    spans: list[float] = []
    times: list[float] = []
    # The first run allocates host memory for inputs.
    for _ in range(2):
        sequences = Sequences(runner, count, context, _WARM_UP + steps + 1)
        stamps, times = [], []
        for _ in range(_WARM_UP + steps):
            sequences.launch()
            stamps.append(stamp(device))
            times.append(time.perf_counter())
        spans = spans_s(stamps, device)
        for _ in range(_WARM_UP + steps):
            sequences.collect()
        sequences.end()
    launches = [b - a for a, b in itertools.pairwise(times)]
    return statistics.median(spans[_WARM_UP:]), statistics.median(launches[_WARM_UP:])


def prefill(
    runner: ModelRunner, variant: Variant, lengths: abc.Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield figures of prompts, each computed in one step."""
    peak = matmul_flops_per_s(device_of(variant.device))
    shape = SHAPES[variant.shape]
    for length in lengths:
        compute_prompt(runner, length)
        seconds = statistics.median(compute_prompt(runner, length) for _ in range(5))
        flops = 2.0 * shape.weights_per_token * length + shape.attention_flops(length)
        yield {
            "what": "prefill",
            "model": variant.label,
            "tokens": length,
            "ms": 1e3 * seconds,
            "tokens_per_s": length / seconds,
            "of_matmul": flops / seconds / peak,
        }


def compute_prompt(runner: ModelRunner, length: int) -> float:
    """Compute a prompt in one step; return the seconds until its token is collected."""
    sequences = Sequences(runner, 1, length, 1)
    (sequence,) = sequences.sequences
    before_s = time.perf_counter()
    sequences.compute([Row(sequence, 0, length, samples=True)])
    runner.collect()
    seconds = time.perf_counter() - before_s
    sequences.end()
    return seconds


def exact_bits(runner: ModelRunner, variant: Variant, batch: int) -> dict[str, Any]:
    """Tell whether a sequence's greedy tokens and log-probabilities have the same bits alone, in a
    batch, in chunks, and prefilled again with its output; and the result of the shard's check at
    load.
    """
    alone = _tokens(runner)
    ways: dict[str, Callable[[], list[Any]]] = {
        "in a batch": lambda: _tokens(runner, batch=batch),
        "in chunks": lambda: _tokens(runner, cut=48),
        "computed again": lambda: _tokens(runner, again_at=20),
        "all of these": lambda: _tokens(runner, batch=batch, cut=48, again_at=20),
    }
    differing = [name for name, way in ways.items() if way() != alone]
    return {
        "what": "exact",
        "model": variant.label,
        "batch": batch,
        "batch_invariant": runner.info.batch_invariant,
        "differing": differing,
    }


def _tokens(
    runner: ModelRunner, *, batch: int = 1, cut: int | None = None, again_at: int = 0
) -> list[Any]:
    """Return 40 tokens, with log-probabilities, of the first of `batch` sequences. Prompts are
    computed in chunks of `cut` tokens, and again, with the output so far, after `again_at` tokens.
    """
    context = 300
    sequences = Sequences(runner, batch, context, 64)
    for sequence in sequences.sequences:
        sequence.request = msgspec.structs.replace(sequence.request, logprobs=0)
    first = sequences.sequences[0]
    ids = random.Random(0).choices(range(runner.info.vocab_size), k=context)
    first.token_ids[:] = array("I", ids)
    found = []
    for number in range(40):
        rows = []
        for sequence in sequences.sequences:
            again = number in (0, again_at)
            rows += _rows_of(sequence, again, cut)
        for step in _in_turns(rows):
            sequences.compute(step)
            for row, result in zip(step, runner.collect(), strict=True):
                if row.samples:
                    row.sequence.token_ids.extend(result_tokens(result))
                    if row.sequence is first and result.logprobs is not None:
                        found.append((result_tokens(result), result.logprobs.chosen))
    sequences.end()
    return found


def _rows_of(sequence: Sequence, again: bool, cut: int | None) -> list[Row]:
    """Return rows of the next tokens to compute, in chunks of `cut`; of all tokens if `again`."""
    end = len(sequence.token_ids)
    start = 0 if again else end - 1
    step = cut or end
    return [
        Row(sequence, at, min(step, end - at), samples=at + step >= end)
        for at in range(start, end, step)
    ]


def _in_turns(rows: abc.Sequence[Row]) -> list[list[Row]]:
    """Divide rows into steps of at most 4,096 tokens with one chunk of each request, earlier chunks
    first.
    """
    steps: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: (row.start, row.count)):
        last = steps[-1]
        taken = {id(other.sequence) for other in last}
        if id(row.sequence) in taken or sum(r.count for r in last) + row.count > 4096:
            steps.append([])
        steps[-1].append(row)
    return steps
