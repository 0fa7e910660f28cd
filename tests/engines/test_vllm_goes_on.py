"""Streams of vLLM's newer model runner go on with equal tokens when its core is killed. Triton's
interpreter runs it on processors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import Shard
from support.vllm_shards import INSTALLED, START_S, interpreted, named, start

from penstock_client import Fleet, GenerationRequest, Patience, SamplingParams, ShardClient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200), INSTALLED]

# What filters tokens does not run in the interpreter.
_ALL_TOKENS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_GREEDY = SamplingParams(temperature=0.0)
_DRAWN = SamplingParams(temperature=1.0, seed=2**63 + 5, **_ALL_TOKENS)
_PROMPT = list(range(40, 60))


def _cases(plain: list[int]) -> dict[str, GenerationRequest]:
    """Requests by what each tries; `plain` is what a greedy one gives."""
    request = GenerationRequest(_PROMPT, _GREEDY, max_tokens=24, ignore_eos=True)

    def asked(sampling: SamplingParams, **fields: Any) -> GenerationRequest:
        return dataclasses.replace(request, sampling=sampling, **fields)

    penalties: dict[str, Any] = {"presence_penalty": 1.2, "frequency_penalty": 0.5}
    stops: dict[str, Any] = {"stop_token_ids": plain, "min_tokens": 20}
    return {
        "greedy": request,
        "seeded": asked(_DRAWN),
        "penalties": asked(dataclasses.replace(_GREEDY, **penalties)),
        "penalties, seeded": asked(dataclasses.replace(_DRAWN, **penalties)),
        "repetition": asked(dataclasses.replace(_DRAWN, repetition_penalty=1.3)),
        "min_tokens": asked(_GREEDY, **stops),
        "bad_words": asked(dataclasses.replace(_DRAWN, bad_words=(tuple(plain[11:13]), (23,)))),
    }


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    folder = tmp_path_factory.mktemp("vllm")
    shard = start(folder, "--max-model-len", "256", python=interpreted(folder / "environment"))
    try:
        shard.wait_healthy(2 * START_S)
        yield shard
    finally:
        shard.close()


async def test_the_newer_runner_goes_on_from_output_in_all_that_the_check_at_load_tries(
    shard: Shard,
) -> None:
    async with ShardClient(shard.address) as client:
        assert (await client.info()).uncontinued == frozenset()


async def test_streams_go_on_with_equal_tokens_after_the_core_was_killed(shard: Shard) -> None:
    patience = Patience(wait_s=2 * START_S)
    async with Fleet([shard.address], patience=patience) as fleet:
        await fleet.wait_ready(60)
        plain = await _read(fleet, GenerationRequest(_PROMPT, _GREEDY, max_tokens=24))
        cases = _cases(plain)
        calm = await _read_all(fleet, cases)
        under_way = [asyncio.Event() for _ in cases]
        streams = asyncio.create_task(_read_all(fleet, cases, under_way))
        for each in under_way:
            await each.wait()
        named(shard, "EngineCore").send_signal(signal.SIGKILL)
        assert await streams == calm
        assert (await _read(fleet, cases["greedy"])) == calm["greedy"]


async def _read_all(
    fleet: Fleet, cases: dict[str, GenerationRequest], under_way: list[asyncio.Event] | None = None
) -> dict[str, list[int]]:
    begun = under_way or [asyncio.Event() for _ in cases]
    read = (_read(fleet, case, each) for case, each in zip(cases.values(), begun, strict=True))
    return dict(zip(cases, await asyncio.gather(*read), strict=True))


async def _read(
    fleet: Fleet, request: GenerationRequest, under_way: asyncio.Event | None = None
) -> list[int]:
    """Return the tokens. Set the event when eight of them are there."""
    tokens: list[int] = []
    async for output in fleet.submit(request):
        tokens += output.token_ids
        if under_way is not None and len(tokens) >= 8:
            under_way.set()
    return tokens
