"""With whom a shard's logits and draws are equal bit for bit: a name for all that decides.

Knows what results depend on. Knows nothing of how they are computed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import random
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from penstock_shard.models.base import MODEL_REVISION
from penstock_shard.models.kernels.build import kernel_hash
from penstock_shard.models.ops.base import Ops
from penstock_shard.runner.sampler import SAMPLER_REVISION

_DIGEST_BYTES = 16
# More than a vector's width and no multiple of one.
_NUM_VALUES = 4099
# Functions that the sampler, rotary tables and modelling code call and that are rounded otherwise
# by other instructions. Torch hands some to a library that chooses them by the maker of the
# processor, so that torch's own name for what it found does not tell.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "log": lambda x: torch.log(x.abs() + 1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "erf": torch.erf,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "rsqrt": lambda x: torch.rsqrt(x.square() + 1e-5),
    "log_softmax": lambda x: torch.log_softmax(x, dim=0),
    "softmax": lambda x: torch.softmax(x, dim=0),
    # Angles grow with positions.
    "cos": lambda x: torch.cos(x * 1000),
    "sin": lambda x: torch.sin(x * 1000),
    "pow": lambda x: 10000.0 ** (x / 8),
}


def fingerprint(weights_hash: str, ops: Ops, kv_dtype: torch.dtype, parallel_size: int = 1) -> str:
    """32 hex digits (blake2b-128): shards with equal ones give equal bits. `parallel_size` ranks
    add up what they compute, which rounds otherwise than one does.
    """
    parts = (
        weights_hash,
        ops.weights,
        str(kv_dtype),
        ops.backend.name,
        *_kernels(ops),
        torch.__version__,
        torch_bits(),
        # Our decoder has its configuration's defaults and its rotary tables from there.
        transformers.__version__,
        str(MODEL_REVISION),
        str(SAMPLER_REVISION),
        str(parallel_size),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _kernels(ops: Ops) -> tuple[str, ...]:
    """The kernels, and what compiles and runs them."""
    if ops.backend.name != "triton":
        return (kernel_hash(),)
    return (_triton_hash(), importlib.metadata.version("triton"), *_device(ops.device))


def _triton_hash() -> str:
    """Of the sources of all that launches or is a kernel."""
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted((Path(__file__).parents[1] / "models").glob("*/triton*.py")):
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()


def _device(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (device.type,)
    capability = str(torch.cuda.get_device_capability(device))
    name = torch.cuda.get_device_name(device)
    return (name, capability, str(torch.version.cuda), torch_bits(device))


def torch_bits(device: torch.device | None = None) -> str:
    """What torch's functions give for fixed values here, in 32 hex digits (blake2b-128): on this
    device, or on the cpu.
    """
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for values in _fixed_values():
        for name, function in _FUNCTIONS.items():
            total.update(f"{name}\0{values.dtype}\0".encode())
            total.update(function(values.to(device or "cpu")).cpu().numpy().tobytes())
    return total.hexdigest()


@functools.cache
def _fixed_values() -> tuple[Tensor, Tensor]:
    """Between -8 and 8, in the two precisions that are computed in."""
    generator = random.Random(1)
    values = [generator.uniform(-8, 8) for _ in range(_NUM_VALUES)]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(values, dtype=torch.float64)
