"""Chooses a model's attention backend: the first that serves the model's layers and computes
correctly on the device.

The check compares a few steps of random tokens with the reference, sdpa in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from penstock_shard.attention.backend_order import READS_ANY_CACHE, candidates, title
from penstock_shard.attention.base import (
    AttentionBackend,
    LayerSpec,
    NotHere,
    Unusable,
)
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.device.dtypes import dtype_name
from penstock_shard.errors import (
    ModelError,
    device_failures,
    first_line,
    is_out_of_memory,
)
from penstock_shard.ops.base import Ops
from penstock_shard.selfcheck.attention import make_case

# The largest difference from attention in float32 over the same rounded keys, values and queries.
# It is relative to 1 + |expected|.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# The most queries of a test sequence: on cuda enough for several tiles of a kernel; on cpu few,
# because Triton's interpreter is slow.
_MOST_QUERIES = {"cuda": 300, "cpu": 24}


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    # The backend's name, or "auto".
    backend: str = "auto"
    # The dtype of cached keys and values; None for the activations' dtype.
    kv_dtype: torch.dtype | None = None
    block_size: int | None = None


def serves_latents(ops: Ops, wish: AttentionOptions) -> bool:
    """Tell whether an allowed backend can take values out of the keys, as latent layers need."""
    layer = LayerSpec(0, 1, 1, 24, 16, 1.0, values_in_keys=True)
    return any(backend.refusal(layer, ops.dtype) is None for backend in _backends(ops, wish, []))


def choose_backend(
    ops: Ops, layers: Sequence[LayerSpec], wish: AttentionOptions, progress: Callable[[str], None]
) -> AttentionBackend:
    """Return the best backend that serves all layers. If better backends were skipped, one line of
    progress says why.

    Raises ModelError if no allowed backend serves them.
    """
    reasons: list[str] = []
    for backend in _backends(ops, wish, reasons):
        reason = fault_of(backend, ops, _kinds(layers), wish)
        if reason is None:
            if reasons:
                progress(f"attention backend {title(backend)}, because {'; '.join(reasons)}")
            return backend
        reasons.append(f"{title(backend)} {reason}")
    flag = "" if wish.backend == "auto" else f"--attention-backend {wish.backend}: "
    raise ModelError(f"{flag}{'; '.join(reasons)}; use --attention-backend sdpa")


def _backends(ops: Ops, wish: AttentionOptions, reasons: list[str]) -> Iterator[AttentionBackend]:
    """Yield the backends to try. Add to `reasons` why others cannot be made."""
    if ops.exact:
        # Only the backend of the exact ops is exact.
        yield ops.backend
        return
    for candidate in candidates(wish.backend, ops.device):
        try:
            backend = candidate.make(ops.device, ops.dtype)
        except NotHere:
            continue
        except Unusable as error:
            reasons.append(str(error))
            continue
        yield backend


def _kinds(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return the first layer of each kind of attention layer."""
    kinds: dict[LayerSpec, LayerSpec] = {}
    for layer in layers:
        if layer.state is None:
            kinds.setdefault(dataclasses.replace(layer, index=0), layer)
    return list(kinds.values())


def fault_of(
    backend: AttentionBackend, ops: Ops, layers: Sequence[LayerSpec], wish: AttentionOptions
) -> str | None:
    """Return why the backend does not serve these layers here (text that follows its name); None if
    it does.
    """
    for layer in layers:
        reason = backend.refusal(layer, ops.dtype)
        if reason is not None:
            return reason
    if backend.name in ("cpu", "sdpa"):
        # The cpu kernels have tests of their own; sdpa is the reference.
        return None
    kv_dtype = wish.kv_dtype or ops.dtype
    if kv_dtype is not ops.dtype and backend.name not in READS_ANY_CACHE:
        return f"keeps keys and values as {dtype_name(ops.dtype)}, not {dtype_name(kv_dtype)}"
    block_size = wish.block_size or backend.block_multiple
    if block_size % backend.block_multiple:
        return f"needs --block-size to be a multiple of {backend.block_multiple}, not {block_size}"
    for layer in layers:
        reason = _tried(backend, ops, layer, kv_dtype, block_size)
        if reason is not None:
            return reason
    return None


def _tried(
    backend: AttentionBackend,
    ops: Ops,
    layer: LayerSpec,
    kv_dtype: torch.dtype,
    block_size: int,
) -> str | None:
    """Return the backend's failure on this device, or None. Raises an out-of-memory error, which is
    not the backend's fault.
    """
    try:
        return _difference(backend, ops, layer, kv_dtype, block_size)
    except device_failures() as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        reason = f"fails on {ops.device} with {type(error).__name__}: {first_line(error)}"
    if ops.device.type == "cuda":
        try:
            torch.cuda.synchronize(ops.device)
        except RuntimeError as error:
            # After a CUDA fault the device takes no more work from this process.
            raise ModelError(
                f"{title(backend)} {reason}; use another --attention-backend"
            ) from error
    return reason


@torch.inference_mode()
def _difference(
    backend: AttentionBackend,
    ops: Ops,
    layer: LayerSpec,
    kv_dtype: torch.dtype,
    block_size: int,
) -> str | None:
    """Describe a difference from the reference that rounding does not explain, or return None."""
    most = _MOST_QUERIES.get(ops.device.type, max(_MOST_QUERIES.values()))
    trial = make_case(layer, ops.dtype, kv_dtype, ops.device, most)
    full = torch.float32
    bound = _TOLERANCE[ops.dtype]
    for got, want in zip(
        trial.run(backend, block_size, ops.dtype, kv_dtype),
        trial.run(SdpaBackend(), block_size, full, full),
        strict=True,
    ):
        expected = want.attended
        if got.attended.shape != expected.shape:
            return f"gives {list(got.attended.shape)} for {list(expected.shape)}"
        errors = (got.attended.float() - expected).abs() / (1 + expected.abs())
        decodes = want.num_decodes
        for what, part in (("decodes", errors[:decodes]), ("chunks", errors[decodes:])):
            worst = float(part.amax()) if len(part) else 0.0
            # `worst > bound` would let a NaN pass.
            if not worst <= bound:
                return (
                    f"differs from sdpa by {worst:.2g} in {what} of layer {layer.index} "
                    f"(bound {bound:g})"
                )
    return None
