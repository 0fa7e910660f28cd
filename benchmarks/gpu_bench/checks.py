"""The checks that a shard makes at load, separately and without a model: kinds of kernels, and
attention backends over layers of several kinds.

On a CPU, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.gpu_bench.attempts import Attempts
from benchmarks.gpu_bench.goals import Row
from benchmarks.gpu_bench.machine import device_of
from penstock_shard.attention.backend_order import Candidate, candidates
from penstock_shard.attention.base import LayerSpec, NotHere, Unusable
from penstock_shard.attention.sdpa import SdpaBackend
from penstock_shard.model_loader.choices.choose_attention import AttentionOptions, fault_of
from penstock_shard.ops.base import WeightKind
from penstock_shard.ops.torch_ops import TorchOps
from penstock_shard.selfcheck.ops import KERNELS, triton_fault

_KINDS: dict[WeightKind, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Layers like those of Llama 3.1 8B, Qwen 2.5 1.5B, Gemma 2, gpt-oss, and with latents.
_LAYERS = {
    "8b": LayerSpec(0, 32, 8, 128, 128, 128**-0.5),
    "1.5b": LayerSpec(0, 12, 2, 128, 128, 128**-0.5),
    "gemma2": LayerSpec(0, 16, 8, 256, 256, 256**-0.5, window=100, softcap=50.0),
    "gpt-oss": LayerSpec(0, 64, 8, 64, 64, 64**-0.5, window=128, has_sinks=True),
    "latents": LayerSpec(0, 16, 1, 576, 512, 192**-0.5, values_in_keys=True),
}
_SMALL = {"small": LayerSpec(0, 4, 2, 16, 16, 0.25)}


def attempts(device_name: str) -> Attempts:
    """Return a check for each kind of kernels, then for each backend, with each kind of weights."""
    device = device_of(device_name)
    if device.type == "cpu":
        from support.triton_interpreter import use_interpreter

        use_interpreter()
    found: dict[str, partial[Row]] = {}
    for kind in _KINDS:
        for exact in (False, True):
            for kernels in KERNELS:
                name = f"kernels of {kernels}, {kind}{', exact' if exact else ''}"
                found[name] = partial(_kernels, device, kind, exact, kernels)
        found.update(_of_backends(device, kind))
    # Checks nothing on a device without fp8.
    found["kernels of rounding, fp8"] = partial(_kernels, device, "fp8", False, "rounding")
    return found


def _kernels(device: torch.device, kind: WeightKind, exact: bool, kernels: str) -> Row:
    dtype = _KINDS.get(kind, torch.bfloat16)
    return _row(triton_fault(device, dtype, kind, exact=exact, kernels=[kernels]))


def _of_backends(device: torch.device, kind: WeightKind) -> Iterator[tuple[str, partial[Row]]]:
    on_gpu = device.type == "cuda"
    for number, candidate in enumerate(candidates("auto" if on_gpu else "triton", device)):
        # The reference for the others.
        if candidate.name == "sdpa":
            continue
        for name, layer in (_LAYERS if on_gpu else _SMALL).items():
            title = f"attention {candidate.name} ({number + 1}), layers of {name}, {kind}"
            yield title, partial(_attention, candidate, layer, device, kind)


def _attention(
    candidate: Candidate, layer: LayerSpec, device: torch.device, kind: WeightKind
) -> Row:
    dtype = _KINDS[kind]
    try:
        backend = candidate.make(device, dtype)
    except (NotHere, Unusable) as error:
        return {"found": f"not here: {error}"}
    if refusal := backend.refusal(layer, dtype):
        return {"found": f"not served: {refusal}"}
    ops = TorchOps(device, dtype, kind, SdpaBackend())
    return _row(fault_of(backend, ops, [layer], AttentionOptions()))


def _row(fault: str | None) -> Row:
    return {"found": "right"} if fault is None else {"failed": fault}
