"""Compares log-probabilities of GGUF files with llama.cpp's, after random prompts.

    python benchmarks/gguf_logits.py --peers DIR FILE.gguf ...

See peers.md to put llama.cpp into DIR. Both round activations to int8 for quantized weights, in
different ways, so small differences are expected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from models.driver import Driver, load, make_sequence

from penstock_shard.checkpoint.gguf_files import unfold

PROMPTS, PROMPT_TOKENS, PORT = 24, 40, 18102
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("PEERS", "peers")))
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.gguf")
    args = parser.parse_args()
    print("| file | the same likeliest token | difference of its log-probability: mean | largest |")
    print("|---|---|---|---|")
    for file in args.files:
        directory = unfold(file)
        vocab_size = int(json.loads((directory / "config.json").read_text())["vocab_size"])
        rng = random.Random(0)
        prompts = [rng.choices(range(vocab_size), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
        theirs = list(by_llama_cpp(args.peers, file, prompts))
        ours = list(here(directory, prompts))
        same = sum(token in found for (token, _), found in zip(ours, theirs, strict=True))
        off = [
            abs(logprob - found[token])
            for (token, logprob), found in zip(ours, theirs, strict=True)
            if token in found
        ]
        print(f"| {file.name} | {same} of {PROMPTS} | {sum(off) / len(off):.4f} | {max(off):.4f} |")


def here(directory: Path, prompts: Prompts) -> Iterator[tuple[int, float]]:
    """Yield the likeliest token after each prompt, and its log-probability."""
    driver = Driver(load(directory, dtype="auto", kv_blocks=256, threads=2))
    for prompt in prompts:
        sequence = make_sequence(prompt, logprobs=0, max_tokens=1)
        result = driver.step([(sequence, len(prompt))])[0]
        driver.preempt(sequence)
        assert result.token_id is not None
        assert result.logprobs is not None
        yield result.token_id, result.logprobs.chosen[0]


def by_llama_cpp(peers: Path, file: Path, prompts: Prompts) -> Iterator[dict[int, float]]:
    """Yield the same, as a dictionary with one entry."""
    with serving(peers, file) as url:
        for prompt in prompts:
            body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 1}
            (answer,) = ask(f"{url}/completion", body)["completion_probabilities"]
            best = answer["top_logprobs"][0]
            yield {best["id"]: best["logprob"]}


@contextmanager
def serving(peers: Path, file: Path) -> Iterator[str]:
    server = peers / "llama-build" / "bin" / "llama-server"
    flags = ("--host", "127.0.0.1", "--port", str(PORT), "-c", "2048", "-np", "1")
    with subprocess.Popen(
        [server, "-m", file, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = f"http://127.0.0.1:{PORT}"
            for _ in range(300):
                with suppress(OSError, urllib.error.HTTPError):
                    urllib.request.urlopen(f"{url}/health", timeout=1).close()
                    break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
