"""Makes tokenizer.json for a model that comes with older tokenizer files only.

transformers does the conversion; the result is checked on sample strings, because the router works
with the converted file alone.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from penstock_shard.errors import ModelError, first_line

_SAMPLES = (
    "Hello, world!",
    "  two  spaces,\ttabs\nand\n\nlines ",
    "Grüße, façade, naïve; 東京 и Москва; مرحبا; 🙂👩‍🚀",
    "def f(x): return x ** 2  # 1234567890",
    "https://example.org/?q=a%20b&c=1",
)


def convert_tokenizer(model_dir: Path, trust_remote_code: bool) -> bytes:
    """The content of a tokenizer.json for the directory.

    Raises ModelError if there is no tokenizer, transformers cannot convert it, or the result gives
    other ids than the tokenizer it was made from.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(
            f"{model_dir}: there is no tokenizer.json, and transformers cannot make one: "
            f"{first_line(error)}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{model_dir}: there is no tokenizer.json, and {type(tokenizer).__name__} cannot be "
            "converted to one"
        )
    content: str = backend.to_str()
    converted = Tokenizer.from_str(content)
    # Without any tokenizer file transformers makes an empty tokenizer and says nothing.
    if "hello" not in converted.decode(converted.encode("hello").ids).lower():
        raise ModelError(f"{model_dir}: there is no tokenizer.json, and no other usable tokenizer")
    for sample in _SAMPLES:
        if converted.encode(sample).ids != tokenizer(sample)["input_ids"]:
            raise ModelError(
                f"{model_dir}: there is no tokenizer.json, and the one made from "
                f"{type(tokenizer).__name__} gives other ids (for {sample!r})"
            )
    return content.encode()
