"""Collects the files of a model that a router needs: tokenizer and chat template. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_tokenizer_files(model_dir: Path, chat_template: Path | None = None) -> dict[str, bytes]:
    """The files that exist, by name. `chat_template` replaces the model's own.

    Raises:
        OSError: a file exists and cannot be read.
    """
    files = {
        name: (model_dir / name).read_bytes() for name in _FILES if (model_dir / name).exists()
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.read_bytes()
    return files


def tokenizer_hash(files: Mapping[str, bytes]) -> str:
    """Equal for shards whose tokenizers and templates are equal."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
