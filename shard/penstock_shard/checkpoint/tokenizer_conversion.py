"""Makes tokenizer.json for a model that has only older tokenizer files, or Mistral's tekken.json.

transformers makes the conversion. The result is checked on sample strings, because the router only
uses the converted file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer
from transformers.integrations.mistral import convert_tekken_tokenizer

from penstock_shard.checkpoint.untrusted.files import check_names, read_object
from penstock_shard.errors import ModelError, first_line, library_faults

_SAMPLES = (
    "Hello, world!",
    "  two  spaces,\ttabs\nand\n\nlines ",
    "Grüße, façade, naïve; 東京 и Москва; مرحبا; 🙂👩‍🚀",
    "def f(x): return x ** 2  # 1234567890",
    "https://example.org/?q=a%20b&c=1",
)
_TEKKEN = "tekken.json"
# Their values become arguments of the tokenizer's class. Some of these arguments name files.
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def make_tokenizer_files(model_dir: Path, trust_remote_code: bool) -> dict[str, bytes]:
    """Make tokenizer.json for a directory without one. Also make other files for routers if the
    tokenizer's own file has their content.

    Raises ModelError if there is no tokenizer, transformers cannot convert it, or the result gives
    other ids than the original.
    """
    if (model_dir / _TEKKEN).exists():
        return _convert_tekken(model_dir / _TEKKEN)
    return {"tokenizer.json": _convert_older(model_dir, trust_remote_code)}


def _convert_tekken(path: Path) -> dict[str, bytes]:
    """Make the tokenizer, its special tokens and, if mistral-common is installed and has one, the
    chat template.
    """
    try:
        tokenizer = convert_tekken_tokenizer(str(path))
        # Mistral's models were trained on texts that begin with this token.
        tokenizer.add_bos_token = True
        content: str = tokenizer.backend_tokenizer.to_str()
        _check_tekken(path, Tokenizer.from_str(content))
    except ImportError as error:
        raise ModelError(
            f"{path}: lists no special tokens, so that mistral-common must say which there are: "
            "pip install mistral-common"
        ) from error
    except library_faults() as error:
        raise ModelError(f"{path}: cannot be converted: {first_line(error)}") from error
    marks = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    files = {"tokenizer.json": content, "tokenizer_config.json": json.dumps(marks)}
    if tokenizer.chat_template and not (path.parent / "tokenizer_config.json").exists():
        files["chat_template.jinja"] = tokenizer.chat_template
    return {name: text.encode() for name, text in files.items()}


def _check_tekken(path: Path, converted: Tokenizer) -> None:
    """Raise ModelError unless sample strings get the ids that follow from the file's ranks."""
    tekken = read_object(path)
    config, bos_id = tekken["config"], converted.token_to_id("<s>")
    shift = config["default_num_special_tokens"]
    # The file may have more tokens than the model.
    listed = tekken["vocab"][: config["default_vocab_size"] - shift]
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in listed}
    words = Split(Regex(config["pattern"]), "isolated")
    for sample in _SAMPLES:
        merged = (_merge(word.encode(), ranks) for word, _ in words.pre_tokenize_str(sample))
        own = [bos_id, *(shift + rank for word in merged for rank in word)]
        if converted.encode(sample).ids != own:
            raise ModelError(f"{path}: the tokenizer made of it gives other ids (for {sample!r})")


def _merge(word: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return the ranks of a word's tokens. Adjacent parts that form a token are merged, the lowest
    rank first.
    """
    parts = [bytes([byte]) for byte in word]
    while pairs := [
        (ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks
    ]:
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks[part] for part in parts]


def _convert_older(model_dir: Path, trust_remote_code: bool) -> bytes:
    for name in _SETTINGS:
        check_names(model_dir, name)
    what = f"{model_dir}: there is no tokenizer.json, and transformers cannot make one"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return _checked(model_dir, tokenizer)
    except library_faults() as error:
        raise ModelError(f"{what}: {first_line(error)}") from error
    except Exception as error:
        # The package tokenizers raises plain Exception.
        if type(error) is Exception:
            raise ModelError(f"{what}: {first_line(error)}") from error
        raise


def _checked(model_dir: Path, tokenizer: Any) -> bytes:
    """Return tokenizer.json. Raises ModelError if it gives other ids than the tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{model_dir}: there is no tokenizer.json, and {type(tokenizer).__name__} cannot be "
            "converted to one"
        )
    content: str = backend.to_str()
    converted = Tokenizer.from_str(content)
    # Without any tokenizer file transformers silently makes an empty tokenizer.
    if "hello" not in converted.decode(converted.encode("hello").ids).lower():
        raise ModelError(f"{model_dir}: there is no tokenizer.json, and no other usable tokenizer")
    for sample in _SAMPLES:
        if converted.encode(sample).ids != tokenizer(sample)["input_ids"]:
            raise ModelError(
                f"{model_dir}: there is no tokenizer.json, and the one made from "
                f"{type(tokenizer).__name__} gives other ids (for {sample!r})"
            )
    return content.encode()
