"""A hash of everything that the bits of logits and drawn tokens depend on. Shards with the same
fingerprint give the same bits.

It covers the sources of kernels and of the code that launches Triton's, because any change may
change a rounding. MODEL_REVISION and SAMPLER_REVISION stand for our other Python code, so that
shards of two versions may continue each other's requests. `tests/comparison` finds results that
differ without a new revision. Libraries are hashed by their versions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import random
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from penstock_shard.errors import ModelError
from penstock_shard.kernels.build_cpu import kernel_hash
from penstock_shard.models.base import MODEL_REVISION
from penstock_shard.ops.base import Ops
from penstock_shard.ops.cpu_ops import CpuOps
from penstock_shard.worker.sampling.sampler import SAMPLER_REVISION

_DIGEST_BYTES = 16
# More values than a vector register holds, and no multiple of its size.
_NUM_VALUES = 4099
# The folder of the outermost package.
_PACKAGE = Path(__file__).parents[__name__.count(".") - 1]
_HAS_KERNELS = re.compile(r"^\s*@triton\.", re.MULTILINE)
# Functions of the sampler, rotary tables and modelling code whose rounding depends on the
# processor. torch's report of the instruction set is not enough, because some of its libraries
# choose code by vendor.
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
    # Sums whose order depends on the length of vector registers.
    "mean": torch.mean,
    "layer_norm": lambda x: functional.layer_norm(x, x.shape),
    "log_softmax": lambda x: torch.log_softmax(x, dim=0),
    "softmax": lambda x: torch.softmax(x, dim=0),
    # Large arguments, because angles grow with positions.
    "cos": lambda x: torch.cos(x * 1000),
    "sin": lambda x: torch.sin(x * 1000),
    "pow": lambda x: 10000.0 ** (x / 8),
}


def fingerprint(
    weights_hash: str,
    ops: Ops,
    kv_dtype: torch.dtype,
    parallel_size: int = 1,
    images: str = "",
) -> str:
    """Return 32 hex digits (blake2b-128). `parallel_size` is included because sums over several
    ranks round differently. `images` is the image encoder's fingerprint, if any.
    """
    parts = (
        weights_hash,
        ops.weights,
        str(kv_dtype),
        ops.backend.name,
        *_kernels(ops),
        torch.__version__,
        torch_bits(),
        # Our decoder takes configuration defaults and rotary tables from transformers.
        importlib.metadata.version("transformers"),
        # The library decides which tokens a constraint allows.
        importlib.metadata.version("llguidance"),
        str(MODEL_REVISION),
        str(SAMPLER_REVISION),
        str(parallel_size),
        *([images] if images else []),
    )
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _kernels(ops: Ops) -> tuple[str, ...]:
    """Return a hash of the kernels; for Triton also its version and the device."""
    if isinstance(ops, CpuOps) and ops.weights == "bfloat16" and ops.kernels.uses_tiles:
        return (kernel_hash(), "tiles")
    # On a GPU, Triton kernels compute parts of a layer with any attention backend.
    if ops.device.type == "cpu" and ops.backend.name != "triton":
        return (kernel_hash(),)
    return (_triton_hash(), importlib.metadata.version("triton"), *_device(ops.device))


def _triton_hash() -> str:
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in triton_sources(_PACKAGE):
        total.update(path.read_bytes() + b"\0")
    return total.hexdigest()


def triton_sources(folder: Path) -> list[Path]:
    """Return the modules below `folder` that import Triton or a module with kernels.

    Raises ModelError if there are no kernels, because the hash would then not depend on them.
    """
    texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
    kernels = [path.stem for path, text in texts.items() if _HAS_KERNELS.search(text)]
    if not kernels:
        raise ModelError(f"no numerics fingerprint: {folder} has no sources of Triton kernels")
    names = "|".join(["triton", *kernels])
    imports = re.compile(rf"^\s*(import|from)\s.*\b({names})\b", re.MULTILINE)
    return [path for path, text in texts.items() if imports.search(text)]


def _device(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (device.type,)
    capability = str(torch.cuda.get_device_capability(device))
    name = torch.cuda.get_device_name(device)
    return (name, capability, str(torch.version.cuda), torch_bits(device))


def torch_bits(device: torch.device | None = None) -> str:
    """Hash (blake2b-128, 32 hex digits) the results of torch's functions for fixed values on this
    device, by default the cpu.
    """
    total = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for values in _fixed_values():
        for name, function in _FUNCTIONS.items():
            total.update(f"{name}\0{values.dtype}\0".encode())
            total.update(function(values.to(device or "cpu")).cpu().numpy().tobytes())
    return total.hexdigest()


@functools.cache
def _fixed_values() -> tuple[Tensor, Tensor]:
    """Return values between -8 and 8, in float32 and in float64."""
    generator = random.Random(1)
    values = [generator.uniform(-8, 8) for _ in range(_NUM_VALUES)]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(values, dtype=torch.float64)
