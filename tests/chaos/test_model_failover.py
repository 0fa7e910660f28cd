"""A real model on the CPU kernels: its streams outlive its engines, log-probabilities and all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.budget import budget, in_soak, seeded
from support.processes import Shard, running
from support.streams import mixed_request, run_whole

from penstock_client import Fleet


def _model_flags(name: str, folder: Path) -> tuple[str, ...]:
    if name == "built-in":
        return ("--runner", "model")
    from model_maker import make_model, write_tokenizer
    from models.tiny_families import make_family

    if name in ("gemma4_unified", "mamba2", "qwen3_next"):
        # Of weights as others are made states would remember nothing.
        make_family(folder / "model", name)
        write_tokenizer(folder / "model")
    else:
        make_model(folder / "model", name)
    return ("--model", str(folder / "model"), "--max-model-len", "512")


# Beside the built-in model a larger one, one with windows beside all keys, one whose windows have a
# pool of their own, one with chunks, one with latents, one with states, and one of states alone.
_OTHERS = (
    "llama-3m",
    "gemma2",
    "gemma4_unified",
    "llama4",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
)


@pytest.mark.parametrize("model", ["built-in", *map(in_soak, _OTHERS)])
async def test_streams_of_a_real_model_outlive_its_engines_bit_for_bit(
    tmp_path: Path, model: str
) -> None:
    pytest.importorskip("torch")
    rng = seeded("streams_of_a_real_model")
    flags = (*_model_flags(model, tmp_path), "--threads", "1")
    # One after the other: the second takes what the first has kept of its load.
    first = Shard(tmp_path / "first", *flags)
    with running(first), running(second := Shard(tmp_path / "second", *flags)):
        shards = [first, second]
        async with Fleet([shard.address for shard in shards]) as fleet:
            for _ in range(budget(1, 30)):
                async with asyncio.timeout(60):
                    while not all(shard.ready for shard in fleet.shards):
                        await asyncio.sleep(0.05)
                info = fleet.info()
                assert info.batch_invariant
                requests = [
                    mixed_request(rng, info.vocab_size, max_tokens=80) for _ in range(budget(6, 64))
                ]
                calm = await asyncio.gather(*(run_whole(fleet, request) for request in requests))
                tasks = [asyncio.create_task(run_whole(fleet, request)) for request in requests]
                await asyncio.sleep(rng.uniform(0.05, budget(1, 4) * 0.5))
                rng.choice(shards).engine.kill()
                after = await asyncio.gather(*tasks)
                for request, before, broken in zip(requests, calm, after, strict=True):
                    assert broken == before, request
