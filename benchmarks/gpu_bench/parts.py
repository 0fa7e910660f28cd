"""The parts of the benchmark, in order of value, with bounds of their time.

Parts import torch and other modules themselves, so that a failed import fails only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_bench.attempts import Attempts
from benchmarks.gpu_bench.goals import Row
from benchmarks.gpu_bench.shapes import Variant

# The least max_model_len, in which sequences for comparisons of bits fit.
_LEAST_LEN = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Amounts of work that the parts do."""

    steps: int
    seconds: float
    # For the parts `requests` and `http`.
    requests: int
    few_requests: int
    # For 8b-1k: requests, and the tokens of each prompt and answer.
    long_requests: int
    long_tokens: int
    batches: tuple[int, ...]
    # Numbers of streams over gRPC for the large shape.
    large_batches: tuple[int, ...]
    prompts: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    context: int
    # Models for comparisons of tokens with transformers.
    families: tuple[str, ...]
    # Logits in a row to sample from.
    vocabulary: int


FULL = Size(
    steps=40,
    seconds=3.0,
    requests=2000,
    few_requests=400,
    long_requests=1024,
    long_tokens=1000,
    batches=(1, 32, 256),
    large_batches=(1, 32, 1024),
    prompts=(2048, 8192),
    attention=((1, 32768), (32, 512), (32, 4096), (256, 512), (256, 2048)),
    context=512,
    families=("llama", "qwen3", "mixtral"),
    vocabulary=128256,
)
TINY = Size(
    steps=6,
    seconds=0.5,
    requests=4,
    few_requests=4,
    long_requests=2,
    long_tokens=20,
    batches=(1, 4),
    large_batches=(1, 4),
    prompts=(64,),
    attention=((2, 48),),
    context=48,
    families=("llama",),
    vocabulary=512,
)

# A part's work: size, device, folder -> rows, each at once.
Rows = Callable[[Size, str, Path], Iterator[Row]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part that measures, or that runs independent attempts."""

    # With time for the first compilation of kernels.
    bound_s: float
    rows: Rows | None = None
    attempts: Callable[[Size, str, Path], Attempts] | None = None


def _env(size: Size, device: str, folder: Path) -> Attempts:
    from benchmarks.gpu_bench import bare_machine

    return bare_machine.attempts(device)


def _checks(size: Size, device: str, folder: Path) -> Attempts:
    from benchmarks.gpu_bench import checks

    return checks.attempts(device)


def _tokens(size: Size, device: str, folder: Path) -> Attempts:
    from benchmarks.gpu_bench import tokens

    return tokens.attempts(size.families, device, folder)


def _sampler(size: Size, device: str, folder: Path) -> Attempts:
    from benchmarks.gpu_bench import sampler

    return sampler.attempts(size.batches, size.vocabulary, device)


def _variant(shape: str, device: str, **changes: Any) -> Variant:
    return Variant("tiny" if device == "cpu" else shape, device, **changes)


def _machine(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import machine

    place = machine.device_of(device)
    yield {
        "what": "machine",
        "copy_gb_per_s": 1e-9 * machine.copy_bytes_per_s(place),
        "matmul_tflops": 1e-12 * machine.matmul_flops_per_s(place),
    }


def _attention(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import attention

    shape = "tiny" if device == "cpu" else "llama-3.1-8b"
    backend = "sdpa" if device == "cpu" else "auto"
    return attention.attention(shape, device, backend, size.attention)


def _decode(shape: str, *, prompts: bool = False, **changes: Any) -> Rows:
    """Return a part that measures decode steps, checks bits of an exact variant, measures prompts,
    and profiles the kernels of both.
    """

    def part(size: Size, device: str, folder: Path) -> Iterator[Row]:
        from benchmarks.gpu_bench import kernels, steps

        longest = max(_LEAST_LEN, *(length + 8 for length in size.prompts))
        variant = _variant(shape, device, max_model_len=longest, **changes)
        runner, loaded = steps.make_runner(variant, folder)
        yield loaded
        yield from steps.decode(runner, variant, size.batches, size.context, size.steps)
        if variant.exact:
            yield steps.exact_bits(runner, variant, size.batches[-1])
        if prompts:
            yield from steps.prefill(runner, variant, size.prompts)
        # Last, because profiling may slow later steps.
        yield from kernels.decode_kernels(runner, variant, size.batches, size.context)
        if prompts:
            yield kernels.prompt_kernels(runner, variant, size.prompts[0])

    return part


def _served(shape: str, streams: str, context_share: int, **changes: Any) -> Rows:
    """Return a part that measures steps while streams are read over gRPC, the device's time for
    such steps, and decode steps.
    """

    def part(size: Size, device: str, folder: Path) -> Iterator[Row]:
        from benchmarks.gpu_bench import serving, steps

        variant = _variant(shape, device, **changes)
        context, counts = size.context // context_share, getattr(size, streams)
        rows: list[Row] = []
        try:
            rows.extend(serving.steps_over_grpc(variant, counts, context, size.seconds, folder))
        finally:
            # Also after a failure, for rows that were measured before.
            runner, loaded = steps.make_runner(variant, folder)
            yield loaded
            for row in rows:
                device_s, launch_s = steps.device_and_launch_s(
                    runner, row["batch"], row["context"], size.steps
                )
                yield {**row, "device_ms": 1e3 * device_s, "launch_ms": 1e3 * launch_s}
            yield from steps.decode(runner, variant, size.batches, size.context, size.steps)

    return part


def _http(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    variant = _variant("qwen2.5-1.5b", device, max_num_seqs=256, max_model_len=4096)
    return serving.requests_over_http(variant, size.few_requests, folder)


def _requests(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    variant = _variant("qwen2.5-1.5b", device, max_num_seqs=512, max_model_len=4096)
    return serving.requests_over_http(variant, size.requests, folder)


def _throughput(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    # A prompt may take a few tokens more than it has words.
    variant = _variant(
        "llama-3.1-8b",
        device,
        quantization="fp8",
        kv_cache_dtype="fp8" if device == "cuda" else "auto",
        max_num_seqs=1024,
        max_model_len=4096,
    )
    return serving.throughput_over_http(variant, size.long_requests, size.long_tokens, folder)


def _transformers(size: Size, device: str, folder: Path) -> Iterator[Row]:
    from benchmarks.gpu_bench import serving

    # A quarter of the requests, because transformers is slower.
    variant = _variant("qwen2.5-1.5b", device)
    yield serving.transformers_requests(variant, max(2, size.requests // 4), folder)


PARTS: dict[str, Part] = {
    "env": Part(60, attempts=_env),
    "machine": Part(45, _machine),
    "checks": Part(90, attempts=_checks),
    "tokens": Part(90, attempts=_tokens),
    "8b": Part(150, _decode("llama-3.1-8b", prompts=True)),
    "http": Part(110, _http),
    "sampler": Part(45, attempts=_sampler),
    "attention": Part(60, _attention),
    "8b-exact": Part(140, _decode("llama-3.1-8b", exact=True)),
    "requests": Part(130, _requests),
    "transformers": Part(80, _transformers),
    "8b-fp8": Part(100, _decode("llama-3.1-8b", quantization="fp8")),
    "8b-1k": Part(180, _throughput),
    "1.5b": Part(120, _served("qwen2.5-1.5b", "batches", 1, max_model_len=8192)),
    "70b-fp8": Part(
        180,
        # A 16th of the context, so that all streams' keys and values fit.
        _served("llama-70b", "large_batches", 16, quantization="fp8", max_num_seqs=1024),
    ),
    "30b-a3b": Part(120, _decode("qwen3-30b-a3b")),
}
