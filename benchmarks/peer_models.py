"""Makes random models of real shapes, with tokenizers that other servers can read.

    python benchmarks/peer_models.py DIR

Writes DIR/130m (hidden 768, 12 layers, vocabulary 32,000), DIR/1b (hidden 2,048, 22 layers) and
DIR/3m (hidden 128, 4 layers, vocabulary 8,192): Llama, in bfloat16, the last in float32. Weights
are the same each time. Tokenizers are byte-level BPE, trained on the sources of Python's standard
library, because every id that a random model picks must be text in a stream.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from model_maker import make_model

# Model -> dtype of weights, and differences from model_maker's llama-130m.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "130m": ("bfloat16", {}),
    "1b": (
        "bfloat16",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    "3m": (
        "float32",
        {
            "vocab_size": 8192,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
CORPUS_BYTES = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    for name, (dtype, changes) in MODELS.items():
        print(f"making {directory / name}", flush=True)
        make(directory / name, dtype, changes)


def make(directory: Path, dtype: str, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    make_model(directory, "llama-130m", **changes)
    if dtype != "float32":
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        model.save_pretrained(directory)
    write_tokenizer(directory, AutoConfig.from_pretrained(directory).vocab_size)


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer with as many ids as the model has, in place of model_maker's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary:
        raise SystemExit(f"the corpus gives {found} tokens, not {vocabulary}")
    tokenizer.save(str(directory / "tokenizer.json"))


def corpus() -> Iterator[str]:
    """Yield sources of the standard library, in a fixed order, up to CORPUS_BYTES."""
    left = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if left > 0 and "site-packages" not in path.parts:
            text = path.read_text("utf-8", errors="ignore")
            left -= len(text)
            yield text


if __name__ == "__main__":
    main()
