"""A GGUF file as a model directory: its configuration and tokenizer as files, and its tensors.
transformers makes configurations and tokenizers; the package gguf reads the file.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_shard.checkpoint.untrusted.config_bounds import check_config
from penstock_shard.checkpoint.untrusted.files import read_object
from penstock_shard.checkpoint.untrusted.gguf_layout import check_gguf
from penstock_shard.checkpoint.weight_files import GGUF
from penstock_shard.device.cache_directory import (
    code_hash,
    ensure_safe,
    file_identity,
    load_directory,
)
from penstock_shard.errors import ModelError, first_line

if TYPE_CHECKING:
    from gguf import GGUFReader

# Architectures whose metadata transformers reads completely. For others it knows only defaults.
_SERVED = ("llama", "qwen2", "qwen3")
_TOKENIZERS = ("gpt2", "llama")
# The fields that are read. In the file, the architecture's name is their prefix.
_READ = {
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("attention.key_length", "attention.value_length"),
    *("rope.freq_base", "rope.dimension_count"),
}
# The quantization method's name in a configuration, and the types without quantization.
GGUF_METHOD = "gguf"
_FLOATS = ("F32", "F16", "BF16", "F64")
# Errors that transformers and gguf raise for an unreadable file.
_ERRORS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
# The file with a hash of the other files in a kept directory.
_DIGEST = "digest"
# The largest number of kept directories. A tokenizer takes up to 20 MB.
_MOST_KEPT = 16
_ARCHITECTURE, _TOKENIZER = "general.architecture", "tokenizer.ggml.model"
# The tensor of factors that scale rotary frequencies, as in Llama 3.1.
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def unfold(path: Path, *, keep: bool = False) -> Path:
    """Make a directory with the configuration and tokenizer of a GGUF file, and a link to the file.
    Without `keep`, the directory is removed when the process ends. Raises ModelError if the file is
    missing, is not a GGUF file, or is not supported.
    """
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    kept = _kept(path) if keep else None
    if kept is not None and _is_whole(kept):
        return kept
    made = Path(tempfile.mkdtemp(prefix="penstock-gguf-", dir=kept and kept.parent))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _unfold_into(made, path)
    if kept is None:
        return made
    (made / _DIGEST).write_text(_digest(made))
    if kept.exists() and not _is_whole(kept):
        shutil.rmtree(kept, ignore_errors=True)
    # Another shard may have made the directory meanwhile.
    with contextlib.suppress(OSError):
        return made.rename(kept)
    return kept if _is_whole(kept) else made


def _is_whole(kept: Path) -> bool:
    """Tell whether the kept directory has all its files, unchanged."""
    try:
        return (kept / _DIGEST).read_text() == _digest(kept)
    except (OSError, ValueError):
        return False


def _digest(directory: Path) -> str:
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        if path.name not in (_DIGEST, GGUF):
            total.update(f"{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()


def _kept(path: Path) -> Path | None:
    """Return the path at which the file's directory is kept; None if nothing can be kept. Removes
    the least recently used directories if there are too many.
    """
    digest = hashlib.blake2b(f"{path.resolve()} {file_identity(path)}".encode(), digest_size=16)
    digest.update(code_hash().encode())
    kept = load_directory() / "gguf" / digest.hexdigest()
    try:
        ensure_safe(kept.parent)
        if ensure_safe(kept):
            os.utime(kept)
        for old in sorted(kept.parent.iterdir(), key=_used_s)[:-_MOST_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return kept


def _used_s(directory: Path) -> float:
    return directory.stat().st_mtime


def _unfold_into(directory: Path, path: Path) -> None:
    reader = open_file(path)
    architecture = _text(reader, _ARCHITECTURE)
    if architecture not in _SERVED:
        raise ModelError(
            f"{path}: is of the architecture {architecture}; GGUF files are served of "
            f"{', '.join(_SERVED)}"
        )
    _check_fields(path, reader, architecture)
    (directory / GGUF).symlink_to(path.resolve())
    try:
        _write_parts(path, directory, reader)
    except _ERRORS as error:
        raise ModelError(f"{path}: cannot be read as a model: {first_line(error)}") from error


def _check_fields(path: Path, reader: GGUFReader, architecture: str) -> None:
    """Raise ModelError for a field that transformers would not put into the configuration."""
    tokenizer = _text(reader, _TOKENIZER)
    if tokenizer not in _TOKENIZERS:
        raise ModelError(
            f"{path}: has a tokenizer {tokenizer}; served are {' and '.join(_TOKENIZERS)}"
        )
    for field in reader.fields:
        prefix, _, name = field.partition(".")
        if prefix == architecture and name not in _READ:
            raise ModelError(f"{path}: {field} is not served, so its text would be wrong")
    check_config(path, {name: _number(reader, f"{architecture}.{name}") for name in _READ})
    head = _number(reader, f"{architecture}.attention.key_length")
    for name in ("attention.value_length", "rope.dimension_count"):
        size = _number(reader, f"{architecture}.{name}")
        if None not in (head, size) and size != head:
            text = f"{architecture}.{name} is {size} where keys have {head}"
            raise ModelError(f"{path}: {text}, which is not served")


def open_file(path: Path) -> GGUFReader:
    """Open the file. Raises ModelError if it is cut short or is not a GGUF file."""
    # Other models do not need this import, which takes long.
    from gguf import GGUFReader

    try:
        check_gguf(path)
        reader = GGUFReader(path)
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > path.stat().st_size:
                raise ModelError(f"{path}: is cut short: {tensor.name} is beyond its end")
    except _ERRORS as error:
        why = f"is no GGUF file, or is cut short: {first_line(error)}"
        raise ModelError(f"{path}: {why}") from error
    return reader


def _write_parts(path: Path, directory: Path, reader: GGUFReader) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    # Use the directory with the link, because other files may lie beside the original.
    config = AutoConfig.from_pretrained(directory, gguf_file=GGUF, local_files_only=True)
    key_length = _number(reader, f"{_text(reader, _ARCHITECTURE)}.attention.key_length")
    if key_length is not None:
        # transformers does not read the head size for every architecture.
        config.head_dim = key_length
    factors = [tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
    if factors:
        config.rope_parameters = _llama3_rope(config, factors[0].data.tolist(), path)
    types = _code_types(reader)
    if types:
        config.quantization_config = {"quant_method": GGUF_METHOD, "types": types}
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    # transformers stores here the model's name from the file, which does not affect results.
    vars(config).pop("_model_name_or_path", None)
    config.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF, local_files_only=True)
    tokenizer.save_pretrained(directory)
    _drop_added(directory / "tokenizer.json", int(config.vocab_size))
    _set_beginning(directory / "tokenizer.json", reader)


def _code_types(reader: GGUFReader) -> list[str]:
    """Return the quantized types of the file's tensors, the most frequent first."""
    counts = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    return [name for name, _ in counts.most_common() if name not in _FLOATS]


def _drop_added(path: Path, num_tokens: int) -> None:
    """Remove tokens that transformers adds, such as its own end token."""
    tokenizer = read_object(path)
    added = tokenizer["added_tokens"]
    tokenizer["added_tokens"] = [token for token in added if token["id"] < num_tokens]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def _set_beginning(path: Path, reader: GGUFReader) -> None:
    """Make the tokenizer put the begin token before texts if the file says so. If it says nothing,
    only tokenizers of type llama do it.
    """
    from tokenizers import Tokenizer, processors

    field = reader.get_field("tokenizer.ggml.add_bos_token")
    is_wanted = _text(reader, _TOKENIZER) == "llama" if field is None else bool(field.contents())
    bos_id = _number(reader, "tokenizer.ggml.bos_token_id")
    if bos_id is None:
        return
    tokenizer = Tokenizer.from_file(str(path))
    if (bos_id in tokenizer.encode("a").ids) == is_wanted:
        return
    bos = tokenizer.id_to_token(bos_id)
    single, pair = (f"{bos} $A", f"{bos} $A {bos} $B") if is_wanted else ("$A", "$A $B")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(bos, bos_id)]
    )
    tokenizer.save(str(path))


def _llama3_rope(config: Any, factors: list[float], path: Path) -> dict[str, Any]:
    """Return Llama 3's rope parameters that give these factors. Raises ModelError if no such
    parameters exist.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta = float(config.rope_parameters["rope_theta"])
    rope = {
        **_LLAMA3,
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": max(factors),
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    config.rope_parameters = rope
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** (-torch.arange(len(factors)) / len(factors))
    if len(found) != len(factors) or not torch.allclose(
        plain / found, torch.tensor(factors), rtol=1e-3
    ):
        raise ModelError(f"{path}: has factors of a rotation that are not those of Llama 3")
    return rope


def _text(reader: GGUFReader, name: str) -> str:
    field = reader.get_field(name)
    value = None if field is None else field.contents()
    return value if isinstance(value, str) else "unknown"


def _number(reader: GGUFReader, name: str) -> int | None:
    field = reader.get_field(name)
    value = None if field is None else field.contents()
    return value if isinstance(value, int) else None
