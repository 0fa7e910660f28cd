"""Compares perplexity and size of a model's weights of each kind with float16.

    python benchmarks/perplexity.py [--model DIR] [--text FILE] [FILE.gguf ...]

Kinds are those of `--dtype` and `--quantization`, GGUF types that the package `gguf` writes, and
given files of the same model, because only llama.cpp's `llama-quantize` writes types such as Q4_K.
A CPU computes all. By default, the model is the built-in one, and the text has conversations like
its training data, drawn with another seed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from models.driver import Driver, load, make_sequence
from models.gguf_maker import make_gguf
from tokenizers import Tokenizer

from penstock_shard.checkpoint.gguf_files import unfold
from penstock_shard.checkpoint.model_source import BUILTIN_MODEL
from penstock_shard.models.decoder.decoder import Decoder
from training.conversations import Sampler, load_corpus

KINDS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
    "int4": {"dtype": "auto", "quantization": "int4"},
}
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
WINDOW_TOKENS = 512
CONVERSATIONS, SEED = 150, 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL, metavar="DIR")
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE.gguf")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    texts = conversations() if args.text is None else [args.text.read_text()]
    windows = [
        ids[start : start + WINDOW_TOKENS]
        for ids in (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        for start in range(0, len(ids), WINDOW_TOKENS)
    ]
    print(f"{sum(map(len, windows)):,} tokens in {len(windows)} windows")
    print("| weights | perplexity | beside float16 | matrices, MB |\n|---|---|---|---|")
    reference = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory, settings in models(args, Path(scratch)):
            loss, num_bytes = measure(directory, settings, windows)
            reference = reference or loss
            print(
                f"| {name} | {math.exp(loss):.3f} | {math.expm1(loss - reference):+.2%} "
                f"| {num_bytes / 1e6:.2f} |",
                flush=True,
            )


def models(args: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    for kind, settings in KINDS.items():
        yield kind, args.model, settings
    for kind in GGUF_TYPES:
        file = make_gguf(args.model, scratch / f"{kind}.gguf", kind)
        yield f"GGUF {kind}", unfold(file), {"dtype": "auto"}
    for file in args.files:
        yield file.name, unfold(file), {"dtype": "auto"}


def conversations() -> list[str]:
    sampler = Sampler(load_corpus(), SEED)
    drawn = [sampler.conversation() for _ in range(CONVERSATIONS)]
    return [
        "<|begin|>" + "".join(f"<|{each.role}|>{each.content}<|end|>" for each in conversation)
        for conversation in drawn
    ]


def measure(
    directory: Path, settings: dict[str, Any], windows: list[list[int]]
) -> tuple[float, int]:
    """Return the mean negative log-likelihood of a token, and the weights' bytes."""
    runner = load(directory, kv_blocks=256, threads=2, **settings)
    driver = Driver(runner)
    found: list[float] = []
    for window in windows:
        sequence = make_sequence(window, prompt_logprobs=0, max_tokens=1)
        result = driver.step([(sequence, len(window))])[0]
        assert result.prompt_logprobs is not None
        found += result.prompt_logprobs.chosen
        driver.preempt(sequence)
    assert isinstance(runner.model, Decoder)
    return -sum(found) / len(found), runner.model._weights.nbytes


if __name__ == "__main__":
    main()
