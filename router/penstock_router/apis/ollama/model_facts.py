"""Tells a model's family, size and dtype in Ollama's words."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from penstock_proto.facts import ShardInfo

# Model types whose architecture has another name in GGUF files.
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "none": ""}
_HEAD = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")


def architecture(info: ShardInfo) -> str:
    """Name the architecture, such as llama or qwen3moe."""
    kind = info.shape.model_type
    if kind in _ARCHITECTURES:
        return _ARCHITECTURES[kind]
    return kind.replace("_", "") or _HEAD.sub("", info.architecture).lower()


def quantization(info: ShardInfo) -> str:
    """Name the weights' dtype, such as BF16."""
    return _DTYPES.get(info.dtype, info.dtype.upper())


def parameter_size(info: ShardInfo) -> str:
    """Show the number of parameters, such as 8.0B; empty if unknown."""
    count = info.shape.num_parameters
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    if count >= 10**6:
        return f"{count / 10**6:.2f}M"
    return f"{count / 1000:.0f}K" if count else ""


def digest(info: ShardInfo, adapter: str) -> str:
    """Return a hash of the weights, as long as Ollama's. Clients show its beginning."""
    parts = (info.weights_hash, info.adapter_hash(adapter))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def model_info(info: ShardInfo) -> dict[str, Any]:
    shape, name = info.shape, architecture(info)
    hidden_size = shape.hidden_size or (0 if info.embedding is None else info.embedding.size)
    known = {
        "general.parameter_count": shape.num_parameters,
        f"{name}.context_length": info.max_model_len,
        f"{name}.embedding_length": hidden_size,
        f"{name}.block_count": shape.num_layers,
        f"{name}.attention.head_count": shape.num_heads,
        f"{name}.attention.head_count_kv": shape.num_kv_heads,
        f"{name}.vocab_size": info.vocab_size,
    }
    return {"general.architecture": name, **{key: known[key] for key in known if known[key]}}
