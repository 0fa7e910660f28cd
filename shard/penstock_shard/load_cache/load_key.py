"""A key of all that a load depends on, so that a kept value can replace the load.

The key has the system's description of a file, not its bytes, because reading a whole model takes
as long as loading it. A changed file has a new time of change.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

from penstock_common.flags import flags_of
from penstock_common.shared_flags import OBSERVING
from penstock_shard.checkpoint.weight_files import weight_files
from penstock_shard.config import ShardConfig
from penstock_shard.device.cache_directory import code_hash, file_identity
from penstock_shard.device.cpu_threads import default_threads
from penstock_shard.kernels.build_cpu import kernel_hash, wanted_levels

# Flag groups that never affect loading. In the key, they would only cause needless loads.
_APART = {"server", OBSERVING, "fake runner (no torch, no weights)"}
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")


def load_key(config: ShardConfig, model_dir: Path) -> str:
    """Return 32 hex digits (blake2b-128). Raises OSError for a file that cannot be examined,
    ModelError for an index that cannot be read, KernelBuildError for kernels that do not run here.
    """
    total = hashlib.blake2b(digest_size=16)
    for part in _parts(config, model_dir):
        total.update(part.encode() + b"\0")
    return total.hexdigest()


def _parts(config: ShardConfig, model_dir: Path) -> Iterator[str]:
    yield code_hash()
    yield kernel_hash()
    yield from wanted_levels()
    yield _processor()
    yield str(default_threads())
    yield from _flags(config)
    files = {path for path in model_dir.iterdir() if path.is_file()}
    # An index may name weights in folders.
    for path in sorted(files.union(weight_files(model_dir))):
        yield f"{path} {file_identity(path)}"


def _flags(config: ShardConfig) -> Iterator[str]:
    group = ""
    for field in flags_of(type(config)):
        group = field.metadata.get("group") or group
        if group not in _APART:
            yield f"{field.name} {getattr(config, field.name)!r}"


def _processor() -> str:
    """Describe the processor, because torch's rounding may depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    first = lines[: lines.index("")] if "" in lines else lines
    return "\n".join(line for line in first if line.partition(":")[0].strip() in _PROCESSOR)
