"""Shapes of models: the work for a token, and the bytes that a step must read.

Models have random weights, made on the device. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# Bytes of a weight, by dtype; and of a weight of the output head, which keeps the precision of
# activations if others are fp8 or int4.
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.53}
_HEAD_BYTES = {**_BYTES, "fp8": 2, "int4": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family; `values` are fields of its config.json."""

    name: str
    model_type: str
    architecture: str
    values: dict[str, Any]

    @property
    def head_dim(self) -> int:
        return int(self.values.get("head_dim") or self._int("hidden_size") // self.num_heads)

    @property
    def num_heads(self) -> int:
        return self._int("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        return self._int("num_key_value_heads")

    @property
    def num_layers(self) -> int:
        return self._int("num_hidden_layers")

    def weights_read(self, num_tokens: int) -> float:
        """Count the weights that a step with `num_tokens` tokens reads, with the expected number of
        experts if tokens choose at random.
        """
        share = 1.0
        if experts := self._experts:
            share = 1.0 - (1.0 - self._int("num_experts_per_tok") / experts) ** num_tokens
        return self._head + self.num_layers * (self._attention + self._feed_forward * share)

    def weight_bytes(self, num_tokens: int, dtype: str) -> float:
        """Return the bytes of these weights in a shard with this dtype."""
        body = self.weights_read(num_tokens) - self._head
        return body * _BYTES[dtype] + self._head * _HEAD_BYTES[dtype]

    @property
    def weights_per_token(self) -> int:
        """Count the weights that a prompt token is multiplied with, without the output head."""
        used = self._feed_forward
        if experts := self._experts:
            used = used * self._int("num_experts_per_tok") // experts
        return self.num_layers * (self._attention + used)

    def kv_elements(self, num_tokens: int) -> int:
        """Count the elements of the keys and values of `num_tokens` tokens."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * num_tokens

    def attention_flops(self, num_tokens: int) -> float:
        """Return the flops of causal attention over a prompt."""
        return 2.0 * self.num_layers * self.num_heads * self.head_dim * num_tokens**2

    @property
    def _experts(self) -> int:
        return int(self.values.get("num_experts", 0))

    @property
    def _attention(self) -> int:
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self._int("hidden_size") * heads * self.head_dim

    @property
    def _feed_forward(self) -> int:
        if experts := self._experts:
            return 3 * experts * self._int("hidden_size") * self._int("moe_intermediate_size")
        return 3 * self._int("hidden_size") * self._int("intermediate_size")

    @property
    def _head(self) -> int:
        return self._int("hidden_size") * self._int("vocab_size")

    def _int(self, name: str) -> int:
        return int(self.values[name])

    def write(self, directory: Path) -> Path:
        """Write a model directory without weights, for --load-format dummy."""
        from model_maker import write_tokenizer

        directory.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **self.values,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(directory)
        _name_all_ids(directory / "tokenizer.json", self._int("vocab_size"))
        return directory


def _name_all_ids(path: Path, count: int) -> None:
    """Give each id of the model a token. Otherwise most ids that random weights choose are no text,
    nothing is streamed, and times of streams mean nothing.
    """
    tokenizer = json.loads(path.read_text())
    known = tokenizer["model"]["vocab"]
    taken = {*known.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    # New words in the alphabet of bytes: U+0120 is a space.
    known.update((f"\u0120x{number:x}", number) for number in range(count) if number not in taken)
    path.write_text(json.dumps(tokenizer))


def _llama(name: str, hidden: int, layers: int, heads: int, wide: int) -> Shape:
    values = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": wide,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": False,
    }
    return Shape(name, "llama", "LlamaForCausalLM", values)


_QWEN_15B = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
_QWEN_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
# Small, to try the whole benchmark on cpu.
_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-1.5b", "qwen2", "Qwen2ForCausalLM", _QWEN_15B),
        _llama("llama-3.1-8b", 4096, 32, 32, 14336),
        Shape("qwen3-30b-a3b", "qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_30B),
        _llama("llama-70b", 8192, 80, 64, 28672),
        Shape("tiny", "llama", "LlamaForCausalLM", _TINY),
    )
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape, and a shard's settings."""

    shape: str
    device: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    exact: bool = False
    max_num_seqs: int = 256
    max_model_len: int = 1024

    @property
    def label(self) -> str:
        how = [self.quantization] if self.quantization else []
        return " ".join([self.shape, *how, *(["exact"] if self.exact else [])])
