"""Compiles for a card, and without one, all that our Triton ops would launch on tensors of the
host: what the interpreter runs need not compile, nor fit into a card's shared memory.

    python tests/models/compile_launches.py [80 | 86 | 89 | 90 | 100 | 120] [KIND] [few]

for a compute capability, 9.0 where none is named, and weights of one KIND, bfloat16 or float32, or
of each; with `few` only the shapes of attention that differ most. Run as a process of its own: it
puts a card that is not there in Triton's driver's place. Prints a line for each launch that does
not compile, then how many did.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.triton import TritonBackend
from penstock_shard.kernels.triton_draw import draw_by_id
from penstock_shard.kernels.triton_quantize import round_rows
from penstock_shard.kernels.triton_rank import draw_ranked
from penstock_shard.ops.base import HeadNorm, Rope, RoutingRule, WeightKind
from penstock_shard.ops.experts import route
from penstock_shard.ops.triton_ops import TritonOps

_HOST = torch.device("cpu")
_HEADS, _KV_HEADS, _DIM, _HIDDEN, _INNER = 32, 8, 128, 4096, 14336
# Shared memory for one program, in bytes, by compute capability: A100, A10 and RTX 3090, L4 and
# RTX 4090, H100 and H200, B200, RTX 5090. From the CUDA C++ programming guide, "Technical
# Specifications per Compute Capability".
_KILOBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
_SHARED_BYTES = {capability: size << 10 for capability, size in _KILOBYTES.items()}
_HAS_FP8 = 89
# Layers as in Llama 3, as in Gemma 2, with many heads on one, and with latents as in DeepSeek V3,
# whole and as one of eight ranks has it.
_LLAMA = LayerSpec(0, _HEADS, _KV_HEADS, _DIM, _DIM, 0.1)
_HEADS_BESIDE = (LayerSpec(0, 16, 8, 256, 256, 0.1), LayerSpec(0, 71, 1, 64, 64, 0.1))
_LATENTS = tuple(LayerSpec(0, n, 1, 576, 512, 0.1, values_in_keys=True) for n in (128, 16))
_DTYPES: dict[WeightKind, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# What would be launched, in words and as a call.
Launch = tuple[str, Callable[[], object]]


class Card:
    """A stand-in for a card's driver and its `utils`, with as much as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.utils = self
        self._capability = capability

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_BYTES[self._capability]}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _HOST


def main() -> int:
    capability = int(sys.argv[1]) if len(sys.argv) > 1 else 90
    compiled = _only_compile(capability)
    failed = 0
    asked = _DTYPES.keys() & set(sys.argv) or _DTYPES
    kinds = {name: kind for name, kind in _DTYPES.items() if name in asked}
    few = "few" in sys.argv
    for name, launch in _launches(kinds, has_fp8=capability >= _HAS_FP8, few=few):
        try:
            launch()
        # Whatever the compiler raises is what is looked for.
        except Exception as error:  # noqa: BLE001
            failed += 1
            print(f"{name}: {type(error).__name__}: {str(error)[-600:]}")
    room = _SHARED_BYTES[capability]
    too_large = [found for found in compiled if found[1] > room]
    print(f"{len(compiled)} compiled, {failed} did not, too large: {too_large}")
    return 1 if failed or too_large else 0


def _only_compile(capability: int) -> list[tuple[str, int]]:
    """Make each launch from now on compile its kernel for this capability and not run it. Return a
    list that gets the name and the bytes of shared memory of each.
    """
    driver.set_active(Card(capability))
    run: Any = jit.JITFunction.run
    compiled: list[tuple[str, int]] = []

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel.metadata.shared))
        return kernel

    jit.JITFunction.run = compile_only
    return compiled


def _launches(
    kinds: dict[WeightKind, torch.dtype], *, has_fp8: bool, few: bool
) -> Iterator[Launch]:
    for (kind, dtype), exact in itertools.product(kinds.items(), (False, True)):
        backend = TritonBackend(exact=exact)
        ops = TritonOps(_HOST, dtype, kind, backend, exact=exact)
        how = f"{kind}{' exact' if exact else ''}"
        yield from _of_layers(ops, how)
        yield from _of_states(ops, how, few=few)
        yield from _of_products(ops, how)
        fp8_too = has_fp8 and dtype is torch.bfloat16
        for cache_dtype in [dtype, torch.float8_e4m3fn] if fp8_too else [dtype]:
            where = f"{how}, cached as {cache_dtype}"
            yield from _of_attention(ops, backend, cache_dtype, where, few=few)
        for spec in _HEADS_BESIDE:
            yield heads_of(backend, dtype, spec, [1, 20], None, how)
        yield f"drawing, {how}", partial(_draw, dtype)
    if has_fp8:
        yield "rounding", lambda: round_rows(torch.zeros(3, _HIDDEN, dtype=torch.bfloat16))
        yield from _of_layers(TritonOps(_HOST, torch.bfloat16, "fp8", TritonBackend()), "fp8")


def _of_layers(ops: TritonOps, how: str) -> Iterator[Launch]:
    x = torch.zeros(3, _HIDDEN, dtype=ops.dtype)
    weight = torch.zeros(_HIDDEN, dtype=torch.float32)
    yield f"norm, {how}", lambda: ops.add_rms_norm(x, x.clone(), weight, 1e-6, 0.0)
    yield f"norm alone, {how}", lambda: ops.add_rms_norm(x, None, weight, 1e-6, 1.0)
    yield f"silu, {how}", lambda: ops.gated_activation(x, "silu")
    yield f"gelu, {how}", lambda: ops.gated_activation(x, "gelu_tanh")
    wide = torch.zeros(3, 2 * _INNER, dtype=ops.dtype)
    yield f"silu of many, {how}", lambda: ops.gated_activation(wide, "silu")


def _of_states(ops: TritonOps, how: str, *, few: bool) -> Iterator[Launch]:
    """Yield launches of layers with states: convolutions; the delta rule of Qwen3-Next, and of Kimi
    Linear by channel; the scan of Mamba-2, and unless `few`, of Mamba by column.
    """
    for counts in ([1, 1, 1], [1, 50]):
        batch, total = batch_of(counts), sum(counts)
        x, weight = torch.zeros(total, 8192, dtype=ops.dtype), torch.zeros(4, 8192)
        kept = torch.zeros(1, 3, 8192)
        conv = partial(ops.short_conv, x, weight, weight[0], kept, batch, silu=True)
        yield f"convolution of {counts}, {how}", conv
    state = torch.zeros(1, 32, 128, 128)
    for sizes in ((total, 32), (total, 32, 128)):
        rule = partial(ops.delta_rule, x, torch.zeros(*sizes), torch.zeros(total, 32), state, batch)
        yield f"delta rule of {sizes}, {how}", rule
    for heads, dim, width in ((80, 64, 128),) if few else ((80, 64, 128), (5120, 1, 16)):
        state, dt = torch.zeros(1, heads, dim, width), torch.zeros(total, heads)
        a = torch.zeros(heads, *(() if dim > 1 else (width,)))
        x = torch.zeros(total, heads, dim, dtype=ops.dtype)
        b = torch.zeros(total, 1, width, dtype=ops.dtype)
        scan = partial(ops.selective_scan, x, dt, a, b, b, dt[0], state, batch)
        yield f"scan of {heads} heads, {how}", scan


def _of_products(ops: TritonOps, how: str) -> Iterator[Launch]:
    if ops.exact:
        matrix = ops.pack([torch.zeros(512, _HIDDEN)])
        for rows in (3, 300):
            x = torch.zeros(rows, _HIDDEN, dtype=ops.dtype)
            yield f"{rows} rows, {how}", partial(matrix.linear, x)
    experts = ops.pack_experts([[torch.zeros(256, 512)]] * 4, 4)
    for tokens in (5, 300):
        yield f"routing, {how}", lambda: ops.route(torch.zeros(3, 128), RoutingRule(8))
        yield f"routing in groups, {how}", partial(_route_in_groups, ops)
        routing = route(torch.zeros(tokens, 4), RoutingRule(2))
        x = torch.zeros(2 * tokens, 512, dtype=ops.dtype)
        given = torch.zeros(2 * tokens, 256, dtype=ops.dtype)
        offsets = routing.offsets
        yield f"experts, {how}", partial(experts.grouped, x, offsets)
        yield f"their sum, {how}", partial(ops.combine, given, routing)


def _of_attention(
    ops: TritonOps, backend: TritonBackend, cache_dtype: torch.dtype, how: str, *, few: bool
) -> Iterator[Launch]:
    cases = (([1, 1, 1], None), ([1, 20], 100), ([1, 20], None), ([1, 1, 1], 100))
    for counts, window in cases[:2] if few else cases:
        yield heads_of(backend, ops.dtype, _LLAMA, counts, window, how, cache_dtype)
    for latents in _LATENTS[:1] if few else _LATENTS:
        for counts in ([1, 1, 1], [20]):
            yield heads_of(backend, ops.dtype, latents, counts, None, how, cache_dtype)
    spec = _LLAMA
    cache = backend.make_cache(spec, 4, 16, cache_dtype, _HOST)
    places = torch.zeros(3, dtype=torch.int64)
    qkv = torch.zeros(3, (_HEADS + 2 * _KV_HEADS) * _DIM, dtype=ops.dtype)
    rope = Rope(torch.zeros(64, _DIM // 2), torch.zeros(64, _DIM // 2))
    weight = torch.zeros(_DIM, dtype=torch.float32)
    for norm in (None, HeadNorm(weight, weight, 1e-6, 0.0)):
        yield (
            f"rotation, {how}",
            partial(ops.rope_and_cache, qkv, spec, cache, places, places, rope, norm),
        )
    heads = torch.zeros(3, _KV_HEADS, _DIM, dtype=ops.dtype)
    yield f"writing, {how}", lambda: backend.write(cache, heads, heads, places)


def heads_of(
    backend: TritonBackend,
    dtype: torch.dtype,
    spec: LayerSpec,
    counts: list[int],
    window: int | None,
    how: str,
    cache_dtype: torch.dtype | None = None,
) -> Launch:
    """Return a launch of attention. It has sinks if a row has several tokens, and a cap if it has a
    window.
    """
    attend = partial(
        backend.attend,
        backend.make_cache(spec, 4, 16, cache_dtype or dtype, _HOST),
        torch.zeros(sum(counts), spec.num_heads, spec.head_dim, dtype=dtype),
        batch_of(counts),
        scale=spec.scale,
        window=window,
        softcap=None if window is None else 50.0,
        sinks=torch.zeros(spec.num_heads, dtype=dtype) if max(counts) > 1 else None,
    )
    return f"attention of {counts}, {spec.num_heads} heads, window {window}, {how}", attend


def batch_of(counts: list[int]) -> AttentionBatch:
    sums = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    lengths = [count + 3 for count in counts]
    return AttentionBatch(
        query_lens=counts,
        seq_lens=lengths,
        num_decodes=sum(count == 1 for count in counts),
        block_size=16,
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        cu_queries=sums,
        cu_keys=sums,
        seq_lens_tensor=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.zeros(len(counts), 4, dtype=torch.int32),
    )


def _route_in_groups(ops: TritonOps) -> None:
    rule = RoutingRule(8, "sigmoid", scale=2.5, groups=8, top_groups=4)
    ops.route(torch.zeros(3, 256), rule, torch.zeros(256))


def _draw(dtype: torch.dtype) -> None:
    """Draw tokens from a vocabulary of several chunks, and from one of a single chunk."""
    for vocabulary in (128_256, 5):
        logits = torch.zeros(2, vocabulary, dtype=dtype)
        draw_by_id(logits, logits[:, 0], torch.zeros(2, 4, dtype=torch.float64), 2.0**42)
        draw_ranked(logits, logits[:, 0], torch.zeros(2, 6, dtype=torch.float64), 2.0**42)


if __name__ == "__main__":
    sys.exit(main())
