"""Measures how images slow text streams of a shard with a small random model that sees.

    python benchmarks/images.py
    python benchmarks/images.py --family internvl --pixels 4194304

Text streams decode all the time, in turns with and without requests with images. Prints the times
between the streams' tokens, the times to first tokens of requests with images, and the time of a
hundred requests with one image, which only the first encodes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from model_maker import write_tokenizer
from models.tiny_vision import FAMILIES, IMAGE_ID, make_vision, random_picture
from support.processes import Shard, running

from penstock_client import Fleet, GenerationRequest, InvalidRequest, PromptImage, SamplingParams
from penstock_common.image_digest import image_digest

# About 60 M parameters for text and 15 M for the encoder.
_TEXT = {
    "hidden_size": 640,
    "num_hidden_layers": 8,
    "intermediate_size": 2560,
    "head_dim": 64,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 8192,
}
_VISION = {"hidden_size": 256, "depth": 8, "num_hidden_layers": 8, "intermediate_size": 1024}


@dataclass
class _Seen:
    gaps_s: list[float] = field(default_factory=list)
    firsts_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--side", type=int, default=2048, help="of an image, in pixels")
    parser.add_argument("--pixels", type=int, default=262_144, help="to which it is resized")
    parser.add_argument("--every-s", type=float, default=2.0, help="how often an image comes")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_vision(directory, args.family, sizes=(_TEXT, _VISION), max_pixels=args.pixels)
        write_tokenizer(directory)
        shard = Shard(Path(folder) / "log", "--model", str(directory), "--max-num-seqs", "128")
        with running(shard):
            asyncio.run(_measure(shard, args))


async def _measure(shard: Shard, args: argparse.Namespace) -> None:
    async with Fleet([shard.address]) as fleet:
        await fleet.wait_ready()
        num_tokens = await _tokens_of(fleet, args)
        print(f"an image of {args.side}x{args.side} takes {num_tokens} tokens")
        print("| images | between tokens p50, ms | p99 | max | first token with an image p50, s |")
        print("|---|---|---|---|---|")
        for _ in range(args.rounds):
            for every_s in (0.0, args.every_s):
                await _show(fleet, args, every_s, num_tokens)
        await _repeat(fleet, args, num_tokens)


async def _show(fleet: Fleet, args: argparse.Namespace, every_s: float, num_tokens: int) -> None:
    seen = await _turn(fleet, args, every_s, num_tokens)
    gaps_ms = np.array(seen.gaps_s) * 1e3
    first = f"{np.median(seen.firsts_s):.2f}" if seen.firsts_s else ""
    what = f"one in {every_s:g} s" if every_s else "none"
    quantiles = (np.percentile(gaps_ms, 50), np.percentile(gaps_ms, 99), gaps_ms.max())
    print(f"| {what} | {' | '.join(f'{each:.1f}' for each in quantiles)} | {first} |", flush=True)


async def _turn(fleet: Fleet, args: argparse.Namespace, every_s: float, num_tokens: int) -> _Seen:
    seen, rng = _Seen(), random.Random(int(every_s * 1000))
    ends_s = time.perf_counter() + args.seconds
    streams = [
        asyncio.create_task(_decode(fleet, rng.randbytes(32), ends_s, seen))
        for _ in range(args.streams)
    ]
    asked = []
    while time.perf_counter() < ends_s:
        await asyncio.sleep(every_s or args.seconds)
        if every_s and time.perf_counter() < ends_s:
            one = _with_image(fleet, args, rng.random(), num_tokens, seen)
            asked.append(asyncio.create_task(one))
    await asyncio.gather(*streams, *asked)
    return seen


async def _decode(fleet: Fleet, prompt: bytes, ends_s: float, seen: _Seen) -> None:
    request = GenerationRequest([*prompt], SamplingParams(seed=1), max_tokens=8000, ignore_eos=True)
    last_s = 0.0
    async with fleet.submit(request) as stream:
        async for _ in stream:
            now_s = time.perf_counter()
            if last_s:
                seen.gaps_s.append(now_s - last_s)
            last_s = now_s
            if now_s > ends_s:
                return


@functools.lru_cache(maxsize=2)
def _picture(side: int, seed: float) -> tuple[str, bytes]:
    picture = random_picture(random.Random(seed), side, side)
    return image_digest(side, side, picture.pixels).hex(), picture.pixels


async def _with_image(
    fleet: Fleet, args: argparse.Namespace, seed: float, num_tokens: int, seen: _Seen
) -> None:
    sha256, data = await asyncio.to_thread(_picture, args.side, seed)
    image = PromptImage(sha256, args.side, args.side, 4, num_tokens)

    async def pixels(_: PromptImage) -> bytes:
        return data

    asked_s = time.perf_counter()
    prompt = [1, 2, 3, 4, *[IMAGE_ID] * num_tokens, 5]
    request = GenerationRequest(prompt, max_tokens=1, images=[image])
    async for _ in fleet.submit(request, pixels):
        seen.firsts_s.append(time.perf_counter() - asked_s)


async def _tokens_of(fleet: Fleet, args: argparse.Namespace) -> int:
    """Return the number of an image's tokens, which the shard's refusal names."""
    seen: Any = _Seen()
    try:
        await _with_image(fleet, args, 0.5, 1, seen)
    except InvalidRequest as error:
        words = str(error).split()
        return int(words[words.index("makes") + 1])
    return 1


async def _repeat(fleet: Fleet, args: argparse.Namespace, num_tokens: int) -> None:
    seen = _Seen()
    began_s = time.perf_counter()
    same = [_with_image(fleet, args, 0.25, num_tokens, seen) for _ in range(100)]
    await asyncio.gather(*same[:1])
    first_s = time.perf_counter() - began_s
    await asyncio.gather(*same[1:])
    rest_s = time.perf_counter() - began_s - first_s
    print(f"one image in a hundred requests: {first_s:.2f} s the first, {rest_s:.2f} s all others")


if __name__ == "__main__":
    main()
