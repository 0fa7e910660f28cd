"""Compares output tokens a second of the engine, without servers, with another engine.

    python benchmarks/offline.py --versus transformers
    python benchmarks/offline.py --model DIR --streams 16 --prompt-tokens 128 --output-tokens 64

Both run in this process with the same checkpoint and threads, in turns, so that a busy neighbor
slows both; medians are compared. transformers computes in float32, penstock by --dtype and
--quantization. Without --model, a random Llama of 130 M parameters, or another --family, is made.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before importing torch: with neighbors, spinning OpenMP threads lose much.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.config import ShardConfig
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.base import Runner

Prompts = list[list[int]]
Contender = Callable[[Prompts], None]


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.model or make_default_model(Path(scratch), args.family)
        run(args, directory)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random, of --family")
    parser.add_argument(
        "--family",
        default="llama-130m",
        help="of tests/model_maker.py, as hybrid-130m (default: %(default)s)",
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: cores minus one")
    parser.add_argument("--dtype", default="auto", help="as of the shard (default: %(default)s)")
    parser.add_argument("--quantization", help="as of the shard")
    parser.add_argument("--versus", choices=("none", "transformers"), default="none")
    return parser.parse_args()


def make_default_model(directory: Path, family: str) -> Path:
    from model_maker import make_model

    print(f"making a random {family}", flush=True)
    return make_model(directory, family)


def run(args: argparse.Namespace, directory: Path) -> None:
    from penstock_shard.device.cpu_threads import default_threads
    from penstock_shard.model_loader.load_model_runner import load_model_runner

    threads = args.threads or default_threads()
    config = ShardConfig(
        device="cpu",
        dtype=args.dtype,
        quantization=args.quantization,
        threads=threads,
        kv_memory_bytes=2**30,
    )
    begin = time.perf_counter()
    runner = load_model_runner(config, directory, progress=lambda line: None)
    print(
        f"loaded in {time.perf_counter() - begin:.1f} s (without imports); weights in "
        f"{runner.info.dtype}, {threads} threads"
    )
    contenders: dict[str, Contender] = {"penstock": engine_contender(runner, config, args)}
    if args.versus == "transformers":
        contenders["transformers"] = transformers_contender(directory, args)
    rng = random.Random(0)
    vocab_size = runner.info.vocab_size
    times: dict[str, list[float]] = {name: [] for name in contenders}
    # Round 0 warms up. Each round has new prompts, so that no prefix is reused.
    for round_ in range(args.rounds + 1):
        for name, contender in contenders.items():
            prompts = make_prompts(rng, args.streams, args.prompt_tokens, vocab_size)
            begin = time.perf_counter()
            contender(prompts)
            elapsed = time.perf_counter() - begin
            rate = args.streams * args.output_tokens / elapsed
            note = "warm-up" if round_ == 0 else f"round {round_}"
            print(
                f"{note:>8}  {name:<12} {rate:8.1f} output tokens/s  {elapsed:6.2f} s", flush=True
            )
            if round_:
                times[name].append(rate)
    report(times)


def make_prompts(rng: random.Random, streams: int, length: int, vocab_size: int) -> Prompts:
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(streams)]


def report(rates: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, median in medians.items():
        print(f"median {name:<12} {median:8.1f} output tokens/s")
    if "transformers" in medians:
        print(f"ratio {medians['penstock'] / medians['transformers']:.2f}")


def engine_contender(runner: Runner, config: ShardConfig, args: argparse.Namespace) -> Contender:
    """Return the engine as in a shard: greedy, without end of sequence."""
    info = runner.info
    blocks = BlockManager.of(info, config.batched_tokens("cpu"))
    limits = SchedulerLimits(
        config.max_num_seqs,
        config.batched_tokens("cpu"),
    )
    engine = Engine(runner, create_scheduler(limits, blocks), blocks)

    def generate(prompts: Prompts) -> None:
        for i, prompt in enumerate(prompts):
            engine.submit(
                EngineRequest(
                    request_id=str(i),
                    attempt=0,
                    prompt=array("I", prompt).tobytes(),
                    sampling=EngineSampling(temperature=0.0),
                    max_tokens=args.output_tokens,
                )
            )
        count = 0
        while engine.has_work:
            count += sum(len(output.token_ids) for output in engine.step())
        assert count == len(prompts) * args.output_tokens, count

    return generate


def transformers_contender(directory: Path, args: argparse.Namespace) -> Contender:
    """Return transformers' continuous batching, greedy, with sdpa attention; or `generate` for one
    batch if layers keep a state, which continuous batching does not support.
    """
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    )
    generation = GenerationConfig(
        max_new_tokens=args.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    tokens = args.streams * (args.prompt_tokens + args.output_tokens)
    batching = ContinuousBatchingConfig(
        page_size=32, num_blocks=tokens // 32 + 2 * args.streams, max_batch_tokens=2048
    )

    def generate_together(prompts: Prompts) -> None:
        found = model.generate(torch.tensor(prompts), generation_config=generation)
        assert found.shape[1] == args.prompt_tokens + args.output_tokens, found.shape

    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return generate_together

    def generate(prompts: Prompts) -> None:
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        count = sum(len(output.generated_tokens) for output in outputs.values())
        assert count == len(prompts) * args.output_tokens, count

    return generate


if __name__ == "__main__":
    main()
