"""Writes GGUF files of models as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

# Where the blocks of a type have halves, and how large these are for weights of about 0.1.
HALVES: dict[str, dict[int, float]] = {
    "Q4_0": {0: 0.02},
    "Q4_1": {0: 0.02, 2: -0.15},
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: -0.15},
    "Q8_0": {0: 0.001},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 7.5e-5},
}
# What such files say of a token, by whether it is special.
_NORMAL, _CONTROL = 1, 3


def make_gguf(
    model_dir: Path,
    path: Path,
    kind: str = "F32",
    *,
    kinds: Mapping[str, str] = MappingProxyType({}),
    drop: tuple[str, ...] = (),
    extra: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    fields: Mapping[str, float] = MappingProxyType({}),
    pieces: Mapping[str, float] = MappingProxyType({}),
    adds_bos: bool | None = None,
) -> Path:
    """The model of a directory, matrices in `kind` where a row is so many blocks of it, less some
    tensors and with others, `kinds` for those whose names have a part, and with more fields or
    other values. With `pieces`, which have scores, it has a tokenizer of them and of bytes in place
    of the directory's.
    """
    config = json.loads((model_dir / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    # As llama.cpp's converter does.
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_dir.name)
    writer.add_size_label("4M")
    writer.add_license("apache-2.0")
    writer.add_tags(["text-generation"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_fields(writer, arch, config, fields)
    if pieces:
        _add_pieces(writer, pieces, config["vocab_size"])
    else:
        _add_tokenizer(writer, model_dir, config)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    for name, values in _tensors(model_dir, arch, config):
        if name not in drop:
            own = next((each for part, each in kinds.items() if part in name), kind)
            _add_tensor(writer, name, values, gguf.GGMLQuantizationType[own])
    for name, values in extra.items():
        _add_tensor(writer, name, values, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Return the values as they are when they are stored in this way and read again."""
    of_kind = gguf.GGMLQuantizationType[kind]
    found: NDArray[np.float32] = gguf.dequantize(_stored(values, of_kind), of_kind)
    return found


def random_blocks(kind: str, count: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of any codes, uint8 [count, bytes], whose weights are about 0.1."""
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (count, num_bytes), np.uint8)
    for at, size in HALVES[kind].items():
        halves = (size * random.uniform(0.5, 1.5, (count, 1))).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8)
    return blocks


def _stored(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Rows of blocks; of the types that the package does not write any, the same for equal rows."""
    try:
        return gguf.quantize(values, kind)
    except NotImplementedError:
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        count = values.shape[1] // block
        seeds = [zlib.crc32(row.tobytes()) for row in values]
        rows = [random_blocks(kind.name, count, np.random.default_rng(seed)) for seed in seeds]
        return np.stack([row.reshape(-1) for row in rows])


def _add_fields(
    writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], changes: Mapping[str, float]
) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float((config.get("rope_parameters") or config)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    for name, value in (fields | dict(changes)).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{arch}.{name}", value)


def _add_tokenizer(writer: gguf.GGUFWriter, model_dir: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    writer.add_token_merges(merges)
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    template = json.loads((model_dir / "tokenizer_config.json").read_text()).get("chat_template")
    if template:
        writer.add_chat_template(template)


def _add_pieces(writer: gguf.GGUFWriter, pieces: Mapping[str, float], vocabulary: int) -> None:
    """Add a vocabulary of SentencePiece: the unknown, begin and end tokens, each byte, the pieces,
    and unused tokens up to the size of the vocabulary.
    """
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *bytes_, *pieces]
    unused = [f"<unused{index}>" for index in range(vocabulary - len(tokens))]
    types = [2, _CONTROL, _CONTROL, *[6] * 256, *[_NORMAL] * len(pieces), *[5] * len(unused)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *unused])
    writer.add_token_scores([0.0] * 259 + [*pieces.values()] + [0.0] * len(unused))
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _tensors(
    model_dir: Path, arch: str, config: dict[str, Any]
) -> list[tuple[str, NDArray[np.float32]]]:
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    found = []
    for file in sorted(model_dir.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            base, _, suffix = name.rpartition(".")
            own = f"{names.get_name(base)}.{suffix}"
            values = tensor.float().numpy()
            found.append((own, _laid_out(own, values, arch, config)))
    return found


def _laid_out(
    name: str, values: NDArray[np.float32], arch: str, config: dict[str, Any]
) -> NDArray[np.float32]:
    """Return a tensor as llama.cpp stores it: in Llama's query and key weights, the rows of a
    head's two halves alternate.
    """
    if arch == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        shape = (heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
    return values


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: NDArray[np.float32],
    kind: gguf.GGMLQuantizationType,
) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if values.ndim < 2 or values.shape[-1] % block:
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, _stored(np.ascontiguousarray(values), kind), raw_dtype=kind)
