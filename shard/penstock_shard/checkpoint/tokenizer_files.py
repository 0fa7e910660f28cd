"""Collects the files of a model that a router needs: tokenizer, chat template, and sizes of images
in tokens. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from penstock_shard.checkpoint.untrusted.files import check_files, read_bounded, read_object

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# The folder of templates besides the default one, such as `tool_use`: one file for each template.
_MORE_TEMPLATES = "additional_chat_templates"
# Files that determine an image's number of tokens. They are read only for models with images, so
# that other models' hashes do not depend on them.
_IMAGE_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def read_tokenizer_files(model_dir: Path, chat_template: Path | None = None) -> dict[str, bytes]:
    """Return the existing files by name. `chat_template` replaces all templates of the model.

    Raises:
        OSError: a file exists and cannot be read.
        ModelError: a file is too large or is a link out of the directory, or config.json or
            chat_template.json is not a JSON object.
    """
    check_files(model_dir)
    names = _FILES + _IMAGE_FILES if _sees_images(model_dir) else _FILES
    files = {name: read_bounded(model_dir / name) for name in names if (model_dir / name).exists()}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.read_bytes()
        return files
    for path in sorted((model_dir / _MORE_TEMPLATES).glob("*.jinja")):
        files[f"{_MORE_TEMPLATES}/{path.name}"] = read_bounded(path)
    if source := _template_of_processor(model_dir, files):
        files["chat_template.jinja"] = source.encode()
    return files


def is_template(name: str) -> bool:
    return name.startswith(f"{_MORE_TEMPLATES}/") and name.endswith(".jinja")


def _sees_images(model_dir: Path) -> bool:
    config = model_dir / "config.json"
    return config.exists() and isinstance(read_object(config).get("vision_config"), dict)


def _template_of_processor(model_dir: Path, files: Mapping[str, bytes]) -> str | None:
    """Return the chat template of an older model of images and text, if its tokenizer has none."""
    path = model_dir / "chat_template.json"
    if "chat_template.jinja" in files or not path.exists():
        return None
    settings = model_dir / "tokenizer_config.json"
    if "tokenizer_config.json" in files and read_object(settings).get("chat_template"):
        return None
    source = read_object(path).get("chat_template")
    return source if isinstance(source, str) else None


def tokenizer_hash(files: Mapping[str, bytes]) -> str:
    """Return a hash that is equal for equal tokenizers and templates."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
